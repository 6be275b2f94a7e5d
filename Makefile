# Everything runs in .venv, made on first use; only python3 (3.10 or newer) is needed.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

QUICK := $(addprefix tests/unit_tests/distributed/, contract buffer layout reduce sharded wire)
QUICK += $(addprefix tests/unit_tests/, optimizer test_architecture.py test_parallel_state.py test_plain_words.py test_public_api.py)

# Containers often set it. Then every process that the tests start compiles core again, and every worker all tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test quick check docs nightly clean

# Made anew when the metadata changes. torch first and alone, so that its build is chosen by constraints.txt only.
$(VENV)/.ready: setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e '.[dev]'
	touch $@

train: $(VENV)/.ready
	$(BIN)/python pretrain_gpt.py $(ARGS)

check: $(VENV)/.ready
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check --quiet .
	$(BIN)/python -m mypy
	$(BIN)/python -m sphinx -W -q -b html docs/source docs/build/html

test: check
	$(BIN)/python -m pytest -n 3 --dist worksteal $(ARGS)

# One case of each test of the engine, the optimizer and the house, in about two minutes; before a commit, not before a push.
quick: $(VENV)/.ready
	$(BIN)/python -m pytest -n 3 --dist worksteal --quick $(QUICK) $(ARGS)

nightly: $(VENV)/.ready
	$(BIN)/python -m pytest -m nightly $(ARGS)
	$(BIN)/python -m pytest --poison tests/unit_tests/distributed tests/unit_tests/optimizer

docs: $(VENV)/.ready
	$(BIN)/python -m sphinx -W -b html docs/source docs/build/html

clean:
	rm -rf $(VENV) docs/build runs
