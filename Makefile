# make demo    install into .venv, then serve the demo model with its adapters on port 8000
# make test    install, then run the tests
# make check   install, then run the linters and the type checker
# make clean   remove what these made
# Variables: PORT (of the demo), PYTHON (3.11 or newer), VENV, TESTS (of `make test`)
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PORT ?= 8000

.PHONY: help demo test check install install-dev clean

help:
	@sed -n '/^#/!q; s/^# //p' $(firstword $(MAKEFILE_LIST))

demo: install
	$(BIN)/lorakeet serve --port $(PORT)

# Files in order: those that take long come first, and no core is idle at the end.
test: install-dev
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(TESTS)

check: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy configs kernels lora models server

install: $(VENV)/installed
install-dev: $(VENV)/installed-dev

# The second test: where Debian's python3-venv is missing, a first try leaves a venv without pip.
$(VENV)/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --editable .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist .package/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
