"""Pages of one look: a template with the shared style, a table of contents, tables that sort, figures that zoom."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from collections.abc import Mapping
from functools import cache
from html import unescape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from consilium import __version__
from consilium.errors import UserError
from consilium.files import write_text
from consilium.reports.embedding import downloads

if TYPE_CHECKING:
    from jinja2 import Environment

_HEADING = re.compile(r"<h2>(.*?)</h2>", re.S)
_CONTENTS = "<!-- contents -->"
_FEW = 3  # headings that need no table of contents


def shared_text(name: str) -> str:
    """A file that all pages share: `style.css` or `page.js`."""
    return (files("consilium.reports") / "templates" / name).read_text(encoding="utf-8")


def write_html(template: str, content: Mapping[str, Any], to: Path, refused: type[UserError]) -> None:
    """Write a page; the file appears whole or not at all."""
    check_page_place(to, refused)
    script = shared_text("page.js")
    seal = b64encode(hashlib.sha256(script.encode()).digest()).decode()  # no other script may run on the page
    page = _environment().get_template(template).render(**content, version=__version__, script=script, seal=seal)
    to.parent.mkdir(parents=True, exist_ok=True)
    write_text(with_contents(page), to)


def check_page_place(to: Path, refused: type[UserError]) -> None:
    """Refuse a folder; before the work that the page tells of, where that takes long."""
    if to.is_dir():
        raise refused(f"{to} is a folder; name a file for the page, such as {to / 'page.html'}.")


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("consilium.reports"), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=StrictUndefined,
    )  # fmt: skip
    environment.globals["downloads"] = downloads
    environment.filters["unplaced"] = unplaced
    return environment


def with_contents(page: str) -> str:
    """Give every second heading a name to link to, and list them where the template says."""
    places: dict[str, str] = {}

    def named(found: re.Match[str]) -> str:
        place = base = re.sub(r"[^a-z0-9]+", "-", unescape(found[1]).lower()).strip("-") or "part"
        while place in places:
            place = f"{base}-{len(places)}"
        places[place] = found[1]
        return f'<h2 id="{place}">{found[1]}</h2>'

    marked = _HEADING.sub(named, page)
    links = "\n".join(f'<li><a href="#{place}">{said}</a></li>' for place, said in places.items())
    told = f'<nav aria-label="Contents"><ul>\n{links}\n</ul></nav>' if len(places) > _FEW else ""
    return marked.replace(_CONTENTS, told, 1)


# a path from the root, or of a Windows drive, where a word begins
_PATH = re.compile(r"(?<![\w./\\:…])(?:/|[A-Za-z]:[\\/])(?:[^\s/\\'\"<>|,;]+[\\/])+([^\s/\\'\"<>|,;]*)")


def unplaced(text: str) -> str:
    """A text in which a path of this machine is only its last name: a page is passed on, the folders are private."""
    return _PATH.sub(lambda found: f"…/{found[1]}" if found[1] else "…", text)
