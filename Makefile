# The same commands for people and for CI. Each sets up .venv by itself.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help setup demo test check format

help:
	@echo "make demo     train a small Mask R-CNN on generated images on this CPU and show the result"
	@echo "make test     run the tests"
	@echo "make check    lint and type-check"
	@echo "make format   format the code"

setup:
	@$(PYTHON) scripts/setup_env.py

demo: setup
	$(BIN)/maskfleet demo demo

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadscope

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
