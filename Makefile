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
.PHONY: help setup demo repl test unit process affected test-all check lint types layers resolve docs notebooks bench clean
help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F'\t' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(STAMP)  ## an environment for all of it in .venv

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip -c .ci/constraints.txt

# pip finds the torch that this machine has an index for; uv resolves the other 300 packages in a third of pip's time.
$(STAMP): pyproject.toml .ci/constraints.txt | $(BIN)/python
	$(PIP) -c .ci/constraints.txt uv torch
	index=$${PIP_INDEX_URL:-$$($(BIN)/python -m pip config get global.index-url 2>/dev/null)}; \
	env $${index:+UV_DEFAULT_INDEX=$$index} $(BIN)/uv pip install --quiet --python $(BIN)/python \
		-c .ci/constraints.txt -e '.[dev]'
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

test: setup  ## tests/unit and tests/process: CPU only, no network
	$(PYTEST) -n $(JOBS) --dist worksteal -m "not gpu" tests/unit tests/process

unit: setup  ## what starts no process, server or engine of its own; a few minutes
	$(PYTEST) -n $(JOBS) --dist worksteal -m "not gpu" tests/unit

process: setup  ## what starts processes, servers and engines
	$(PYTEST) -n $(JOBS) --dist worksteal -m "not gpu" tests/process

affected: setup  ## long tests, new random examples and clients that changes since .ci/proved reach
	$(BIN)/python .ci/trees.py affected

test-all: setup  ## every test; files that passed are run again only if what they import changed; clients need the network
	$(BIN)/python .ci/trees.py all

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
