# Each target sets up what it needs in .venv; a second run finds it there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A torch to install instead of the newest (CI tests the lower bound with it).
TORCH ?= torch torchvision

.PHONY: demo test test-properties test-devices test-slow test-all lint types docs sweep benchmarks clean

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

# Of the properties' examples: a commit has the same ones each time it is tested.
SEED ?= $(shell git rev-list --count HEAD 2>/dev/null || echo 0)
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal --hypothesis-seed=$(SEED)

# Of what is run: one test in so many; as many turns in a row run all.
ONE_IN ?= 1
TURN ?= 0

# Of a test with many parameter sets: so many, others at each commit; 0 runs all. Of the tests that
# are not marked "every", one in so many: all of them take two cores some eight minutes.
PARAMETERS ?= 1
OF_TESTS ?= 2

# What is not slow; test-devices has the simulated accelerator.
test: $(VENV)/.test
	$(PYTEST) -m 'not slow' --parameters $(PARAMETERS) --delay-seed $(SEED) \
	    --one-in $(OF_TESTS) --turn $(SEED)

# More examples of each property.
test-properties: $(VENV)/.test
	$(PYTEST) -m 'hypothesis and not slow' --hypothesis-profile full --one-in $(ONE_IN) --turn $(TURN)

# On the simulated accelerator; ONE_IN=24 takes a minute.
test-devices: $(VENV)/.test
	$(PYTEST) -m 'not slow' --simulated --parameters 1 --one-in $(ONE_IN) --turn $(TURN)
	$(BIN)/python -m pytest -m 'timed and not slow' --simulated

# What takes long.
test-slow: $(VENV)/.test
	$(PYTEST) -m slow --one-in $(ONE_IN) --turn $(TURN)

# Every test, example and parameter set, on both: before a release.
test-all: $(VENV)/.test
	$(PYTEST) --hypothesis-profile full
	$(BIN)/python -m pytest -m timed
	$(PYTEST) --simulated --hypothesis-profile full
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
