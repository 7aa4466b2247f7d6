"""The security page tells the truth: its tests exist, and its lists are those of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.docs.pages import ROOT

TEXT = (ROOT / "docs/security.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", TEXT)


def rows(heading: str) -> Iterator[list[str]]:
    """The rows of the first table below a heading."""
    table = TEXT.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    yield from ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:])


@pytest.mark.parametrize("file", sorted({file for file, _ in NAMED}))
def test_every_named_test_exists(file: str) -> None:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {name for named, name in NAMED if named == file} <= found


def test_every_threat_names_the_test_that_holds_it() -> None:
    threats = list(rows("Threats, and the tests that hold them"))
    assert len(threats) >= 25
    assert [row for row in threats if not re.search(r"`tests/[\w/]+\.py::test_\w+`", row[2])] == []


def test_the_commands_that_stay_are_all_named() -> None:
    pytest.importorskip("nvflare")
    from consilium.federation.cell_policy import REQUESTS
    from consilium.federation.start import ADMIN_COMMANDS, SITE_PROCESSORS

    stays = {row[0]: row[2] for row in rows("What stays of NVIDIA FLARE's surface")}
    assert set(re.findall(r"`(\w+)`", stays["commands of the administrator"])) == set(ADMIN_COMMANDS)
    assert len(re.findall(r"`(\w+)`", stays["cell `SITE`, from the server"])) == len(SITE_PROCESSORS)
    topics = {topic for _, topic in REQUESTS["server", "site"]}
    assert set(re.findall(r"`(\w+)`", stays["cell `server`, from sites"])) == {"task", *topics}
    topics = {topic for _, topic in REQUESTS["server_job", "site_job"]} - {"consilium."}
    assert set(re.findall(r"`(\w+)`", stays["cell `server.JOB`, from sites"])) == topics
