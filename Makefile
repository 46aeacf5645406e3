# Everything below makes its own virtual environment; a fresh machine needs Python and pip.

PYTHON ?= python3
BASE ?= 0.6.16.post3
MINUTES ?= 5
VENV ?= .venv

WHEEL_PYTHON = $(VENV)/wheel/bin/python
TEST_PYTHON = $(VENV)/test/bin/python
NATIVE_BIN = $(VENV)/native/bin
HEADERS = $(abspath $(VENV)/native/headers)
CMAKE = PATH="$(abspath $(NATIVE_BIN)):$$PATH" $(NATIVE_BIN)/cmake -S . -G Ninja -DGEMM_WORKSPACE_HEADERS=$(HEADERS)

# GPU targets run in the environment that has torch, cuDNN and FlashInfer's dependencies.
GPU_PYTHON ?= $(PYTHON)
WHEELS ?=
CHECKOUT ?=
JOBS ?= 6
OUT ?= gpu-out
GPU_OPTIONS ?=

# NATIVE=1 puts the native launch into the wheel.
NATIVE ?=

.PHONY: wheel native test releases soak gpu gpu-soak gpu-memcheck gpu-plan-sizes gpu-upstream lint clean help

help:
	@echo "make wheel [BASE=0.6.14]  build and verify the drop-in wheel into dist/"
	@echo "make wheel NATIVE=1       the same with the native launch, for x86-64 Linux"
	@echo "make native               build the native launch and run its tests"
	@echo "make test                 the CPU suite"
	@echo "make releases             build and verify all known releases, print the table"
	@echo "make soak [MINUTES=5]     the simulated device with fresh seeds, for minutes"
	@echo "make gpu WHEELS=\"R.whl F.whl\"  the hazard catalogue on this GPU (tests/gpu/README.md)"
	@echo "make gpu-soak WHEELS=...  a server in small, SOAK_MINUTES (4) a wheel"
	@echo "make gpu-memcheck WHEELS=F.whl  a short one under compute-sanitizer"
	@echo "make gpu-plan-sizes       workspaces by device description, SM90 to SM121"
	@echo "make gpu-upstream CHECKOUT=... WHEELS=...  upstream's tests, release against fork"
	@echo "make lint                 ruff and mypy"
	@echo "make clean                remove environments, caches and dist/"

wheel: $(VENV)/wheel/ready $(if $(NATIVE),native)
	$(WHEEL_PYTHON) -m graft build $(BASE) -o dist $(if $(NATIVE),--native build/native/_native.so)

# Three builds: with sanitizers for the tests, and the one that is shipped.
native: $(VENV)/native/ready $(VENV)/test/ready
	$(CMAKE) -B build/native-asan -DGEMM_WORKSPACE_SANITIZE=ON
	$(CMAKE) -B build/native-tsan -DGEMM_WORKSPACE_THREAD_SANITIZE=ON
	$(CMAKE) -B build/native
	$(NATIVE_BIN)/cmake --build build/native-asan
	$(NATIVE_BIN)/ctest --test-dir build/native-asan --output-on-failure
	$(NATIVE_BIN)/cmake --build build/native-tsan
	$(NATIVE_BIN)/ctest --test-dir build/native-tsan --output-on-failure
	$(NATIVE_BIN)/cmake --build build/native
	NATIVE_BUILD=build/native $(TEST_PYTHON) -m pytest -q tests/native

test: $(VENV)/test/ready
	$(TEST_PYTHON) -m pytest -n auto --dist loadgroup

releases: $(VENV)/wheel/ready
	$(WHEEL_PYTHON) -m graft.table

soak: $(VENV)/test/ready
	HYPOTHESIS_PROFILE=soak SOAK_MINUTES=$(MINUTES) $(TEST_PYTHON) -m pytest -q -s tests/sim/test_machine.py

gpu:
	$(GPU_PYTHON) tests/gpu/catalogue $(WHEELS) -j $(JOBS) -o $(OUT) $(GPU_OPTIONS)

gpu-soak:
	$(GPU_PYTHON) tests/gpu/soak.py $(WHEELS) -o $(OUT) $(GPU_OPTIONS)

gpu-memcheck:
	$(GPU_PYTHON) tests/gpu/soak.py $(WHEELS) --sanitize -o $(OUT) $(GPU_OPTIONS)

gpu-plan-sizes:
	$(GPU_PYTHON) tests/gpu/plan_sizes.py -o $(OUT) $(GPU_OPTIONS)

gpu-upstream:
	$(GPU_PYTHON) tests/gpu/upstream_tests.py "$(CHECKOUT)" $(WHEELS) -o $(OUT) $(GPU_OPTIONS)

lint: $(VENV)/test/ready
	$(TEST_PYTHON) -m ruff check .
	$(TEST_PYTHON) -m ruff format --check .
	$(TEST_PYTHON) -m mypy

$(VENV)/wheel/ready: requirements/wheel.txt
	$(PYTHON) -m venv --clear $(VENV)/wheel
	$(WHEEL_PYTHON) -m pip install --disable-pip-version-check -q -r requirements/wheel.txt
	@touch $@

# The wheels are 0.8 GB, of which 29 MB of headers are kept.
$(VENV)/native/ready: requirements/native.txt requirements/native-tools.txt csrc/headers.py
	$(PYTHON) -m venv --clear $(VENV)/native
	$(NATIVE_BIN)/pip install --disable-pip-version-check -q -r requirements/native-tools.txt
	$(NATIVE_BIN)/pip download --disable-pip-version-check -q --no-deps \
		-d $(VENV)/native/wheels -r requirements/native.txt
	$(NATIVE_BIN)/python csrc/headers.py $(VENV)/native/wheels $(VENV)/native/headers
	rm -rf $(VENV)/native/wheels
	@touch $@

$(VENV)/test/ready: requirements/wheel.txt requirements/test.txt requirements/test-no-deps.txt
	$(PYTHON) -m venv --clear $(VENV)/test
	$(TEST_PYTHON) -m pip install --disable-pip-version-check -q -r requirements/test.txt
	$(TEST_PYTHON) -m pip install --disable-pip-version-check -q --no-deps -r requirements/test-no-deps.txt
	@touch $@

clean:
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
