# Two commands on a fresh machine: `make demo`, `make test`. `make help` lists the rest.
# PYTHON=/path/to/python3.x chooses the interpreter; default: the newest suitable one on PATH.

VENV  := .venv
BIN   := $(VENV)/bin
READY := $(VENV)/.ready
CODE  := minipic_backend integrations tests examples benchmarks tools
ARGS  ?=

# Any Python from 3.8 can run the set-up, which then looks for a suitable one.
BOOT = $(or $(PYTHON),$(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 8))' 2>/dev/null && echo $$p && break; done))

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint typecheck format bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## make .venv and install everything

$(READY): pyproject.toml $(wildcard tools/*.py)
	@test -n "$(BOOT)" || { echo "MiniPIC needs Python 3.11 or newer: none found on PATH" >&2; exit 1; }
	@echo "Setting up $(VENV) (a few minutes and 4 GB, once)"
	@"$(BOOT)" -m tools.setup_venv --venv "$(VENV)" --python "$(PYTHON)"
	@touch $@

demo: $(READY) ## answer questions over real documents on the CPU engine
	@$(BIN)/minipic demo $(ARGS)

# Kernels in a process of their own: Triton's interpreter, which they need where there is no GPU, is
# switched on before Triton is imported, and vLLM must not be run with it.
test: $(READY) ## run the test suite, or ARGS="tests/test_layout.py -k …"
ifeq ($(ARGS),)
	$(BIN)/python -m pytest tests/kernels
	$(BIN)/python -m pytest --ignore=tests/kernels
else
	$(BIN)/python -m pytest $(ARGS)
endif

lint: $(READY) ## check style
	$(BIN)/ruff check $(wildcard $(CODE))
	$(BIN)/ruff format --check $(wildcard $(CODE))

typecheck: $(READY) ## check types, mypy strict
	$(BIN)/mypy

format: $(READY) ## format, and fix what can be fixed
	$(BIN)/ruff check --fix $(wildcard $(CODE))
	$(BIN)/ruff format $(wildcard $(CODE))

bench: $(READY) ## benchmarks: make bench ARGS="throughput --json out.json"
	$(BIN)/minipic bench $(ARGS)

clean: ## remove .venv and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist
	find . -name __pycache__ -type d -not -path './.git/*' -exec rm -rf {} +
