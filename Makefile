# The ways to run the project. `make` alone lists them.
#
# Every target makes its own environment first, in .venv, from locked versions;
# tools/make_env.py says what is missing where that fails.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.SUFFIXES:
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory

# Tests start hundreds of Python processes: compiled once, each takes half the time.
export PYTHONPYCACHEPREFIX := $(CURDIR)/build/pycache
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
# Product code, tests and scripts; those that are not there yet are left out.
PYTHON_DIRS := $(wildcard marshal cli simulator tests integration examples benchmarks tools)
# Extra arguments, as in: make unit ARGS="-k codec -x"
ARGS ?=
# Of `make test`: 1 runs one thing after the other, 4 what waits beside what computes.
JOBS ?= 4
# Seeds of `make sim` and `make proof`.
SEEDS ?= 0:20000

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' \
		$(firstword $(MAKEFILE_LIST))

.PHONY: env
env: ## Make .venv with locked versions (at once when it stands)
	@PYTHON="$(PYTHON)" sh tools/make_env.sh

.PHONY: demo
demo: env ## Embedded Kafka, three consumers, one killed: who takes over?
	@$(BIN)/marshal demo $(ARGS)

.PHONY: test
test: env ## Every check and every test, on a real broker too
	@JOBS=$(JOBS) $(BIN)/python tools/test_lanes.py $(ARGS)

.PHONY: unit
unit: env ## The tests that need no broker
	@$(BIN)/python -m pytest -q tests $(ARGS)

.PHONY: lowest
lowest: env ## Tests with the lowest versions that pyproject.toml allows
	@sh tools/lowest.sh $(ARGS)

.PHONY: check
check: env ## Style, types, layers, generated documents
	@echo "== ruff"
	@$(BIN)/ruff check --quiet $(PYTHON_DIRS)
	@$(BIN)/ruff format --check --quiet $(PYTHON_DIRS) \
		|| { echo "Badly formatted; run: make fmt" >&2; exit 1; }
	@echo "== mypy"
	@$(BIN)/mypy --strict --no-error-summary
	@$(BIN)/mypy --config-file tools/mypy_names.ini --no-error-summary
	@echo "== import-linter"
	@said=$$($(BIN)/lint-imports --no-logo 2>&1) || { echo "$$said" >&2; exit 1; }
ifneq ($(wildcard tools/cli_reference.py),)
	@echo "== CLI reference"
	@$(BIN)/python tools/cli_reference.py | diff -u docs/cli.md - \
		|| { echo "docs/cli.md is out of date; run: make docs" >&2; exit 1; }
endif

.PHONY: cover
cover: env ## Each module of the core: all branches, by its own test file
	@echo "== coverage of the core"
	@$(BIN)/python tools/core_coverage.py

.PHONY: bench
bench: env ## Every benchmark once, as a smoke run; documents in build/bench/smoke
	@$(BIN)/python benchmarks/run.py $(ARGS)

.PHONY: bench-docs
bench-docs: env ## Benchmarks in full, and their figures into the documents; continues
	@$(BIN)/python benchmarks/run.py --docs $(ARGS)

.PHONY: proof
proof: env ## What only computes long, at full size; report in build/proof
	@SEEDS=$(SEEDS) $(BIN)/python tools/proof.py -- $(ARGS)

.PHONY: model
model: env ## Of the proof: every state of small worlds, with larger bounds
	@$(BIN)/python tools/proof.py model -- $(ARGS)

.PHONY: flood
flood: env ## Of the proof: ten million hostile records; memory stays flat
	@$(BIN)/python tools/proof.py flood -- $(ARGS)

.PHONY: chaos
chaos: env ## Of the proof: every fault on three real brokers; see build/chaos
	@$(BIN)/python tools/proof.py chaos -- $(ARGS)

.PHONY: sim
sim: env ## Of the proof: 20,000 simulated fleets, summed up in build/sim.json
	@SEEDS=$(SEEDS) $(BIN)/python tools/proof.py sim -- $(ARGS)

.PHONY: docs
docs: env ## Generate docs/cli.md, the reference of the command
	@mkdir -p docs
	@$(BIN)/python tools/cli_reference.py > docs/cli.md.new
	@mv docs/cli.md.new docs/cli.md

.PHONY: fmt
fmt: env ## Format, and fix what can be fixed
	@$(BIN)/ruff check --quiet --fix-only $(PYTHON_DIRS)
	@$(BIN)/ruff format $(PYTHON_DIRS)

.PHONY: lock
lock: env ## Renew the locked versions in requirements/
	@sh tools/lock.sh

.PHONY: clean
clean: ## Remove all that was made here; caches outside stay
	@rm -rf .venv build dist .coverage* .hypothesis .import_linter_cache \
		.mypy_cache .pytest_cache .ruff_cache marshal/kafka_marshal/_native.*.so
	@find $(PYTHON_DIRS) -name __pycache__ -type d -prune -exec rm -rf {} +
