# `make demo` and `make test` set everything up by themselves on a machine with Python 3.11+ and make.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
OUT ?= demo

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint types imports unit format docs pictures bench bench-paper bench-fused bench-descent bench-overhead bench-gated bench-frontier bench-certificates bench-audit bench-federation bench-memory clean

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

bench: $(READY) ## The gated search against its yardsticks; more work than the baseline fails (SPEARPP_DATA as below)
	$(BIN)/python -m benchmarks.speed $(ARGS)

bench-paper: $(READY) ## The paper's search beside geoopt's: steps a second (SPEARPP_DATA names the CIFAR-10 npz)
	$(BIN)/python -m benchmarks.paper $(ARGS)

bench-fused: $(READY) ## The paper's search in one kernel against the same step by step, on a GPU (SPEARPP_DATA as above)
	$(BIN)/python -m benchmarks.fused $(ARGS)

bench-descent: $(READY) ## The gated descent in one kernel against the same step by step, on a GPU
	$(BIN)/python -m benchmarks.descent $(ARGS)

bench-overhead: $(READY) ## What Python costs a descent on one core
	$(BIN)/python -m benchmarks.overhead

bench-gated: $(READY) ## The gated engine, measured (SPEARPP_DATA as above; ARGS="--rows m200")
	$(BIN)/python -m benchmarks.gated $(ARGS)

bench-frontier: $(READY) ## One witness against two: how large a batch comes back (ARGS="--rows m200 raw")
	$(BIN)/python -m benchmarks.frontier $(ARGS)

bench-certificates: $(READY) ## Count wrong certificates over varied data (must be none)
	$(BIN)/python -m benchmarks.certificates $(ARGS)

bench-audit: $(READY) ## Verdicts on clients as there are, and false alarms (must be none) (ARGS="--rows alarms")
	$(BIN)/python -m benchmarks.audit $(ARGS)

bench-federation: $(READY) ## What audits cost a Flower federation: rounds a minute, memory, drops (ARGS="--clients 50")
	$(BIN)/python -m benchmarks.federation $(ARGS)

bench-memory: $(READY) ## The largest resident size where a layer has 100M weights, by file format (ARGS="--memory 2G")
	$(BIN)/python -m benchmarks.memory $(ARGS)

clean: ## Remove the environment and everything built
	rm -rf .venv demo dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
