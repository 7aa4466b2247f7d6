"""Every public name has a docstring, and the examples in it run."""

from __future__ import annotations

import doctest
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import consilium
from tests.cli.conftest import write_study

CALLABLE = sorted(set(consilium.__all__) - {"METHODS"})


@pytest.fixture(scope="module")
def place(federation: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the examples name: `study.toml` and `data`."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "data").symlink_to(federation)
    write_study(folder / "study.toml", Path("data"), rounds=1)
    return folder


def _run(thing: Any, name: str) -> tuple[int, str]:
    """How many examples were tried, and what went wrong."""
    said: list[str] = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    for found in doctest.DocTestFinder(recurse=False).find(thing, name, globs={}):
        runner.run(found, out=said.append)
    return runner.summarize(verbose=False).attempted, "".join(said)


@pytest.mark.xdist_group("examples")
@pytest.mark.parametrize("name", ["", *CALLABLE])
def test_examples_run(name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    torch.set_num_threads(1)
    tried, wrong = _run(getattr(consilium, name) if name else consilium, name or "consilium")
    assert tried >= 3
    assert wrong == ""


@pytest.mark.parametrize("name", CALLABLE)
def test_every_argument_is_explained(name: str) -> None:
    thing = getattr(consilium, name)
    text = inspect.getdoc(thing) or ""
    arguments = [p for p in inspect.signature(thing).parameters if p != "self"]
    assert [p for p in arguments if f"    {p}: " not in text] == []
