# `make demo`: the main job on this machine. `make test`: lint, types, tests. Both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Where there is no NVIDIA GPU: pip prefers 2.13.0+cpu, where an index or a folder has it, to the default wheel, which
# brings gigabytes of CUDA.
TORCH_CPU := torch==2.13.0
DEMO_DIR ?= demo-results

.PHONY: demo test check lint types security unit nightly clean

demo: $(STAMP)
	$(BIN)/benchctl matrix --suite quick --output $(DEMO_DIR)

test: check unit

check: lint types security

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# Bandit's rules, as ruff has them, and whether the installed packages fit together; neither needs a network.
# Not asked: assert (narrows types), processes by argument list (no shell anywhere), seeded random numbers (traffic),
# and names that look like addresses, passwords or temporary files.
security: $(STAMP)
	$(BIN)/ruff check --select S --ignore S101,S603,S607,S311,S104,S105,S108 benchctl reports scripts server workloads
	$(BIN)/python -m pip check

unit: $(STAMP)
	$(BIN)/python -m pytest

# What `make unit` leaves out: long tests, and the fuzzers with many random inputs instead of a few fixed ones.
nightly: $(STAMP)
	$(BIN)/python -m pytest -m nightly
	BENCHCTL_FUZZ_EXAMPLES=2000 $(BIN)/python -m pytest --timeout 1800 tests/fuzz

# PYTHONWARNINGS: setuptools warns, over ten lines, about any editable installation.
$(STAMP): export PYTHONWARNINGS = ignore
$(STAMP): pyproject.toml
	@echo 'Setting up $(VENV): downloads and installs torch and others, a minute or more ...'
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "benchctl needs Python 3.11 or newer")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@if nvidia-smi -L >/dev/null 2>&1; then \
	    $(BIN)/python -m pip install --quiet -e '.[gpu,dev]'; \
	else \
	    $(BIN)/python -m pip install --quiet $(TORCH_CPU) && $(BIN)/python -m pip install --quiet -e '.[dev]'; \
	fi
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info
