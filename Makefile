# One verb per job; CI and the README call these and nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# What `make demo` needs alone: no server, no tools for tests.
DEMO_STAMP := $(VENV)/.installed-runtime
REPL_STAMP := $(VENV)/.installed-repl
PIP := $(BIN)/python -m pip install --quiet
# 3 workers keep the two cores busy that the suite is meant for: a third of its time it waits for processes.
JOBS ?= 3
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# Tests start some thousand processes: none compiles the sources again, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=
# What `make test-all` draws its examples from; printed, so that a failure can be repeated. A commit draws its
# own: others than the one before it, and the same wherever it is checked. EXPLORE=N: any others.
ifndef EXPLORE
EXPLORE := $(shell hash=$$(git rev-parse --short=7 HEAD 2>/dev/null) && printf %d 0x$$(echo $$hash | cut -c1-7) || od -An -N4 -tu4 /dev/urandom | tr -d ' ')
endif

# How much of each `make slow` does; the tests' own defaults are several times as much.
SOAK_REQUESTS ?= 1500
FUZZ_SECONDS ?= 90
PROGRAMS ?= 3000
SLOW_EXAMPLES ?= 30
LENGTHS = $(foreach name,SOAK_REQUESTS FUZZ_SECONDS PROGRAMS SLOW_EXAMPLES,$(name)=$($(name)))
LONG := -n $(JOBS) --dist worksteal --timeout 1800

.PHONY: help setup demo repl test test-all slow clients explore check lint types layers resolve docs notebooks bench clean
help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F'\t' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(STAMP)  ## an environment for all of it in .venv

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip -c .ci/constraints.txt

$(STAMP): pyproject.toml .ci/constraints.txt | $(BIN)/python
	$(PIP) -c .ci/constraints.txt -e '.[dev]'
	touch $@ $(DEMO_STAMP) $(REPL_STAMP)

$(DEMO_STAMP): pyproject.toml .ci/constraints.txt | $(BIN)/python
	$(PIP) -c .ci/constraints.txt -e '.[runtime]'
	touch $@

$(REPL_STAMP): pyproject.toml .ci/constraints.txt | $(BIN)/python
	$(PIP) -c .ci/constraints.txt -e '.[runtime,repl]'
	touch $@

repl: $(REPL_STAMP)  ## a Python prompt on the bundled checkpoint
	$(BIN)/python -m sglang_dsl

demo: $(DEMO_STAMP)  ## a multi-call program on the bundled checkpoint
	$(BIN)/python -m sglang_dsl demo

test: setup  ## unit + contract + architecture + e2e, CPU only, no network
	$(PYTEST) -n $(JOBS) --dist worksteal -m "not gpu and not slow"

test-all: slow explore clients  ## what `make test` leaves out

slow: setup  ## long tests: programs with faults, masks against brute force, the differential, soak, fuzz
	EXPLORE=$(EXPLORE) $(LENGTHS) $(PYTEST) $(LONG) --durations 10 -m "slow and not gpu and not clients and not ray"
	$(PYTEST) --timeout 1800 --durations 10 -m "slow and ray"

clients: setup  ## heavy clients from their own packages, in environments of their own; needs the network
	$(PYTEST) --durations 10 -m clients

explore: setup  ## property tests on examples that were never tried
	EXPLORE=$(EXPLORE) $(PYTEST) $(LONG) -m "(hypothesis or drawn) and not slow and not gpu"

check: lint types layers  ## ruff, mypy, the import layers

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/docstrings.py

types: setup
	$(BIN)/mypy

layers: setup
	$(BIN)/lint-imports

resolve: setup  ## every extra from the public index alone, for each Python; reads metadata, needs the network
	$(BIN)/python .ci/resolve.py

docs: setup  ## the site, below build/site; warnings are errors
	$(BIN)/python .ci/docs.py
	$(BIN)/mkdocs build --strict --quiet
	@echo build/site/index.html

notebooks: setup  ## execute the tutorials' notebooks anew and keep what they print
	$(BIN)/python .ci/notebooks.py

bench: setup  ## figures side by side with transformers in one run; minutes
	$(BIN)/python -m benchmarks.engine

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
