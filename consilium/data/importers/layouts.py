"""What an importer expects to find on disk: the part of its README.md that says it."""

from __future__ import annotations

from pathlib import Path

from consilium.data.importers.found import Found, listed
from consilium.errors import DataError


def expected_layout(name: str) -> str:
    """The lines below "Expected layout" in an importer's README.md, indented; empty where it has no such part."""
    readme = Path(__file__).parent / name.replace("-", "_") / "README.md"
    _, _, layout = readme.read_text(encoding="utf-8").partition("\n## Expected layout\n")
    lines = [line for line in layout.splitlines() if line.strip() and not line.startswith("```")]
    return "".join(f"\n  {line}" for line in lines)


def need_cases(name: str, found: Found, source: Path) -> None:
    """Refuses a folder in which an importer found no case, and shows what it looked for."""
    if not found.cases:
        raise DataError(
            f"no case of {name} was found in {source}, so nothing was written."
            f"{listed([*found.doubts, *(f'left out: {line}' for line in found.left_out)])}"
            f"\nThe importer expects these names in the folder or below it:{expected_layout(name)}"
        )
