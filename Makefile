# Everything below makes its own virtual environment; a fresh machine needs Python and pip.

PYTHON ?= python3
BASE ?= 0.6.16.post3
MINUTES ?= 5
VENV ?= .venv

WHEEL_PYTHON = $(VENV)/wheel/bin/python
TEST_PYTHON = $(VENV)/test/bin/python

.PHONY: wheel test releases soak lint clean help

help:
	@echo "make wheel [BASE=0.6.14]  build and verify the drop-in wheel into dist/"
	@echo "make test                 the CPU suite"
	@echo "make releases             build and verify all known releases, print the table"
	@echo "make soak [MINUTES=5]     the simulated device with fresh seeds, for minutes"
	@echo "make lint                 ruff and mypy"
	@echo "make clean                remove environments, caches and dist/"

wheel: $(VENV)/wheel/ready
	$(WHEEL_PYTHON) -m graft build $(BASE) -o dist

test: $(VENV)/test/ready
	$(TEST_PYTHON) -m pytest -n auto

releases: $(VENV)/wheel/ready
	$(WHEEL_PYTHON) -m graft.table

soak: $(VENV)/test/ready
	HYPOTHESIS_PROFILE=soak SOAK_MINUTES=$(MINUTES) $(TEST_PYTHON) -m pytest -q -s tests/sim/test_machine.py

lint: $(VENV)/test/ready
	$(TEST_PYTHON) -m ruff check .
	$(TEST_PYTHON) -m ruff format --check .
	$(TEST_PYTHON) -m mypy

$(VENV)/wheel/ready: requirements/wheel.txt
	$(PYTHON) -m venv --clear $(VENV)/wheel
	$(WHEEL_PYTHON) -m pip install --disable-pip-version-check -q -r requirements/wheel.txt
	@touch $@

$(VENV)/test/ready: requirements/wheel.txt requirements/test.txt requirements/test-no-deps.txt
	$(PYTHON) -m venv --clear $(VENV)/test
	$(TEST_PYTHON) -m pip install --disable-pip-version-check -q -r requirements/test.txt
	$(TEST_PYTHON) -m pip install --disable-pip-version-check -q --no-deps -r requirements/test-no-deps.txt
	@touch $@

clean:
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
