"""What a release says of itself agrees: version, citation, changelog, and the files in the wheel."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch

from consilium import __version__
from tests.docs.pages import ROOT

CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
GROUPS = {"Security", "Added", "Changed", "Deprecated", "Removed", "Fixed"}


def test_the_version_has_a_dated_section_and_a_citation() -> None:
    assert re.search(rf"^## \[{re.escape(__version__)}\] - \d{{4}}-\d\d-\d\d$", CHANGELOG, re.MULTILINE)
    assert f"version: {__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_changes_are_grouped_and_each_is_named_once() -> None:
    assert set(re.findall(r"^### (.*)$", CHANGELOG, re.MULTILINE)) <= GROUPS
    for part in re.split(r"^## ", CHANGELOG, flags=re.MULTILINE)[1:]:
        heads = re.findall(r"^### (.*)$", part, re.MULTILINE)
        assert len(heads) == len(set(heads)), part.splitlines()[0]
        entries = re.findall(r"^- (.*)$", part, re.MULTILINE)
        assert len(entries) == len(set(entries)), part.splitlines()[0]


def test_every_file_beside_the_code_is_in_the_wheel() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["consilium"]
    files = [path.relative_to(ROOT / "consilium").as_posix() for path in (ROOT / "consilium").rglob("*.*")]
    beside = [name for name in files if not name.endswith((".py", ".pyc")) and "__pycache__" not in name]
    assert [name for name in beside if not any(fnmatch(name, pattern) for pattern in patterns)] == []
