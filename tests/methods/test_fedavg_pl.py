"""The pseudo-label frame: teachers are SOLO's models, sent once, kept, and waited for a round."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from consilium import packet_files
from consilium.contract import Stage, run_in_process
from consilium.errors import StudyError
from consilium.learning.pseudo_labels import claimed, teacher_outputs
from consilium.methods.fedprox import proximal_job
from consilium.methods.pseudo_labelled import _labels
from consilium.methods.teachers import taught
from consilium.run_folder import RunFolder
from consilium.simulation import Result
from consilium.site import Round
from tests.toy import toy_study, write_organs

ONE_EACH = {"data__annotated": {"cid": ["round"]}, "method__teachers__rounds": 1}  # only bea annotates the square


def last(result: Result) -> Any:
    kind: Any = RunFolder.open(result.folder).study.method
    return packet_files.load(result.folder / "last.safetensors", kind.Server)


def trained(result: Result) -> dict[tuple[str, int, str], dict[str, Any]]:
    events = RunFolder.open(result.folder).events()
    return {(e["phase"], e["round"], e["site"]): e for e in events if e["event"] == "train"}


def test_a_teacher_is_what_the_site_trains_alone(organs: Path, tmp_path: Path) -> None:
    """Bit by bit, round by round; and a site that was away catches up with itself."""
    stage = Stage(toy_study(organs, "fedavg-pl"), tmp_path / "pl")
    alone = Stage(toy_study(organs, "solo"), tmp_path / "solo")
    site = stage.workers["ada"].site
    memory = alone.method.remember(alone.workers["ada"].site)
    for step in range(3):
        _, memory = alone.method.train(alone.workers["ada"].site, memory, alone.method.Downlink(), alone.rounds[step])
    teaching = stage.method.remember(site).teaching
    together, _, _ = taught(site, teaching, 3, 3)
    for step in range(3):
        teaching, _, _ = taught(site, teaching, step + 1, 3)
    assert teaching.teacher.digest == together.teacher.digest == memory.teacher.digest
    assert (teaching.rounds, teaching.state) == (3, None)
    assert teaching.best is not None and teaching.valid == together.valid


def test_teachers_are_sent_once(organs: Path, tmp_path: Path) -> None:
    result = run_in_process(toy_study(organs, "fedavg-pl"), tmp_path)
    events = trained(result)
    up = {key: event["bytes_up"] for key, event in events.items()}
    down = {key: event["bytes_down"] for key, event in events.items()}
    size = sum(t.numel() * 4 for t in last(result).global_.values())
    assert up["teacher", 1, "ada"] < 1000 and up["teacher", 2, "ada"] < 1000
    assert 0.9 * size < up["teacher", 3, "ada"] < 1.7 * size
    assert all(0.9 * size < up["train", r, "ada"] < 1.7 * size for r in (1, 2, 3))
    assert down["teacher", 3, "ada"] < 1000
    assert down["train", 1, "ada"] > 2.7 * size  # the model and two teachers
    assert all(down["train", r, "ada"] < 1.7 * size for r in (2, 3))
    assert last(result).holders == {"ada": ("bea", "cid"), "bea": ("ada", "cid"), "cid": ("ada", "bea")}


def test_a_late_teacher_is_waited_for_a_round(organs: Path, tmp_path: Path) -> None:
    """bea, who alone annotates the square, trains no teacher in time; it trains it when it is back, and goes on."""
    study = toy_study(organs, "fedavg-pl", **ONE_EACH, study__away={"bea": ["teacher"]})
    result = run_in_process(study, tmp_path)
    steps = {key: event["steps"] for key, event in trained(result).items() if key[0] == "train"}
    assert steps["train", 1, "ada"] == steps["train", 1, "cid"] == 0
    assert steps["train", 1, "bea"] > 0
    assert all(steps["train", r, s] > 0 for r in (2, 3) for s in ("ada", "bea", "cid"))
    in_time = run_in_process(toy_study(organs, "fedavg-pl", **ONE_EACH), tmp_path)
    assert last(result).teachers["bea"].digest == last(in_time).teachers["bea"].digest


def test_a_teacher_that_never_comes_does_not_stop_the_run(organs: Path, tmp_path: Path) -> None:
    """The square stays unknown at the others, neither present nor absent; the first round changes nothing."""
    study = toy_study(organs, "fedavg-pl", **ONE_EACH, study__away={"bea": ["teacher", 1, 2, 3]})
    result = run_in_process(study, tmp_path)
    assert last(result).teachers.keys() == {"ada", "cid"}
    steps = {key: event["steps"] for key, event in trained(result).items() if key[0] == "train"}
    assert steps["train", 1, "ada"] == 0 and steps["train", 2, "ada"] > 0
    stage = Stage(toy_study(organs, "fedavg-pl", **ONE_EACH), tmp_path / "stage")
    server = stage.method.start(stage.task, stage.roster)
    reply = stage.method.Uplink(server.global_ * 3, None, 0.0, 0)
    merged = stage.method.merge(server, {"ada": reply}, Round(3, "train", 0, 3))
    assert merged.global_.digest == server.global_.digest  # who waited is not averaged


def test_labels_come_from_the_annotation_and_the_others_teachers(organs: Path, tmp_path: Path) -> None:
    """At ada every voxel of its annotation keeps its label; squares come from teachers only."""
    stage = Stage(toy_study(organs, "fedavg-pl", method__teachers__rounds=4, local__lr=0.02), tmp_path)
    for index in range(5):
        stage.round(index)
    worker = stage.workers["ada"]
    kept: Any = worker.kept(4)
    teaching = kept.memory.teaching
    site = stage.method._with_maps(worker.site, teaching)
    teach = stage.method._teach(worker.site, teaching)
    found = 0
    for batch in site.batches(stage.rounds[4]):
        labelled = teach(batch)
        assert labelled.batch.labels is None  # all are known
        assert torch.equal(labelled.batch.truth == 1, batch.truth == 1)
        found += int((labelled.batch.truth == 2).sum())
        live = teach(replace(batch, beside=None))
        assert torch.equal(live.batch.truth, labelled.batch.truth)
    assert found > 0


@pytest.mark.parametrize("teachers", ["cached", "live"])
def test_in_a_case_without_a_mask_all_labels_come_from_teachers(teachers: str, tmp_path: Path) -> None:
    """Also those the site annotates elsewhere: there its own teacher is heard."""
    folder = write_organs(tmp_path / "organs", unlabelled=2)
    study = toy_study(
        folder, "fedavg-pl", method__teachers__rounds=8, local__lr=0.02, method__teachers__labels=teachers
    )
    stage = Stage(study, tmp_path)
    for index in range(9):
        stage.round(index)
    worker = stage.workers["ada"]
    teaching = worker.kept(8).memory.teaching  # type: ignore[union-attr]
    site = replace(worker.site, data=worker.site.data.with_unlabelled())
    teach = stage.method._teach(site, teaching)
    labelled_batches = [teach(batch) for batch in stage.method._with_maps(site, teaching).batches(stage.rounds[8])]
    seen = {case: (labelled, i) for labelled in labelled_batches for i, case in enumerate(labelled.batch.cases)}
    assert set(seen) == {"ada0", "ada1", "ada2", "ada100", "ada101"}
    for case, (labelled, i) in seen.items():
        everything, truth = labelled.pseudo.others[i], labelled.batch.truth[i]
        assert labelled.batch.labels is None
        if case in ("ada100", "ada101"):
            given = teacher_outputs(
                site.task, {**teaching.others, "ada": teaching.best}, _labels(site), labelled.batch.images
            )
            assert torch.equal(truth, claimed(given, site.task.labels)[i])
            assert (truth == 1).any()
        else:
            assert not (everything == 1).any()


def test_live_teachers_label_as_cached_ones_where_nothing_is_augmented(organs: Path, tmp_path: Path) -> None:
    fields = {"method__teachers__rounds": 1, "study__rounds": 2}
    cached, live = (
        run_in_process(toy_study(organs, "fedavg-pl", method__teachers__labels=how, **fields), tmp_path)
        for how in ("cached", "live")
    )
    gap = last(cached).global_ - last(live).global_
    assert gap.norm() < 1e-4 * last(live).global_.norm()


def test_patches_and_augmentation_move_labels_with_images(organs: Path, tmp_path: Path) -> None:
    """Volumes smaller than the patch are padded, with background."""
    study = toy_study(organs, "fedavg-pl", task__patch=[20, 12], task__augment=["flip", "rotate"], study__rounds=2)
    assert "site_mean" in run_in_process(study, tmp_path).summary["headline"]


def test_fedprox_without_its_pull_is_fedavg(organs: Path, tmp_path: Path) -> None:
    plain, none, some = (
        run_in_process(toy_study(organs, name, study__rounds=2, method__teachers__rounds=1, **fields), tmp_path)
        for name, fields in (("fedavg-pl", {}), *(("fedprox-pl", {"method__mu": mu}) for mu in (0.0, 1.0)))
    )
    assert last(plain).global_.digest == last(none).global_.digest
    start = toy_study(organs, "fedavg-pl").task.initial()
    assert (last(some).global_ - start).norm() < (last(plain).global_ - start).norm()


def test_the_pull_of_fedprox_as_ufps_writes_it_is_a_mean(organs: Path, tmp_path: Path) -> None:
    """μ times the mean of squares over all d parameters; FedProx has μ/2 times their sum, d/2 times as much."""
    site = Stage(toy_study(organs, "fedprox-pl"), tmp_path).workers["ada"].site
    anchor = site.task.initial()
    moved = {name: anchor[name] + 0.5 for name in site.task.parameters()}
    d = sum(tensor.numel() for tensor in moved.values())
    total, mean = (proximal_job(site, anchor, 0.2, mean=how).penalty for how in (False, True))
    assert total is not None and mean is not None
    assert mean(moved).item() == pytest.approx(0.2 * 0.25, rel=1e-5)
    assert total(moved).item() == pytest.approx(0.2 / 2 * 0.25 * d, rel=1e-5)
    study: Any = toy_study(organs, "fedprox-pl", method__squares="mean")
    assert study.method.squares == "mean"
    with pytest.raises(StudyError, match="squares = 'square': it must be one of sum, mean"):
        toy_study(organs, "fedprox-pl", method__squares="square")


def test_releases_of_fedasam_can_be_averaged_over_rounds(organs: Path, tmp_path: Path) -> None:
    """As the paper's FedASAM*: sites train on from the last round's model, the mean is what they use."""
    plain = run_in_process(toy_study(organs, "fedasam-pl", method__teachers__rounds=1), tmp_path)
    fields = {"release__swa_from": 0.3, "release__swa_cycle": 1}
    study = toy_study(organs, "fedasam-pl", method__teachers__rounds=1, **fields)
    server: Any = packet_files.load(run_in_process(study, tmp_path).folder / "last.safetensors", study.method.Server)
    assert server.now.global_.digest == last(plain).global_.digest
    assert server.mean.global_.digest != server.now.global_.digest
    assert server.mean.teachers["ada"].digest == server.now.teachers["ada"].digest


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"method__teachers__rounds": -1}, r"\[method.teachers\] rounds = -1: it cannot be negative"),
        ({"method__teachers__labels": "dead"}, "labels = 'dead': it must be one of cached, live"),
        ({"method__teachers__priority": ["round", "round"]}, "a label is named twice"),
        ({"method__teachers__priority": ["ring"]}, "there is no label 'ring'; choose from round, square"),
        ({"data__annotated": {"ada": []}}, "annotated.ada is empty"),
        ({"data__annotated": {"bea": ["round"], "cid": ["round"]}}, "no site that trains annotates 'square'"),
        ({"task__unannotated": "background"}, "for methods without teachers"),
        ({"local__batchnorm": "local", "task__norm": "batch"}, "learning from teachers needs batchnorm = 'average'"),
    ],
)
def test_studies_that_cannot_work(changes: dict[str, Any], sentence: str, organs: Path, tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=sentence):
        run_in_process(toy_study(organs, "fedavg-pl", **changes), tmp_path)


def test_where_everyone_annotates_all_the_user_is_told(federation: Path, tmp_path: Path) -> None:
    result = run_in_process(toy_study(federation, "fedavg-pl", study__rounds=1), tmp_path)
    warnings = [e["text"] for e in RunFolder.open(result.folder).events() if e["event"] == "warning"]
    assert warnings == ["every site annotates all labels, so there is nothing for teachers to add."]
