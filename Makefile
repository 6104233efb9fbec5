# Two commands for a fresh machine (Python 3.10 to 3.13, gcc, make): `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.ready
BENCH_STAMP = $(VENV)/.bench
SOURCES = $(wildcard src/*.c src/*.h src/*.pyx src/*.pxd) setup.py pyproject.toml

.PHONY: demo demo-mooncake test bench bench-smoke bench-mooncake torture instructions lint sdist clean

demo: $(STAMP)
	$(BIN)/omni-fastshm run examples/qwen2_5_omni.yaml

# The same over Mooncake's store, and one with both kinds of edges; each starts a master of its own on this machine.
demo-mooncake: $(STAMP)
	$(BIN)/omni-fastshm mooncake up -- $(BIN)/omni-fastshm run examples/qwen2_5_omni_mooncake.yaml
	$(BIN)/omni-fastshm mooncake up -- $(BIN)/omni-fastshm run examples/qwen2_5_omni_mixed.yaml

test: $(STAMP)
	$(BIN)/pytest -q

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

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The wheel is built from the sdist, so that an incomplete sdist shows.
sdist: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build --no-isolation

$(STAMP): $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "setuptools==84.2.1" "cython==3.3.1"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation --editable ".[demo,dev]"
	touch $(STAMP)

$(BENCH_STAMP): $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation --editable ".[bench]"
	touch $(BENCH_STAMP)

clean:
	rm -rf build dist *.egg-info omni_fastshm/*.so
