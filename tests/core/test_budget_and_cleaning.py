"""What a hospital has used of its limits, and what it removes when nobody has used it for long."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from consilium.budget import BudgetUse
from consilium.cli.main import main
from consilium.left_log import append
from consilium.store import RELEASE
from tests.core.test_rehearsal import hospital

DAY = 24 * 3600


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["federation", *arguments])
    return int(ended.value.code or 0)


def test_every_budget_is_shown_beside_its_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two updates of one study, in two runs, one of them twice, and a scoring of another: by hand."""
    rules = hospital(tmp_path, limits="rounds = 8\nstudy_bytes = 1000\nepsilon = 1.0")
    for run, what, digest in (
        ("a-s0-1", "train", "1"),
        ("a-s0-1-2", "train", "2"),
        ("a-s0-1-2", "train", "2"),
        ("b", "score", "3"),
    ):
        line = {"run": run, "what": what, "round": 1, "bytes": 100, "sha256": digest, "spent": []}
        (tmp_path / "m").mkdir(exist_ok=True)
        append({**line, "facts": {"seconds": 2.0}}, tmp_path / "m")
    assert command("budget", "--hospital", str(rules), "--json") == 0
    found = {(use["what"], use["study"]): use for use in json.loads(capsys.readouterr().out)["budgets"]}
    assert (found["rounds", ""]["used"], found["rounds", ""]["allowed"]) == (2, 8)
    assert found["scorings", ""]["used"] == 1
    assert found["bytes", ""]["used"] == 400
    assert (found["study_bytes", "a-s0-1"]["used"], found["study_bytes", "a-s0-1"]["allowed"]) == (300, 1000)
    assert found["study_seconds", "a-s0-1"]["used"] == 6.0
    assert found["study_rounds", "b"]["used"] == 0
    assert command("budget", "--hospital", str(rules)) == 0
    out = capsys.readouterr().out
    assert "  rounds: 2 of 8 (25 %)\n" in out and "  bytes: 400, no limit\n" in out
    assert BudgetUse("bytes", "", 433_424, 0).text == "bytes: 433,424, no limit"


def made(folder: Path, files: dict[str, int]) -> None:
    """Files of ten bytes, by their age in days."""
    for name, days in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 10)
        then = time.time() - days * DAY
        for place in (path, *path.parents):
            if place == folder:
                break
            os.utime(place, (then, then))


JOB = "0b0e3d5c-7a77-4bb2-8c53-3d3a1c0f3a11"


def test_only_what_nobody_used_for_long_is_removed_and_only_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = hospital(tmp_path)
    rules.write_text(rules.read_text() + "[keep]\nmemories = 30\nreleases = 90\njobs = 30\n")
    old, young = {}, {}
    for run, days in (("gone-s0-1", 40), ("fresh-s0-2", 2)):
        (old if days > 30 else young).update({f"{run}/memory/00001.json": days, f"{run}/order.safetensors": days})
    kept = {f"kept-s0-3/{RELEASE}": 40, "kept-s0-3/memory/1.json": 40}  # its model needs the memory
    done = {f"done-s0-4/{RELEASE}": 100}
    stays = {"done-s0-4/left.jsonl": 100, "left.jsonl": 500, "key": 500, "errors.log": 500, "review/a.toml": 500}
    made(tmp_path / "m", {**old, **young, **kept, **done, **stays})
    made(tmp_path / "kit", {f"{JOB}/log.txt": 50, "startup/client.key": 500})
    kit(tmp_path / "kit", "bea", "site")
    asked = ["clean", "--hospital", str(rules), "--kit", str(tmp_path / "kit")]
    assert command(*asked) == 0
    told = capsys.readouterr().out
    assert "--yes removes them" in told
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert {line.split()[1] for line in told.splitlines()[:-1]} == {"gone-s0-1", "done-s0-4", JOB}
    assert command(*asked, "--yes") == 0
    after = {path for path in tmp_path.rglob("*") if path.is_file()}
    removed = {path.relative_to(tmp_path).as_posix() for path in before - after}
    assert removed == {f"m/{name}" for name in (*old, *done)} | {f"kit/{JOB}/log.txt"}


def test_without_days_nothing_is_ever_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rules = hospital(tmp_path)
    made(tmp_path / "m", {"old-s0-1/memory/00001.json": 4000})
    assert command("clean", "--hospital", str(rules), "--yes") == 0
    assert "removed 0 B" in capsys.readouterr().out
    assert (tmp_path / "m/old-s0-1/memory/00001.json").exists()


def test_the_settings_of_the_folder_are_taken_where_nothing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `review` and `budget` do."""
    monkeypatch.chdir(tmp_path)
    assert command("clean") == 2
    assert "hospital.toml" in capsys.readouterr().err
    hospital(tmp_path).rename(tmp_path / "hospital.toml")
    made(tmp_path / "m", {"old-s0-1/memory/00001.json": 4000})
    assert command("clean", "--older", "30") == 0
    assert "old-s0-1" in capsys.readouterr().out


def kit(folder: Path, name: str, role: str) -> None:
    (folder / "consilium.json").write_text(json.dumps({"name": name, "role": role}))


def server_job(folder: Path, meta: str) -> None:
    """Files of a job fifty days old, and what the server's store says of it."""
    made(folder, {f"{JOB}/log.txt": 50, f"jobs/{JOB}/workspace": 50, f"jobs/{JOB}/meta": 50})
    kit(folder, "server", "server")
    (folder / f"jobs/{JOB}/meta").write_text(meta)
    os.utime(folder / f"jobs/{JOB}/meta", (0, 0))


def test_a_server_keeps_its_runs_unless_they_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server_job(tmp_path, '{"status": "FINISHED:COMPLETED"}')
    made(tmp_path, {"runs/a-s0-1/study.toml": 50})
    assert command("clean", "--kit", str(tmp_path)) == 2
    assert "--older DAYS" in capsys.readouterr().err
    assert command("clean", "--kit", str(tmp_path), "--older", "30", "--yes") == 0
    assert not (tmp_path / JOB).exists() and not (tmp_path / "jobs" / JOB).exists()
    assert (tmp_path / "runs/a-s0-1/study.toml").exists()
    assert command("clean", "--kit", str(tmp_path), "--older", "30", "--runs", "--yes") == 0
    assert not (tmp_path / "runs/a-s0-1").exists()


def test_a_kit_that_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a nightly job nobody would notice that nothing is ever removed."""
    assert command("clean", "--kit", str(tmp_path / "nope"), "--older", "3") == 2
    assert "is not a kit" in capsys.readouterr().err
    assert command("clean", "--hospital", str(hospital(tmp_path)), "--kit", str(tmp_path / "nope")) == 2
    assert "is not a kit" in capsys.readouterr().err


@pytest.mark.parametrize("meta", ['{"status": "RUNNING"}', '{"status": "SUBMITTED"}', "{", "[]"])
def test_a_job_that_waits_or_runs_is_kept_however_old_it_is(tmp_path: Path, meta: str) -> None:
    server_job(tmp_path, meta)
    assert command("clean", "--kit", str(tmp_path), "--older", "30", "--yes") == 0
    assert (tmp_path / JOB / "log.txt").exists() and (tmp_path / "jobs" / JOB / "workspace").exists()


def test_jobs_lie_where_the_server_puts_them(tmp_path: Path) -> None:
    pytest.importorskip("nvflare")
    from consilium.federation.kits import make_kits
    from consilium.federation.project import Project
    from consilium.federation.supervisor import prepare

    kit = make_kits(Project("eyes", "localhost", 8002, ("ada",)), tmp_path / "kits")["server"]
    prepare(kit, "server")
    parts = {part["id"]: part for part in json.loads((kit / "local/resources.json").read_text())["components"]}
    assert parts["job_manager"]["args"]["uri_root"] == str(kit / "jobs")
