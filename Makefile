PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo test test-all check docs bench clean

setup: .venv/.ready

.venv/.ready: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

demo: setup
	$(BIN)/consilium demo --to demo

test: setup
	$(BIN)/python -m pytest

test-all: setup
	$(BIN)/python -m pytest -m "" --timeout 7200

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -n 0 tests/architecture

# a broken link or a name that is not there is an error
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

bench: setup
	$(BIN)/python -m benchmarks

clean:
	rm -rf .venv build dist *.egg-info
