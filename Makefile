PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: train test check docs nightly clean

# One environment for everything; made anew when the metadata changes.
$(VENV)/.ready: setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

train: $(VENV)/.ready
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 4 pretrain_gpt.py $(ARGS)

check: $(VENV)/.ready
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy
	$(BIN)/python -m sphinx -W -q -b html docs/source docs/build/html

test: check
	$(BIN)/python -m pytest -m 'not nightly'

nightly: $(VENV)/.ready
	$(BIN)/python -m pytest -m nightly

docs: $(VENV)/.ready
	$(BIN)/python -m sphinx -W -b html docs/source docs/build/html

clean:
	rm -rf $(VENV) docs/build runs
