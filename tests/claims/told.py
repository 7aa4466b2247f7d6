"""What tests of claims share: how large they are, who watches their suites, and how a difference is said."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from consilium.scores.statistics import Paired
from consilium.suites import SuiteResult, run_suite

TINY = bool(os.environ.get("CONSILIUM_CLAIMS_TINY"))
SEEDS = [0] if TINY else [0, 1, 2]
WORKERS = int(os.environ.get("CONSILIUM_CLAIMS_WORKERS", "2"))

Tell = Callable[[str], None]


class _Said:
    """Progress, run by run."""

    def say(self, text: str) -> None:
        print(text, flush=True)

    def show(self, event: Mapping[str, object]) -> None: ...


def finished(place: Path, name: str, text: str) -> SuiteResult:
    """A suite's runs, trained now or found in `place`."""
    path = place / f"{name}.toml"
    path.write_text(text, encoding="utf-8")
    result = run_suite(path, place / "runs", WORKERS, _Said())
    assert result.failed == ()
    return result


def said(found: Paired) -> str:
    return f"{found.difference:+.4f} (95 % interval {found.low:+.4f} to {found.high:+.4f}, {found.cases} cases)"
