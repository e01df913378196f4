# `make demo`: the main job on this machine. `make test`: lint, types, tests. Both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# A CPU build of torch where there is no NVIDIA GPU: the default wheel brings gigabytes of CUDA.
TORCH_CPU := torch==2.13.0
DEMO_DIR ?= demo-results

.PHONY: demo test check lint types unit clean

demo: $(STAMP)
	$(BIN)/benchctl matrix --suite quick --output $(DEMO_DIR)

test: check unit

check: lint types

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP)
	$(BIN)/python -m pytest

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "benchctl needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	if nvidia-smi -L >/dev/null 2>&1; then \
	    $(BIN)/python -m pip install --quiet -e '.[gpu,dev]'; \
	else \
	    $(BIN)/python -m pip install --quiet $(TORCH_CPU) && $(BIN)/python -m pip install --quiet -e '.[dev]'; \
	fi
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
