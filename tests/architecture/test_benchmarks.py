"""Benchmarks run seldom; that they can still be imported is seen here."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import benchmarks
from benchmarks.__main__ import BENCHMARKS

MODULES = sorted(path.stem for path in Path(benchmarks.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_can_be_imported(name: str) -> None:
    assert importlib.import_module(f"benchmarks.{name}").__doc__


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_names_a_function(name: str) -> None:
    module, _, function = BENCHMARKS[name].partition(":")
    assert callable(getattr(importlib.import_module(f"benchmarks.{module}"), function))
