"""Patterns of paths, such as `images/{patient}_{eye}.png`: what they capture pairs images with masks.

`{name}` captures a part of a file's or folder's name; the same name twice must be the same text. `*` is any part of a
name and is captured too, unless the pattern has fields; `**` is any number of folders. The fields `label`, `rater`,
`split`, `site` and `class` say something about a file. All others together name the case.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from consilium.errors import StudyError

ABOUT = ("label", "rater", "split", "site", "class")
_PIECES = re.compile(r"\*\*/|\*\*|\*|\?|\{([^{}]*)\}")
_SPLIT_WORDS = {
    **dict.fromkeys(("train", "training", "tr"), "train"),
    **dict.fromkeys(("valid", "val", "validation", "va"), "valid"),
    **dict.fromkeys(("test", "testing", "ts"), "test"),
}


@dataclass(frozen=True)
class Match:
    """A file and what its path says."""

    path: Path
    case: tuple[tuple[str, str], ...]  # the fields that name the case, in order of their names
    about: Mapping[str, str]

    @property
    def name(self) -> str:
        return "-".join(text.replace("/", "-") for _, text in self.case)


def matches(pattern: str, files: Iterable[Path], labels: Iterable[str] = ()) -> list[Match]:
    """The files whose whole relative path fits; `{label}` fits the names of the labels only."""
    expression = _expression(pattern, labels)
    found = []
    for path in files:
        if fit := expression.fullmatch(path.as_posix()):
            fields = fit.groupdict()
            about = {name: fields.pop(name) for name in ABOUT if name in fields}
            named = {name: text for name, text in fields.items() if not name.startswith("star_")}
            found.append(Match(path, tuple(sorted((named or fields).items())), about))
    return found


def literals(pattern: str) -> int:
    """How many characters of a pattern stand for themselves; a label's name, one of a few, counts as one."""
    return len(_PIECES.sub("", pattern.replace("{label}", "l")))


def split_of(word: str) -> str:
    """train, valid or test from a folder's name, or "" where it says none of them."""
    return _SPLIT_WORDS.get(word.lower(), "")


def _expression(pattern: str, labels: Iterable[str]) -> re.Pattern[str]:
    """A regular expression with a group for every field and star."""
    parts: list[str] = []
    seen: set[str] = set()
    stars = end = 0
    for piece in _PIECES.finditer(pattern):
        parts.append(re.escape(pattern[end : piece.start()]))
        end = piece.end()
        name = piece[1]
        if name is None and piece[0].startswith("**"):
            parts.append("(?:.*/)?" if piece[0].endswith("/") else ".*")
        elif name is None:
            parts.append(f"(?P<star_{stars}>{'[^/]' if piece[0] == '?' else '[^/]*'})")
            stars += 1
        elif not name.isidentifier() or name.startswith("star_"):
            raise StudyError(
                f"the pattern {pattern!r} has the field {{{name}}}; name it with letters, such as {{case}}."
            )
        elif name in seen:
            parts.append(f"(?P={name})")
        else:
            seen.add(name)
            inner = "|".join(map(re.escape, labels)) if name == "label" else ""
            parts.append(f"(?P<{name}>{inner or '[^/]+?'})")
    parts.append(re.escape(pattern[end:]))
    return re.compile("".join(parts))
