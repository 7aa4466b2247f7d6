"""How numbers of things are written."""

from __future__ import annotations


def counted(number: int, thing: str, ending: str = "s") -> str:
    """The number and the thing, in the plural unless there is one: "1 case", "2 cases"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}{ending}"


def are(number: int) -> str:
    """The verb for so many things."""
    return "is" if number == 1 else "are"
