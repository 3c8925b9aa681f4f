# Each target sets up what it needs in .venv; a second run finds it there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A torch to install instead of the newest (CI tests the lower bound with it).
TORCH ?= torch torchvision

.PHONY: demo test test-rest test-devices test-slow test-all lint types docs sweep benchmarks clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH) -e '.[examples]'
	touch $@

$(VENV)/.test: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH) -e '.[test]'
	touch $@

$(VENV)/.sweep: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH) -e '.[sweep]'
	touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH) -e '.[dev]'
	touch $@

demo: $(VENV)/.demo
	$(BIN)/python examples/digits_resnet.py

test: $(VENV)/.test
	$(BIN)/python -m pytest -n auto --dist worksteal --quick
	$(BIN)/python -m pytest -n auto --dist worksteal --quick --simulated --one-in 24

# What make test leaves out and is not slow: every other parameter set, every example of a property.
test-rest: $(VENV)/.test
	$(BIN)/python -m pytest -n auto --dist worksteal --rest

# On the simulated accelerator: make test runs one test in twenty-four there.
test-devices: $(VENV)/.test
	$(BIN)/python -m pytest -n auto --dist worksteal --quick --simulated
	$(BIN)/python -m pytest --quick --simulated -m timed

# What takes long, or one test in so many of it: as many turns in a row run all.
ONE_IN ?= 1
TURN ?= 0
test-slow: $(VENV)/.test
	$(BIN)/python -m pytest -n auto --dist worksteal -m slow \
	    --one-in $(ONE_IN) --turn $(TURN)

# Every parameter set and the slow tests, on both: before a release.
test-all: $(VENV)/.test
	$(BIN)/python -m pytest -n auto
	$(BIN)/python -m pytest -m timed
	$(BIN)/python -m pytest -n auto --simulated
	$(BIN)/python -m pytest --simulated -m timed

lint: $(VENV)/.dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

types: $(VENV)/.dev
	$(BIN)/python -m mypy

docs: $(VENV)/.dev
	$(BIN)/python -m sphinx -W -q -b html docs docs/_build/html

sweep: $(VENV)/.sweep
	$(BIN)/python -m tests.sweep --into docs/explanation/sweep

# The other libraries are in an environment of their own: nothing else needs them.
.venv-peers/.done: pyproject.toml examples/benchmarks/requirements-peers.txt
	[ -x .venv-peers/bin/python ] || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH) \
	    -r examples/benchmarks/requirements-peers.txt -e .
	touch $@

benchmarks: $(VENV)/.test .venv-peers/.done
	.venv-peers/bin/python examples/benchmarks/peers.py
	$(BIN)/python examples/benchmarks/two_stages.py
	$(BIN)/python examples/benchmarks/one_stage.py
	$(BIN)/python examples/benchmarks/doors.py
	$(BIN)/python examples/benchmarks/profiling.py
	$(BIN)/python examples/benchmarks/deferred_batch_norm.py
	$(BIN)/python examples/benchmarks/small_operations.py
	$(BIN)/python examples/benchmarks/overlap.py
	$(BIN)/python examples/benchmarks/scaling.py --tiny

clean:
	rm -rf $(VENV) .venv-peers docs/_build
