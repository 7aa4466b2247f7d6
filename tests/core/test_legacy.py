"""Studies and run folders of version 0.1 open, mean what they meant, and go on bit by bit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from consilium import simulation
from consilium.contract import run_and_copy, state
from consilium.errors import StudyError
from consilium.fields import to_toml
from consilium.legacy import MODULES, told_by_0_1
from consilium.run_folder import RunFolder
from consilium.study import Study
from consilium.study_reading import load_study
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


def test_a_study_for_data_elsewhere_is_no_run_of_0_1(tmp_path: Path) -> None:
    """An administrator without data writes [facts]; the defaults are those of today."""
    text = """
    [data]
    federation = "elsewhere"
    [method]
    name = "fedavg"
    [facts]
    task = "segmentation"
    labels = ["disc", "cup"]
    dimensions = 2
    channels = 3
    """
    (tmp_path / "study.toml").write_text(text)
    study = load_study(tmp_path / "study.toml")
    assert (study.local.optimizer_state, study.task_fields.decides) == ("kept", "slice")


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
    whole, run = run_and_copy(study, tmp_path)
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


def test_a_run_of_fedsm_keeps_its_rule_for_gamma_and_its_hash(federation: Path, tmp_path: Path) -> None:
    """0.1 pooled validation cases. A run of today has another hash, so that no suite and no resume mixes both rules."""
    today = toy_study(federation, "fedsm")
    assert vars(today.method)["tuned_by"] == "sites"
    later = r"\n(tuned_by|needed_gain|decides) = .*"  # keys of [method] and [task] that 0.1 did not have
    path = tmp_path / "study.toml"
    path.write_text(re.sub(later, "", as_written_by_0_1(today)), encoding="utf-8")
    old = load_study(path)
    assert (vars(old.method)["tuned_by"], vars(old.method)["needed_gain"]) == ("pooled", 0.0)
    as_then = toy_study(federation, "fedsm", method__tuned_by="pooled", method__needed_gain=0.0)
    assert old.hash == as_then.hash != today.hash
    assert not {"tuned_by", "needed_gain"} & told_by_0_1(old.tables()["method"]).keys()
    assert told_by_0_1(today.tables()["method"])["tuned_by"] == "sites"
    path.write_text(re.sub(r"\ntuned_by = .*", "", today.to_toml()), encoding="utf-8")
    assert load_study(path).hash == today.hash  # 0.2 had `decides`, and γ by sites


def flat(study: Study) -> str:
    """The study file of a run of UFPS by 0.1: every field in [method]."""
    tables = study.tables()
    old = {path: key for key, path in MODULES[study.method_name].items()}
    method: dict[str, Any] = {}
    for name, value in tables["method"].items():
        method.update(
            {old[f"{name}.{key}"]: part for key, part in value.items()} if isinstance(value, dict) else {name: value}
        )
    lines = [f"{key} = {to_toml(value)}" for key, value in method.items()]
    head, _, rest = study.to_toml().partition("[method]\n")
    return f"{head}[method]\n" + "\n".join(lines) + "\n\n" + rest.partition("\n\n")[2]


def test_flat_fields_of_0_1_are_read_into_modules(organs: Path, tmp_path: Path) -> None:
    changes = {"method__teachers__labels": "live", "method__sharpness__rho": 0.3, "method__main_teacher__guard": False}
    study = toy_study(organs, "ufps", **changes)
    text = flat(study)
    assert 'teachers = "live"' in text and "rho = 0.3" in text and "gmt_guard = false" in text
    assert "[method.sharpness]" not in text and len(MODULES["ufps"]) == 30
    path = tmp_path / "study.toml"
    path.write_text(text, encoding="utf-8")
    assert load_study(path).method == study.method and load_study(path).hash == study.hash
    changed: Any = load_study(path, ["method.rho=0.5"]).method
    assert changed.sharpness.rho == 0.5
    with pytest.raises(StudyError, match=r"\[method\] rho = 0.3, but \[method.sharpness\] rho = 0.5; keep the one in"):
        load_study(path, ['method.sharpness={"strategy" = "usam", "rho" = 0.5}'])


def test_a_study_of_ufps_keeps_the_hash_it_had() -> None:
    """Suites find finished runs by it."""
    told = told_by_0_1({"name": "ufps", "shares": "cases", "noise": {"arce": 0.1}, "sharpness": {"strategy": "usam"}})
    assert told == {"name": "ufps", "shares": "cases", "arce": 0.1, "sharpness": "usam"}
    assert told_by_0_1({"name": "fedsm", "personal_fields": {"mix": 0.1}})["personal_fields"] == {"mix": 0.1}


def test_a_run_of_ufps_with_flat_fields_goes_on_bit_by_bit(organs: Path, tmp_path: Path) -> None:
    starts = {"method__sharpness__start": 0.0, "method__uncertainty__trust_from": 0.0}
    study = toy_study(organs, "ufps", local__batch_size=4, method__teachers__rounds=1, study__rounds=2, **starts)
    whole, run = run_and_copy(study, tmp_path, round=1)
    (run / "study.toml").write_text(flat(study), encoding="utf-8")
    assert state(simulation.resume(run, workers=0)) == state(whole)


def test_a_teacher_in_a_memory_of_0_1_is_found(organs: Path, tmp_path: Path) -> None:
    """0.1 called it `school`: in the memory's shape and in the paths of its weights."""
    short = {"method__teachers__rounds": 1, "local__batch_size": 4}  # the second round is one with label maps
    study = toy_study(organs, "fedavg-pl", local__optimizer_state="fresh", **short)
    whole, run = run_and_copy(study, tmp_path)
    for path in run.glob("sites/*/memory/*.json"):
        facts = json.loads(path.read_text())
        facts.pop("digest")
        old = json.loads(json.dumps(facts).replace("memory/teaching/", "memory/school/"))
        old["shape"] = facts["shape"].replace('"teaching"', '"school"')
        assert old != facts
        path.write_text(json.dumps(old))
    assert state(simulation.resume(run, workers=0)) == state(whole)


def test_a_pooled_run_goes_on_under_the_name_its_site_had(federation: Path, tmp_path: Path) -> None:
    """0.1 called the virtual site `pooled`: folder, origin, states and journal have that name, and so has the rest."""
    study = toy_study(federation, "pooled", local__batch_size=4, local__optimizer_state="kept", study__firewall="off")
    whole, run = run_and_copy(study, tmp_path)
    (run / "sites" / "(pooled)").rename(run / "sites" / "pooled")
    for path in [run / "origin.json", run / "journal.jsonl", *run.glob("server/*.json")]:
        path.write_text(without_digest(path.read_text().replace("(pooled)", "pooled"), path))
    for path in run.glob("sites/pooled/memory/*.json"):
        path.write_text(json.dumps(remembered_by_0_1(json.loads(path.read_text()), {"pooled": "state"})))
    (run / "study.toml").write_text(as_written_by_0_1(study), encoding="utf-8")
    assert state(simulation.resume(run, workers=0)) == state(whole)
    trained = [event["site"] for event in RunFolder.open(run).events() if event["event"] == "train"]
    assert trained == ["pooled"] * 3


def without_digest(text: str, path: Path) -> str:
    """A document as 0.1 wrote it; the lines of a journal have no checksum."""
    if path.suffix != ".json":
        return re.sub(r', "crc": "\w+"', "", text)
    return json.dumps({key: value for key, value in json.loads(text).items() if key != "digest"})
