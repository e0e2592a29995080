SHELL := /bin/bash
# The two commands: `make serve` and `make test`. Both make .venv, install what is pinned and fetch the model, with
# progress, the first time; the second time they go straight to work.

PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1
export MODEL DEVICE PORT  # read by the shell, so that any path survives

QUICK := $(wildcard tests/unit tests/property tests/kernels)
LONGER := $(wildcard tests/sim tests/integration tests/server tests/judges)

.DEFAULT_GOAL := help
.PHONY: help serve test check unit full bench test-console gpu gpu-dry

help: ## say what there is
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'
	@echo
	@echo '  make serve MODEL=name-or-path DEVICE=cpu|cuda PORT=8000'
	@echo '  PYTHON=python3.12 chooses the interpreter; PIP_ARGS="..." is passed to pip, for example an index with CPU builds'
	@echo '  of torch: the usual one has CUDA builds for Linux, several GB of them.'

serve: $(VENV)/.runtime ## serve a model on this machine; Ctrl-C stops it
	@$(BIN)/evenhand serve $(if $(MODEL),--model "$$MODEL") $(if $(DEVICE),--device "$$DEVICE") $(if $(PORT),--port "$$PORT")

test: check $(VENV)/.model ## everything that CI runs (some 45 minutes on two cores)
	$(BIN)/pytest $(QUICK) $(LONGER) -m 'not gpu'

check: $(VENV)/.dev ## lint, format, types, import rules
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: $(VENV)/.dev $(VENV)/.model ## the quick tests (under 3 minutes)
	$(BIN)/pytest $(QUICK) -m 'not slow and not gpu'

full: check $(VENV)/.model ## the long versions; files its report under tests/bench/results
	set -o pipefail; $(BIN)/pytest $(QUICK) $(LONGER) -m 'not gpu' --hypothesis-profile full --durations 20 \
	    | tee tests/bench/results/full_$(shell uname -m)_$(shell date +%F).txt

bench: $(VENV)/.runtime $(VENV)/.model ## static against continuous batching, on this machine
	$(BIN)/evenhand bench batching

test-console gpu gpu-dry: ## the console's and the GPU's tests; not in this release
	@echo "make $@: the console and the GPU kernels come with later releases (CHANGELOG.md)" >&2; exit 2

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "Evenhand needs Python 3.11 or later, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
	         "Choose another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.runtime: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -c constraints.txt -e . $(PIP_ARGS)
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1' $(PIP_ARGS)  # the first one with --group
	$(BIN)/python -m pip install -c constraints.txt --group dev $(PIP_ARGS)
	@touch $@

# Fetched into EVENHAND_HOME, which is shared by clones: the stamp only says that this clone has asked.
$(VENV)/.model: $(VENV)/.runtime
	@$(BIN)/evenhand model fetch smollm2-135m-instruct
	@touch $@
