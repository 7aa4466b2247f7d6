"""A run folder with a journal, written by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from consilium.files import checked_line

START = {
    "event": "start",
    "method": "fedsm",
    "round": 0,
    "rounds": 10,
    "aside": ["calibrate"],
    "sites": {"ada": 8, "bea": 12},
}


def trained(site: str, round: int, loss: float = 0.5) -> dict[str, Any]:
    return {
        "event": "train", "phase": "train", "round": round, "site": site, "loss": loss, "seconds": 2.0,
        "bytes_up": 100, "bytes_down": 300,
    }  # fmt: skip


def ended(round: int, seconds: float, phase: str = "train") -> dict[str, Any]:
    return {"event": "round", "phase": phase, "round": round, "step": round, "steps": 10, "seconds": seconds}


def scored(round: int, **sites: float) -> dict[str, Any]:
    mean = sum(sites.values()) / len(sites)
    return {
        "event": "score", "phase": "train", "round": round, "model": "global", "metric": "dice",
        "valid": {"site_mean": mean, "sites": sites}, "test": {"site_mean": 0.99, "sites": {}},
    }  # fmt: skip


TWO_ROUNDS = [
    START,
    trained("ada", 1, 0.9),
    trained("bea", 1, 0.8),
    ended(1, 3.0),
    scored(1, ada=0.5, bea=0.7),
    trained("ada", 2, 0.6),
    {"event": "refused", "phase": "train", "round": 2, "site": "bea", "why": "its update is not finite"},
    ended(2, 5.0),
    scored(2, ada=0.75, bea=0.25),
]


def write_run(folder: Path, events: Sequence[Mapping[str, Any]] = TWO_ROUNDS) -> Path:
    """A run folder as far as a page reads it."""
    folder.mkdir(parents=True)
    (folder / "study.toml").write_text("")
    lines = [{**event, "time": f"2026-01-01T00:00:{i:02d}.000+00:00"} for i, event in enumerate(events)]
    if lines:
        (folder / "journal.jsonl").write_text("".join(checked_line(line) + "\n" for line in lines))
    return folder
