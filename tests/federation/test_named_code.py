"""A study may name classes of other packages; the server imports only what its owner allowed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("nvflare")

from consilium.errors import StudyError
from consilium.federation.named_code import ALLOWED, allowed_code, read_submitted
from tests.toy import toy_study

MARK = "named_by_a_study"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that leaves a file when it is imported."""
    mark = tmp_path / "imported"
    (tmp_path / f"{MARK}.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, MARK, raising=False)
    return mark


@pytest.mark.parametrize(("old", "where"), [('name = "fedavg"', "method"), ("[task]", "task")])
def test_nothing_a_study_names_is_imported(
    module: Path, tmp_path: Path, federation: Path, old: str, where: str
) -> None:
    text = toy_study(federation).to_toml()
    new = f'name = "{MARK}:Evil"' if where == "method" else f'[task]\nnetwork = "{MARK}:Evil"'
    lines = [line for line in text.splitlines() if where == "method" or not line.startswith("network")]
    head, _, rest = "\n".join(lines).partition("[method]" if where == "method" else "[task]")
    path = tmp_path / "study.toml"
    path.write_text(f"{head}[method]{rest.replace(old, new)}" if where == "method" else f"{head}{new}{rest}")
    assert f"{MARK}:Evil" in path.read_text()
    with pytest.raises(StudyError, match=rf"not the project.s own code.*--code {MARK}:Evil"):
        read_submitted(path, [])
    assert not module.exists()
    with pytest.raises(StudyError, match="cannot import"):
        read_submitted(path, [f"{MARK}:Evil"])
    assert module.exists()  # allowed, so it was looked for


def test_a_study_without_code_is_read(tmp_path: Path, federation: Path) -> None:
    study = toy_study(federation)
    path = tmp_path / "study.toml"
    path.write_text(study.to_toml())
    assert read_submitted(path, []).hash == study.hash
    path.write_bytes(b"\xff")
    with pytest.raises(StudyError, match="not valid TOML"):
        read_submitted(path, [])


def test_names_reach_the_jobs_process_in_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOWED, raising=False)
    assert allowed_code() == []
    monkeypatch.setenv(ALLOWED, "a.b:C\nd:E")
    assert allowed_code() == ["a.b:C", "d:E"]
