"""The documentation as data: code blocks and tables of README.md and docs/."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consilium.cli.main import command

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
SHELL = ("", "sh", "bash", "shell", "console")

Command = Any  # typer's own copy of click has no public type


@dataclass(frozen=True)
class Block:
    """A fenced block, and where it stands."""

    page: Path
    line: int
    language: str
    text: str
    mark: str  # "run", "run: slow" or "not run: why", of a comment above the block, else of the page

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


_MARK = re.compile(r"<!-- ((?:not )?run\b.*?) -->")
_PAGE = re.compile(r"<!-- commands of this page: (not run.*?) -->")


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    common = _PAGE.search(text)
    language, start, lines, mark, above = "", 0, list[str](), "", ""
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.startswith("```"):
            lines.append(line)
        elif start:
            yield Block(page, start, language, "\n".join(lines), mark)
            start = 0
        else:
            own = _MARK.search(above)
            mark = own[1] if own else common[1] if common else ""
            language, start, lines = line.removeprefix("```").strip(), number, []
        above = line


def all_blocks(*languages: str) -> list[Block]:
    return [block for page in PAGES for block in blocks(page) if block.language in languages]


def commands(block: Block) -> Iterator[list[str]]:
    """The `consilium …` commands of a block, as words without the program's name."""
    for line in block.text.replace("\\\n", " ").splitlines():
        line = line.removeprefix("$ ").removeprefix(".venv/bin/")
        if line.startswith("consilium "):
            yield shlex.split(line, comments=True)[1:]


def the_commands() -> dict[str, Command]:
    group: Any = command()
    found: dict[str, Command] = group.commands
    return found


def sections(page: Path) -> dict[str, str]:
    """Title → text, of headings of any depth."""
    parts = re.split(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


def table(text: str, head: str) -> dict[str, list[str]]:
    """The first table whose first column is called `head`: first cell, without backticks → the other cells."""
    rows: dict[str, list[str]] = {}
    inside = False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith(f"| {head} "):
            inside = True
        elif inside and not line.startswith("|"):
            break
        elif inside and not line.startswith("|-"):
            rows[cells[0].strip("` ")] = cells[1:]
    return rows
