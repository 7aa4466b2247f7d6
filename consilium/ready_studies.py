"""Lists and copies the studies and suites of the package."""

from __future__ import annotations

import re
import shutil
from importlib import resources
from pathlib import Path

from consilium.errors import DataError, StudyError
from consilium.fields import nearest


def folder_of_studies() -> Path:
    """The folder of the package's studies."""
    return Path(str(resources.files("consilium") / "studies"))


def ready_studies() -> dict[str, str]:
    """The names of all ready studies and suites, each with its first sentences, which describe it."""
    found = {}
    for path in sorted(folder_of_studies().glob("*.toml")):
        text = path.read_text(encoding="utf-8")
        if re.search(r"^\[(study|suite)\]", text, re.M) and not path.stem.endswith(("_base", "_paper")):
            notes = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#")]
            found[path.stem] = _sentences([note for note in notes if not note.startswith("consilium ")])
    return found


def _sentences(notes: list[str]) -> str:
    """The first lines, up to one that ends a sentence."""
    last = next((i for i, note in enumerate(notes) if note.endswith((".", ":"))), 0)
    return " ".join(notes[: last + 1])


def copy_study(name: str, to: Path) -> list[Path]:
    """Copy a study or suite into a folder, with the files it names; nothing is overwritten.

    Returns the files, the study's own first.
    """
    name = name.removesuffix(".toml")
    if name not in ready_studies():
        raise StudyError(f"there is no study '{name}'; {nearest(name, ready_studies())}")
    todo, names = [f"{name}.toml"], list[str]()
    while todo:
        names.append(todo.pop())
        text = (folder_of_studies() / names[-1]).read_text(encoding="utf-8")
        named = re.findall(r'^\w+\s*=\s*"([\w-]+\.toml)"', text, re.M)
        todo += [other for other in named if other not in (*names, *todo)]
    there = [to / file for file in names if (to / file).exists()]
    if there:
        raise DataError(f"{there[0]} exists already; copy into another folder with --to.")
    to.mkdir(parents=True, exist_ok=True)
    for file in names:
        shutil.copyfile(folder_of_studies() / file, to / file)
    return [to / file for file in names]
