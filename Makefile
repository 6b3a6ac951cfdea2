# The commands for developers and for CI. Every target creates .venv with the pinned versions if it is missing.
PYTHON ?= python3
BIN := .venv/bin
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadscope

.PHONY: help setup demo test test-slow test-tools test-cluster test-k8s check format

help:
	@echo "make demo           train a small Mask R-CNN on generated images on the CPU and show the result"
	@echo "make test           run the unit and behaviour tests (under 6 minutes on 2 cores)"
	@echo "make test-slow      run the tests marked slow: kill -9, whole trainings, charts, Terraform, images"
	@echo "make test-tools     install the tools that some tests need: helm, checkov, nginx, buildah, ... (root)"
	@echo "make test-cluster   run the tests on three hosts in network namespaces (root; needs make test-tools)"
	@echo "make test-k8s       run the tests on the cluster that KUBECONFIG names (needs make test-tools)"
	@echo "make check          lint and type-check"
	@echo "make format         format the code"

setup:
	@$(PYTHON) scripts/setup_env.py

demo: setup
	$(BIN)/maskfleet demo demo

# Every test is in exactly one of these two lanes; tests/test_lanes.py checks that.
test: setup
	$(PYTEST) -m "not slow"

test-slow: setup
	$(PYTEST) -m slow

# Debian and Ubuntu. A test whose tool is missing is skipped and says so.
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
