"""A site's hidden labels reach nothing: no patch, no loss, no choice of a model; only test scores that are marked."""

from __future__ import annotations

import json
import tomllib
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from consilium import packet_files
from consilium.contract import run_in_process
from consilium.data.check import check
from consilium.errors import StudyError, UserError
from consilium.methods import METHODS
from consilium.run_folder import RunFolder
from consilium.simulation import Result
from consilium.study import Study
from consilium.timeline import timeline
from consilium.validation import admitted, expected_roster, members_of
from consilium.wires.in_process import InProcess
from tests.toy import ANNOTATED, toy_study, write_organs

EVERYTHING_ON = {
    "method__uncertainty__weigh_from": 0.0,
    "method__uncertainty__weigh_until": 2.0,
    "method__noise__start": 2.0,
    "method__uncertainty__trust_from": 2.0,
    "method__main_teacher__start": 2.0,
    "method__sharpness__start": 2.0,
}
PERSONAL = ["fedavg-foreground", "cond-dec", "fedbn", "multi-decoder", "dod", "fedcrld", "menu-net"]
SUPERVISED = {"task__network": "plain-unet", "task__widths": [4, 8, 8], "task__residual_units": None}


def organ_study(folder: Path, method: str = "fedavg", **changes: Any) -> Study:
    wanted = {"task__patch": [12, 12], "task__loss": "dice+ce", "task__augment": ["flip"], "study__score_every": 1}
    return toy_study(folder, method, **{**wanted, "local__batch_size": 2, **changes})


@pytest.fixture(scope="module")
def organs(tmp_path_factory: pytest.TempPathFactory) -> Path:  # smaller than the one all tests share
    return write_organs(tmp_path_factory.mktemp("organs") / "true", unlabelled=2)


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_organs(tmp_path_factory.mktemp("organs") / "noisy", hidden_noise=True, unlabelled=2)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:  # `organs` without the cases that have no mask
    return write_organs(tmp_path_factory.mktemp("organs") / "drawn")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of two rounds on a folder of organs, made once."""
    made: dict[str, Result] = {}

    def run(folder: Path, method: str, **changes: Any) -> Result:
        key = f"{folder} {method} {changes}"
        if key not in made:
            study = organ_study(folder, method, study__rounds=2, **changes)
            made[key] = run_in_process(study, tmp_path_factory.mktemp("runs"))
        return made[key]

    return run


def weights(result: Result) -> tuple[bytes, bytes]:
    return (result.folder / "last.safetensors").read_bytes(), (result.folder / "best.safetensors").read_bytes()


def scored(result: Result, split: str) -> dict[tuple[str, ...], float]:
    rows = RunFolder.open(result.folder).rows()
    return {(r.phase, str(r.round), r.of, r.site, r.case, r.label, r.metric): r.value for r in rows if r.split == split}


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("fedavg", {}),
        pytest.param("local", {}, marks=pytest.mark.slow),
        pytest.param("fedsm", {}, marks=pytest.mark.slow),  # its threshold is tuned on validation
        pytest.param("pooled", {"task__patch": []}, marks=pytest.mark.slow),
        pytest.param("solo", {}, marks=pytest.mark.slow),
        ("fedavg-pl", {}),
        ("ufps", EVERYTHING_ON),
        pytest.param(
            "ufps",
            {**EVERYTHING_ON, "method__teachers__labels": "live", "method__main_teacher__when": "match"},
            marks=pytest.mark.slow,
        ),
        ("fedavg", {"data__test_masks": "complete", **SUPERVISED}),
        *(pytest.param(name, {}, marks=pytest.mark.slow, id=name) for name in PERSONAL),
    ],
    ids=["fedavg", "local", "fedsm", "pooled", "solo", "fedavg-pl", "ufps", "ufps live", "complete tests", *PERSONAL],
)
def test_hidden_masks_swapped_for_noise_give_the_same_weights(
    method: str, changes: dict[str, Any], organs: Path, noisy: Path, trained: Any
) -> None:
    """Bit by bit: the last weights, the weights chosen on validation, and all validation scores."""
    true, swapped = (trained(folder, method, **changes) for folder in (organs, noisy))
    assert weights(true) == weights(swapped)
    assert scored(true, "valid") == scored(swapped, "valid")
    complete = "data__test_masks" in changes
    assert (scored(true, "test") == scored(swapped, "test")) is not complete  # there, and only there, they are read


def test_annotated_masks_do_matter(organs: Path, trained: Any, tmp_path: Path) -> None:
    """The test above can fail: noise in what is annotated gives other weights."""
    spoilt = write_organs(tmp_path / "spoilt", noise="square", unlabelled=2)
    assert weights(trained(organs, "fedavg")) != weights(trained(spoilt, "fedavg"))


@pytest.mark.parametrize(
    "method", ["fedavg", "solo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("local", "pooled", "fedsm"))]
)
def test_cases_without_a_mask_are_left_out_of_supervised_training(
    method: str, organs: Path, drawn: Path, trained: Any
) -> None:
    """Bit by bit as if they were not there; and the user is told."""
    changes = {"task__patch": []} if method == "pooled" else {}
    with_them, without = (trained(folder, method, **changes) for folder in (organs, drawn))
    assert weights(with_them) == weights(without)
    assert scored(with_them, "valid") == scored(without, "valid")
    assert scored(with_them, "test") == scored(without, "test")
    whose = "6 of pooled" if method == "pooled" else "2 of ada, 2 of bea, 2 of cid"
    assert warnings(with_them) == [f"cases without a mask are left out: {whose}; methods with teachers use them."]
    assert warnings(without) == []


@pytest.mark.parametrize("method", ["fedavg", "pooled", "fedavg-pl"])
def test_a_dry_run_says_what_the_roll_call_will(method: str, organs: Path, tmp_path: Path) -> None:
    """Its roster is of the tables alone, cases without a mask included."""
    study = organ_study(organs, method, **({"task__patch": []} if method == "pooled" else {}))
    federation = study.federation()
    roster = expected_roster(study, federation, members_of(study, federation))
    with closing(InProcess(study, RunFolder.create(study, tmp_path).path)) as wire:
        assert roster == wire.roll_call().members
    left_out = [note for note in admitted(study, timeline(study.method, 2), roster) if "without a mask" in note]
    assert len(left_out) == (method != "fedavg-pl")


@pytest.mark.parametrize(
    "method",
    [
        "fedavg-pl",
        "ufps",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in METHODS
            if name.endswith("-pl") and name != "fedavg-pl"
        ),
    ],
)
def test_methods_with_teachers_learn_from_cases_without_a_mask(
    method: str, organs: Path, drawn: Path, trained: Any
) -> None:
    """Teachers are the same, bit by bit: they learn from masks alone. The common model is another."""
    servers = []
    for folder in (organs, drawn):
        run = trained(folder, method)
        kind: Any = RunFolder.open(run.folder).study.method
        servers.append(packet_files.load(run.folder / "last.safetensors", kind.Server))
        steps = {e["site"]: e["steps"] for e in RunFolder.open(run.folder).events() if e.get("phase") == "train"
                 and e["event"] == "train"}  # fmt: skip
        assert steps["ada"] == (3 if folder is organs else 2)  # batches of two
        assert warnings(run) == []
    with_them, without = servers
    assert {s: t.digest for s, t in with_them.teachers.items()} == {s: t.digest for s, t in without.teachers.items()}
    assert with_them.global_.digest != without.global_.digest
    assert (with_them.n, without.n) == (dict.fromkeys(ANNOTATED, 5), dict.fromkeys(ANNOTATED, 3))


def warnings(result: Result) -> list[str]:
    return [event["text"] for event in RunFolder.open(result.folder).events() if event["event"] == "warning"]


def test_scores_on_complete_test_masks_are_marked(organs: Path, tmp_path: Path) -> None:
    complete = run_in_process(organ_study(organs, data__test_masks="complete"), tmp_path)
    plain = run_in_process(organ_study(organs), tmp_path)
    assert complete.summary["hidden"] == {"ada": ["square"], "bea": ["round"]}
    assert "hidden" not in plain.summary
    assert json.loads((complete.folder / "summary.json").read_text())["hidden"]["ada"] == ["square"]
    seen = {
        (run is complete, split, site): {key[5] for key in scored(run, split) if key[3] == site}
        for run in (complete, plain)
        for split in ("valid", "test")
        for site in ("ada", "cid")
    }
    assert seen[True, "test", "ada"] == {"round", "square"}
    assert seen[True, "valid", "ada"] == seen[False, "test", "ada"] == seen[False, "valid", "ada"] == {"round"}
    assert seen[True, "valid", "cid"] == seen[False, "test", "cid"] == {"round", "square"}
    assert weights(complete) == weights(plain)


def test_all_can_be_annotated_for_the_bound(organs: Path, tmp_path: Path) -> None:
    everyone = dict.fromkeys(ANNOTATED, "all")
    bound = run_in_process(organ_study(organs, data__annotated=everyone, study__rounds=1), tmp_path)
    assert {key[5] for key in scored(bound, "valid") if key[3] == "ada"} == {"round", "square"}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"data__annotated": {"ada": []}}, r"annotated.ada is empty: .* leave the site out"),
        (
            {"data__annotated": {"bea": ["round"], "cid": ["round"]}},
            r"no site that trains annotates 'square'; give it to one with \[data\] annotated",
        ),
        ({"study__leave_out": ["bea", "cid"]}, r"no site that trains annotates 'square'"),
        ({"data__annotated": {"ada": ["ring"]}}, r"there is no label 'ring'"),
        ({"data__test_masks": "all"}, r"test_masks = 'all': it must be one of annotated, complete"),
    ],
)
def test_annotations_that_cannot_work(changes: dict[str, Any], sentence: str, organs: Path, tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=sentence):
        run_in_process(organ_study(organs, **changes), tmp_path)


def test_images_of_two_sizes_in_one_batch_are_refused(tmp_path: Path) -> None:
    folder = write_organs(tmp_path / "organs")
    for sub in ("images", "labels"):
        path = folder / "ada" / sub / "1.png"
        Image.fromarray(np.asarray(Image.open(path))[:12]).save(path)
    with pytest.raises(UserError, match=r"12×16 and of 16×16 cannot be in one batch; set \[task\] patch"):
        run_in_process(organ_study(folder, task__patch=[], local__batch_size=3), tmp_path / "runs")
    run_in_process(organ_study(folder, task__patch=[14, 14], study__rounds=1), tmp_path / "runs")  # one is smaller


def test_a_mask_value_without_a_label_is_named(tmp_path: Path) -> None:
    folder = write_organs(tmp_path / "organs")
    path = folder / "ada/labels/0.png"
    mask = np.array(Image.open(path))
    mask[0, 0] = 7
    Image.fromarray(mask).save(path)
    (fault,) = check(folder).faults
    assert "ada/labels/0.png" in str(fault) and "7" in fault.sentence and "not in labels" in fault.sentence


def test_site_toml_says_who_annotates(organs: Path) -> None:
    assert tomllib.loads((organs / "ada/site.toml").read_text())["annotated"] == ["round"]
