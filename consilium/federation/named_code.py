"""Classes of other packages that a study names: the server imports only those its owner has allowed."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Collection
from pathlib import Path

from consilium.errors import StudyError
from consilium.study import Study, load_study

ALLOWED = "CONSILIUM_SERVER_CODE"  # the variable that carries the names to a job's process


def allowed_code() -> list[str]:
    """What `consilium federation server --code` named."""
    return os.environ.get(ALLOWED, "").split()


def read_submitted(path: Path, allowed: Collection[str]) -> Study:
    """A study that the office has submitted; nothing it names is imported before this has looked at the names."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StudyError(f"the study is not valid TOML: {error}.") from error
    for section, key in (("method", "name"), ("task", "network")):
        table = tables.get(section, {})
        name = str(table.get(key, "")) if isinstance(table, dict) else ""
        if ":" in name and name not in allowed:
            raise StudyError(
                f"[{section}] {key} = '{name}' is code of another package, which this server does not run; its owner "
                f"allows it with `consilium federation server --code {name}`."
            )
    return load_study(path)
