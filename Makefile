# Two commands for a fresh machine (Python 3.10 to 3.13, gcc, make): `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.ready
DOCS_STAMP = $(VENV)/.docs-ready
BENCH_STAMP = $(VENV)/.bench
SOURCES = $(wildcard src/*.c src/*.h src/*.pyx src/*.pxd src/*/*.pxd) setup.py pyproject.toml

.PHONY: demo demo-mooncake test test-vllm-omni sanitizers instructions bench bench-smoke bench-mooncake torture lint docs pages
.PHONY: bench-vllm-omni wheel wheels matrix clean

demo: $(STAMP)
	$(BIN)/omni-fastshm run examples/qwen2_5_omni.yaml

# The same over Mooncake's store, and one with both kinds of edges; each starts a master of its own on this machine.
demo-mooncake: $(STAMP)
	$(BIN)/omni-fastshm mooncake up -- $(BIN)/omni-fastshm run examples/qwen2_5_omni_mooncake.yaml
	$(BIN)/omni-fastshm mooncake up -- $(BIN)/omni-fastshm run examples/qwen2_5_omni_mixed.yaml

test: $(STAMP)
	$(BIN)/pytest -q

# The C core as plain programs under ASan, UBSan and TSan, with its mutants, models and fuzzers; a part of `make test`.
sanitizers: $(STAMP)
	$(BIN)/pytest -q tests/native tests/model tests/fuzz tests/test_orderings.py

# Six to ten minutes; the tables on the screen, all figures in out/bench.json, the page with its images in out/.
# Leave the machine alone meanwhile.
bench: $(BENCH_STAMP)
	$(BIN)/omni-fastshm bench --json out/bench.json --out out

# Each measurement once, in a message or two, to see that all of them work.
bench-smoke: $(BENCH_STAMP)
	$(BIN)/pytest bench -q --benchmark-disable --bench-loads S1,S2,S3,S4,S5,S7,S8

# About ten minutes; `make torture KILLS=10000 MESSAGES=10000000 WAITS=1000 FUZZ=1000000` is the full size: docs/torture.md
KILLS ?= 2500
MESSAGES ?= 3000000
WAITS ?= 200
FUZZ ?= 100000
torture: $(STAMP)
	mkdir -p out
	PYTHONPATH=tests $(BIN)/python -m torture --kills $(KILLS) --messages $(MESSAGES) --waits $(WAITS) --fuzz $(FUZZ) \
		$(if $(SEED),--seed $(SEED)) $(if $(OWN_MOUNT),--own-mount) --json out/torture.json

# About a minute; `python -m bench.mooncake --publish` keeps the figures for docs/mooncake.md.
bench-mooncake: $(STAMP)
	$(BIN)/python -m bench.mooncake

# What tests/test_instructions.py compares with, for this interpreter and machine; valgrind must be installed.
instructions: $(STAMP)
	$(BIN)/python tests/support/instructions.py --renew

# The tests of the connector inside vllm-omni beside the real one, in a virtual environment of its own: about 10 GB of
# downloads, no GPU needed, five minutes. `make test-vllm-omni VLLM_OMNI=0.12.0rc1`: the generation of December 2025.
VLLM_OMNI ?= 0.30.0
VLLM = .venv-vllm-omni$(if $(filter-out 0.30.0,$(VLLM_OMNI)),-$(VLLM_OMNI))
test-vllm-omni: $(VLLM)/.ready
	$(VLLM)/bin/python -m pytest -q -o filterwarnings=default tests/integrations

# About three minutes; with PUBLISH=1 the figures are kept for docs/vllm-omni.md. Leave the machine alone meanwhile.
bench-vllm-omni: $(VLLM)/.ready
	$(VLLM)/bin/python -m bench.vllm_omni $(if $(PUBLISH),--publish)

# Which torch and setuptools, vllm says itself; but not the CPU build of torch, which pip would prefer where it lies at
# hand: the other wheels do not load beside it.
$(VLLM)/.ready: $(SOURCES)
	test -x $(VLLM)/bin/pip || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check "vllm==$(firstword $(subst rc, ,$(VLLM_OMNI)))" \
		"vllm-omni==$(VLLM_OMNI)" "torch!=2.13.0+cpu" "setuptools>=77" "cython==3.3.1" "posix_ipc==1.3.2" "pytest==9.2.0"
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	touch $(VLLM)/.ready

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy examples/*.py

# The documentation as a site, in build/site; reads the sources, needs Python 3.11 and no network beyond the set-up.
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	$(BIN)/python tools/check_site.py build/site

# What pages say about settings, errors and the layout, written from the code.
pages: $(STAMP)
	$(BIN)/python tools/render_pages.py
	$(BIN)/python tests/native/render_layout.py

# The wheel is built from the sdist, so that an incomplete sdist shows.
wheel: $(STAMP)
	rm -rf dist
	mkdir -p build
	$(BIN)/python -m build --no-isolation >build/wheel.log 2>&1 || { tail -50 build/wheel.log; exit 1; }
	$(BIN)/python tests/check_package.py dist

# For release: Python 3.10 to 3.13 in manylinux containers, of this machine's kind. Needs Docker or Podman.
wheels:
	$(PYTHON) -m venv build/cibuildwheel
	build/cibuildwheel/bin/pip install --quiet --disable-pip-version-check cibuildwheel==4.3.5
	build/cibuildwheel/bin/cibuildwheel --output-dir dist

# Every Python 3.10 to 3.13 that is on the PATH, with several releases of NumPy; `make matrix ARGS=--help`.
matrix:
	$(PYTHON) tools/matrix.py $(ARGS)

# Only the tools: nothing is compiled for the pages, and no torch is needed.
$(DOCS_STAMP): pyproject.toml
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python tools/extra.py docs | xargs $(BIN)/pip install --quiet --disable-pip-version-check
	touch $@

$(STAMP): $(SOURCES)
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "setuptools==84.2.1" "cython==3.3.1"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation --editable ".[demo,dev]"
	touch $(STAMP)

$(BENCH_STAMP): $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation --editable ".[bench]"
	touch $(BENCH_STAMP)

clean:
	rm -rf build dist *.egg-info omni_fastshm/*.so
