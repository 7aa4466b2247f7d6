"""The readme of a kit: how its owner starts it. NVIDIA FLARE's own names scripts that would go around our settings."""

from __future__ import annotations

from pathlib import Path

_TEXTS = {
    "server": """\
The kit of the federation's server.

Start it, and keep it running, with

    consilium federation server {kit}

""",
    "submit": """\
The kit of the administrator '{name}', who submits studies and fetches results:

    consilium federation status --kit {kit}
    consilium federation submit STUDY.toml --kit {kit}

""",
    "watch": """\
The kit of the administrator '{name}', who watches studies and fetches results, and cannot submit or stop them:

    consilium federation status --kit {kit}
    consilium federation log JOB --kit {kit}

""",
    "site": """\
The kit of site '{name}'.

Write this hospital's own settings, edit them, then start the site and keep it running:

    consilium federation site {kit} --hospital hospital.toml --example
    consilium federation site {kit} --hospital hospital.toml

""",
}
_END = """\
The `.key` file is private. Whoever has it can act as '{name}'.
"""


def write_readme(kit: Path, name: str, role: str) -> None:
    """Replace the readme of a kit that was just made; `role` is server, site, submit or watch."""
    text = _TEXTS[role] + _END
    (kit / "startup" / "readme.txt").unlink(missing_ok=True)
    (kit / "readme.txt").write_text(text.format(kit=name, name=name), encoding="utf-8")
