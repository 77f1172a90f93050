# Two commands do everything: `make demo` runs the runbook here, `make test` runs every test.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --constraint constraints.txt
# Each worker begins with a stretch of its own, so that tests that share a launch mostly stay
# together, and takes over from the other one's end. (loadgroup is no choice: pytest-xdist 3.8
# ignores the groups under pytest 9.2.) Later words win: PYTEST_ARGS=-n0 is one process.
WORKERS ?= logical
PYTEST_ARGS ?=
GPU_ARGS ?=

.PHONY: help demo test gpu lint clean

help:
	@echo "make demo   install, run all nine phases on this machine (CPU is enough), print the verdict"
	@echo "make test   install, run all tests on all cores (PYTEST_ARGS='-n0 tests/read': some, on one)"
	@echo "make gpu    install, run everything that waits for a GPU, in stages (GPU_ARGS='--stand-in')"
	@echo "make lint   install, run ruff, mypy and import-linter"
	@echo "make clean  remove the virtual environment and build output (artifacts/ is kept)"

$(VENV)/.runtime: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing nsa-runbook into $(VENV)"
	@$(PIP) --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	@echo "installing the development tools into $(VENV)"
	@$(PIP) --editable '.[dev]'
	@touch $@

demo: $(VENV)/.runtime
	$(BIN)/runbook run --phase all

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 PYTEST_TIMEOUT=600 \
	  $(BIN)/python -m pytest --numprocesses $(WORKERS) --maxprocesses 8 --dist worksteal $(PYTEST_ARGS)

# pytest and hypothesis are what its stage `tests` needs.
gpu: $(VENV)/.dev
	$(BIN)/runbook gpu-acceptance $(GPU_ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache
