"""Table S13 from the audits of a suite's runs: made once, means over seeds, the paper's figures below."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from consilium.errors import StudyError
from consilium.suites.audits import audit_tables
from consilium.suites.sections import PaperTable, SuiteSection


def model(name: str, dice: float, accuracy: float) -> dict[str, Any]:
    interval = {"value": accuracy, "low": 0.0, "high": 1.0}
    pair = {"accuracy": accuracy, "f1": accuracy / 2}
    simple = {"auc": interval, "tpr": interval}
    shadow = {**simple, "imitation": {"dice": dice, "hd": 2.0}, "by_class": {"class mean": pair, "member": pair}}
    unsure = {"members": [0.1, 0.2], "non-members": [0.3, 0.4]}
    return {"model": name, "attacks": {"loss threshold": simple, "shadow": shadow}, "uncertainty": unsure}


def standing(folder: Path, name: str, *audits: list[dict[str, Any]]) -> SimpleNamespace:
    runs = {}
    for seed, models in enumerate(audits):
        run = folder / f"{name}-{seed}"
        (run / "audit").mkdir(parents=True)
        facts = {"quick": True, "augmented": False, "private": False, "models": models}
        (run / "audit" / "audit.json").write_text(json.dumps(facts))
        runs[seed] = SimpleNamespace(folder=run, name=run.name)
    return SimpleNamespace(name=name, runs=runs)


def test_the_table_of_a_row_is_the_mean_over_seeds_and_sites(tmp_path: Path) -> None:
    paper = PaperTable("Table S13", ("ada",), {"No aug": (50.39,)}, about="audit")
    suite: Any = SimpleNamespace(heading=SimpleNamespace(audit="quick"), papers=(paper,))
    one = [model("global", 0.1, 0.1), model("teacher/ada", 0.5, 0.8), model("teacher/bea", 0.9, 0.6)]
    two = [model("teacher/ada", 0.7, 0.6)]
    standings: Any = [standing(tmp_path, "plain", one, two), standing(tmp_path, "turned", two)]
    said: list[str] = []
    first, last = audit_tables(suite, standings, tmp_path / "suite", said.append)
    assert not said  # both were audited before
    assert first.sites == ("ada", "bea")
    assert first.lines["shadow: Dice / HD"] == {"ada": "60.00 / 2.000", "bea": "90.00 / 2.000", "mean": "75.00 / 2.000"}
    assert first.lines["attack, members"]["ada"] == "70.00 / 35.00"
    assert first.lines["AUC"]["mean"] == "0.650"
    assert (first.papers, last.papers) == ((), (paper,))  # once, below the last
    assert "50.39" in last.to_markdown()
    assert (tmp_path / "suite" / "uncertainty.svg").exists()


def test_no_audit_is_made_unasked(tmp_path: Path) -> None:
    suite: Any = SimpleNamespace(heading=SimpleNamespace(audit=""), papers=())
    assert audit_tables(suite, [], tmp_path, print) == ()
    with pytest.raises(StudyError, match="it must be quick or full"):
        SuiteSection("mine", ("fedavg",), audit="slow")
