"""A site with a legitimate kit that lies in every message: the run finishes for the others, and says what was wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from consilium import simulation
from tests.federation.conftest import SITES, Running, digest
from tests.federation.lies import ANSWERS, CARDS, SHEETS
from tests.toy import toy_study

pytestmark = [pytest.mark.federation, pytest.mark.xdist_group("federation"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def hostile(running: Running) -> Iterator[Running]:
    """The federation with a bea that lies (odd_site.py)."""
    running.restart("bea", "hostile")
    try:
        yield running
    finally:
        running.restart("bea")


def test_a_site_that_lies_in_every_message_is_left_out_and_the_run_finishes(
    hostile: Running, federation: Path, tmp_path: Path
) -> None:
    """One round for each wrong answer, with a wrong score sheet each, then a good round; wrong final scores."""
    rounds = len(ANSWERS) + 1
    study = toy_study(
        federation, "scaffold", study__name="hostile", study__rounds=rounds, study__score_every=1,
        study__deadline=60.0,
    )  # fmt: skip
    hostile.admin.submit(study)
    run = hostile.finished(study)
    events = hostile.events(study)
    said = {e["round"]: e for e in events if e["event"] in ("lost", "refused")}
    assert {e["site"] for e in said.values()} == {"bea"}
    told = {name: said[i]["why"] for i, name in enumerate(ANSWERS, 1) if i in said}
    wrong = {name: told.get(name) for name, lie in ANSWERS.items() if lie.why not in told.get(name, "")}
    assert wrong == {}
    assert hostile.rounds(study, "bea") == [rounds]
    assert [e["site"] for e in events if e["event"] == "dropped"] == ["bea"]  # the answer to no order
    unscored = [e for e in events if e["event"] == "unscored"]
    assert {e["site"] for e in unscored} == {"bea"}
    for (lie, (_, why)), event in zip(SHEETS.items(), unscored, strict=False):
        assert why in event["why"], (lie, event["why"])
    ends = [e["why"] for e in unscored if e["phase"] in ("best", "last")]
    assert ends and all("'message' should have the fields" in why for why in ends)
    summary = hostile.folder(study).summary()
    assert summary["unscored"] == ["bea"]
    assert sorted(summary["headline"]["sites"]) == ["ada", "cid"]
    assert digest(simulation.run(simulation.with_attendance(study, run), tmp_path, workers=0).folder) == digest(run)


@pytest.mark.parametrize(
    "lie", [name if i == 0 else pytest.param(name, marks=pytest.mark.slow) for i, name in enumerate(CARDS)]
)
def test_a_site_with_a_card_that_cannot_be_believed_is_left_out(lie: str, hostile: Running, federation: Path) -> None:
    index = list(CARDS).index(lie)
    study = toy_study(federation, study__name=f"card-{index}", study__rounds=1, study__deadline=60.0)
    job = hostile.admin.submit(study)
    hostile.finished(study)
    hostile.admin.wait(job)
    (event,) = [e for e in hostile.events(study) if e["event"] == "left out"]
    assert event["site"] == "bea"
    assert CARDS[lie][1] in event["why"]
    assert {e["site"] for e in hostile.events(study) if e["event"] == "train"} == set(SITES) - {"bea"}
    assert hostile.folder(study).summary()["left_out"] == {"bea": event["why"]}
    assert "bea" in hostile.admin.outcome(job)["said"]
