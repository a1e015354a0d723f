# Each command makes its virtual environment itself. PYTHON is the interpreter it is made with.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# Files to test; empty is all.
TESTS ?=
READY = $(VENV)/.ready

.PHONY: demo test lint bench atlas gpu-check maxtext-env clean

demo: $(READY)  ## what head chunking saves on one TPU v5p, as a table and plots in results/demo
	rm -rf results/demo
	$(BIN)/mla-bench sweep scenarios/quick.toml --out results/demo

test: $(READY)  ## all tests
	$(BIN)/python -m pytest $(TESTS) --numprocesses 2 --dist loadfile --no-loadscope-reorder

lint: $(READY)  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(READY)  ## the engine's own time, against a plain script: half an hour on two cores
	$(BIN)/python tests/bench.py

ATLAS = indexer indexer-loss mla mesh

atlas: $(READY)  ## the reference atlas in results/atlas: hours on two cores; called again, it goes on
	for part in $(ATLAS); do \
	  run=results/atlas/$$part; begun=$$(test -e $$run/run.json && echo --resume); \
	  $(BIN)/mla-bench sweep scenarios/atlas/$$part.toml --out $$run $$begun && \
	  $(BIN)/mla-bench parity --run $$run && $(BIN)/mla-bench report $$run >/dev/null || exit; \
	done
	$(BIN)/python tests/atlas.py

# Runs with the packages of a machine with a GPU and jax for it: no virtual environment is made.
gpu-check:  ## predicted against measured HBM on the GPU of this machine
	$(PYTHON) -m mla_bench.gpu_check

MAXTEXT = .venv-maxtext

maxtext-env: $(MAXTEXT)/.ready  ## an environment with MaxText for --python, with PYTHON=python3.12

$(MAXTEXT)/.ready: constraints-maxtext.txt
	$(PYTHON) -m venv $(MAXTEXT)
	$(MAXTEXT)/bin/python -m pip install --quiet --constraint constraints-maxtext.txt \
	  'jax[tpu]' flax jaxtyping protobuf omegaconf packaging pathwaysutils jinja2 qwix aqtp tokamax
	$(MAXTEXT)/bin/python -m pip install --quiet --constraint constraints-maxtext.txt --no-deps maxtext
	touch $@

clean:
	rm -rf .venv .venv-*

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[cuda]' --group dev
	touch $@
