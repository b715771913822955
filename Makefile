# Commands for a fresh machine: `make env`, `make demo` and `make test`. Each makes .venv when it is missing.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
CONSTRAINTS := .ci/constraints.txt
# One stamp per set of extras and torch, so that another TORCH= installs again.
STAMP = $(VENV)/.installed-$(1)-$(subst /,_,$(TORCH))

# Where the home cannot be written, what we and others keep between runs lies beside the environment.
ifeq ($(shell test -w "$$HOME" && echo yes),)
export XDG_CACHE_HOME ?= $(abspath $(VENV))/cache
endif

# Half an environment is none: Debian without python3-venv leaves one that has no pip.
.DELETE_ON_ERROR:
.PHONY: help env demo test test-all soak mutants sanitize bench docs notebook lint typecheck format check-wheel address release clean

help:  ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("doge_fast needs Python >= 3.11; %s is %s. Pass another: make PYTHON=python3.12 ..." % (sys.executable, sys.version.split()[0]) if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	@# Debian 12 brings pip 23.0; what it resolves is not tested.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'pip>=24.1'

# torch first and alone: nothing later may pull another build of it.
$(VENV)/.installed-%: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) '$(TORCH)' -e '.[$(firstword $(subst -, ,$*))]'
	@touch $@

env: $(call STAMP,pipeline)  ## the environment alone, in .venv, with all that doge-fast needs

demo: $(call STAMP,pipeline)  ## the whole story on text found on this machine, in two minutes
	$(BIN)/python -m doge_fast demo

# Processes that share the tests. worksteal: the tests of a file stay together, so that what a file
# makes once is made once, and no process waits for another at the end.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$(( n < 4 ? n : 4 )))
SHARED = -n $(WORKERS) --dist worksteal
# Of every package, where all versions are the pinned ones; on another torch of ours alone.
STRICT = $(if $(filter file default,$(origin TORCH)),-W error)

test: $(call STAMP,all)  ## tests of every part, five to nine minutes on two cores
	$(BIN)/python -m pytest $(STRICT) -m 'not exhaustive and not soak' $(SHARED)

test-all: $(call STAMP,all)  ## every test that takes no minutes by itself
	$(BIN)/python -m pytest $(STRICT) -m 'not soak' $(SHARED)

LAWS = tests/method/test_properties.py tests/test_fuzzing.py
soak: $(call STAMP,all)  ## beside those: tests of minutes each, and a thousand examples of every law
	$(BIN)/python -m pytest $(STRICT) -m soak $(SHARED)
	$(BIN)/python -m pytest $(STRICT) --hypothesis-profile many $(LAWS) $(SHARED)

# Of each module of the core, drawn from a seed; all of them take hours: SAMPLE=0.
SAMPLE ?= 70
mutants: $(call STAMP,all)  ## changes of the core that the fast tests must notice: 9 in 10
	$(BIN)/python -m tests.mutants --sample $(SAMPLE)

sanitize: $(call STAMP,all)  ## the C++ operators under sanitizers of memory, arithmetic and threads
	$(BIN)/python -m tests.sanitize

bench: $(call STAMP,all)  ## operators, steps and peers on this machine, in minutes
	$(BIN)/python -m benchmarks.operators
	$(BIN)/python -m benchmarks.optimizer_step
	$(BIN)/python -m benchmarks.stacked --pairs 5 --no-memory
	$(BIN)/python -m benchmarks.peers --pairs 5

docs: $(call STAMP,all)  ## the documentation as pages, in docs/_build/index.html
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build

notebook: | $(BIN)/python  ## examples/weights.ipynb, from its page and the address in pyproject.toml
	$(BIN)/python docs/_extensions/notebook.py

lint: $(call STAMP,all)  ## linter, formatter check and import layers
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m pytest -q tests/test_import_layers.py

# As it is installed, with kernels/ inside the package: mypy does not see our path shim.
INSTALLED = build/installed
typecheck: $(call STAMP,all)  ## strict types
	rm -rf $(INSTALLED)
	mkdir -p $(INSTALLED)
	cp -R doge_fast pyproject.toml $(INSTALLED)
	rm $(INSTALLED)/doge_fast/kernels/[a-z]*.pyi
	cp kernels/*.py $(INSTALLED)/doge_fast/kernels
	cd $(INSTALLED) && $(abspath $(BIN))/python -m mypy --cache-dir $(CURDIR)/.mypy_cache

format: $(call STAMP,all)  ## rewrite the sources in the house format
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

check-wheel: $(call STAMP,all)  ## wheel, sdist, editable install and plain checkout all import
	$(BIN)/python -m pytest tests/test_layout.py

# Publishing is a person's decision, and so is where the repository is public. This makes and checks
# what is published.
address:
	@grep -q '^Repository = "https://' pyproject.toml || \
	{ echo 'pyproject.toml has no [project.urls] Repository: see "A release" in CONTRIBUTING.md' >&2; exit 1; }

release: address $(call STAMP,all)  ## wheel and sdist in dist/, checked, and what is left to do by hand
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m pip install --quiet twine
	$(BIN)/python -m twine check --strict dist/*
	@sed -n '/^## A release/,/^## /p' CONTRIBUTING.md | sed '/^## /d'

clean:  ## remove what was built; keeps runs/
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
