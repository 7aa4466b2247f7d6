"""`consilium audit`: members of a model that knows them by heart are found, strangers are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from consilium.analysis.opening import open_run
from consilium.audit.auditing import Audit, AuditOptions, audit, power_of, write_audit
from consilium.audit.figures import uncertainty_figure
from consilium.audit.statistics import OVER
from consilium.audit.tables import markdown
from consilium.audit.targets import targets_of
from consilium.cli.main import app
from consilium.errors import RunError, UserError
from consilium.simulation import run
from tests.audit.noise import moved, overfitted, write_noise
from tests.toy import toy_study

pytestmark = pytest.mark.xdist_group("audit")  # what its tests share is made once

SHORT = AuditOptions(quick=True, epochs=10, least_steps=60)


def areas(found: Audit) -> dict[str, float]:
    """The AUC of every attack on the first model."""
    return {name: power_of(attack).auc.value for name, attack in found.models[0].attacks.items()}


def test_members_of_an_overfitted_model_are_found(memorised: Path, tmp_path: Path) -> None:
    found = audit(memorised, SHORT)
    assert min(areas(found).values()) > 0.8
    assert areas(found).keys() == {"loss threshold", "shadow"}
    assert found.models[0].verdict == OVER
    files = write_audit(found, tmp_path / "found")
    facts = json.loads(files[0].read_text())
    (model,) = facts["models"]
    assert (model["model"], model["members"], model["non_members"]) == ("global", 24, 24)
    assert model["attacks"]["shadow"]["members"] == 12  # the half that the attacker did not know
    assert model["attacks"]["loss threshold"]["fpr"] == 0.1
    assert "over the bar" in files[1].read_text()
    assert facts["models"] == audit(memorised, SHORT).to_json()["models"]


@pytest.mark.parametrize(
    ("method", "names"),
    [
        ("fedsm", ["global", "personal/ada", "personal/bea", "personal/cid", "selector"]),
        ("apple", ["personal/ada", "personal/bea", "personal/cid", "core/ada", "core/bea", "core/cid"]),
    ],
)
def test_every_model_is_a_target(method: str, names: list[str], federation: Path, tmp_path: Path) -> None:
    targets = targets_of(open_run(run(toy_study(federation, method, study__rounds=1), tmp_path, workers=0).folder))
    assert [target.name for target in targets] == names
    own = [target for target in targets if target.of]
    assert all(target.sites == (target.of,) for target in own)
    assert all(target.sites == ("ada", "bea", "cid") for target in targets if not target.of)
    stay = {target.kind for target in targets if target.stays}
    assert stay == {"fedsm": set(), "apple": {"personal"}}[method]


def test_teachers_are_targets_and_the_command_prints_one_document(taught: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["audit", str(taught), "--quick", "--json", "--to", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "auditing global: 24 members" in done.stderr
    facts = json.loads(done.stdout)
    assert facts == json.loads((tmp_path / "audit.json").read_text())
    models = {model["model"]: model for model in facts["models"]}
    assert list(models) == ["global", "teacher/ada", "teacher/bea", "teacher/cid"]
    assert all("loss threshold" in model["attacks"] for model in models.values())
    assert all("needs 4 cases" in model["skipped"]["shadow"] for model in models.values())  # one test case a site
    labels = {target.of: target.labels for target in targets_of(open_run(taught)) if target.of}
    assert labels == {"ada": ("round",), "bea": ("square",), "cid": ("round", "square")}


def test_a_wrong_folder_is_said_in_a_sentence(tmp_path: Path, memorised: Path) -> None:
    with pytest.raises(RunError, match="is not a run"):
        audit(tmp_path)
    (tmp_path / "file").write_text("")
    found = audit(memorised, AuditOptions(quick=True, epochs=1, least_steps=1))
    with pytest.raises(UserError, match="choose another place with --to"):
        write_audit(found, tmp_path / "file")


def test_every_model_is_in_the_figure_and_the_table_has_both_classes() -> None:
    """Eight models of two runs: six columns, the other two below, and each model has one scale in both runs."""
    part = {"accuracy": 0.5, "f1": 0.25}
    figures: dict[str, Any] = {
        "members": 2, "non_members": 2, "auc": {"value": 0.5, "low": 0.4, "high": 0.6}, "fpr": 0.1, "verdict": "x",
        "tpr": {"value": 0.5, "low": 0.4, "high": 0.6}, "by_class": dict.fromkeys(("class mean", "member"), part),
    }  # fmt: skip
    figures["by_class"]["non-member"] = {"accuracy": 0.75, "f1": 0.125}
    models = [
        {"model": f"personal/{i}", "uncertainty": {"members": [i, i + 1], "non-members": [i]}, "skipped": {},
         "stays_at_its_site": False, "attacks": {"shadow": figures}} for i in range(8)
    ]  # fmt: skip
    facts = {"models": models, "augmented": False, "private": False, "run": "r", "bar": "b"}
    drawn = [axes for axes in uncertainty_figure([facts, {**facts, "augmented": True}]).axes if axes.has_data()]
    assert [axes.get_title(loc="left").split()[0][-1] for axes in drawn] == list("0123450123456767")
    assert drawn[0].get_xlim() == drawn[6].get_xlim() != drawn[12].get_xlim()
    assert "| 50.0 / 25.0 | 50.0 / 25.0 | 75.0 / 12.5 | x |" in markdown(facts)


@pytest.mark.slow
def test_members_of_a_large_overfitted_model_are_found(tmp_path: Path) -> None:
    federation = write_noise(tmp_path / "federation", 0, 200, 100, 200)
    found = audit(overfitted(federation, tmp_path / "runs", epochs=60), AuditOptions(quick=True))
    assert min(areas(found).values()) > 0.8


@pytest.mark.slow
def test_strangers_to_a_model_are_not_found(tmp_path: Path) -> None:
    """The mean over three draws of 200 members that the model never saw and 200 non-members."""
    made = overfitted(write_noise(tmp_path / "federation", 0, 60, 10, 10), tmp_path / "runs", epochs=30)
    found = [
        areas(audit(moved(made, write_noise(tmp_path / f"strangers{seed}", seed, 200, 100, 200)), SHORT))
        for seed in (1, 2, 3)
    ]
    for attack in ("loss threshold", "shadow"):
        assert sum(one[attack] for one in found) / 3 == pytest.approx(0.5, abs=0.05), attack
