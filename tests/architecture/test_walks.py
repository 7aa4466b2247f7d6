"""The two ways that docs/architecture.md draws pass files that are there, each once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import consilium

PACKAGE = Path(consilium.__file__).parent
PAGE = PACKAGE.parent / "docs" / "architecture.md"


def walks(page: str) -> list[list[str]]:
    """The files of every drawing, in order: the first word of a step."""
    drawings = re.findall(r"```text\n(.*?)```", page, re.S)
    return [re.findall(r"^[ │]+([\w/]+\.py)\b", drawing, re.M) for drawing in drawings]


@pytest.mark.parametrize("walk", walks(PAGE.read_text(encoding="utf-8")), ids=["study", "image"])
def test_a_walk_passes_every_file_once(walk: list[str]) -> None:
    assert len(walk) > 10
    assert [file for file in walk if not (PACKAGE / file).is_file()] == []
    assert len(set(walk)) == len(walk)


def test_all_files_that_the_page_names_are_there() -> None:
    named = set(re.findall(r"\b((?:[a-z_]+/)+[a-z_]+\.py)\b", PAGE.read_text(encoding="utf-8")))
    places = (PACKAGE, PACKAGE.parent)
    assert sorted(file for file in named if not any((place / file).is_file() for place in places)) == []
