"""Shell completion as a shell asks for it: a process, words in the environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from consilium.cli import completing
from consilium.methods import METHODS


def test_method_names_are_those_of_the_list() -> None:
    assert completing.methods("") == list(METHODS)
    assert completing.methods("fedsm-e") == ["fedsm-extra", "fedsm-ensemble"]


def test_run_folders_are_found_one_folder_further_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("runs/a-s0", "runs/b-s0", "rest/deep/er", "runs/no"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("runs/a-s0", "runs/b-s0", "rest/deep/er"):
        (tmp_path / name / "study.toml").touch()
    monkeypatch.chdir(tmp_path)
    assert completing.runs("") == ["runs/a-s0", "runs/b-s0"]
    assert completing.runs("ru") == ["runs/a-s0", "runs/b-s0"]
    assert completing.runs("runs/b") == ["runs/b-s0"]
    assert completing.runs("rest/") == ["rest/deep/er"]
    assert completing.runs(f"{tmp_path}/runs/a") == [f"{tmp_path}/runs/a-s0"]
    assert completing.runs("none") == []


def test_studies_of_the_package() -> None:
    assert "retina_fedsm" in completing.studies("retina_f")


@pytest.mark.parametrize(("words", "answer"), [("consilium meth", "methods"), ("consilium methods menu", "menu-net")])
def test_a_shell_gets_its_answer_without_torch(words: str, answer: str) -> None:
    asked = {"_CONSILIUM_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    code = """
import sys
from consilium.cli.main import main
try:
    main()
finally:
    assert "torch" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == [answer], done.stderr
