"""The page on what left the sites says what the journal counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from consilium.audit.leaks import MODEL, leak_page
from consilium.federation.forecasting import size_text
from consilium.privacy.dp import Privacy
from consilium.reporting import write_report
from consilium.reports.leaks import LeakPage
from consilium.reports.reading import read_run
from consilium.simulation import run
from tests.toy import toy_study

pytestmark = pytest.mark.xdist_group("audit")


def page_of(folder: Path) -> LeakPage:
    page = leak_page(read_run(folder))
    assert page is not None
    return page


def test_fields_times_and_bytes_are_those_of_the_journal(taught: Path) -> None:
    page = page_of(taught)
    found = {(field.phase, field.name): field for field in page.fields}
    assert (found["teacher", "teacher"].times, found["train", "global"].times) == ("1", "1")
    assert found["train", "global"].reveals == MODEL
    assert ("teacher", "global") not in found  # nothing of it is sent in that phase
    events = [json.loads(line) for line in (taught / "journal.jsonl").read_text().splitlines()]
    sent = dict.fromkeys(("ada", "bea", "cid"), 0)
    for event in events:
        if event["event"] == "train":
            sent[event["site"]] += event["bytes_up"]
    assert {site.site: site.total for site in page.sites} == {site: size_text(n) for site, n in sent.items()}
    assert {site.messages for site in page.sites} == {2}
    assert {site.refused for site in page.sites} == {"nothing"}
    assert "there is no ε" in page.privacy


def test_the_report_has_the_page_and_the_verdicts(memorised: Path, tmp_path: Path) -> None:
    figures = {"auc": {"value": 0.91, "low": 0.8, "high": 1.0}, "tpr": {"value": 0.5, "low": 0.4, "high": 0.6}}
    attack = {"members": 24, "non_members": 24, **figures, "fpr": 0.1, "verdict": "over the bar"}
    model = {"model": "global", "stays_at_its_site": False, "attacks": {"loss threshold": attack}, "skipped": {}}
    write_report([memorised], tmp_path / "before.html")
    (memorised / "audit").mkdir()
    try:
        (memorised / "audit" / "audit.json").write_text(json.dumps({"bar": "The bar.", "models": [model]}))
        write_report([memorised], tmp_path / "after.html")
    finally:
        (memorised / "audit" / "audit.json").unlink()
        (memorised / "audit").rmdir()
    before, after = ((tmp_path / name).read_text() for name in ("before.html", "after.html"))
    assert "What left the sites" in before
    assert "Not audited" in before
    assert "Not audited" not in after
    assert "0.91 (0.80 to 1.00)" in after
    assert "over the bar" in after


def test_epsilon_is_that_of_the_sites_ledgers(federation: Path, tmp_path: Path) -> None:
    study = toy_study(federation, "fedavg", study__rounds=2, privacy__clip=1.0, privacy__noise=20.0)
    page = page_of(run(study, tmp_path, workers=0).folder)
    expected = f"{Privacy(clip=1.0, noise=20.0).told(2):.3g}"
    assert {site.epsilon for site in page.sites} == {expected}
    assert "all training cases of a site together" in page.privacy
    assert "Without noise left: numbers of cases, scores, steps" in page.privacy
    assert not any("ranges" in what for what, _ in page.beside)  # a private study does not send them


def test_what_a_private_run_of_fedsm_sends_is_named_for_what_it_is(federation: Path, tmp_path: Path) -> None:
    """Its losses are zeros, and its calibration is of validation cases."""
    how = {"privacy__unit": "patient", "privacy__clip": 0.5, "privacy__noise": 2.0, "study__rounds": 1}
    page = page_of(run(toy_study(federation, "fedsm", **how), tmp_path, workers=0).folder)
    found = {(field.phase, field.name): field.reveals for field in page.fields}
    assert found["train", "loss"] == found["train", "selector_loss"] == "nothing: it is always 0 in a private study"
    assert "validation cases" in found["calibrate", "calibration"]
