"""A study waits at a hospital until a person there approves it, and then runs: on real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from consilium.cli.main import main
from consilium.left_log import check_chain
from consilium.store import read_release
from tests.federation.conftest import PATIENCE, Running
from tests.toy import toy_study

pytestmark = [pytest.mark.federation, pytest.mark.xdist_group("federation"), pytest.mark.timeout(900)]


def review(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["federation", "review", *arguments])
    assert not ended.value.code
    return capsys.readouterr().out


def test_a_study_is_reviewed_approved_and_run(
    running: Running, federation: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = toy_study(federation, study__name="reviewed", study__rounds=1, study__quorum=3)
    rules = running.local.hospital("bea")
    before = rules.read_text()
    try:
        rules.write_text(before.partition("[limits]")[0] + "[limits]\napproval = true\n")
        first = running.admin.submit(study)
        running.admin.wait(first, PATIENCE)
        said = running.admin.outcome(first)["said"]
        assert "site 'bea' cannot take part: nobody there has approved this study yet" in said
        (waiting,) = json.loads(review(capsys, "--hospital", str(rules), "--json"))["studies"]
        assert waiting["state"] == "waiting"
        assert "Sites: ada, bea, cid." in review(capsys, waiting["study"][:12], "--hospital", str(rules))
        assert "approved by" in review(capsys, waiting["study"][:12], "--hospital", str(rules), "--approve")
        second = running.admin.submit(study)
        running.finished(study)
        running.admin.wait(second, PATIENCE)
    finally:
        rules.write_text(before)
    assert {e["site"] for e in running.events(study) if e["event"] == "train"} == {"ada", "bea", "cid"}
    memory = running.local.memory("bea")
    _, facts = read_release(memory / running.folder(study).path.name)
    assert facts["seal"]["signature"]  # the real server's, or the site would not have taken it
    assert check_chain(memory).faults == ()
