# Two commands matter: `make demo` and `make test`. Each first brings .venv up to uv.lock; called again it starts at once.
# Nothing outside this folder is touched. Variables: PYTHON, the interpreter for .venv (3.11 or newer); NPROC, DEVICE, ARGS for the demo.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
UV_VERSION := 0.13.9
TORCH := torch==2.13.0

NPROC ?= 2
DEVICE ?= cpu
ARGS ?=
# The demo's batches are cut for two ranks. With these its optimizer step is the same on others.
FIT_1 := distributed.ep_size=1
FIT_4 := train.micro_batch_size=32
FIT_8 := train.micro_batch_size=16

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint format typecheck path-length lock wheel clean

help:
	@echo "make demo       set up, then fine-tune a small Qwen3-MoE on two expert-parallel ranks (NPROC=1|2|4|8 DEVICE=cpu ARGS='key=value ...')"
	@echo "make test       set up, then lint, import rules, types and the tests that need no GPU"
	@echo "make test-all   the same with every test; those for GPUs skip where there is none"
	@echo "make setup      .venv with the pinned dependencies, and nothing else"
	@echo "make lint | format | typecheck | wheel | path-length"
	@echo "make lock       resolve the dependencies again after a change in pyproject.toml"
	@echo "make clean      remove .venv and what tools left (runs/ stays)"

# The stamp holds the checksum of what the environment was built from, so a fresh clone's file times do not matter.
setup:
	@key="`cat uv.lock pyproject.toml Makefile | cksum`"; \
	if [ -x $(BIN)/nemo-moe ] && [ "`cat $(STAMP) 2>/dev/null`" = "$$key" ]; then exit 0; fi; \
	$(MAKE) --no-print-directory install && echo "$$key" > $(STAMP)

# An environment that is broken (an interrupted set-up) or too old is made again.
.PHONY: uv install
uv:
	@if ! $(BIN)/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "nemo_moe needs python 3.11 or newer; $(PYTHON) is `$(PYTHON) --version 2>/dev/null || echo not there`." >&2; \
	    echo "Name another interpreter, for example: make demo PYTHON=python3.12" >&2; exit 1; }; \
	  rm -rf $(VENV); \
	  $(PYTHON) -m venv $(VENV) || { \
	    echo "$(PYTHON) -m venv failed: the system's package of python's venv module may be missing" >&2; rm -rf $(VENV); exit 1; }; \
	fi
	@echo "setting up $(VENV) (a few minutes the first time) ..."
	$(BIN)/python -m pip install -qq uv==$(UV_VERSION)

# torch goes first, by plain pip, which finds the build (CPU or CUDA) that this machine's pip is set up for. All else is hash-checked.
install: uv
	$(BIN)/uv export --quiet --frozen --no-header --no-annotate --no-emit-project --extra dev --no-hashes --output-file $(VENV)/constraints.txt
	$(BIN)/uv export --quiet --frozen --no-header --no-annotate --no-emit-project --extra dev --prune torch --output-file $(VENV)/requirements.txt
	$(BIN)/python -m pip install -qq $(TORCH) --constraint $(VENV)/constraints.txt
	$(BIN)/python -m pip install -qq --no-deps --require-hashes --requirement $(VENV)/requirements.txt
	$(BIN)/python -m pip install -qq --no-deps --no-build-isolation --editable .
	@$(BIN)/python -m pip check || { echo "if pyproject.toml has changed, run: make lock" >&2; exit 1; }

demo: setup
	@case $(NPROC) in 1|2|4|8) ;; *) echo "NPROC must be 1, 2, 4 or 8 (the demo's 8 experts and batches of 128 are dealt to them); found $(NPROC)" >&2; exit 1;; esac
	$(BIN)/nemo-moe finetune demo --nproc-per-node $(NPROC) device=$(DEVICE) $(FIT_$(NPROC)) $(ARGS)

test: lint typecheck
	$(BIN)/python -m pytest

test-all: lint typecheck
	$(BIN)/python -m pytest -m ""

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/lint-imports
	$(BIN)/hadolint docker/Dockerfile

typecheck: setup
	$(BIN)/mypy

# Lines of code from the key in the YAML to the bytes on the wire, for each dispatcher: a budget for whoever has to read them.
path-length: setup
	$(BIN)/python tools/path_length.py

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: setup
	$(BIN)/python -m build --no-isolation

# uv writes the package index's addresses into the lock. They are replaced by placeholders: uv reads names, versions and hashes
# from the lock, and each machine's pip knows its own index. Leave UV_INDEX, UV_DEFAULT_INDEX and UV_FIND_LINKS unset here.
lock: uv
	$(BIN)/uv lock
	sed -E -e 's#registry = "https?://[^"]*"#registry = "https://index.invalid/simple"#g' \
	  -e 's#url = "https?://[^/"]+/#url = "https://files.invalid/#g' uv.lock > $(VENV)/uv.lock
	mv $(VENV)/uv.lock uv.lock
	$(BIN)/uv lock --check

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
