"""What every method promises, whoever wrote it. Each promise is one test over all of METHODS."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from consilium import simulation, tree
from consilium.errors import StudyError
from consilium.messages import Envelope
from consilium.method import Maybe, timeline
from consilium.methods import METHODS
from consilium.run_folder import RunFolder
from consilium.simulation import Result
from consilium.site import POOLED
from consilium.study import Study
from consilium.tree import flatten, unflatten
from consilium.worker import open_worker, place_in
from tests.contract.promises import (
    Interrupted,
    Stage,
    crash_after,
    digest,
    run_in_process,
    run_tampered,
    state,
    with_packet,
    without_packet,
)
from tests.toy import toy_study


def each(names: Iterable[str]) -> Any:
    """One test per method; those of one method share a process and so the runs made once."""
    return pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.xdist_group(n)) for n in names])


every_method = each(METHODS)
PARTIAL = ("solo", "fedavg-pl", "fedprox-pl", "fedasam-pl", "ufps")  # for sites that annotate different labels
every_shared_method = each(name for name, kind in METHODS.items() if not kind.pooled)


@pytest.fixture(scope="session")
def study_of(federation: Path, organs: Path) -> Any:
    """A study of a method on the toy federation it is for."""

    def study(name: str, **changes: Any) -> Study:
        changes.setdefault("local__batch_size", 2 if name == "per-fedavg" else 4)  # steps enough to learn, and no more
        return toy_study(organs if changes.pop("partial", name in PARTIAL) else federation, name, **changes)

    return study


@pytest.fixture(scope="session")
def finished(study_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An undisturbed in-process run of each method, made once."""
    made: dict[tuple[str, str, bool], Result] = {}

    def finish(name: str, away: dict[str, list[int]] | None = None, partial: bool = False) -> Result:
        key = (name, str(away), partial or name in PARTIAL)
        if key not in made:
            study = study_of(name, study__away=away or {}, partial=key[2])
            made[key] = run_in_process(study, tmp_path_factory.mktemp(name))
        return made[key]

    return finish


def second_round(study: Study) -> int:
    """The place in the run of the paper's second round."""
    return [round.index for phase, round in timeline(study.method, study.plan.rounds) if phase.counts][1]


def losses(result: Result) -> dict[int, float]:
    folder = RunFolder.open(result.folder)
    first = folder.study.method.phases(3)[0].name
    events = [e for e in folder.events() if e["event"] == "train" and e["phase"] == first]
    rounds = sorted({e["round"] for e in events})
    return {r: sum(e["loss"] for e in events if e["round"] == r) for r in rounds}


@every_method
def test_it_learns(name: str, finished: Any) -> None:
    by_round = losses(finished(name))
    assert by_round[max(by_round)] < 0.95 * by_round[1], f"summed training loss by round: {by_round}"


CRASHES = ("train", "round", "score")  # before a round is committed, after it, and after its scores


@pytest.mark.parametrize(
    ("name", "event"),
    [
        pytest.param(name, event, marks=pytest.mark.xdist_group(name))
        for i, name in enumerate(METHODS)
        for event in (CRASHES if name == "fedsm" else CRASHES[i % 3 : i % 3 + 1])
    ],
)
def test_resume_is_the_uninterrupted_run(name: str, event: str, study_of: Any, tmp_path: Path, finished: Any) -> None:
    study = study_of(name)
    with pytest.raises(Interrupted):
        run_in_process(study, tmp_path, crash_after(event, 2))
    (path,) = tmp_path.iterdir()
    assert not (path / "summary.json").exists()
    resumed = simulation.resume(path, workers=0)
    whole = finished(name)
    assert state(resumed) == state(whole)
    for file in ("best.safetensors", "scores.csv"):
        assert (path / file).read_bytes() == (whole.folder / file).read_bytes(), file


@every_method
def test_across_processes_is_in_process(name: str, study_of: Any, tmp_path: Path, finished: Any, pool: Any) -> None:
    across = simulation.run(study_of(name), tmp_path, pool=pool)
    assert state(across) == state(finished(name))
    assert (across.folder / "scores.csv").read_bytes() == (finished(name).folder / "scores.csv").read_bytes()


@every_shared_method
def test_one_reply_is_enough(name: str, finished: Any) -> None:
    """In round 2 cid alone is merged: the state is another than with all, it is finite, and the run goes on."""
    result = finished(name, away={"ada": [2], "bea": [2]})
    folder = RunFolder.open(result.folder)
    place = {round.index: round for _, round in timeline(folder.study.method, folder.study.plan.rounds)}
    second = place[second_round(folder.study)]
    told = [event for event in folder.events() if event["event"] == "train"]
    here = [e["site"] for e in told if (e["round"], e["phase"]) == (second.number, second.phase)]
    after = {e["site"] for e in told if e["round"] > second.number}
    assert here == ["cid"]
    assert after >= {"ada", "bea", "cid"}
    assert state(result) != state(finished(name))
    server = tree.load(result.folder / "last.safetensors", folder.study.method.Server)
    parts = tree.split(server)
    tensors = [tensor for weights in parts.weights.values() for tensor in weights.values()]
    assert all(torch.isfinite(tensor).all() for tensor in (*tensors, *parts.tensors.values()))


@every_shared_method
def test_a_lost_or_refused_reply_leaves_the_site_as_if_away(
    name: str, study_of: Any, tmp_path: Path, finished: Any
) -> None:
    """In one round ada's reply is lost on its way and bea's is spoilt; only cid's is merged."""

    def spoil(packet: tree.Packet) -> tree.Packet:
        path = max(packet.tensors)
        return tree.Packet(packet.header, {**packet.tensors, path: packet.tensors[path] * torch.nan})

    def hand(site: str, head: Envelope, reply: Any) -> Any:
        if head.round.index != second or site == "cid":
            return reply
        return without_packet(reply) if site == "ada" else with_packet(reply, spoil)

    study = study_of(name)
    second = second_round(study)
    hurt = run_tampered(study, tmp_path / "hurt", hand)
    (lost,) = [e for e in hurt.events() if e["event"] == "lost"]
    (refused,) = [e for e in hurt.events() if e["event"] == "refused"]
    assert (lost["site"], refused["site"]) == ("ada", "bea")
    assert "not finite" in refused["why"]
    assert state(hurt) == state(finished(name, away={"ada": [2], "bea": [2]}))


@each(["fedavg", "scaffold", "fedsm"])  # without memory, with it, with several phases
def test_attendance_repeats_a_run(name: str, study_of: Any, tmp_path: Path) -> None:
    def hand(site: str, head: Envelope, reply: Any) -> Any:
        return without_packet(reply) if (site, head.round.index) in {("bea", 1), ("cid", 2)} else reply

    study = study_of(name)
    lossy = run_tampered(study, tmp_path / "lossy", hand)
    again = run_in_process(simulation.with_attendance(study, lossy.path), tmp_path / "again")
    assert state(lossy) == state(again)


@every_method
def test_a_redelivered_order_changes_nothing(name: str, study_of: Any, tmp_path: Path) -> None:
    stage = Stage(study_of(name), tmp_path)
    stage.round(0)
    site, worker = next(iter(stage.workers.items()))
    order = flatten(stage.method.send(stage.server, stage.roster[site], stage.rounds[1]))
    first, second = (tree.to_bytes(stage.train(site, order, 1, 0)) for _ in range(2))
    assert first == second
    assert worker.shelf.rounds() == ([0, 1] if worker.norm.remembers(stage.method, worker.site.local) else [])


@every_method
def test_inputs_are_not_modified(name: str, study_of: Any, tmp_path: Path) -> None:
    stage = Stage(study_of(name), tmp_path)
    stage.round(0)
    method, round = stage.method, stage.rounds[1]
    server, before = stage.server, digest(stage.server)
    replies = {}
    for site, worker in stage.workers.items():
        order = method.send(server, stage.roster[site], round)
        memory = method.remember(worker.site)
        given = (digest(order), digest(memory))
        replies[site], _ = method.train(worker.site, memory, order, round)
        assert (digest(order), digest(memory)) == given, f"train changed its arguments at {site}"
    sent = {site: digest(reply) for site, reply in replies.items()}
    method.merge(server, replies, round)
    released = method.release(server, next(iter(stage.roster.values())))
    shown = digest(released)
    method.deploy(stage.task, None, released).answer(torch.rand(2, 1, 16, 16))
    assert digest(server) == before
    assert {site: digest(reply) for site, reply in replies.items()} == sent
    assert digest(released) == shown


@every_method
def test_memory_matters_where_it_is_declared(name: str, study_of: Any, tmp_path: Path) -> None:
    stage = Stage(study_of(name, local__optimizer_state=METHODS[name].optimizer_state or "kept"), tmp_path)
    site = next(iter(stage.workers))
    index = second_round(stage.study)
    for earlier in range(index):
        stage.round(earlier)
    order = flatten(stage.method.send(stage.server, stage.roster[site], stage.rounds[index]))
    kept = tree.to_bytes(stage.train(site, order, index, index - 1))
    forgotten = tree.to_bytes(stage.train(site, order, index, -1))
    assert kept != forgotten or _deployed_differently(Stage(stage.study, tmp_path / "whole"), site)


@every_method
def test_the_optimiser_starts_a_round_as_the_study_says(name: str, study_of: Any, tmp_path: Path) -> None:
    """From the second round on, what a site sends depends on `optimizer_state`, unless the method fixes it."""
    if fixed := METHODS[name].optimizer_state:
        assert study_of(name).local.optimizer_state == fixed
        with pytest.raises(StudyError, match=f"'{name}' fixes it to '{fixed}'"):
            study_of(name, local__optimizer_state={"kept": "fresh", "fresh": "kept"}[fixed])
        return
    stage = Stage(study_of(name, local__optimizer_state="kept"), tmp_path)
    site, worker = next(iter(stage.workers.items()))
    index = second_round(stage.study)
    for earlier in range(index):
        stage.round(earlier)
    memory = worker.kept(index - 1).memory
    fresh = dataclasses.replace(worker.site.local, optimizer_state="fresh")
    here = {"kept": worker.site, "fresh": dataclasses.replace(worker.site, local=fresh)}
    sent, states = {}, {}
    for word, place in here.items():
        order = stage.method.send(stage.server, stage.roster[site], stage.rounds[index])
        uplink, after = stage.method.train(place, memory, order, stage.rounds[index])
        sent[word], states[word] = digest(uplink), after.states
    assert sent["kept"] != sent["fresh"]
    assert states["kept"] and all(kept.step for kept in states["kept"].values())
    assert states["fresh"] == {}


def _deployed_differently(stage: Stage, site: str) -> bool:
    """After the last phase the site's memory decides what its predictor says."""
    for index in range(len(stage.rounds)):
        stage.round(index)
    worker = stage.workers[site]
    release = flatten(stage.method.release(stage.server, stage.roster[site]))
    images = torch.linspace(0, 1, 2 * 256).reshape(2, 1, 16, 16)
    answers = [worker.predictor(release, merged).answer(images).output for merged in (len(stage.rounds) - 1, -1)]
    return not torch.equal(*answers)


@every_method
def test_blank_is_the_shape_of_a_real_uplink(name: str, study_of: Any, tmp_path: Path) -> None:
    stage = Stage(study_of(name), tmp_path)
    site = next(iter(stage.workers))
    for index in (0, len(stage.rounds) - 1):
        order = stage.method.send(stage.server, stage.roster[site], stage.rounds[index])
        got = unflatten(stage.train(site, flatten(order), index, -1), stage.method.Uplink)
        blank = stage.method.blank(stage.task, stage.roster, stage.roster[site], stage.rounds[index])
        for field, part in vars(blank).items():
            sent = getattr(got, field)
            if isinstance(part, Maybe):
                blank = dataclasses.replace(blank, **{field: None if sent is None else part.like})
            elif isinstance(part, torch.Tensor):
                assert (sent.shape, sent.dtype) == (part.shape, part.dtype)
                blank = dataclasses.replace(blank, **{field: None})
        for real, expected in zip(tree.split(got).weights.items(), tree.split(blank).weights.items(), strict=True):
            assert real[0] == expected[0]
            assert {k: (t.shape, t.dtype) for k, t in real[1].items()} == {
                k: (t.shape, t.dtype) for k, t in expected[1].items()
            }


@every_method
def test_the_headline_model_is_no_other_method_in_disguise(name: str, finished: Any) -> None:
    def outputs(other: str) -> torch.Tensor:
        result = finished(other, partial=name in PARTIAL)
        folder = RunFolder.open(result.folder)
        method = folder.study.method
        server = tree.load(result.folder / "last.safetensors", method.Server)
        roster = _roster(folder)
        worker = open_worker(folder.study, folder.study.federation(), "ada", roster, place_in(folder.path, "ada"))
        merged = max(worker.shelf.rounds(), default=-1)
        release = flatten(method.release(server, roster.get("ada")))
        images = torch.linspace(0, 1, 4 * 256).reshape(4, 1, 16, 16)
        return worker.predictor(release, merged).answer(images).output

    mine = outputs(name)
    for other in {"local", "fedavg"} - {name}:
        gap = (mine - outputs(other)).abs().max().item()
        assert gap > 1e-4, f"{name} predicts as {other} does: largest difference {gap}"


@every_shared_method
def test_a_site_can_use_what_was_delivered_without_the_server(name: str, finished: Any) -> None:
    """Its scores, computed at the site from its own folder alone, are the run's."""
    folder = RunFolder.open(finished(name).folder)
    worker = open_worker(folder.study, folder.study.federation(), "ada", _roster(folder), place_in(folder.path, "ada"))
    predictor = worker.released()
    own = {
        (batch.cases[i], mark.label): mark.value
        for batch in worker.site.data.whole("test", 16)
        for i, output in enumerate(predictor.answer(batch.images).output)
        for mark in worker.site.task.score(output, batch.truth[i], full=False, labels=batch.labels_of(i))
        if mark.metric == worker.site.task.headline
    }
    rows = [row for row in folder.rows() if row.phase == "best" and row.site == "ada" and row.split == "test"]
    rows = [row for row in rows if (row.model, row.of, row.when) == (predictor.model, predictor.of, predictor.when)]
    told = {(row.case, row.label): row.value for row in rows if row.metric == worker.site.task.headline}
    assert own == pytest.approx(told)


def _roster(folder: RunFolder) -> dict[str, Any]:
    from consilium.messages import card_from_json
    from consilium.store import read_json

    members = read_json(folder.path / "origin.json")["members"]
    return {name: card_from_json(card) for name, card in members.items() if name != POOLED}
