"""One vocabulary: no class name twice, and no word of a private language in names."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import consilium
from tests.architecture.sources import nodes

ROOT = Path(consilium.__file__).parent
MESSAGES = {"Server", "Downlink", "Uplink", "Memory", "Release"}  # every method has its own, inside its class
METAPHORS = ("desk", "office", "shelf", "veil", "school", "lesson")
FORMATS = {"legacy.py", "supervisor.py", "project.py"}  # they read what 0.1 wrote under these words


def classes(source: str) -> list[str]:
    return [node.name for node in nodes(source) if isinstance(node, ast.ClassDef)]


def names(source: str) -> set[str]:
    """Every name that a source defines or uses."""
    found = {node.id for node in nodes(source) if isinstance(node, ast.Name)}
    found |= {node.attr for node in nodes(source) if isinstance(node, ast.Attribute)}
    found |= {node.arg for node in nodes(source) if isinstance(node, ast.arg)}
    defined = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return found | {node.name for node in nodes(source) if isinstance(node, defined)}


def metaphors(source: str) -> list[str]:
    pattern = re.compile(rf"(^|_)({'|'.join(METAPHORS)})s?(_|$)")
    words = {re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower(): name for name in names(source)}
    return sorted(name for word, name in words.items() if pattern.search(word))


def test_no_class_name_is_used_twice() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        for name in classes(path.read_text(encoding="utf-8")):
            if name not in MESSAGES:
                homes[name].append(str(path.relative_to(ROOT)))
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def test_names_are_words_of_the_field() -> None:
    sources = {str(path.relative_to(ROOT)): path for path in ROOT.rglob("*.py") if path.name not in FORMATS}
    found = {name: metaphors(path.read_text(encoding="utf-8")) for name, path in sources.items()}
    assert {name: words for name, words in found.items() if words} == {}


def test_a_metaphor_would_be_noticed() -> None:
    assert metaphors("class MemoryShelf: ...\ndef ask(desk): return desk.said\n") == ["MemoryShelf", "desk"]
    assert metaphors("unveiled = officer = 1") == []
