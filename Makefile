# The verbs of the project; `make help` lists them.

PYTHON ?= python3
# Installed before everything else, so that a machine that has a CPU build at hand keeps it.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_DEV := $(VENV)/.ready-dev
WORKERS ?= 2
# Tests take from 1 ms to two minutes, so a worker that has none left takes some of another's.
PYTEST := $(BIN)/pytest -n $(WORKERS) --dist worksteal
# What `make core` tests: the pure rooms, state, and the texts of the command line.
CORE_TESTS := tests/compress tests/wire tests/gossip tests/node tests/state tests/cli tests/test_layers.py tests/config/test_options.py

# What `make quick` tests: the rooms of `peer` in which something differs from this commit, and tests that differ.
SINCE ?= origin/main
CHANGED = git diff --name-only --merge-base $(SINCE) && git ls-files --others --exclude-standard
TESTS_OF = sed -nE 's:^(tests/(.*/)?test_[a-z0-9_]+\.py)$$:\1:p; t; s:^(peer|tests)/([a-z_]+)/.*:tests/\2:p; t; s:^peer/([a-z_]+)\.py:tests/test_\1.py:p; s:^tools/.*:tests/tools:p'

.DEFAULT_GOAL := help
.PHONY: help run test suite quick core test-compose lint audit proto docs fuzz fuzz-meaning chaos kills soak clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

run: $(READY) ## set up, train with eight real peers, show a report
	$(BIN)/sotto up --peers 8

test: lint suite ## check style and types, run the whole test suite

suite: $(READY_DEV)
	$(PYTEST)

quick: lint ## the inner loop: all of `make lint`, and the tests of the rooms that changed since SINCE=origin/main
	changed=$$($(CHANGED)) && \
	$(PYTEST) -m "not slow and not compose" tests/test_layers.py tests/test_size.py \
	  $$(echo "$$changed" | $(TESTS_OF) | sort -u | xargs --no-run-if-empty ls -d 2>/dev/null)

core: $(READY_DEV) ## style, and the tests of the core that start no process
	$(BIN)/ruff check peer tests tools setup.py
	$(PYTEST) -m "not slow and not compose" $(CORE_TESTS)

test-compose: $(READY_DEV) ## start, kill and resume the compose cluster, and two bare devices (as root; see tests/compose)
	$(BIN)/pytest -m compose -s tests/compose

lint: $(READY_DEV) ## ruff, mypy, dead code, and whether generated files are fresh
	$(BIN)/ruff check peer tests tools setup.py
	$(BIN)/ruff format --check peer tests tools setup.py
	$(BIN)/mypy
	$(BIN)/vulture
	$(BIN)/python tools/generate_proto.py --check
	$(BIN)/python tools/generate_kernel_types.py --check
	$(BIN)/python tools/pin_packages.py --check
	$(BIN)/python tools/render_docs.py --check
	$(BIN)/python tools/draw_concepts.py --check

audit: ## ask for known vulnerabilities of the packages in the image; needs a connection to PyPI
	test -x build/audit/bin/python || $(PYTHON) -m venv build/audit
	build/audit/bin/pip install --quiet --disable-pip-version-check pip-audit==2.10.1
	build/audit/bin/python tools/audit_packages.py

proto: $(READY_DEV) ## generate the Python code of proto/, and the types of the native kernels
	$(BIN)/python tools/generate_proto.py
	$(BIN)/python tools/generate_kernel_types.py

docs: $(READY_DEV) ## generate the pages and pictures of docs/ that come from code, and build the site into build/site
	$(BIN)/python tools/render_docs.py
	$(BIN)/python tools/draw_concepts.py
	$(BIN)/python -m sphinx -W --keep-going -n -q -c docs . build/site
	@echo 'the site: build/site/docs/index.html'

fuzz: $(READY_DEV) ## fuzz the frame decoder for an hour
	$(BIN)/python -m tests.stress.fuzz --seconds 3600

fuzz-meaning: $(READY_DEV) ## tell peers of every algorithm well-formed lies for an hour
	$(BIN)/python -m tests.stress.fuzz_meaning --seconds 3600 --workers $(WORKERS)

chaos: $(READY_DEV) ## run the fault simulator over a thousand seeds
	$(BIN)/python -m tests.stress.chaos --seeds 0-1023 --workers $(WORKERS)
	for A in low-rank compressed-allreduce; do $(BIN)/python -m tests.stress.chaos --algorithm $$A --seeds 0-63 --workers $(WORKERS) || exit 1; done
	$(BIN)/python -m tests.stress.chaos --divided --seeds 0-999 --rounds 60 --workers $(WORKERS)

kills: $(READY_DEV) ## kill real peers 200 times for each of seven algorithms, compare every bit
	$(BIN)/python -m tests.stress.kills --kills 200

soak: $(READY_DEV) ## run eight real peers for 20,000 rounds: nothing may grow
	$(BIN)/python -m tests.stress.soak

clean: ## delete the environment, builds and caches; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis peer/native/_kernels.*

$(READY): EXTRAS := watch
$(READY_DEV): EXTRAS := watch,dev,docs,fuzz$(MORE:%=,%)
$(READY) $(READY_DEV): pyproject.toml setup.py $(wildcard peer/native/*.[ch]) peer/native/build.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Sottovoce needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'setting up $(VENV), once. 1 of 2: $(TORCH), several hundred megabytes'
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	@echo '2 of 2: Sottovoce and what it needs; its kernels are compiled for this machine, which takes minutes'
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[$(EXTRAS)]" $(PACKAGES)
	@touch $(READY) $@
