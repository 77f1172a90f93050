# Two commands do everything: `make demo` runs the runbook here, `make test` tests a change.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Makes $(VENV), or completes it; another Python than the one there only if PYTHON=... asks for it.
INSTALL := $(PYTHON) scripts/environment.py $(VENV) $(if $(filter file,$(origin PYTHON)),--keep)
# For `make wheels`: names, or a file with the `pip list` of the machine that gets them.
HAVE ?= torch
WHEELS_ARGS ?=
# Each worker begins with a stretch of its own, so that tests that share a launch mostly stay
# together, and takes over from the other one's end. (loadgroup is no choice: pytest-xdist 3.8
# ignores the groups under pytest 9.2.) Later words win: PYTEST_ARGS=-n0 is one process.
WORKERS ?= logical
PYTEST_ARGS ?=
GPU_ARGS ?=

.PHONY: help demo test test-all gpu lint wheels clean

help:
	@echo "make demo   install, run all nine phases on this machine (CPU is enough), print the verdict"
	@echo "make test   install, run the tests of every commit on all cores (PYTEST_ARGS='-n0 tests/folder')"
	@echo "make test-all  the same and the long tier: every fault, every mutant, whole runs"
	@echo "make gpu    install, run everything that waits for a GPU, in stages (GPU_ARGS='--stand-in')"
	@echo "make lint   install, run ruff, mypy, import-linter, the budget and zizmor"
	@echo "make wheels download what a machine that has HAVE='torch numpy' (or a file) still needs"
	@echo "make clean  remove the virtual environment and build output (artifacts/ is kept)"
	@echo "PYTHON=python3.12 takes another Python, VENV=FOLDER another virtual environment"

demo:
	@$(INSTALL)
	$(BIN)/runbook run --phase all

# Tests marked `slow` are the long tier. Some hundred processes begin with the same modules: each
# would compile them anew where the shell forbids to keep that.
test-all: TIER := --long
test test-all:
	@$(INSTALL) --dev
	OMP_NUM_THREADS=1 PYTEST_TIMEOUT=600 PYTHONDONTWRITEBYTECODE= \
	  $(BIN)/python -m pytest --numprocesses $(WORKERS) --maxprocesses 8 --dist worksteal $(TIER) $(PYTEST_ARGS)

# pytest and hypothesis are what its stage `tests` needs.
gpu:
	@$(INSTALL) --dev
	$(BIN)/python -m benchmarks.gpu_session $(GPU_ARGS)

lint:
	@$(INSTALL) --dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/budget.py
	$(BIN)/zizmor --offline --quiet --persona=pedantic .github/workflows action.yml

wheels:
	@$(PYTHON) scripts/wheels.py --have "$(HAVE)" $(WHEELS_ARGS)

clean:
	rm -rf $(VENV) dist build wheels .pytest_cache .mypy_cache .ruff_cache
