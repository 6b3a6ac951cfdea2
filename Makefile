# The same commands for people and for CI. Each sets up .venv by itself.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help setup demo test test-tools test-cluster test-k8s check format

help:
	@echo "make demo     train a small Mask R-CNN on generated images on this CPU and show the result"
	@echo "make test     run the tests"
	@echo "make test-cluster   run the tests on three hosts made on this machine (root; make test-tools first)"
	@echo "make test-k8s       run the tests on the cluster that KUBECONFIG names (make test-tools first)"
	@echo "make check    lint and type-check"
	@echo "make format   format the code"

setup:
	@$(PYTHON) scripts/setup_env.py

demo: setup
	$(BIN)/maskfleet demo demo

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadscope

# What some tests need beside .venv, on Debian and its kin; a test whose tool is missing is skipped and says so.
test-tools:
	apt-get install -y --no-install-recommends iproute2 openssh-server openssh-client openmpi-bin procps nginx-light buildah debootstrap
	$(PYTHON) scripts/setup_tools.py

test-cluster: setup
	$(BIN)/python scripts/test_cluster.py

test-k8s: setup
	$(BIN)/python scripts/test_k8s.py

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
