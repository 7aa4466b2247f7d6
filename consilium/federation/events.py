"""What happens to a participant, one JSON object per line, and logs that do not grow for ever."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from consilium.federation.places import EVENTS
from consilium.files import append_lines

LARGEST = 20 << 20  # bytes of a log
KEPT = 5  # older ones: process.log.1 is the last


def note(kit: Path, event: str, **facts: Any) -> None:
    """Write a line; a full disk stops nobody."""
    line = json.dumps({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **facts})
    with contextlib.suppress(OSError):
        append_lines(line + "\n", kit / EVENTS, private=True)


def rotate(log: Path, largest: int = LARGEST, kept: int = KEPT) -> bool:
    """Put a log aside once it is too large. The process that writes to it goes on with the same file, emptied."""
    try:
        if log.stat().st_size <= largest:
            return False
        for number in range(kept - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                _aside(log, number).replace(_aside(log, number + 1))
        shutil.copy(log, _aside(log, 1))  # with its rights
        os.truncate(log, 0)
    except OSError:
        return False  # a full disk; the next look may find room
    return True


def _aside(log: Path, number: int) -> Path:
    return log.with_name(f"{log.name}.{number}")
