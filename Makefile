# Everything below sets up its own environment, .venv, from python3 (3.11 or newer), make and a package index.
# Options: PYTHON=python3.12 (which interpreter), ENVIRONMENT=auto|cpu|gpu (which set of packages), PYTEST_ARGS='-k cache'.

PYTHON ?= python3
ENVIRONMENT ?= auto
PYTEST_ARGS ?=
EXTRAS ?= dev eval
BIN := .venv/bin
SETUP := $(PYTHON) scripts/environment.py --environment $(ENVIRONMENT)

# Without byte code every process that a test starts compiles its imports anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help reproduce test test-gpu lint format check compile-gpu resolve-gpu clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@sed -n 's/^# \(Options: .*\)/\1/p' $(firstword $(MAKEFILE_LIST))

reproduce: ## run the main job on this machine: records, tables, figures, claims, report; repeating it skips what is done
	@$(SETUP) --extras eval
	@$(BIN)/python -m experiments.reproduce

test: ## run every test that needs no GPU; those of the tracker need wandb among EXTRAS, which are 'dev eval'
	@$(SETUP) --extras $(EXTRAS)
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not gpu" $(PYTEST_ARGS)

test-gpu: ## run the tests that need an NVIDIA GPU, compute-sanitizer's checks among them where a CUDA toolkit is found
	@$(SETUP) --extras dev
	@$(BIN)/python -c 'import sys, torch; torch.cuda.is_available() or sys.exit("no NVIDIA GPU: torch.cuda.is_available() is False; accepted: a machine with one and the gpu set of packages, see ENVIRONMENT")'
	@$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

lint: ## check style, formatting, types and that notebooks hold no outputs; changes nothing
	@$(SETUP) --extras dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	git ls-files '*.ipynb' | xargs -r $(BIN)/nbstripout --verify

format: ## format the code and strip notebook outputs, as the pre-commit hooks do
	@$(SETUP) --extras dev
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format
	git ls-files '*.ipynb' | xargs -r $(BIN)/nbstripout

check: lint test ## lint, test, and compare every committed table, figure and report with the committed records
	$(BIN)/python -m analysis --check

compile-gpu: ## compile the Triton kernels for six NVIDIA architectures, without a GPU, and compare what they take
	@$(SETUP) --extras dev
	@$(BIN)/python -m scripts.compile_triton --check

resolve-gpu: ## ask the package index whether the GPU set of packages resolves; installs nothing
	@$(SETUP) --extras dev
	@$(BIN)/python scripts/environment.py --resolve-gpu

clean: ## remove .venv, caches and Hydra's run folders; results/ stays
	rm -rf .venv .hypothesis .mypy_cache .pytest_cache .ruff_cache build outputs multirun *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
