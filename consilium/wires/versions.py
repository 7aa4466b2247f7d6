"""Which versions of sites a server can run a study with."""

from __future__ import annotations

import re

OLDEST = (0, 2)  # messages and methods have not changed since


def incompatible(here: str, there: str) -> str:
    """Why a site of version `there` cannot take part with a server of version `here`; empty if it can.

    The third number may differ either way. A site may be of an earlier second number, down to `OLDEST`, and never of a
    later one: the server is updated first.
    """
    ours, theirs = _numbers(here), _numbers(there)
    if here == there or (theirs is not None and ours is not None and OLDEST <= theirs <= ours and theirs[0] == ours[0]):
        return ""
    said = f"it has another version: {there} where the server has {here}"
    if ours is None or theirs is None:
        return f"{said}; install the same consilium on both"
    if theirs > ours:
        return f"{said}; update the server first"
    oldest = max(OLDEST, (ours[0], 0))
    return f"{said}, which works with sites from {oldest[0]}.{oldest[1]} on; update the site"


def _numbers(version: str) -> tuple[int, int] | None:
    found = re.fullmatch(r"(\d{1,4})\.(\d{1,4})\.\d{1,4}", version)  # a draft (0.3.0rc1) goes only with itself
    return (int(found[1]), int(found[2])) if found else None
