# Everything a person or CI does here. Each target sets up what it needs; the second time that takes seconds.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --progress-bar off --constraint constraints.txt
ARGS   ?=

export PYTHONUTF8 := 1

.DELETE_ON_ERROR:
.PHONY: help setup check test demo lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv with everything that checks, tests and the demo need

# torch goes first and alone: its version is pinned to one that has a CPU build, and what follows must not pick another.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'make: $(PYTHON) is missing or older than Python 3.11; name another: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	@test -x $(BIN)/python || { echo 'setup: creating $(VENV)'; $(PYTHON) -m venv $(VENV); }
	@echo 'setup: installing torch, then the package with its tools, as constraints.txt pins them'
	@$(PIP) torch
	@$(PIP) hatchling
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@

check: $(STAMP) ## ruff, mypy --strict, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

test: check ## the checks, then the tests; ARGS goes to pytest
	$(BIN)/python -m pytest $(ARGS)

demo: $(STAMP) ## asynchronous GRPO of a small transformer, every stage a process; ARGS goes to `transferqueue demo`
	$(BIN)/transferqueue demo $(ARGS)

lock: $(STAMP) ## rewrite constraints.txt from what is installed now
	@{ echo '# What `make setup` installs, pinned; written by `make lock`.'; \
	   $(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//'; } > constraints.txt
	@touch $(STAMP)

clean: ## remove .venv, caches, builds (runs/ stays)
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
