"""The firewall lets honest sites in, the odd one of the retina phantom above all, and says how near they came.

python -m pytest -m claims -n 0 -s tests/claims/test_firewall.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from consilium.data.phantoms import write_phantom
from consilium.run_folder import RunFolder
from consilium.simulation import run
from consilium.study import Study
from consilium.study_reading import make_study
from tests.toy import toy_study

pytestmark = pytest.mark.claims
SGD = {"optimizer": "sgd", "momentum": 0.0, "lr": 0.1}


def verdicts(study: Study, to: Path) -> list[Mapping[str, Any]]:
    """Every update of a run that refuses."""
    folder = RunFolder.open(run(study, to).folder)
    return [event for event in folder.events() if event["event"] in ("train", "refused") and "firewall" in event]


def told(name: str, found: list[Mapping[str, Any]]) -> None:
    """A line of the table in docs/privacy.md: how many, how many refused, and the extremes of the figures."""
    figures = [part for event in found for part in event["firewall"]["figures"].values()]
    own = [part for part in figures if "times_own" in part]
    refused = Counter(event["site"] for event in found if event["event"] == "refused")
    print(
        f"{name}: {len(found)} updates, {sum(refused.values())} refused {dict(refused)};",
        f"times_own up to {max(part['times_own'] for part in own):.2f},",
        f"turn from {min(part['turn'] for part in own):.2f},",
        f"shift up to {max(part['shift'] for part in figures):.2f},",
        f"times_others up to {max(part.get('times_others', 0.0) for part in figures):.2f}",
    )
    for event in found:
        if event["event"] == "refused":
            print(f"  round {event['round']}, {event['site']}: {event['why']}")


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedsm"])
def test_the_odd_site_of_the_retina_phantom_is_not_refused(method: str, tmp_path: Path) -> None:
    write_phantom("retina", tmp_path / "retina", 120, 32, 0)
    study = make_study(
        {
            "study": {"rounds": 60, "score_every": 60, "firewall": "refuse"},
            "data": {"federation": str(tmp_path / "retina")},
            "preprocess": {"size": [32, 32]},
            "task": {"widths": [8, 16, 32], "residual_units": 0, "selector_widths": [4, 8]},
            "local": {"batch_size": 4, **(SGD if method == "scaffold" else {})},
            "method": {"name": method},
        }
    )
    found = verdicts(study, tmp_path / "runs")
    told(f"retina, {method}", found)
    told(f"retina, {method}, rimone", [event for event in found if event["site"] == "rimone"])
    assert [event["event"] for event in found if event["site"] == "rimone" and event["phase"] == "train"] == [
        "train"
    ] * 60
    assert sum(event["event"] == "refused" for event in found) <= 0.01 * len(found)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedsm", "apple"])
def test_false_alarms_on_the_toy_task(method: str, federation: Path, tmp_path: Path) -> None:
    """Three seeds of 30 rounds at three sites: 270 replies."""
    found: list[Mapping[str, Any]] = []
    for seed in range(3):
        plan = {"study__rounds": 30, "study__score_every": 30, "study__seed": seed, "study__firewall": "refuse"}
        found += verdicts(toy_study(federation, method, **plan), tmp_path)
    told(f"toy, {method}", found)
    assert sum(event["event"] == "refused" for event in found) <= 0.01 * len(found)
