"""[task] initial: a network begins with the weights of a run or a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from consilium.contract import run_in_process
from consilium.errors import StudyError
from consilium.finished_run import open_run
from consilium.study import Study
from consilium.study_reading import make_study
from tests.toy import toy_study


def starting(study: Study, initial: Path | str) -> Study:
    tables = study.tables()
    tables["task"]["initial"] = str(initial)
    tables.pop("facts")
    return make_study(tables)


@pytest.fixture(scope="module")
def study(federation: Path) -> Study:
    return toy_study(federation, "fedavg", study__rounds=1)


def test_a_run_begins_where_another_ended(study: Study, tmp_path: Path) -> None:
    folder = run_in_process(study, tmp_path).folder
    trained = open_run(folder).model().state_dict()
    begun = starting(study, folder).task.initial()
    assert all(torch.equal(begun[name], tensor) for name, tensor in trained.items())
    assert starting(study, folder).hash != study.hash
    assert starting(study, "").hash == study.hash  # studies without the key keep their runs


def test_a_file_of_another_head_keeps_the_seeded_one(study: Study, tmp_path: Path) -> None:
    own = dict(study.task.initial())
    last = list(own)[-1]
    others = {name.removeprefix("net."): torch.full_like(t, 0.5) for name, t in own.items()}
    others[last.removeprefix("net.")] = torch.zeros(7)
    save_file(others, tmp_path / "w.safetensors")
    begun = starting(study, tmp_path / "w.safetensors").task.initial()
    assert torch.equal(begun[last], own[last])
    assert all(bool((begun[name] == 0.5).all()) for name in own if name != last)
    assert torch.equal(begun[last], study.task.initial()[last])


def test_what_cannot_be_a_start_is_refused(study: Study, tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="there is no such run or file"):
        starting(study, tmp_path / "nothing")
    (tmp_path / "w.pt").write_bytes(b"\x80\x04")
    with pytest.raises(StudyError, match="safetensors files only"):
        starting(study, tmp_path / "w.pt").task.initial()
    (tmp_path / "w.safetensors").write_bytes(b"not tensors")
    with pytest.raises(StudyError, match="cannot be read"):
        starting(study, tmp_path / "w.safetensors").task.initial()
    save_file({"other": torch.zeros(3)}, tmp_path / "other.safetensors")
    with pytest.raises(StudyError, match="holds 0 of the network's"):
        starting(study, tmp_path / "other.safetensors").task.initial()
