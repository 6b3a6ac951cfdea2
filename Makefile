# The commands for developers and for CI. Every target creates .venv with the pinned versions if it is missing.
PYTHON ?= python3
BIN := .venv/bin
FUZZ ?= --minutes 10
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadscope

.PHONY: help setup demo test test-slow test-tools test-cluster test-k8s soak fuzz chaos check format

help:
	@echo "make setup          create .venv with the pinned versions; every other target does it if needed"
	@echo "make demo           train a small Mask R-CNN on generated images on the CPU and show the result"
	@echo "make test           run the unit and behaviour tests (under 6 minutes on 2 cores)"
	@echo "make test-slow      run the tests marked slow: kill -9, whole trainings, charts, Terraform, images"
	@echo "make test-tools     install the tools that some tests need: helm, checkov, nginx, chromium, ... (root)"
	@echo "make test-cluster   run the tests on three hosts in network namespaces (root; needs make test-tools)"
	@echo "make test-k8s       run the tests on the cluster that KUBECONFIG names (needs make test-tools)"
	@echo "make soak           kill small runs 100 times on 1, 2 and 3 ranks and compare the results (about an hour)"
	@echo "make fuzz           feed random input to everything that reads files (10 minutes; FUZZ='--minutes 60')"
	@echo "make chaos          train on three such hosts while faults happen, and check what status says (root)"
	@echo "make check          lint and type-check"
	@echo "make format         format the code"
	@echo "make help           print this list"

setup:
	@$(PYTHON) scripts/setup_env.py

demo: setup
	$(BIN)/maskfleet demo demo

# Every test is in exactly one of these two lanes; tests/test_lanes.py checks that.
test: setup
	$(PYTEST) -m "not slow"

test-slow: setup
	$(PYTEST) -m slow

# Debian and Ubuntu. A test whose tool is missing is skipped and says so. Ubuntu has Chromium as a snap alone; there the
# tests use Google Chrome if it is installed.
test-tools:
	apt-get install -y --no-install-recommends iproute2 openssh-server openssh-client openmpi-bin procps curl nginx-light buildah debootstrap cron gcc libc6-dev python3-fusepy libfuse2
	apt-get install -y --no-install-recommends chromium || echo "chromium could not be installed: the tests that need it use google-chrome, or are skipped"
	$(PYTHON) scripts/setup_tools.py

test-cluster: setup
	$(BIN)/python scripts/test_cluster.py

test-k8s: setup
	$(BIN)/python scripts/test_k8s.py

soak: setup
	$(BIN)/python scripts/soak.py

# Prints the seed; findings are saved in fuzz-findings/.
fuzz: setup
	$(BIN)/python scripts/fuzz.py $(FUZZ)

# Writes benchmarks/results/chaos.json; `$(BIN)/python scripts/faults_page.py` puts it into the documentation.
chaos: setup
	$(BIN)/python scripts/chaos.py

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
