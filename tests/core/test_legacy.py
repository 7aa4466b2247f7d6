"""Studies and run folders of version 0.1 open, mean what they meant, and go on bit by bit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from consilium import simulation
from consilium.study import Study, load_study
from tests.contract.promises import Interrupted, crash_after, run_in_process, state
from tests.toy import toy_study

STUDY = """
[study]
rounds = 60
[data]
federation = "{federation}"
[local]
lr = 1e-3
[method]
name = "{method}"
{field}
"""


@pytest.mark.parametrize(("method", "field", "meant"), [
    ("fedsm", 'optimizer_state = "fresh"', "fresh"),
    ("fedsm", 'optimizer_state = "kept"', "kept"),
    ("fedsm-extra", 'optimizer_state = "fresh"', "fresh"),
])  # fmt: skip
def test_the_field_of_a_method_is_read_as_one_of_local(
    method: str, field: str, meant: str, federation: Path, tmp_path: Path
) -> None:
    path = tmp_path / "study.toml"
    path.write_text(STUDY.format(federation=federation, method=method, field=field), encoding="utf-8")
    study = load_study(path)
    assert study.local.optimizer_state == meant
    assert "optimizer_state" not in study.tables()["method"]
    assert load_study(path, [f"method.optimizer_state={meant}"]).hash == study.hash


@pytest.mark.parametrize(("method", "did"), [
    ("local", "kept"), ("pooled", "kept"), ("fedavg", "fresh"), ("fedprox", "fresh"), ("apple", "fresh"),
])  # fmt: skip
def test_a_runs_own_study_says_what_the_run_did(method: str, did: str, federation: Path, tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    path.write_text(as_written_by_0_1(toy_study(federation, method)), encoding="utf-8")
    assert load_study(path).local.optimizer_state == did


def as_written_by_0_1(study: Study) -> str:
    """The study file of a run folder: all defaults written out, none of them `[local] optimizer_state`."""
    text = re.sub(r"\noptimizer_state = .*", "", study.to_toml())
    if study.method_name.startswith("fedsm"):
        text = text.replace("[method]", f'[method]\noptimizer_state = "{study.local.optimizer_state}"')
    return text


OLD = {"local": {"local": "state"}, "fedsm": {"global": "global_state", "personal": "personal_state"}, "apfl": {}}


@pytest.mark.parametrize(("method", "did"), [("local", "kept"), ("fedsm", "kept"), ("apfl", "fresh")])
def test_a_run_goes_on_bit_by_bit(method: str, did: str, federation: Path, tmp_path: Path) -> None:
    study = toy_study(federation, method, local__batch_size=4, local__optimizer_state=did)
    whole = run_in_process(study, tmp_path / "whole")
    with pytest.raises(Interrupted):
        run_in_process(study, tmp_path / "cut", crash_after("round", 2))
    (run,) = (tmp_path / "cut").iterdir()
    (run / "study.toml").write_text(as_written_by_0_1(study), encoding="utf-8")
    memories = list(run.glob("sites/*/memory/*.json"))
    assert len(memories) >= 3
    for path in memories:
        path.write_text(json.dumps(remembered_by_0_1(json.loads(path.read_text()), OLD[method])))
    assert state(simulation.resume(run, workers=0)) == state(whole)


def remembered_by_0_1(document: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Without `states`, which were fields of their own, and without a digest."""
    document.pop("digest")  # 0.1 wrote none
    shape = json.loads(document["shape"])
    memory = shape["tree"]["memory"]
    states = memory.pop("states")
    memory.update({old: states.get(job) for job, old in names.items()})
    weights = {}
    for path, digest in document["weights"].items():
        for job, old in names.items():
            path = path.replace(f"memory/states/{job}/", f"memory/{old}/")
        weights[path] = digest
    rest = {key: value for key, value in document.items() if key != "digest"}
    return {**rest, "shape": json.dumps(shape), "weights": weights}
