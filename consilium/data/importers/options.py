"""What a person may say to an importer; each importer takes some of it and refuses the rest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from consilium.errors import StudyError
from consilium.fields import nearest


@dataclass(frozen=True)
class ImportOptions:
    """Empty means: not said."""

    images: str = ""  # a pattern of paths, or what an importer calls its images
    masks: tuple[str, ...] = ()  # patterns, each for all labels or LABEL=PATTERN
    table: Path | None = None  # a CSV that names images and masks
    labels: tuple[str, ...] = ()
    values: tuple[str, ...] = ()  # STORED=LABEL
    threshold: float | None = None
    channels: int | None = None
    dimensions: int | None = None
    contains: tuple[str, ...] = ()  # OUTER=INNER
    site: str = ""
    all: bool = False  # also the cases that the paper leaves out

    def refuse_others(self, name: str, taken: Iterable[str]) -> None:
        """A sentence for the first option that was given and is not one of `taken`."""
        for field in fields(self):
            if getattr(self, field.name) != field.default and field.name not in taken:
                raise StudyError(f"--{field.name} does not go with `import {name}`; leave it out.")


def pairs(option: str, texts: Iterable[str]) -> dict[str, str]:
    """KEY=VALUE texts as a dictionary."""
    found = {}
    for text in texts:
        key, sign, value = text.partition("=")
        if not (key and sign and value):
            raise StudyError(f"--{option} {text}: write two words with '=' between them.")
        found[key.strip()] = value.strip()
    return found


def label_number(word: str, labels: tuple[str, ...], option: str) -> int:
    """The mask value of a label, by its name or number; 0 and "background" are background."""
    if word in labels:
        return 1 + labels.index(word)
    if word == "background" or word == "0":
        return 0
    if word.isdecimal() and int(word) <= len(labels):
        return int(word)
    raise StudyError(f"--{option} names {word!r}, which is not a label; {nearest(word, labels)}")
