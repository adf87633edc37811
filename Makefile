# `make demo` and `make test` need only make and Python 3.10 or newer: each first makes a virtual
# environment in this folder and installs everything into it. Later runs use it again.
PYTHON ?= python3

override VENV := .venv$(if $(filter-out python3,$(PYTHON)),-$(subst /,-,$(patsubst /%,%,$(PYTHON))))
override READY := $(VENV)/ready

help:
	@echo 'make demo    train on a sample of QM9, compare with the dense model, draw the learning curve'
	@echo 'make test    run the tests that are not slow, a few minutes'
	@echo 'make test-all  run every test, about fifteen minutes'
	@echo 'make lint    check the style, the statements, the imports, and by mypy attributes and calls'
	@echo 'make bench   run short versions of the benchmarks that make sense here'
	@echo 'make mutants  plant random faults, and count those that the quick tests find: an hour or more'
	@echo 'make docs    build the pages and the API reference into site/'
	@echo 'make wheel   build the sdist and the wheel into dist/, and check them'
	@echo 'make clean   remove the environments and everything that was built'
	@echo 'Add PYTHON=python3.13 to any of them to use that interpreter, in a separate environment.'

demo: $(READY)
	@$(VENV)/bin/python examples/qm9/demo.py

# One process per core. The tests of a module stay together until a process is idle.
override PYTEST = $(VENV)/bin/python -m pytest -n auto --dist worksteal

# Python may keep what it compiled, whatever the environment says: else each worker, and each process
# that tests start, would compile the package and the tests once more.
test test-all: export PYTHONDONTWRITEBYTECODE :=

test: $(READY)
	@$(PYTEST) -m 'not slow'
	@echo 'Left out: tests marked slow (the sanitizers over all cases, nvcc for every GPU, long' \
	    'trainings), which `make test-all` runs, and GPU tests if there is no GPU.'

test-all: $(READY)
	@$(PYTEST)

lint: $(READY)
	@$(VENV)/bin/python -m ruff check .
	@$(VENV)/bin/python -m ruff format --quiet --check . || { echo "make lint: run ruff format ." >&2; exit 1; }
	@$(VENV)/bin/python tools/plain_statements.py chainer_bspmm tests benchmarks examples docs tools
	@$(VENV)/bin/lint-imports --no-logo --no-cache
	@$(VENV)/bin/python -m mypy --no-error-summary

# The tool that makes the faults is wanted only here: it is no part of every environment.
mutants: $(READY)
	@$(VENV)/bin/python -c 'import cosmic_ray' 2>/dev/null || $(VENV)/bin/python -m pip install -qq \
	    --disable-pip-version-check 'cosmic-ray>=8.7.0,<9'
	@nice $(VENV)/bin/python tools/mutants.py $(MUTANTS)

bench: $(READY)
	@$(VENV)/bin/python -m benchmarks

docs: $(READY)
	@$(VENV)/bin/python -m mkdocs build --strict

wheel: $(READY)
	@rm -rf dist
	@$(VENV)/bin/python tools/package.py
	@$(VENV)/bin/python -m twine check --strict dist/*
	@$(VENV)/bin/check-wheel-contents dist/*.whl

clean:
	rm -rf .venv .venv-* build dist chainer_bspmm.egg-info .hypothesis .pytest_cache .ruff_cache .mypy_cache .cache site

# Recreate the environment if it is not this checkout's: its interpreter was replaced or removed, or
# the folder was copied or moved, so that the environment would run the code in the old place.
override INSTALLED := $(shell $(VENV)/bin/python -Ic \
	'from importlib.util import find_spec; print(find_spec("chainer_bspmm").origin)' 2>/dev/null)
ifneq ($(INSTALLED),$(CURDIR)/chainer_bspmm/__init__.py)
.PHONY: $(READY)
endif

$(READY): setup.cfg pyproject.toml tools/environment.py
	@$(PYTHON) -c '' || { echo 'PYTHON=$(PYTHON) does not run. Name a Python that does, 3.10 or newer:' \
	    'make PYTHON=/path/to/python' >&2; exit 1; }
	@$(PYTHON) tools/environment.py $(VENV)

.PHONY: help demo test test-all lint mutants bench docs wheel clean
