"""Run folders made up for the tests of reports, in the layout other code writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from consilium.reports.reading import RunView, read_run
from consilium.scores.rows import COLUMNS, ScoreRow, write_rows
from consilium.scores.summary import run_summary

# cases for testing, and how hard a site is for a model of its own and for one shared model
SITES: Mapping[str, tuple[int, float, float]] = {
    "drishti": (12, 0.88, 0.885),
    "binrushed": (20, 0.862, 0.868),
    "magrabia": (10, 0.877, 0.867),
    "messidor": (24, 0.901, 0.902),
    "rimone": (16, 0.822, 0.788),
    "refuge": (40, 0.915, 0.917),
}
HEADLINE = {"pooled": "pooled", "local": "local", "fedsm": "super"}
LABELS = {"disc": 0.03, "cup": -0.03}
LIFT = {"pooled": 0.012, "local": 0.0, "fedsm": 0.013}


def make_run(
    root: Path,
    method: str,
    seed: int = 0,
    rounds: int = 40,
    every: int = 4,
    sites: Mapping[str, tuple[int, float, float]] = SITES,
    outside: tuple[str, ...] = (),
    finished: bool = True,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """A run folder with believable numbers; `settings` are added to [method]."""
    folder = root / f"retina-{method}-s{seed}-{len(str(settings)):04x}"
    folder.mkdir(parents=True)
    rng = np.random.default_rng([seed, *method.encode()])
    steps = list(range(every, rounds + 1, every))
    rows: list[ScoreRow] = []
    for round_ in steps:
        grown = 1 - 0.7 * float(np.exp(-6 * round_ / rounds)) + float(rng.normal(0, 0.004))
        splits = ["valid", "test"] if round_ in (steps[-2], steps[-1]) else ["valid"]
        for split in splits:
            rows += _scored(method, round_, split, grown, sites, outside, rng)
    (folder / "scores.csv").write_text(",".join(COLUMNS) + "\n" + write_rows(rows))
    (folder / "study.toml").write_text(_study(method, seed, rounds, settings or {}))
    (folder / "journal.jsonl").write_text("".join(_journal(steps, sites)))
    (folder / "origin.json").write_text(
        json.dumps({"versions": {"consilium": "0.1.0", "torch": "2.13.0"}, "commit": "abc123", "machine": "x86_64"})
    )
    if finished:
        (folder / "summary.json").write_text(json.dumps(_summary(method, seed, rounds, rows, steps)))
    return folder


def _scored(
    method: str,
    round_: int,
    split: str,
    grown: float,
    sites: Mapping[str, tuple[int, float, float]],
    outside: tuple[str, ...],
    rng: np.random.Generator,
) -> Iterator[ScoreRow]:
    for site, (n, own, shared) in sites.items():
        for index in range(n if split == "test" else max(2, n // 2)):
            case, hard = f"{site}-{split}-{index:03d}", np.random.default_rng([index, *site.encode()]).normal(0, 0.02)
            for model, of, level in _models(method, site, own, shared, sites):
                for label, shift in LABELS.items():
                    value = min(1.0, max(0.0, grown * (level + shift + hard) + rng.normal(0, 0.006)))
                    head = (round_, "train", model, of, "merged", site, site in outside, split, case)
                    yield ScoreRow(*head, label, "dice", float(value))
            if method == "fedsm":
                chosen = f"personal/{site}" if index % 8 else ("global" if index else f"personal/{min(sites)}")
                for choice in ["global", *(f"personal/{name}" for name in sites)]:
                    head = (round_, "train", "super", "", "merged", site, site in outside, split, case)
                    yield ScoreRow(*head, "", f"chosen:{choice}", float(choice == chosen))


def _models(
    method: str, site: str, own: float, shared: float, sites: Mapping[str, tuple[int, float, float]]
) -> Iterator[tuple[str, str, float]]:
    if method == "local":
        for i, of in enumerate(sites):
            yield "local", of, own if of == site else 0.35 + 0.4 * ((3 * i + len(site)) % 5) / 5
    elif method == "fedsm":
        yield "global", "", shared
        yield "personal", site, own + 0.01
        yield "super", "", own + LIFT["fedsm"]
    else:
        yield HEADLINE.get(method, "global"), "", shared + LIFT.get(method, 0.0)


def _summary(method: str, seed: int, rounds: int, rows: list[ScoreRow], steps: list[int]) -> dict[str, Any]:
    best = [row for row in rows if row.round == steps[-2]]
    last = [row for row in rows if row.round == steps[-1]]
    sent = {"local": 0, "pooled": 0, "fedavg": 46_000_000, "fedsm": 98_500_000}.get(method, 46_000_000) * rounds
    model = HEADLINE.get(method, "global")
    return run_summary(
        method, seed, rounds, model, "dice", best, last, steps[-2], steps[-1],
        seconds=60.0 + 3 * len(method), bytes_up=sent, bytes_down=sent, peak_memory_mb=812,
    )  # fmt: skip


def _study(method: str, seed: int, rounds: int, settings: Mapping[str, Any]) -> str:
    extra = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
    return (
        f'[study]\nname = "retina-{method}"\nrounds = {rounds}\nseed = {seed}\nsites = []\n'
        f'[data]\nfederation = "data/retina"\n[local]\noptimizer = "adam"\nlr = 1e-3\n'
        f'[method]\nname = "{method}"\n{extra}'
    )


def _journal(steps: list[int], sites: Mapping[str, Any]) -> Iterator[str]:
    for round_ in steps:
        for site in sites:
            event = {"event": "train", "round": round_, "phase": "train", "site": site, "loss": 0.1, "seconds": 1.0}
            yield json.dumps(event) + "\n"


@pytest.fixture
def run_folder(tmp_path: Path) -> Callable[..., Path]:
    """make_run in this test's own folder."""
    return lambda method, **options: make_run(tmp_path / "runs", method, **options)


SMALL = {"hk": (3, 0.8, 0.75), "basel": (4, 0.7, 0.72)}


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[RunView]:
    """Pooled, local, FedAvg and FedSM at two small sites."""
    root = tmp_path_factory.mktemp("four")
    return [read_run(make_run(root, method, sites=SMALL)) for method in ("pooled", "local", "fedavg", "fedsm")]
