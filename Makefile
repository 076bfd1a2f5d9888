# One verb per job; CI and the README call these and nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# 2 workers: the suite is meant for two cores.
JOBS ?= 2

.PHONY: setup demo test check lint types floors bench clean
setup: $(STAMP)

$(STAMP): pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip -c .ci/constraints.txt
	$(BIN)/python -m pip install --quiet -c .ci/constraints.txt -e '.[dev]'
	touch $@

demo: setup  ## a multi-call program on the bundled checkpoint
	$(BIN)/python -m sglang_dsl demo

test: setup  ## unit + contract + architecture + e2e, CPU only, no network
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not gpu and not slow"

check: lint types floors

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

floors: setup
	$(BIN)/lint-imports

bench: setup  ## figures side by side with transformers in one run; minutes
	$(BIN)/python benchmarks/engine.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
