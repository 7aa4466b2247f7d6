"""Project files and kits: names are checked, and the defaults that would send logs or run code are off."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from consilium.errors import DataError, StudyError
from consilium.federation.kits import make_kits
from consilium.federation.project import Project, read_project
from consilium.federation.supervisor import prepare


def test_a_project_file_is_written_and_read(tmp_path: Path) -> None:
    project = Project("eyes", "fl.example.org", 8002, ("ada", "bea"))
    project.write(tmp_path / "eyes.toml")
    assert read_project(tmp_path / "eyes.toml") == project
    with pytest.raises(DataError, match="is there already"):
        project.write(tmp_path / "eyes.toml")


@pytest.mark.parametrize(
    ("sites", "why"),
    [((), "at least one"), (("ada", "ada"), "once"), (("a/b",), "cannot be used"), (("server",), "server")],
)
def test_names_that_cannot_work_are_refused(sites: tuple[str, ...], why: str) -> None:
    with pytest.raises(StudyError, match=why):
        Project("eyes", "localhost", 8002, sites)


def test_a_kits_readme_names_our_own_start(tmp_path: Path) -> None:
    """NVIDIA FLARE's says to run start.sh, which knows nothing of hospital.toml."""
    kits = make_kits(Project("eyes", "localhost", 8002, ("ada",)), tmp_path / "kits")
    starts = {"server": "federation server server", "office": "federation submit", "ada": "federation site ada"}
    for name, start in starts.items():
        texts = [path.read_text() for path in kits[name].rglob("readme*")]
        assert len(texts) == 1
        assert f"consilium {start}" in texts[0]
        assert ".sh" not in texts[0]


def test_kits_send_no_logs_and_run_only_this_package(tmp_path: Path) -> None:
    kits = make_kits(Project("eyes", "localhost", 8002, ("ada",)), tmp_path / "kits")
    site = json.loads((kits["ada"] / "local/resources.json").read_text())
    assert site["allow_log_streaming"] is False
    assert site["class_allow_list"] == ["consilium.federation"]
    assert not [part for part in site["components"] if "log" in part["id"]]
    rights = json.loads((kits["ada"] / "local/authorization.json").read_text())["permissions"]
    assert list(rights) == ["project_admin"]
    assert {rights["project_admin"][what] for what in ("shell_commands", "byoc", "operate")} == {"none"}
    sent = json.loads((kits["ada"] / "startup/fed_client.json").read_text())
    assert sent["client"]["connection_security"] == "mtls"
    with pytest.raises(DataError, match="has kits already"):
        make_kits(Project("eyes", "localhost", 8002, ("ada",)), tmp_path / "kits")
    with pytest.raises(DataError, match="which is not a site"):
        prepare(kits["server"], "site")
    hospital = tmp_path / "hospital.toml"
    hospital.write_text('site = "bea"\ndata = "d"\nmemory = "m"\nlabels = ["blob"]\n')
    with pytest.raises(DataError, match="but the kit is of 'ada'"):
        prepare(kits["ada"], "site", hospital)
