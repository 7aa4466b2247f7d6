"""Methods without teachers, replayed by naive loops with a real 2-D network: the same models of server and sites."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from consilium.methods import dod as dod_method
from consilium.methods import fedcrld as fedcrld_method
from consilium.methods import menu_net as menu_net_method
from consilium.networks.parts import encoder_stages
from tests.replay.partial_labels import (
    SMOOTH,
    exclusive_loss,
    foreground_loss,
    loss_of_all,
    renumbered,
)
from tests.replay.partial_loop import (
    DECODER,
    ENCODER,
    Hospital,
    Model,
    Organs,
    Replay,
    apart,
    average,
    felt,
    first,
    part_of,
    played,
    small_study,
)
from tests.replay.test_pseudo_labelled import NEAR

pytestmark = pytest.mark.usefixtures("smooth")
AWAY = {"study__away": {"bea": [2]}, "study__rounds": 3}
CLIPPED = {**AWAY, "task__loss": "dice+ce", "local__clip": 0.5}
STUDIES = {
    "momentum": ("momentum", {}),
    "adamw, a site away": ("adamw", AWAY),
    "momentum, clipped": ("momentum", CLIPPED),
    "adamw, fresh": ("adamw fresh", {"task__loss": "dice+ce"}),
}


def in_studies(quick: str) -> pytest.MarkDecorator:
    """One study by default, all in the slow tier."""
    marks = {name: () if name == quick else pytest.mark.slow for name in STUDIES}
    cases = [pytest.param(*study, id=name, marks=marks[name]) for name, study in STUDIES.items()]
    return pytest.mark.parametrize(("how", "changes"), cases)


def shares(play: Replay) -> dict[str, float]:
    return {name: here.n for name, here in play.hospitals.items()}


def near(theirs: Mapping[str, Tensor], ours: Model, start: Model, network: nn.Module) -> bool:
    return apart(theirs, ours, start, felt(network, start)) < NEAR


# ------------------------------------------------------------------------------------------- alone


@in_studies("adamw, a site away")
def test_solo(how: str, changes: dict[str, Any], uneven: Path, tmp_path: Path) -> None:
    """Each site trains a model of its own organs and background."""
    done = played(small_study(uneven, "solo", how, **changes), tmp_path)
    play = Replay.of(done.stage)
    for name, here in play.hospitals.items():
        which: dict[str, Any] = {"kind": "teacher", "labels": here.labels}
        w = start = first(play.task, **which)
        for round in play.rounds:
            if here not in play.at(round):
                continue
            student = here.student(play.task.network(**which), w, round)
            for batch in here.batches(round):
                target = renumbered(batch.truth, play.task.labels, here.labels)
                student.step(loss_of_all(student(batch.images), target, here.crossed))
            here.keep(student)
            w = student.weights()
        assert near(done.server.teachers[name], w, start, play.task.network(**which))
        assert near(done.memories[name].teacher, w, start, play.task.network(**which))


# ------------------------------------------------------------------------------------------- one global model


@in_studies("momentum")
@pytest.mark.parametrize("name", ["fedavg-foreground", "cond-dec"])
def test_one_model_of_annotated_foreground(
    name: str, how: str, changes: dict[str, Any], uneven: Path, tmp_path: Path
) -> None:
    """FedAvg of separate losses of the annotated organs. With cond-dec, site i of K adds (i + 1) / K times its mean
    magnitude to every normalised map of the decoder."""
    done = played(small_study(uneven, name, how, task__residual_units=1, **changes), tmp_path)
    play = Replay.of(done.stage)
    w = start = first(play.task)
    for round in play.rounds:
        replies = {}
        for here in play.at(round):
            student = here.student(play.task.network(), w, round)
            if name == "cond-dec":
                tell(student.network, (sorted(play.hospitals).index(here.name) + 1) / len(play.hospitals))
            for batch in here.batches(round):
                output = student(batch.images)
                student.step(foreground_loss(output, batch.truth, play.task.labels, here.labels, here.crossed))
            here.keep(student)
            replies[here.name] = student.weights()
        w = average(replies, shares(play))
    network = play.task.network() if name == "fedavg-foreground" else tell(play.task.network(), 1 / 3)
    assert near(done.server.global_, w, start, network)


def tell(network: nn.Module, constant: float) -> nn.Module:
    """Add the constant after every normalisation of the decoder, in units of the image's own mean magnitude."""

    def add(module: nn.Module, given: Any, output: Tensor) -> Tensor:
        size = torch.stack([image.detach().abs().mean() for image in output])
        return output + constant * size.view(-1, 1, 1, 1)

    found = [m for n, m in network.named_modules() if n.startswith(DECODER) and isinstance(m, nn.InstanceNorm2d)]
    assert len(found) == 3
    for norm in found:
        norm.register_forward_hook(add)
    return network


@in_studies("momentum, clipped")
@pytest.mark.parametrize("encoder_shares", ["annotating", pytest.param("half", marks=pytest.mark.slow)])
def test_menu_net(encoder_shares: str, how: str, changes: dict[str, Any], uneven: Path, tmp_path: Path) -> None:
    """By organ of a site a pass of its own, which changes that organ's encoder and the decoder. An organ's encoder is
    averaged over the sites that annotate it, the decoder over all."""
    fields = {"method__exclusion": 0.8, "method__encoder_shares": encoder_shares}
    done = played(small_study(uneven, "menu-net", how, **fields, **changes), tmp_path)
    play = Replay.of(done.stage)
    task, labels = menu_net_method.menu(play.task), play.task.labels
    w = start = first(task)
    encoders = {label: f"encoders.{i}." for i, label in enumerate(labels)}
    for round in play.rounds:
        replies = {}
        for here in play.at(round):
            own = w
            for organ in here.labels:
                student = here.student(task.network(), own, round, organ, ["decoder.", "head.", encoders[organ]])
                for batch in here.batches(round):
                    student.step(marginal_and_exclusion(student(batch.images), batch.truth, labels, here))
                here.keep(student, organ)
                own = student.weights()
            replies[here.name] = own
        decoder = average({k: part_of(m, ["decoder.", "head."]) for k, m in replies.items()}, shares(play))
        w = {**w, **decoder}
        for label, prefix in encoders.items():
            came = {k: part_of(m, [prefix]) for k, m in replies.items() if label in play.hospitals[k].labels}
            others = {k: part_of(m, [prefix]) for k, m in replies.items() if label not in play.hospitals[k].labels}
            if encoder_shares == "half":  # every site sends it, who does not annotate the organ counts half
                w |= average({**came, **others}, {**dict.fromkeys(came, 1.0), **dict.fromkeys(others, 0.5)})
            elif came:
                w |= average(came, shares(play))
    assert near(done.server.global_, w, start, task.network())


def marginal_and_exclusion(logits: Tensor, truth: Tensor, labels: Organs, here: Hospital) -> Tensor:
    """Unannotated probability counts as background; it may not lie on annotated foreground."""
    q = logits.softmax(1)
    known = [1 + labels.index(label) for label in here.labels]
    unknown = [c for c in range(1, q.shape[1]) if c not in known]
    marginal = torch.stack([q[:, [0, *unknown]].sum(1), *(q[:, c] for c in known)], 1)
    target = renumbered(truth, labels, here.labels)
    loss = torch.stack(exclusive_loss(marginal.log(), target, here.crossed)).mean()
    if not unknown:
        return loss
    drawn, dice, entropy = (target > 0).float(), [], []
    for case in range(len(q)):
        for c in unknown:
            p, y = q[case, c], drawn[case]
            dice.append(2 * (p * y).sum() / (p.sum() + y.sum() + SMOOTH))
            entropy.append((y * (1 + p).log()).mean())
    return loss + 0.8 * (torch.stack(dice).mean() + torch.stack(entropy).mean())


# ------------------------------------------------------------------------------------------- a part stays at the site

LOCAL_PARTS = {"multi-head": DECODER[:1], "multi-encoder": ENCODER, "multi-decoder": DECODER}
Loss = Callable[[Any, Tensor], Tensor]


def partly_local(
    play: Replay, task_at: Callable[[Hospital], Any], local: Sequence[str] | None, shared: Sequence[str], loss: Any
) -> tuple[Model, dict[str, Model]]:
    """The average of everything but the `local` part (or of the `shared` part alone), and the sites' whole models."""
    own = {name: first(task_at(here)) for name, here in play.hospitals.items()}

    def split(model: Model) -> Model:
        if local is None:
            return part_of(model, shared)
        return {name: tensor for name, tensor in model.items() if not name.startswith(tuple(local))}

    w = split(next(iter(own.values())))
    for round in play.rounds:
        replies = {}
        for here in play.at(round):
            student = here.student(task_at(here).network(), {**own[here.name], **w}, round)
            for batch in here.batches(round):
                student.step(loss(here, student, batch))
            here.keep(student)
            own[here.name] = student.weights()
            replies[here.name] = split(own[here.name])
        w = average(replies, shares(play))
    return w, own


@in_studies("momentum")
@pytest.mark.parametrize("name", list(LOCAL_PARTS))
def test_the_part_of_a_network_stays_at_its_site(
    name: str, how: str, changes: dict[str, Any], uneven: Path, tmp_path: Path
) -> None:
    """The loss covers a site's organs, with all else as background; channels of other organs are not used."""
    done = played(small_study(uneven, name, how, **changes), tmp_path)
    play = Replay.of(done.stage)

    def loss(here: Hospital, student: Any, batch: Any) -> Tensor:
        logits = student(batch.images)[:, [0, *(1 + play.task.labels.index(label) for label in here.labels)]]
        target = renumbered(batch.truth, play.task.labels, here.labels)
        return torch.stack(exclusive_loss(logits, target, here.crossed)).mean()

    w, own = partly_local(play, lambda here: play.task, LOCAL_PARTS[name], (), loss)
    start = first(play.task)
    where = felt(play.task.network(), start)
    assert done.server.global_.keys() == w.keys() != start.keys()
    assert apart(done.server.global_, w, start, where) < NEAR
    for site, model in own.items():
        assert apart(done.server.personal[site], model, start, where) < NEAR
        assert apart(done.memories[site].personal, model, start, where) < NEAR


@in_studies("momentum, clipped")
def test_dod(how: str, changes: dict[str, Any], uneven: Path, tmp_path: Path) -> None:
    """A controller makes of the pooled bottleneck and the organ's number three convolutions 8-8-1 for each image."""
    done = played(small_study(uneven, "dod", how, **changes), tmp_path)
    play, labels = Replay.of(done.stage), done.stage.task.labels

    def loss(here: Hospital, student: Any, batch: Any) -> Tensor:
        logits = torch.stack([organ_logits(student.network, batch.images, labels.index(o), len(labels))
                              for o in here.labels], 1)  # fmt: skip
        target = renumbered(batch.truth, labels, here.labels)
        padded = torch.cat([torch.zeros_like(logits[:, :1]), logits], 1)
        return foreground_loss(padded, target, here.labels, here.labels, here.crossed)

    w, own = partly_local(
        play,
        lambda here: dod_method.dynamic(play.task, here.labels, True),
        None,
        [f"net.{prefix}" for prefix in ENCODER],
        loss,
    )
    everything = dod_method.dynamic(play.task, labels, True)
    start = first(everything)
    where = felt(everything.network(), start)
    assert apart(done.server.global_, w, start, where) < NEAR
    for site, model in own.items():
        assert apart(done.server.personal[site], model, start, where) < NEAR


def organ_logits(network: Any, images: Tensor, organ: int, organs: int) -> Tensor:
    """DoDNet's head, image by image: (cases, *spatial)."""
    low: list[Tensor] = []
    hook = network.net.net.model[1].submodule[1].submodule.register_forward_hook(lambda m, i, out: low.append(out))
    features = network.net(images)
    hook.remove()
    found = []
    for case, pooled in enumerate(low[0].mean((2, 3))):
        task = torch.zeros(organs)
        task[organ] = 1
        numbers = network.controller(torch.cat([pooled, task]))
        flow, at = features[case][None], 0
        for out in (8, 8, 1):
            kernel, bias = numbers[at : at + out * 8].view(out, 8, 1, 1), numbers[at + out * 8 : at + out * 9]
            flow, at = conv2d(flow, kernel, bias), at + out * 9
            flow = flow.relu() if out > 1 else flow
        found.append(flow[0, 0])
    return torch.stack(found)


# ------------------------------------------------------------------------------------------- FedCRLD


@in_studies("adamw, a site away")
def test_fedcrld(how: str, changes: dict[str, Any], uneven: Path, tmp_path: Path) -> None:
    """A site takes over all but its encoder; attention asks the received encoder; three losses beside segmentation."""
    fields = {"method__momentum": 0.8, "method__predictions": 0.9, "method__features": 1.2, "method__distillation": 1.1}
    done = played(small_study(uneven, "fedcrld", how, **fields, **changes), tmp_path)
    play = Replay.of(done.stage)
    task = fedcrld_method.attended(play.task, True, True)
    everything = first(task)
    encoder = [f"net.{prefix}" for prefix in ENCODER]
    start = w = {name: tensor for name, tensor in everything.items() if not name.startswith("far.")}
    own, steady = dict.fromkeys(play.hospitals, w), dict.fromkeys(play.hospitals, w)
    for round in play.rounds:
        replies = {}
        for here in play.at(round):
            channels = [0, *(1 + play.task.labels.index(label) for label in here.labels)]
            asked = far_of(task, w)
            student = here.student(task.network(), {**w, **part_of(own[here.name], encoder), **asked}, round)
            mean = here.student(task.network(), {**steady[here.name], **asked}, round)
            common = here.student(task.network(), {**w, **asked}, round)
            for batch in here.batches(round):
                with torch.no_grad():
                    before, given = mean(batch.images), common(batch.images)
                now = student(batch.images)
                target = renumbered(batch.truth, play.task.labels, here.labels)
                loss = torch.stack(exclusive_loss(now.output[:, channels], target, here.crossed)).mean()
                p, p_mean, p_global = (one.output[:, channels].softmax(1) for one in (now, before, given))
                loss = loss + 0.9 * (p - p_mean).square().mean()
                loss = loss + 1.2 * (now.features - before.features).square().mean()
                loss = loss + 1.1 * (p_global * (p_global.log() - p.log())).sum(1).mean()
                student.step(loss)
                with torch.no_grad():
                    for name, parameter in mean.parameters.items():
                        parameter.copy_(0.8 * parameter + 0.2 * student.parameters[name])
            here.keep(student)
            own[here.name], steady[here.name] = (
                {name: model[name] for name in start} for model in (student.weights(), mean.weights())
            )
            replies[here.name] = own[here.name]
        w = average(replies, shares(play))
    where = felt(task.network(), everything)
    assert apart(done.server.global_, w, start, where) < NEAR
    for site, model in own.items():
        assert apart(done.server.personal[site], model, start, where) < NEAR
        kept = {name: done.memories[site].momentum[name] for name in start}
        assert apart(kept, steady[site], start, where) < NEAR


def far_of(task: Any, w: Model) -> Model:
    """The received encoder under the names of the fixed one."""
    network: Any = task.network()
    network.load_state_dict(w, strict=False)
    for fixed, stage in zip(network.far, encoder_stages(network.net), strict=True):
        fixed.load_state_dict(stage.state_dict())
    return part_of({k: t.clone() for k, t in network.state_dict().items()}, ["far."])
