"""The project file: who takes part, and where the server is."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from consilium.errors import DataError, StudyError
from consilium.fields import fill, nearest, plain, to_toml
from consilium.files import write_text

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
RESERVED = ("server", "admin", "office", "authority")  # folders of kits, and parties
ADMIN = "office@consilium.org"  # the kit `admin`'s certificate; the name is that of 0.1's kits
ROLES = {"submit": "project_admin", "watch": "watcher"}  # of administrators: our word, and the one on certificates
SUBMITS = ROLES["submit"]
_ADMINS = "@consilium.org"  # how the names on administrators' certificates end; no site's name has an '@'


def admin_user(name: str) -> str:
    """The name on the certificate of an administrator's kit."""
    return ADMIN if name in ("admin", "office") else name + _ADMINS


def is_admin(user: str) -> bool:
    """Whether a name on a certificate is an administrator's."""
    return user.endswith(_ADMINS) and bool(_NAME.fullmatch(user.removesuffix(_ADMINS)))


@dataclass(frozen=True)
class Project:
    """One consortium."""

    name: str
    server: str  # the name or address under which all sites reach the server
    port: int
    sites: tuple[str, ...]
    admins: Mapping[str, str] = field(default_factory=dict)  # besides `admin`: the role of each, submit or watch

    def __post_init__(self) -> None:
        for name in (self.name, self.server, *self.sites, *self.admins):
            if not _NAME.fullmatch(name):
                raise StudyError(f"the name {name!r} cannot be used; write letters, digits, '-', '_' or '.'.")
        if len(set(self.sites)) < len(self.sites) or not self.sites:
            raise StudyError("name every site once, and at least one.")
        for name in self.sites:
            if name in (self.server, *RESERVED):
                raise StudyError(f"'{name}' is a reserved name; give the site another.")
            if "." in name:
                raise StudyError(f"the site '{name}' must have no '.' in its name: NVIDIA FLARE splits it there.")
        for name, role in self.admins.items():
            if name in (*self.sites, self.server, *RESERVED):
                raise StudyError(f"'{name}' is a reserved name or a site's; give the administrator another.")
            if role not in ROLES:
                raise StudyError(f"the administrator '{name}' has the role {role!r}; {nearest(role, ROLES)}")
        if not 1 <= self.port <= 65535:
            raise StudyError(f"port {self.port}: it must be from 1 to 65535.")

    def write(self, path: Path) -> None:
        if path.exists():
            raise DataError(f"{path} exists already; edit it, or delete it first.")
        write_text(self.text(), path)

    def text(self) -> str:
        """As a project file."""
        return "".join(f"{key} = {to_toml(value)}\n" for key, value in plain(self).items())

    @property
    def participants(self) -> tuple[str, ...]:
        """The names of all kits."""
        return ("server", "admin", *self.sites, *self.admins)

    def role(self, name: str) -> str:
        """What a participant is: server, site, or an administrator's role."""
        fixed = {"server": "server", "admin": "submit", **self.admins}
        if name not in self.participants:
            said = nearest(name, self.participants)
            raise DataError(f"there is no participant '{name}' in the project file; {said}")
        return fixed.get(name, "site")

    def joined_by(self, name: str, role: str) -> Project:
        """With one participant more; `role` is site, submit or watch."""
        if role == "site":
            return replace(self, sites=(*self.sites, name))
        return replace(self, admins={**self.admins, name: role})


def read_project(path: Path) -> Project:
    try:
        return fill(Project, tomllib.loads(path.read_text(encoding="utf-8")), str(path))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; make it with `consilium federation init`.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not valid TOML: {error}.") from error
