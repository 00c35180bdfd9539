# make demo    batch generation with real weights (SmolLM2-135M-Instruct), no account and no hub needed
# make test    the test suite
# make oldest  the test suite on the oldest allowed version of every dependency, in an environment of its own
# make lint    ruff, and mypy over the packages that pyproject.toml names
# make picture the packages and modules, drawn from the real imports into docs/
# make fuzz    random episodes over real schedulers, hand-overs and sequences' state, damaged model files (FUZZ_STEPS=5000000 for a long run)
# make mutants changes one line at a time and sees whether the tests notice (MUTANTS=5 per module, MUTANT_MINUTES=60)
# make clients OpenAI clients, lm-eval, a browser against a server of the demo model, each in an environment of its own
# make faults  kills, stops and cuts off processes of a deployment under load: each once (10 min), then FAULT_MINUTES at random
# make aot     compile for NVIDIA targets without a GPU (installs JAX's CUDA plugin; needs ptxas and libdevice)
# make venv    only the virtual environment, with the development tools
# make clean   remove the virtual environment and build products
#
# PYTHON=/path/to/python3.12 chooses the interpreter; VENV=dir the environment's place.

SHELL := bash
.DELETE_ON_ERROR:
VENV ?= .venv
PY := $(VENV)/bin/python
PYTEST_ARGS ?= -n 2 --dist worksteal
FUZZ_STEPS ?= 500000
FAULT_MINUTES ?= 5
FUZZ_REQUESTS ?= 100000
FUZZ_FILES ?= 20000
FUZZ_TRIALS ?= 500
MUTANTS ?= 5
MUTANT_SEED ?= 1
MUTANT_MINUTES ?= 60

.PHONY: help demo test oldest lint picture fuzz mutants faults aot clients venv clean
help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: $(VENV)/.run-installed
	$(PY) -m deepinfer_jax generate --model demo --input examples/demo_prompts.txt --max-tokens 64

test: $(VENV)/.dev-installed
	JAX_PLATFORMS=cpu $(PY) -m pytest $(PYTEST_ARGS)

oldest:
	$(MAKE) VENV=$(VENV)-oldest $(VENV)-oldest/bin/python
	$(VENV)-oldest/bin/python tests/project/oldest.py >$(VENV)-oldest/oldest.txt
	$(MAKE) VENV=$(VENV)-oldest PIP_ARGS="--constraint $(VENV)-oldest/oldest.txt" test

lint: $(VENV)/.dev-installed
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) tests/project/typecheck.py

picture: $(VENV)/.dev-installed
	$(PY) tests/project/picture.py

fuzz: $(VENV)/.dev-installed
	JAX_PLATFORMS=cpu $(PY) tests/fuzz/sched_fuzz.py --steps $(FUZZ_STEPS)
	JAX_PLATFORMS=cpu $(PY) tests/fuzz/handoff_fuzz.py --requests $(FUZZ_REQUESTS)
	JAX_PLATFORMS=cpu $(PY) tests/fuzz/loader_fuzz.py --steps $(FUZZ_FILES)
	JAX_PLATFORMS=cpu PYTHONPATH=tests/helpers $(PY) tests/fuzz/state_fuzz.py --trials $(FUZZ_TRIALS)

mutants: $(VENV)/.dev-installed
	$(PY) tests/helpers/mutants.py --sample $(MUTANTS) --seed $(MUTANT_SEED) --minutes $(MUTANT_MINUTES)

faults: $(VENV)/.dev-installed
	JAX_PLATFORMS=cpu $(PY) tests/helpers/processes/process_faults.py --minutes $(FAULT_MINUTES)

aot: $(VENV)/.aot-installed
	JAX_PLATFORMS=cpu $(PY) -m pytest $(PYTEST_ARGS) $(wildcard tests/*/test_*aot*.py)

clients: $(VENV)/.dev-installed
	JAX_PLATFORMS=cpu $(PY) tests/clients/run.py $(CLIENT_ARGS)

venv: $(VENV)/.dev-installed

clean:
	rm -rf $(VENV) $(VENV)-oldest build dist *.egg-info .pytest_cache .hypothesis .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The first Python >= 3.12 among these; a name that exists but does not run (a version manager's shim) is passed over.
CANDIDATES = $(if $(PYTHON),$(PYTHON),python3.13 python3.12 python3 python)
$(PY):
	@for p in $(CANDIDATES); do \
	  if "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; then \
	    echo "creating $(VENV) with $$("$$p" --version)"; exec "$$p" -m venv "$(VENV)"; \
	  fi; \
	  found="$$found$$("$$p" --version 2>/dev/null | sed "s|^|  $$p: |")"$$'\n'; \
	done; \
	echo "DeepInfer-JAX needs Python 3.12 or newer, and none of these is: $(CANDIDATES)" >&2; \
	echo -n "$$found" | sed '/^$$/d' >&2; \
	echo "Install one, or name it: make $(firstword $(MAKECMDGOALS)) PYTHON=/path/to/python3.12" >&2; exit 1

# Installed again only when pyproject.toml has changed; sources are used in place (editable).
$(VENV)/.run-installed: pyproject.toml | $(PY)
	$(PY) -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.dev-installed: pyproject.toml | $(PY)
	$(PY) -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -e '.[dev]'
	@touch $@ $(VENV)/.run-installed

# The plugin must have jax's own version.
$(VENV)/.aot-installed: $(VENV)/.dev-installed
	$(PY) -m pip install --quiet --disable-pip-version-check "jax-cuda13-plugin==$$($(PY) -c 'import jax; print(jax.__version__)')"
	@touch $@
