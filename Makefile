# The same commands for people and for CI. Each sets up .venv by itself.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help setup demo test test-tools test-cluster check format

help:
	@echo "make demo     train a small Mask R-CNN on generated images on this CPU and show the result"
	@echo "make test     run the tests"
	@echo "make test-cluster   run the tests on three hosts made on this machine (root; make test-tools first)"
	@echo "make check    lint and type-check"
	@echo "make format   format the code"

setup:
	@$(PYTHON) scripts/setup_env.py

demo: setup
	$(BIN)/maskfleet demo demo

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadscope

# What test-cluster needs beside .venv, on Debian and its kin.
test-tools:
	apt-get install -y --no-install-recommends iproute2 openssh-server openssh-client openmpi-bin procps

test-cluster: setup
	$(BIN)/python scripts/test_cluster.py

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
