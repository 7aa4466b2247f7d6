"""The project file: who takes part, and where the server is."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from consilium.errors import DataError, StudyError
from consilium.fields import fill, plain, to_toml

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
RESERVED = ("server", "office", "authority")  # folders of kits, and parties
OFFICE = "office@consilium.org"  # the one who may submit studies, by certificate


@dataclass(frozen=True)
class Project:
    """One consortium."""

    name: str
    server: str  # the name or address under which all sites reach the server
    port: int
    sites: tuple[str, ...]

    def __post_init__(self) -> None:
        for name in (self.name, self.server, *self.sites):
            if not _NAME.fullmatch(name):
                raise StudyError(f"the name {name!r} cannot be used; write letters, digits, '-', '_' or '.'.")
        if len(set(self.sites)) < len(self.sites) or not self.sites:
            raise StudyError("name every site once, and at least one.")
        for name in self.sites:
            if name in (self.server, *RESERVED):
                raise StudyError(f"'{name}' is a name within every federation; give the site another.")
            if "." in name:
                raise StudyError(f"the site '{name}' must have no '.' in its name: NVIDIA FLARE splits it there.")
        if not 1 <= self.port <= 65535:
            raise StudyError(f"port {self.port}: it must be from 1 to 65535.")

    def write(self, path: Path) -> None:
        if path.exists():
            raise DataError(f"{path} is there already; edit it, or delete it first.")
        lines = [f"{key} = {to_toml(value)}" for key, value in plain(self).items()]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_project(path: Path) -> Project:
    try:
        return fill(Project, tomllib.loads(path.read_text(encoding="utf-8")), str(path))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; make it with `consilium federation init`.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not valid TOML: {error}.") from error
