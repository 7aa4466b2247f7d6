"""How numbers of things and lists of them are written."""

from __future__ import annotations

import shlex
from collections.abc import Sequence


def counted(number: int, thing: str, ending: str = "s") -> str:
    """The number and the thing, in the plural unless there is one: "1 case", "2 cases"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}{ending}"


def are(number: int) -> str:
    """The verb for so many things."""
    return "is" if number == 1 else "are"


def command(*words: object) -> str:
    """A command of consilium as a shell takes it, in backquotes: names with spaces are quoted."""
    return f"`consilium {shlex.join(map(str, words))}`"


def listed(words: Sequence[str]) -> str:
    """The words in a sentence: "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
