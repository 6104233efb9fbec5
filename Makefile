# Two commands for a fresh machine (Python 3.10 to 3.13, gcc, make): `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.ready
SOURCES = $(wildcard src/*.c src/*.h src/*.pyx src/*.pxd) setup.py pyproject.toml

.PHONY: demo test bench lint sdist clean

demo: $(STAMP)
	$(BIN)/omni-fastshm run examples/qwen2_5_omni.yaml

test: $(STAMP)
	$(BIN)/pytest -q

# Three to six minutes; the tables on the screen, all figures in out/bench.json. Leave the machine alone meanwhile.
bench: $(STAMP)
	mkdir -p out
	$(BIN)/pytest bench -q --benchmark-columns=median,iqr,rounds --benchmark-json=out/bench.json
	$(BIN)/python -m bench.report out/bench.json

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

clean:
	rm -rf build dist *.egg-info omni_fastshm/*.so
