"""Losses, teachers and their labels, as a replay needs them: case by case and organ by organ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from consilium.batch import Batch
from consilium.site import Round
from tests.replay.partial_loop import Hospital, Model, Organs, Replay, average, first, heads, loaded

SMOOTH = 1e-5  # of Dice


def exclusive_loss(logits: Tensor, truth: Tensor, crossed: bool, ignored: Tensor | None = None) -> list[Tensor]:
    """By case: the mean over organs of 1 − 2 Σ p y / (Σ p + Σ y), and with `crossed` the cross entropy of a voxel.

    `truth` (cases, *spatial) numbers the channels of `logits`; in `ignored` voxels nothing is counted.
    """
    found = []
    for case in range(len(logits)):
        counted = torch.ones_like(truth[case]).bool() if ignored is None else ~ignored[case]
        chances = logits[case].softmax(0)
        each = []
        for organ in range(1, len(chances)):
            p, y = chances[organ][counted], (truth[case][counted] == organ).float()
            each.append(1 - (2 * (p * y).sum() + SMOOTH) / (p.sum() + y.sum() + SMOOTH))
        loss = torch.stack(each).mean()
        if crossed:
            right = logits[case].log_softmax(0).gather(0, truth[case].long()[None])[0]
            loss = loss - right[counted].sum() / counted.numel()
        found.append(loss)
    return found


def loss_of_all(output: Any, truth: Tensor, crossed: bool) -> Tensor:
    """The mean over cases, of a network whose channels are all labels; inner heads are weighed."""
    parts = [weight * torch.stack(exclusive_loss(logits, truth, crossed)).mean() for weight, logits in heads(output)]
    return torch.stack(parts).sum()


def renumbered(truth: Tensor, labels: Organs, own: Organs) -> Tensor:
    """Mask values of the task as places among a site's `own` labels; other labels are background."""
    found = torch.zeros_like(truth, dtype=torch.long)
    for place, label in enumerate(own, start=1):
        found[truth == labels.index(label) + 1] = place
    return found


def foreground_loss(logits: Tensor, truth: Tensor, labels: Organs, own: Organs, crossed: bool) -> Tensor:
    """Each annotated organ alone, by a sigmoid; nothing is learned about background."""
    dice, entropy = [], []
    for case in range(len(logits)):
        for label in own:
            logit, y = logits[case, 1 + labels.index(label)], (truth[case] == 1 + labels.index(label)).float()
            p = torch.sigmoid(logit)
            dice.append(1 - (2 * (p * y).sum() + SMOOTH) / (p.sum() + y.sum() + SMOOTH))
            entropy.append(nn.functional.binary_cross_entropy_with_logits(logit, y))
    loss = torch.stack(dice).mean()
    return loss + torch.stack(entropy).mean() if crossed else loss


# ------------------------------------------------------------------------------------------- teachers


class Labelled(NamedTuple):
    """A batch's labels, each (cases, *spatial)."""

    truth: Tensor  # the annotation, and the teachers' labels elsewhere
    others: Tensor  # the teachers' labels of organs that the site does not annotate
    everything: Tensor  # the teachers' labels of all organs
    entropy: Tensor


def teachers_of(play: Replay) -> dict[str, Model]:
    """Algorithm 1: each site trains a model of its own organs and background; its best round on validation is sent."""
    found = {}
    for name, here in play.hospitals.items():
        how: dict[str, Any] = {"kind": "teacher", "labels": here.labels}
        w, best, top = first(play.task, **how), {}, -1.0
        for round in play.rounds:
            if round.phase != "teacher":
                continue
            teacher = here.student(play.task.network(**how), w, round, "teacher")
            for batch in here.batches(round):
                target = renumbered(batch.truth, play.task.labels, here.labels)
                teacher.step(loss_of_all(teacher(batch.images), target, here.crossed))
            here.keep(teacher, "teacher")
            w, score = teacher.weights(), own_dice(here, teacher.network)
            if score > top:
                best, top = w, score
        found[name], here.memory["valid"] = best, top
    return found


@torch.no_grad()
def own_dice(here: Hospital, teacher: nn.Module) -> float:
    """The mean Dice of the site's organs over its validation cases that have them."""
    teacher.eval()
    scores = []
    for batch in here.site.data.whole("valid", 1):
        found = teacher(batch.images).argmax(1)
        truth = renumbered(batch.truth, here.task.labels, here.labels)
        for organ in range(1, len(here.labels) + 1):
            one, other = found == organ, truth == organ
            if other.any():
                scores.append(2 * float((one & other).sum()) / float(one.sum() + other.sum()))
    return sum(scores) / len(scores)


@torch.no_grad()
def teachers_chances(here: Hospital, teachers: Mapping[str, Model], images: Tensor) -> dict[str, Tensor]:
    """Every teacher's probabilities of background and its organs."""
    found = {}
    for name, weights in teachers.items():
        network = here.task.network("teacher", here.site.roster[name].labels)
        found[name] = loaded(network, weights).eval()(images).softmax(1)
    return found


def claimed(chances: Mapping[str, Tensor], known: Mapping[str, Organs], labels: Organs, without: Organs = ()) -> Tensor:
    """The organ of every voxel: that of the surest teacher among those that see one; background if none does."""
    some = next(iter(chances.values()))
    surest, organ = torch.zeros_like(some[:, 0]), torch.zeros_like(some[:, 0], dtype=torch.long)
    for name, p in chances.items():
        for place, label in enumerate(known[name], start=1):
            if label not in without:
                wins = (p.argmax(1) == place) & (p[:, place] > surest)
                surest[wins], organ[wins] = p[:, place][wins], labels.index(label) + 1
    return organ


def labelled(here: Hospital, teachers: Mapping[str, Model], batch: Batch) -> Labelled:
    """Eq. 4: the annotation, and the teachers' labels of every other organ; E_vox of Eq. 6 beside them."""
    if batch.beside is not None:  # made once, and turned with the image
        others, everything = batch.beside[:, 0].long(), batch.beside[:, 1].long()
        truth = torch.where(batch.truth > 0, batch.truth.long(), others)
        return Labelled(truth, others, everything, batch.beside[:, 2])
    labels, known = here.task.labels, {name: here.site.roster[name].labels for name in teachers}
    chances = teachers_chances(here, teachers, batch.images)
    everything = claimed(chances, known, labels)
    others = claimed(chances, known, labels, without=here.labels)
    bare = [case for case in range(len(batch.cases)) if batch.labels_of(case) == ()]
    others[bare] = everything[bare]  # a case without a mask has all labels from teachers
    truth = torch.where(batch.truth > 0, batch.truth.long(), others)
    background = torch.stack([p[:, 0] for p in chances.values()]).prod(0)
    merged = [background]
    for label in labels:
        merged.append(
            torch.stack([p[:, 1 + known[k].index(label)] for k, p in chances.items() if label in known[k]]).mean(0)
        )
    q = torch.stack(merged, 1)
    q = q / q.sum(1, keepdim=True)
    entropy = -(q * q.clamp_min(1e-38).log()).sum(1) / q.shape[1]
    return Labelled(truth, others, everything, entropy)


Learn = Callable[[Hospital, Model, Round, Mapping[str, Model]], Model]


def with_teachers(play: Replay, learn: Learn) -> Model:
    """The frame of FedAvg*: teachers, then rounds in which every site learns from their labels."""
    return every_round(play, teachers_of(play), learn)[-1]


def every_round(play: Replay, teachers: Mapping[str, Model], learn: Learn) -> list[Model]:
    """w ← Σ (n_k / n) w_k over the sites that answered; the model after each round."""
    w, history, n = first(play.task), [], with_unlabelled(play)
    for round in play.rounds:
        if round.phase != "teacher":
            w = average({here.name: learn(here, w, round, teachers) for here in play.at(round)}, n)
            history.append(w)
    return history


def label_once(play: Replay, teachers: Mapping[str, Model]) -> None:
    """The labels of whole cases, which are augmented with the images."""
    for here in play.hospitals.values():
        maps = {}
        for batch in here.site.data.whole("train", 1):
            made = labelled(here, teachers, batch)
            maps[batch.cases[0]] = torch.cat([made.others, made.everything, made.entropy.half()]).float()
        here.site = replace(here.site, data=here.site.data.with_maps(maps.__getitem__))


def with_unlabelled(play: Replay) -> dict[str, int]:
    """While the common model is trained, cases without a mask are used and counted too."""
    for here in play.hospitals.values():
        here.site = replace(here.site, data=here.site.data.with_unlabelled())
    return {name: here.n + here.site.card.unlabelled for name, here in play.hospitals.items()}
