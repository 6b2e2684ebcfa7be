# Needs make and Python 3.11 or newer; everything else goes into .venv.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2
KILLS ?= 30
SEED ?= 0
ARGS ?=

# The first that runs, is new enough and can make virtual environments; PYTHON=... names another.
PYTHONS := $(or $(PYTHON),python3.12 python3.11 python3)
PROBE := import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))

.PHONY: help venv quickstart test test-deviceless test-slurm test-mpi test-exhaustive soak lint format clean

help:
	@echo "make quickstart    trains a small model on the packaged corpus, on CPU (ARGS=\"KEY=VALUE ...\" changes its configuration)"
	@echo "make test          format, lint, types, tests and doctests (WORKERS=2 processes)"
	@echo "make test-deviceless  what is compiled for GPUs that are not here (installs a compiler of 200 MB into .cache)"
	@echo "make test-slurm    starts a SLURM cluster on this machine and trains on it (Debian: slurm-wlm, munge; root)"
	@echo "make test-mpi      trains with mpirun (Debian: openmpi-bin)"
	@echo "make test-exhaustive  every combination of schedules, axes and formats (WORKERS=2 processes), half an hour"
	@echo "make soak          kills training with SIGKILL at 30 random moments, minutes (KILLS=30 SEED=0)"
	@echo "make lint          format, lint and types only"
	@echo "make format        rewrites the code in the project's format"
	@echo "make venv          makes .venv and installs jaxpar with its dev extra (PYTHON=... for another interpreter)"
	@echo "make clean         removes .venv and caches; runs/ stays"

venv: $(STAMP)
	@$(BIN)/python -c "import platform; print('$(VENV) is ready: Python', platform.python_version())"

$(STAMP): pyproject.toml
	@set -e; \
	if ! $(BIN)/python -c "$(PROBE)" >/dev/null 2>&1; then \
		for python in $(PYTHONS); do \
			if "$$python" -c "$(PROBE)" >/dev/null 2>&1; then found="$$python"; break; fi; \
		done; \
		if [ -z "$$found" ]; then \
			echo "jaxpar needs Python 3.11 or newer with its venv module; none of these is one: $(PYTHONS)" >&2; \
			echo "install one (Debian, Ubuntu: python3 and python3-venv), or name it: make venv PYTHON=/path/to/python" >&2; \
			exit 1; \
		fi; \
		"$$found" -m venv --clear $(VENV); \
	fi
	$(BIN)/python -m pip install --editable ".[dev]"
	@touch $@

# A new directory each time: a run that is found in its directory would be continued.
quickstart: $(STAMP)
	$(BIN)/python -m jaxpar.train configs/quickstart.toml run.dir=runs/quickstart-$$(date +%Y%m%d-%H%M%S) $(ARGS)

test: lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# In a directory of its own: as a part of .venv, JAX would look for GPUs in every run.
DEVICELESS := .cache/deviceless

test-deviceless: $(STAMP)
	@set -e; version=$$($(BIN)/python -c "import importlib.metadata as m; print(m.version('jaxlib'))"); \
	if [ ! -e $(DEVICELESS)/$$version ]; then \
		rm -rf $(DEVICELESS); \
		$(BIN)/python -m pip install --no-deps --target $(DEVICELESS) \
			jax-cuda12-plugin==$$version jax-cuda12-pjrt==$$version; \
		touch $(DEVICELESS)/$$version; \
	fi
	PYTHONPATH=$(DEVICELESS) $(BIN)/python -m pytest tests/deviceless

test-slurm: $(STAMP)
	$(BIN)/python -m pytest -m slurm tests/slurm

test-mpi: $(STAMP)
	$(BIN)/python -m pytest -m mpi tests/slurm

test-exhaustive: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m exhaustive tests/equivalence

soak: $(STAMP)
	KILLS=$(KILLS) SEED=$(SEED) $(BIN)/python -m pytest -m soak -s tests/processes

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
