"""Help texts as a terminal shows them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from consilium.cli.main import app


def texts(command: Any, name: str = "") -> Iterator[tuple[str, str]]:
    for text in (command.help, *(getattr(one, "help", None) for one in command.params)):
        yield name, text or ""
    for word, one in getattr(command, "commands", {}).items():
        yield from texts(one, f"{name} {word}".strip())


def test_no_help_loses_a_word_in_brackets() -> None:
    """They are markup: `[facts]` would not be shown."""
    lost = [(name, text) for name, text in texts(get_command(app)) if re.search(r"\[(?!/?bold\])[a-z]", text)]
    assert not lost
