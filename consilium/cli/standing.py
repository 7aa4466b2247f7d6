"""How `federation status` says who is connected, and whose certificate ends."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def standing_of(facts: Mapping[str, Any]) -> str:
    """One site's line: since when, its last round, and until when its certificate is valid."""
    said = "connected"
    if since := facts.get("since"):
        said += f" since {datetime.fromtimestamp(since).astimezone():%Y-%m-%d %H:%M}"
    if number := facts.get("round"):
        said += f", last round {number} of {facts['run']}"
    if expires := facts.get("expires"):
        said += f", certificate until {datetime.fromtimestamp(expires, UTC):%Y-%m-%d}"
    return said


def endings(kit: Path, standing: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What to say of certificates that end soon: this kit's own, the server's and those of everyone connected."""
    from consilium.federation.certificates import Certificate, certificate_of

    own = certificate_of(kit)
    others = [
        Certificate(name, "", 0, datetime.fromtimestamp(row["expires"], UTC))
        for name, row in standing.items()
        if name != own.name
    ]
    return [said for one in (own, *others) if (said := one.warning())]
