"""Where preprocessed arrays and what is known of files are kept between commands."""

from __future__ import annotations

import os
from pathlib import Path

SETTLED = 2 * 10**9  # ns: a file younger than this may change again within one tick of its clock


def cache_root() -> Path:
    """$CONSILIUM_CACHE, else consilium in the user's cache folder."""
    if own := os.environ.get("CONSILIUM_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "consilium"
