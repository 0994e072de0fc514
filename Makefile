# make run       install into .venv and run the quick start (CONFIG=... for another configuration)
# make test      install the test extra and run every gate (PYTEST_ARGS=... for pytest)
# make test-gpu  install the gpu extra (torch, triton) and run the tests that need a CUDA GPU
# make clean     remove what these made, runs excepted

VENV ?= .venv
PYTHON ?= python3
CONFIG ?= configs/quickstart.yaml
PYTEST_ARGS ?= -n 2 --dist worksteal

BIN := $(VENV)/bin
# Bytecode is written at first import, also where the environment says not to: compiling all of every
# dependency would double the install, and compiling at every start would triple the start.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --prefer-binary \
	--no-compile

.PHONY: run test test-gpu lint venv clean
.DELETE_ON_ERROR:

run: $(VENV)/.installed
	$(BIN)/simserve run $(CONFIG)

test: lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

test-gpu: $(VENV)/.installed-gpu
	$(BIN)/python -m pytest -m gpu

venv: $(BIN)/python

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "simserve needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V 2>&1)." >&2; \
		echo "Name another one, for example: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; \
		exit 1; }
	$(PYTHON) -m venv $(VENV)

# One stamp per set of extras, so that a second run does not start pip.
$(VENV)/.installed: EXTRAS :=
$(VENV)/.installed-test: EXTRAS := [test]
$(VENV)/.installed-gpu: EXTRAS := [gpu,test,test-torch]
$(VENV)/.installed $(VENV)/.installed-test $(VENV)/.installed-gpu: pyproject.toml | $(BIN)/python
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip
	@echo "Installing simserve$(EXTRAS) into $(VENV) ..."
	$(INSTALL) --editable '.$(EXTRAS)'
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
