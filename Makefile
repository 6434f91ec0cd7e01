# `make train` and `make test` set themselves up: a virtual environment in .venv, minitx and what it
# needs. TORCH pins PyTorch, or says where it is from, as pip takes it: TORCH=torch==2.13.0.
PYTHON ?= python3
TORCH ?= torch
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: train test lint bench gpu-test clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

train: $(VENV)/.installed  ## train a small GPT on real text with the Triton kernel, parity first
	$(BIN)/python train.py --kernel triton $(ARGS)

test: $(VENV)/.installed  ## every test this machine can run
	$(BIN)/python -m pytest -n auto $(ARGS)

gpu-test: $(VENV)/.installed  ## the tests that need a GPU
	$(BIN)/python -m pytest -m "gpu or huge or two_gpus" $(ARGS)

lint: $(VENV)/.installed  ## format, lint and types, changing nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(VENV)/.installed  ## what this machine can measure, into runs/bench
	$(BIN)/python -m minitx.bench softmax $(ARGS)
	$(BIN)/python -m minitx.bench attention $(ARGS)
	$(BIN)/python -m minitx.bench train $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache
