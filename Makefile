# `make demo` and `make test` set everything up by themselves on a machine with Python 3.11+ and make.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
OUT ?= demo

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint types imports unit format docs pictures bench clean

help: ## Show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

venv: $(READY) ## Build .venv from constraints.txt

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "spearpp needs Python 3.11 or newer, found " + sys.version.split()[0] + "; try: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt hatchling editables wheel
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY) ## Play a client with photographs, audit its update, write demo/report.html
	$(BIN)/spearpp demo --out $(OUT)

test: lint types imports unit ## Everything CI checks

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports --no-cache

unit: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile

format: $(READY) ## Let ruff format and fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY) ## Build the documentation into site/ (no network needed)
	@# not --quiet: that hides warnings from --strict too
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo site/index.html

pictures: $(READY) ## Draw the documentation's terminals and reports again (needs chromium)
	$(BIN)/python tools/pictures.py

bench: $(READY) ## Run one benchmark: make bench NAME=hostile ARGS="--updates 60"; no NAME lists them
	@$(if $(NAME),$(BIN)/python -m benchmarks.$(NAME) $(ARGS),$(BIN)/python -m benchmarks)

clean: ## Remove the environment and everything built
	rm -rf .venv demo dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
