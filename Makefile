# Every target makes .venv when it is missing, and installs into it again when pyproject.toml has changed.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
TORCH := $(shell sed -n 's/.*"\(torch==[^"]*\)".*/\1/p' pyproject.toml)

.DEFAULT_GOAL := help
.PHONY: help demo serve test test-slow check format bench clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/\1|\2/p' Makefile | awk -F '|' '{ printf "  make %-10s %s\n", $$1, $$2 }'

demo: $(INSTALLED) ## Train the bundled model for a minute or two; loss and samples before and after
	$(BIN)/python -m lorimer.engine.demo

serve: ## Start the HTTP service (not in this version)
	@echo "make serve: the HTTP service is not in this version of Lorimer; make demo runs the engine" >&2
	@exit 1

test: $(INSTALLED) ## Run the tests, in less than 15 minutes on two cores
	$(BIN)/python -m pytest -m "not slow and not gpu" --timeout=300

test-slow: $(INSTALLED) ## Run the tests that are slow or download something
	$(BIN)/python -m pytest -m "slow and not gpu"

check: $(INSTALLED) ## Check format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(INSTALLED) ## Format the code and repair what lint can repair
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(INSTALLED) ## Measure the engine against transformers and PEFT
	$(BIN)/python -m bench

clean: ## Remove caches and build products; .venv stays
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache
	find src tests tools bench -type d -name __pycache__ -prune -exec rm -rf {} +

# torch is installed alone first: the version is then settled when pip resolves everything that depends on it.
$(INSTALLED): pyproject.toml
	@command -v "$(PYTHON)" > /dev/null || { \
		echo "make: no $(PYTHON) found; Lorimer needs Python 3.11 or newer: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "make: $(PYTHON) is $$("$(PYTHON)" --version 2>&1); Lorimer needs Python 3.11 or newer:" \
			"make PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/pip || "$(PYTHON)" -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --disable-pip-version-check --editable ".[server,cookbook,dev]"
	@touch $@
