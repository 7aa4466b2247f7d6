"""Methods in the frame of pseudo labels, replayed by naive loops with a real 2-D network: the same server's model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import (
    adaptive_avg_pool2d,
    adaptive_max_pool2d,
    conv2d,
    cosine_similarity,
    instance_norm,
    prelu,
)

from consilium import packet_files
from consilium.contract import Stage, run_in_process
from consilium.site import Round
from tests.replay.partial_labels import (
    Learn,
    every_round,
    label_once,
    labelled,
    loss_of_all,
    teachers_of,
    with_teachers,
    with_unlabelled,
)
from tests.replay.partial_loop import (
    Hospital,
    Model,
    Replay,
    Student,
    apart,
    average,
    felt,
    first,
    heads,
    loaded,
    played,
    small_study,
)

pytestmark = pytest.mark.usefixtures("smooth")
NEAR = 1e-3  # of the way from the start


def fedavg(here: Hospital, w: Model, round: Round, teachers: Mapping[str, Model]) -> Model:
    """FedAvg*: SGD on f(X, Y_gt, PL(X, w^T))."""
    student = here.student(here.task.network(), w, round)
    for batch in here.batches(round):
        student.step(loss_of_all(student(batch.images), labelled(here, teachers, batch).truth, here.crossed))
    here.keep(student)
    return student.weights()


def fedprox(here: Hospital, w: Model, round: Round, teachers: Mapping[str, Model]) -> Model:
    """FedProx*: f + (μ/2) ‖w − w_g‖²."""
    student = here.student(here.task.network(), w, round)
    for batch in here.batches(round):
        loss = loss_of_all(student(batch.images), labelled(here, teachers, batch).truth, here.crossed)
        for name, parameter in student.parameters.items():
            loss = loss + 1.5 / 2 * (parameter - w[name]).square().sum()
        student.step(loss)
    here.keep(student)
    return student.weights()


def moon(here: Hospital, w: Model, round: Round, teachers: Mapping[str, Model]) -> Model:
    """MOON*: f − μ log(e^{cos(z, z_g)/τ} / (e^{cos(z, z_g)/τ} + e^{cos(z, z_prev)/τ})), none at first."""
    student = here.student(here.task.network(), w, round)
    previous = here.memory.get("previous")
    for batch in here.batches(round):
        z: list[Tensor] = []
        bottleneck(student.network).register_forward_hook(lambda m, given, out, z=z: z.append(out.mean((2, 3))))
        loss = loss_of_all(student(batch.images), labelled(here, teachers, batch).truth, here.crossed)
        if previous is not None:
            near, far = (pooled(here, weights, batch.images) for weights in (w, previous))
            up, down = ((cosine_similarity(z[0], other, dim=1) / 0.4).exp() for other in (near, far))
            loss = loss - 2.0 * (up / (up + down)).log().mean()
        student.step(loss)
    here.keep(student)
    here.memory["previous"] = student.weights()
    return student.weights()


def bottleneck(network: Any) -> nn.Module:
    return network.net.model[1].submodule[1].submodule  # type: ignore[no-any-return]


@torch.no_grad()
def pooled(here: Hospital, weights: Model, images: Tensor) -> Tensor:
    network, z = loaded(here.task.network(), weights).eval(), []
    bottleneck(network).register_forward_hook(lambda m, given, out: z.append(out.mean((2, 3))))
    network(images)
    return z[0]


def fedalign(here: Hospital, w: Model, round: Round, teachers: Mapping[str, Model]) -> Model:
    """FedAlign*: f + μ f̄ gap / gap̄, with gap the distance of the last block's Lipschitz constant to a slim block's."""
    student = here.student(here.task.network(), w, round)
    network: Any = student.network
    for batch in here.batches(round):
        above, whole = [], []
        hooks = [
            network.net.model[1].submodule[0].register_forward_hook(lambda m, i, out, a=above: a.append(out.detach())),
            bottleneck(network).register_forward_hook(lambda m, i, out, b=whole: b.append(out.detach())),
        ]
        loss = loss_of_all(student(batch.images), labelled(here, teachers, batch).truth, here.crossed)
        for hook in hooks:
            hook.remove()
        block: Any = bottleneck(network)
        thin = 2  # a quarter of 8 channels
        slim = conv2d(above[0], block.conv.weight[:thin], block.conv.bias[:thin], block.conv.stride, padding=1)
        slim = instance_norm(slim, weight=block.adn.N.weight[:thin], bias=block.adn.N.bias[:thin])
        slim = prelu(slim, block.adn.A.weight)
        gap = (steepest(above[0], slim) - steepest(above[0], whole[0])).square().mean()
        student.step(loss + 0.45 * loss.detach() / gap.detach() * gap)
    here.keep(student)
    return student.weights()


def steepest(above: Tensor, below: Tensor) -> Tensor:
    """By case: the largest singular value of T = F_above F_belowᵀ / voxels, by ten power iterations on T Tᵀ."""
    found = []
    for one, other in zip(adaptive_avg_pool2d(above, below.shape[2:]), below):  # type: ignore[arg-type]
        t = one.flatten(1) @ other.flatten(1).T / other[0].numel()
        v = torch.ones(len(t))
        for _ in range(10):
            v = t @ (t.T @ v)
            v = v / v.norm()
        found.append((v @ (t @ (t.T @ v))).sqrt())
    return torch.stack(found)


def ascent(student: Student, slope: Model, rho: float, eta: float) -> Model:
    """ε = ρ T² ∇f / ‖T ∇f‖, with T = |w| + η on weights and 1 on biases."""
    t = {n: torch.ones_like(p) if n.endswith("bias") else p.detach().abs() + eta for n, p in student.parameters.items()}
    length = torch.cat([(t[n] * g).flatten() for n, g in slope.items()]).norm()
    return {n: rho * t[n] ** 2 * g / length for n, g in slope.items()}


@torch.no_grad()
def move(student: Student, by: Model, sign: float = 1.0) -> None:
    for name, parameter in student.parameters.items():
        parameter += sign * by[name]


def fedasam(here: Hospital, w: Model, round: Round, teachers: Mapping[str, Model]) -> Model:
    """FedASAM*: w ← w − η ∇f(w + ε), both gradients on the same batch."""
    student = here.student(here.task.network(), w, round)
    for batch in here.batches(round):
        truth = labelled(here, teachers, batch).truth
        epsilon = ascent(student, student.slope(loss_of_all(student(batch.images), truth, here.crossed)), 0.7, 0.001)
        move(student, epsilon)
        slope = student.slope(loss_of_all(student(batch.images), truth, here.crossed))
        move(student, epsilon, -1)
        student.descend(slope)
    here.keep(student)
    return student.weights()


def ms_kd(here: Hospital, w: Model, round: Round, teachers: Mapping[str, Model]) -> Model:
    """MS-KD*: f, and by teacher KL(teacher ‖ student) of logits and distances of features where it sees an organ."""
    student = here.student(here.task.network(), w, round)
    masters = {
        name: loaded(here.task.network("teacher", here.site.roster[name].labels), weights).eval()
        for name, weights in teachers.items()
    }
    for batch in here.batches(round):
        answer, own = with_levels(student.network, batch.images)
        loss = loss_of_all(answer, labelled(here, teachers, batch).truth, here.crossed)
        for name, master in masters.items():
            with torch.no_grad():
                said, theirs = with_levels(master, batch.images)
            sees = (said.argmax(1) > 0).float()
            known = [1 + here.task.labels.index(label) for label in here.site.roster[name].labels]
            q = answer.softmax(1)
            unknown = [c for c in range(q.shape[1]) if c not in known]
            q = torch.stack([q[:, unknown].sum(1), *(q[:, c] for c in known)], 1)
            p = said.softmax(1)
            each = (p * (p.log() - q.log())).sum(1)
            loss = loss + 0.7 / len(masters) * (each * sees).sum() / sees.sum().clamp_min(1)
            for mine, other in zip(own, theirs):
                seen = adaptive_max_pool2d(sees[:, None], mine.shape[2:])  # type: ignore[arg-type]
                far = ((mine - other) ** 2 * seen).sum() / (seen.sum() * mine.shape[1]).clamp_min(1)
                loss = loss + 1.3 / len(masters) / len(own) * far
        student.step(loss)
    here.keep(student)
    return student.weights()


def with_levels(network: Any, images: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The logits, and the features of every level down and up."""
    top, features = network.net.model, []
    stages = (top[0], top[1].submodule[0], bottleneck(network), top[1].submodule[2])
    hooks = [stage.register_forward_hook(lambda m, given, out: features.append(out)) for stage in stages]
    logits = network(images)
    for hook in hooks:
        hook.remove()
    return logits, features


def cps(play: Replay) -> tuple[Model, Model]:
    """CPS*: f(w_1) + 1.5 CE(w_1(x), arg max w_2(x)), and the same the other way round; both are averaged."""
    teachers, n = teachers_of(play), with_unlabelled(play)
    w = [first(play.task), first(play.task, draw=1)]
    for round in play.rounds[1:]:
        replies: list[dict[str, Model]] = [{}, {}]
        for here in play.at(round):
            pair = [here.student(play.task.network(), w[i], round, str(i)) for i in (0, 1)]
            for batch in here.batches(round):
                truth = labelled(here, teachers, batch).truth
                with torch.no_grad():
                    decided = [heads(one(batch.images))[0][1].argmax(1) for one in pair]
                for one, other in zip(pair, reversed(decided)):
                    output = one(batch.images)
                    cross = [k * nn.functional.cross_entropy(logits, other) for k, logits in heads(output)]
                    one.step(loss_of_all(output, truth, here.crossed) + 1.5 * torch.stack(cross).sum())
            for i, one in enumerate(pair):
                here.keep(one, str(i))
                replies[i][here.name] = one.weights()
        w = [average(replies[i], n) for i in (0, 1)]
    return w[0], w[1]


# ------------------------------------------------------------------------------------------- the comparisons

NO_CACHE = {"method__teachers__labels": "live"}
AWAY = {"study__away": {"bea": [2]}, "study__rounds": 3}
PLAIN = {
    "task__network": "plain-unet",
    "task__residual_units": None,
    "task__supervision": [0.3],
    "task__loss": "dice+ce",
}
LOOPS: dict[str, tuple[Learn, dict[str, Any]]] = {
    "fedavg-pl": (fedavg, {}),
    "fedprox-pl": (fedprox, {"method__mu": 1.5}),
    "moon-pl": (moon, {"method__mu": 2.0, "method__temperature": 0.4}),
    "fedalign-pl": (fedalign, {}),
    "fedasam-pl": (fedasam, {}),
    "ms-kd-pl": (ms_kd, {"method__logits": 0.7, "method__features": 1.3}),
}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("fedavg-pl", "momentum", AWAY),
    ("fedprox-pl", "adamw", {}),
    ("moon-pl", "momentum", {}),
    ("fedalign-pl", "momentum", {}),
    ("fedasam-pl", "adamw", {}),
    ("ms-kd-pl", "adamw", {"local__clip": 0.5}),
]
MORE: list[tuple[str, str, dict[str, Any]]] = [
    *((name, how, AWAY) for name in LOOPS for how in ("momentum", "adamw", "adamw fresh")),
    *((name, "adamw", NO_CACHE) for name in LOOPS),
    *((name, "momentum", PLAIN) for name in ("fedavg-pl", "fedprox-pl", "fedasam-pl")),
    *((name, "adamw", {"task__residual_units": 1, "local__clip": 0.5}) for name in ("fedavg-pl", "moon-pl")),
    ("fedavg-pl", "adamw", {"local__schedule": "decay", "local__decay": 0.5, "local__epochs": 2}),
]


def named(case: tuple[str, str, dict[str, Any]]) -> str:
    name, how, changes = case
    return " ".join([name, how, *(key.rpartition("__")[2] for key in changes)])


def gap(name: str, how: str, changes: dict[str, Any], organs: Path, place: Path) -> float:
    learn, fields = LOOPS[name]
    done = played(small_study(organs, name, how, **fields, **changes), place)
    ours = with_teachers(Replay.of(done.stage), learn)
    start = first(done.stage.task)
    return apart(done.server.global_, ours, start, felt(done.stage.task.network(), start))


@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_naive_loop_ends_with_the_same_model(case: Any, uneven: Path, tmp_path: Path) -> None:
    assert gap(*case, uneven, tmp_path) < NEAR


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=named)
def test_a_naive_loop_ends_with_the_same_model_in_other_studies(case: Any, uneven: Path, tmp_path: Path) -> None:
    assert gap(*case, uneven, tmp_path) < NEAR


@pytest.mark.slow
def test_labels_turn_with_their_images(uneven: Path, tmp_path: Path) -> None:
    fields = {"task__augment": ["flip", "rotate"], "method__teachers__rounds": 2}
    done = played(small_study(uneven, "fedavg-pl", "momentum", **fields), tmp_path)
    play, plain = Replay.of(done.stage), small_study(uneven, "fedavg-pl", "momentum")
    teachers, _ = teachers_of(play), with_unlabelled(play)
    label_once(play, teachers)
    w, start = every_round(play, teachers, fedavg)[-1], first(plain.task)
    assert apart(done.server.global_, w, start, felt(plain.task.network(), start)) < NEAR


@pytest.mark.slow
def test_sites_wait_a_round_for_a_late_teacher(uneven: Path, tmp_path: Path) -> None:
    """bea alone annotates the square and misses the teachers' phase: the others might as well be away in round 1."""
    only = {"data__annotated": {"cid": ["round"]}, "study__rounds": 3}
    done = played(small_study(uneven, "fedavg-pl", "adamw", study__away={"bea": ["teacher"]}, **only), tmp_path)
    play = Replay.of(done.stage)
    play.away = {"ada": [1], "cid": [1]}
    ours, start = with_teachers(play, fedavg), first(play.task)
    assert apart(done.server.global_, ours, start, felt(play.task.network(), start)) < NEAR


@pytest.mark.parametrize(
    ("how", "changes"),
    [
        ("momentum", {}),
        pytest.param("adamw", AWAY, marks=pytest.mark.slow),
        pytest.param("adamw fresh", PLAIN, marks=pytest.mark.slow),
    ],
)
def test_both_networks_of_cps(how: str, changes: dict[str, Any], uneven: Path, tmp_path: Path) -> None:
    done = played(small_study(uneven, "cps-pl", how, **changes), tmp_path)
    for i, (theirs, ours) in enumerate(zip((done.server.global_, done.server.second), cps(Replay.of(done.stage)))):
        start = first(done.stage.task, draw=i)
        assert apart(theirs, ours, start, felt(done.stage.task.network(), start)) < NEAR


def test_the_release_of_fedasam_is_the_mean_of_every_second_round(uneven: Path, tmp_path: Path) -> None:
    """SWA, cycle 2, counted back from the last of four rounds: (w_2 + w_4) / 2. The run is the engine's own."""
    fields = {"release__swa_from": 0.25, "release__swa_cycle": 2, "study__rounds": 4, "study__score_every": 9}
    study = small_study(uneven, "fedasam-pl", "momentum", study__away={"bea": [3]}, **fields)
    folder = run_in_process(study, tmp_path).folder
    server: Any = packet_files.load(folder / "last.safetensors", study.method.Server)
    play = Replay.of(Stage(study, tmp_path / "again"))
    w = every_round(play, teachers_of(play), fedasam)
    start = first(play.task)
    where = felt(play.task.network(), start)
    mean = {name: (w[1][name] + w[3][name]) / 2 for name in start}
    assert apart(server.now.global_, w[3], start, where) < NEAR
    assert apart(server.mean.global_, mean, start, where) < NEAR
