# splitserve. `make demo` shows it, `make test` checks it; both make .venv first if it is not there.
#
#   make demo        serve a real model split in two, ask it, prove it, measure it, stop it (two cores, no GPU)
#   make test        ruff, mypy, import-linter and every test that needs no GPU and no patience
#   make test-slow   the tests that take minutes
#   make kernels     every form of every GPU kernel, compiled and checked for five architectures (no GPU; half an hour)
#   make bench-cpu [PEERS=...]    this CPU's bounds, our servers, and others beside them (benchmarks/serve/peers.py says how)
#   make bench-router TOOLS=DIR   our router against sglang_router and vllm-router (benchmarks/serve/router.py says how)
#   make engines-vllm      a real pair of vLLM servers behind our router against one of them (two cores, 2 GB, 10 minutes)
#   make engines-sglang    our command lines before SGLang's own argument parser, from its wheel
#   make lint        the checks without the tests
#   make clean       remove .venv and every cache

PYTHON ?= python3
BIN := .venv/bin
JOBS ?= $(shell nproc)

# Packages are installed uncompiled, and containers like to set this: then every engine would compile torch as it starts.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-slow kernels bench-cpu bench-router engines-vllm engines-sglang lint format clean venv venv-demo

demo: venv-demo
	@PATH="$(CURDIR)/$(BIN):$$PATH" deploy/demo.sh

# Tests in one process run on every core at once, in the order of their names: a long file must not begin last. Then
# those that start processes, two at a time: they mostly wait, and more would pin their engines to the same two cores.
test: lint
	OMP_NUM_THREADS=1 MALLOC_PERTURB_=127 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder tests/structure tests/unit tests/models
	$(BIN)/python -m pytest -q -n 2 --dist loadfile tests/proc

test-slow: venv
	$(BIN)/python -m pytest -q -m "slow and not gpu"

kernels: venv
	$(BIN)/python -m splitserve kernels build --cache .cache/kernels/triton

bench-cpu: venv
	$(BIN)/python -m benchmarks.ops.cpu
	$(BIN)/python -m benchmarks.serve.peers $(PEERS)

bench-router: venv
	$(BIN)/python -m benchmarks.serve.router --tools $(TOOLS)

engines-vllm: venv
	$(PYTHON) scripts/vllm_venv.py
	test -e .cache/engines/smollm2-135m-f32/config.json || $(BIN)/python -m benchmarks.serve.as_safetensors .cache/engines/smollm2-135m-f32
	$(BIN)/python -m benchmarks.serve.engines --python .venv-vllm/bin/python

engines-sglang: venv
	test -d .cache/engines/sglang || $(BIN)/python -m pip install --quiet --no-deps --target .cache/engines/sglang sglang==0.5.23
	SPLITSERVE_TEST_SGLANG=$(CURDIR)/.cache/engines/sglang $(BIN)/python -m pytest -q -rs -m slow tests/proc/test_sglang_wheel.py

lint: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: venv
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Instant and offline once they are complete: the script compares what is wanted with what it installed last.
venv:
	@$(PYTHON) scripts/venv.py dev

venv-demo:
	@$(PYTHON) scripts/venv.py demo

clean:
	rm -rf .venv .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
