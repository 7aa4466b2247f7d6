"""What every method promises, whoever wrote it. Each promise is one test over all of METHODS."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from consilium import packet_files, simulation
from consilium.contract import (
    Stage,
    after_one_round,
    copy_at,
    declares_its_uplinks,
    digest,
    goes_on_with_one_reply,
    keeps_its_inputs,
    learns,
    repeats_an_order,
    resumes,
    run_in_process,
    run_tampered,
    second_round,
    state,
    without_packet,
)
from consilium.errors import StudyError
from consilium.messages import Envelope
from consilium.methods import METHODS
from consilium.run_folder import RunFolder
from consilium.simulation import Result
from consilium.site import POOLED
from consilium.site_opening import open_worker, place_in
from consilium.study import Study
from consilium.tree import flatten
from consilium.worker import open_released
from tests.toy import toy_study

ACROSS = ("fedavg", "local", "pooled", "scaffold", "fedsm", "apple", "ufps")  # run in worker processes too


def together(name: str) -> pytest.MarkDecorator:
    """Tests of one method share a process and so the runs made once; there is one pool of worker processes for all."""
    return pytest.mark.xdist_group("pool" if name in ACROSS else name)


def each(names: Iterable[str], slow: Container[str] = ()) -> Any:
    """One test per method."""
    marks = {n: [together(n), *([pytest.mark.slow] if n in slow else [])] for n in names}
    return pytest.mark.parametrize("name", [pytest.param(n, marks=found) for n, found in marks.items()])


# settings that make another method of one: their name here, the method, what is set
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fedsm-network": ("fedsm", {"method__selector_training": "synchronised"}),
    "fedsm-extra-regression": ("fedsm-extra", {"method__selector_training": "regression"}),
}
WITHOUT_OPTIMISER = ("pfedme",)  # its steps are its own
SIBLINGS = ("multi-head", "multi-encoder")  # one implementation with multi-decoder: the slow tier tries them
# methods whose messages and memory are those of another one here: what is promised of these the slow tier tries
COUSINS = {
    *("fedprox-pl", "fedasam-pl", "moon-pl", "fedalign-pl", "ms-kd-pl", "fedprox-finetune", "heurfedamp", "fedasam"),
    *("fedbn", "fedavg-foreground", "fedprox", "fedsm-ensemble", "dod"),
}
NOT_QUICK = {*SIBLINGS, *COUSINS, *VARIANTS}
every_method = each(METHODS, slow=SIBLINGS)
every_protocol = each([*METHODS, *VARIANTS], slow=NOT_QUICK)
every_method_and_variant = each([*METHODS, *VARIANTS], slow=SIBLINGS)
# for sites that annotate different labels
PARTIAL = (
    *("solo", "ufps", *(name for name in METHODS if name.endswith("-pl"))),
    *("fedavg-foreground", "cond-dec", "dod", "fedcrld", "menu-net", "multi-head", "multi-encoder", "multi-decoder"),
)
SHARED = [name for name, kind in METHODS.items() if not kind.pooled]
every_shared_method = each(SHARED, slow={*SIBLINGS, *COUSINS})
every_shared_method_and_variant = each([*SHARED, *VARIANTS], slow=NOT_QUICK)


@pytest.fixture(scope="session")
def study_of(federation: Path, organs: Path) -> Any:
    """A study of a method on the toy federation it is for."""

    def study(name: str, **changes: Any) -> Study:
        name, more = VARIANTS.get(name, (name, {}))
        changes = {"study__score_every": 2, **changes, **more}  # the best round need not be the last
        return toy_study(organs if changes.pop("partial", name in PARTIAL) else federation, name, **changes)

    return study


CRASHES = ("train", "round", "score")  # before a round is committed, after it, and after its scores


def used_strides(tensor: torch.Tensor) -> list[int]:
    """Of the axes longer than one: nothing reads by the others."""
    return [step for step, size in zip(tensor.stride(), tensor.shape) if size > 1]


@contextmanager
def steps_looked_at(found: list[str]) -> Iterator[None]:
    """Note what each step of an optimiser meanwhile reads: a fault, or an empty text where it lies as its parameter."""

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            beside = {"gradient": parameter.grad, **optimizer.state.get(parameter, {})}
            for name, tensor in beside.items():
                if isinstance(tensor, torch.Tensor) and tensor.shape == parameter.shape:
                    same = used_strides(tensor) == used_strides(parameter)
                    found.append("" if same else f"{name} of shape {tuple(tensor.shape)}")

    hook = register_optimizer_step_pre_hook(look)
    try:
        yield
    finally:
        hook.remove()


@pytest.fixture(scope="session")
def steps() -> dict[str, list[str]]:
    """By method, what `steps_looked_at` found in its finished run."""
    return {}


@pytest.fixture(scope="session")
def finished(study_of: Any, steps: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An undisturbed in-process run of each method, made once; beside it, its folder as it was in round 2."""
    made: dict[tuple[str, str, bool], Result] = {}

    def finish(name: str, away: dict[str, list[int]] | None = None, partial: bool = False) -> Result:
        key = (name, str(away), partial or name in PARTIAL)
        if key not in made:
            study, runs = study_of(name, study__away=away or {}, partial=key[2]), tmp_path_factory.mktemp(name)
            copying = copy_at(CRASHES, 2, RunFolder.path_of(study, runs), runs / "killed")
            with steps_looked_at(steps.setdefault(name, [])):
                made[key] = run_in_process(study, runs, copying)
        return made[key]

    return finish


@pytest.fixture(scope="session")
def begun(study_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The sites and the server of each method after one round, made once; no test changes what another one reads."""
    made: dict[str, Stage] = {}

    def begin(name: str) -> Stage:
        if name not in made:
            made[name] = after_one_round(study_of(name), tmp_path_factory.mktemp(f"{name}-begun"))
        return made[name]

    return begin


@every_method_and_variant
def test_it_learns(name: str, finished: Any) -> None:
    learns(finished(name))


@every_method_and_variant
def test_gradients_and_moments_lie_in_memory_as_their_parameters_do(
    name: str, finished: Any, steps: dict[str, list[str]]
) -> None:
    """A fused step reads all of them as they lie, so another layout would interchange the numbers of a convolution."""
    finished(name)
    assert steps[name] or name in WITHOUT_OPTIMISER
    assert not [fault for fault in steps[name] if fault]


@pytest.mark.parametrize(
    ("name", "event"),
    [
        pytest.param(name, event, marks=[together(name), *([pytest.mark.slow] if name in NOT_QUICK else [])])
        for i, name in enumerate([*METHODS, *VARIANTS])
        for event in (CRASHES if name == "fedsm" else CRASHES[i % 3 : i % 3 + 1])
    ],
)
def test_resume_is_the_uninterrupted_run(name: str, event: str, finished: Any) -> None:
    whole = finished(name)
    resumes(whole.folder.parent / "killed" / event / whole.folder.name, whole)


@each(METHODS, slow={*METHODS} - {*ACROSS})  # the slow tier compares the others too
def test_across_processes_is_in_process(name: str, study_of: Any, tmp_path: Path, finished: Any, pool: Any) -> None:
    across = simulation.run(study_of(name), tmp_path, pool=pool)
    assert state(across) == state(finished(name))
    assert (across.folder / "scores.csv").read_bytes() == (finished(name).folder / "scores.csv").read_bytes()


@pytest.fixture(scope="session")
def hurt(study_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of each method in whose second round ada's reply is lost on its way and bea's is spoilt, made once."""
    made: dict[str, RunFolder] = {}

    def run(name: str) -> RunFolder:
        if name not in made:
            made[name] = goes_on_with_one_reply(study_of(name), tmp_path_factory.mktemp(f"{name}-hurt"))
        return made[name]

    return run


@every_shared_method_and_variant
def test_one_reply_is_enough(name: str, hurt: Any, finished: Any) -> None:
    """In round 2 cid alone is merged: the state is another than with all, it is finite, and the run goes on."""
    assert state(hurt(name)) != state(finished(name))


AWAY = ("scaffold", "fedsm", "ufps")  # the default tier compares these, the slow tier the others


@each([*SHARED, *VARIANTS], slow={*SHARED, *VARIANTS} - {*AWAY})
def test_a_lost_or_refused_reply_leaves_the_site_as_if_away(name: str, hurt: Any, finished: Any) -> None:
    assert state(hurt(name)) == state(finished(name, away={"ada": [2], "bea": [2]}))


@each(["fedavg", "scaffold", "fedsm"], slow=("scaffold", "fedsm"))  # without memory, with it, with several phases
def test_attendance_repeats_a_run(name: str, study_of: Any, tmp_path: Path) -> None:
    def hand(site: str, head: Envelope, reply: Any) -> Any:
        return without_packet(reply) if (site, head.round.index) in {("bea", 1), ("cid", 2)} else reply

    study = study_of(name)
    lossy = run_tampered(study, tmp_path / "lossy", hand)
    again = run_in_process(simulation.with_attendance(study, lossy.path), tmp_path / "again")
    assert state(lossy) == state(again)


@every_protocol
def test_a_redelivered_order_changes_nothing(name: str, begun: Any) -> None:
    repeats_an_order(begun(name))


@every_protocol
def test_inputs_are_not_modified(name: str, begun: Any) -> None:
    keeps_its_inputs(begun(name))


@pytest.fixture(scope="session")
def remembering(study_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The sites and the server before the paper's second round, and what the first site kept of its optimiser and the
    rest; made once."""

    @cache
    def begin(name: str) -> tuple[Stage, str, Any]:
        study = study_of(name, local__optimizer_state=METHODS[name].optimizer_state or "kept")
        stage = Stage(study, tmp_path_factory.mktemp(f"{name}-remembering"))
        for earlier in range(second_round(study)):
            stage.round(earlier)
        site, worker = next(iter(stage.workers.items()))
        return stage, site, worker.kept(second_round(study) - 1).memory

    return begin


@each(METHODS, slow={*SIBLINGS, *COUSINS})
def test_memory_matters_where_it_is_declared(name: str, remembering: Any, tmp_path: Path) -> None:
    stage, site, _ = remembering(name)
    index = second_round(stage.study)
    order = flatten(stage.method.send(stage.server, stage.roster[site], stage.rounds[index]))
    kept = packet_files.to_bytes(stage.train(site, order, index, index - 1))
    forgotten = packet_files.to_bytes(stage.train(site, order, index, -1))
    assert kept != forgotten or _deployed_differently(Stage(stage.study, tmp_path), site)


@each(METHODS, slow={*SIBLINGS, *COUSINS})
def test_the_optimiser_starts_a_round_as_the_study_says(name: str, study_of: Any, remembering: Any) -> None:
    """From the second round on, what a site sends depends on `optimizer_state`, unless the method fixes it."""
    if fixed := METHODS[name].optimizer_state:
        assert study_of(name).local.optimizer_state == fixed
        with pytest.raises(StudyError, match=f"'{name}' fixes it to '{fixed}'"):
            study_of(name, local__optimizer_state={"kept": "fresh", "fresh": "kept"}[fixed])
        return
    stage, site, memory = remembering(name)
    index = second_round(stage.study)
    own = stage.workers[site].site
    fresh = dataclasses.replace(own.local, optimizer_state="fresh")
    here = {"kept": own, "fresh": dataclasses.replace(own, local=fresh)}
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


@every_protocol
def test_blank_is_the_shape_of_a_real_uplink(name: str, study_of: Any, tmp_path: Path) -> None:
    declares_its_uplinks(study_of(name), tmp_path)


@pytest.fixture(scope="session")
def headline(finished: Any) -> Any:
    """What the headline model of a method says of four images, asked once."""

    @cache
    def outputs(name: str, partial: bool) -> torch.Tensor:
        result = finished(name, partial=partial)
        folder = RunFolder.open(result.folder)
        method = folder.study.method
        server: Any
        if name == "fedsm":  # whole after its last exchanges; at γ = 1 it would be its global model, FedAvg's
            server = dataclasses.replace(
                packet_files.load(result.folder / "best.safetensors", method.Server), confidence=0.0
            )
        else:
            server = packet_files.load(result.folder / "last.safetensors", method.Server)
        roster = _roster(folder)
        worker = open_worker(folder.study, folder.study.federation(), "ada", roster, place_in(folder.path, "ada"))
        merged = max(worker.memories.rounds(), default=-1)
        release = flatten(method.release(server, roster.get("ada")))
        images = next(worker.site.data.whole("test", 4)).images
        return worker.predictor(release, merged).answer(images).output

    return outputs


@every_method
def test_the_headline_model_is_no_other_method_in_disguise(name: str, headline: Any) -> None:
    mine = headline(name, name in PARTIAL)
    for other in {"local", "fedavg"} - {name}:
        gap = (mine - headline(other, name in PARTIAL)).abs().max().item()
        assert gap > 1e-4, f"{name} predicts as {other} does: largest difference {gap}"


@every_shared_method
def test_a_site_can_use_what_was_delivered_without_the_server(name: str, finished: Any) -> None:
    """Its scores, computed at the site from its own folder alone, are the run's."""
    folder = RunFolder.open(finished(name).folder)
    worker = open_worker(folder.study, folder.study.federation(), "ada", _roster(folder), place_in(folder.path, "ada"))
    predictor = open_released(worker.method, worker.site.task, worker.norm, worker.site.local, worker.place, "ada")
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
    from consilium.files import read_json
    from consilium.messages import card_from_json

    members = read_json(folder.path / "origin.json")["members"]
    return {name: card_from_json(card) for name, card in members.items() if name != POOLED}
