# A virtual environment of its own; PYTHON chooses the interpreter it is made with.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready

.PHONY: demo test lint bench clean

demo: $(READY)  ## what head chunking saves on one TPU v5p: table and plots, in under five minutes
	rm -rf results/demo
	$(BIN)/mla-bench sweep scenarios/quick.toml --out results/demo

test: $(READY)  ## all tests
	$(BIN)/python -m pytest

lint: $(READY)  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: $(READY)  ## the wide sweep of scenarios/pr4564.toml; an evening on a laptop
	$(BIN)/mla-bench sweep scenarios/pr4564.toml

clean:
	rm -rf $(VENV)

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable . --group dev
	touch $@
