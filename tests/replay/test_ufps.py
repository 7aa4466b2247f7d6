"""UFPS replayed by a naive loop (Algorithms 1 to 4), every module alone and all together: the same global model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from consilium import packet_files
from consilium.batch import Batch
from consilium.contract import Stage, run_in_process
from consilium.data.phantoms import write_phantom
from consilium.learning.cmidg import cmidg
from consilium.site import Round
from consilium.study_reading import load_study
from tests.replay.partial_labels import (
    Labelled,
    exclusive_loss,
    labelled,
    teachers_of,
    with_unlabelled,
)
from tests.replay.partial_loop import (
    DECODER,
    Hospital,
    Model,
    Replay,
    apart,
    average,
    felt,
    first,
    heads,
    loaded,
    played,
    small_study,
)
from tests.replay.test_pseudo_labelled import NEAR, ascent, move

STUDIES = Path(__file__).parents[2] / "studies"


class Reply(NamedTuple):
    w: Model
    mean: float  # μ, of the uncertainty bank
    variance: float  # σ
    mask: Tensor | None  # M_{L,mo}


class Ended(NamedTuple):
    w: Model
    disputed: Tensor | None  # M_G


def ufps(play: Replay, decoder: tuple[str, ...] = DECODER) -> Ended:
    """Algorithm 2."""
    teachers, n = teachers_of(play), with_unlabelled(play)
    w, disputed = first(play.task), None
    for round in play.rounds:
        if round.phase == "teacher":
            continue
        how = Settings(play.method, round.step + 1, round.total)
        replies = {here.name: local_training(here, w, disputed, round, teachers, how) for here in play.at(round)}
        models = {name: reply.w for name, reply in replies.items()}
        w = average(models, n)
        if how.r >= how.method.uncertainty.trust_from and how.method.uncertainty.parts != "none":
            by_trust = average(models, trust(replies, n))
            parts = how.method.uncertainty.parts
            w = {k: by_trust[k] if parts == "whole" or k.startswith(decoder) == (parts == "decoder") else t
                 for k, t in w.items()}  # fmt: skip
        masks = [reply.mask for reply in replies.values() if reply.mask is not None]
        if masks:  # Eq. 12: neither chosen by all nor by none
            times = torch.stack(masks).sum(0)
            disputed = (times > 0) & (times < len(masks))
    return Ended(w, disputed)


def trust(replies: Mapping[str, Reply], n: Mapping[str, int]) -> dict[str, float]:
    """Eq. 7, with the mean of the sites' values as temperatures."""
    names = list(replies)
    columns = [[replies[name].mean for name in names], [replies[name].variance for name in names]]
    cold = [torch.softmax(-torch.tensor(c, dtype=torch.float64) / (sum(c) / len(c)), 0) for c in columns]
    size = torch.tensor([n[name] for name in names], dtype=torch.float64)
    return dict(zip(names, ((cold[0] + cold[1] + size / size.sum()) / 3).tolist(), strict=True))


@dataclass(frozen=True)
class Settings:
    """The method's fields in round r of R; here all starts are numbers of rounds."""

    method: Any
    r: int
    total: int

    @property
    def weighs(self) -> bool:
        how = self.method.uncertainty
        return how.scheduler != "none" and how.weigh_from <= self.r < how.weigh_until

    @property
    def climbs(self) -> bool:
        return self.method.sharpness.strategy == "susam" and self.r >= self.method.sharpness.start

    @property
    def waited(self) -> int:
        """Rounds since the last update of the masks."""
        how = self.method.sharpness
        return int(self.r - how.start) % int(how.mask_every)


def local_training(
    here: Hospital, w: Model, disputed: Tensor | None, round: Round, teachers: Mapping[str, Model], how: Settings
) -> Reply:
    """Algorithm 3."""
    student = here.student(here.task.network(), w, round)
    bank, seen = here.memory.get("bank", torch.empty(0)), []
    steps = Masks(here, round, how, disputed, "chosen" not in here.memory)
    for number, batch in enumerate(here.batches(round)):
        labels = labelled(here, teachers, batch)
        if how.method.teachers.labels == "cached":
            labels = labels._replace(entropy=labels.entropy.half().float())  # as a site keeps it beside its cases
        u = uncertainty(labels, 1 + len(here.task.labels))
        seen.append(u)
        weights = scheduled(u, bank, how) if how.weighs else torch.ones(len(u))
        truth, ignored = labels.truth, torch.zeros_like(labels.truth).bool()
        if how.method.main_teacher.labels != "pretrained" and how.r >= how.method.main_teacher.start:
            truth, ignored = main_teacher(here, w, batch, labels, how.method.main_teacher)

        def f(output: Any, truth: Tensor = truth, ignored: Tensor = ignored, weights: Tensor = weights) -> Tensor:
            return calculate_loss(output, truth, ignored, weights, here.crossed, how)

        if not how.climbs:
            student.step(f(student(batch.images)))
            continue
        augmented = cmidg(batch.images, here.site.generator(round, f"cmidg {number}"))
        slope = student.slope(f(student(augmented)))
        epsilon = ascent(student, slope, how.method.sharpness.rho, how.method.sharpness.eta)
        mask = steps.mask(slope, number)
        epsilon = {k: e * m for (k, e), m in zip(epsilon.items(), like(mask, epsilon), strict=True)}
        move(student, epsilon)
        slope = student.slope(f(student(batch.images)))
        move(student, epsilon, -1)
        student.descend(slope)
    here.keep(student)
    bank = here.memory["bank"] = torch.cat([bank, *seen])
    upload = largest(here.memory["momentum"], how.method.sharpness.keep_share) if steps.updates else None
    return Reply(student.weights(), float(bank.mean()), float((bank - bank.mean()).square().mean()), upload)


def calculate_loss(
    output: Any, truth: Tensor, ignored: Tensor, weights: Tensor, crossed: bool, how: Settings
) -> Tensor:
    """Algorithm 4: w(U) f, and from r_WS on aRCE; every head of the network counts."""
    total = torch.zeros(())
    noise = how.method.noise
    factor = noise.arce * math.exp(-noise.growth * (1 - how.r / how.total)) if how.r >= noise.start else 0.0
    for weight, logits in heads(output):
        each = torch.stack(exclusive_loss(logits, truth, crossed, ignored))
        total = total + weight * (weights * each).sum() / len(each)
        p = torch.zeros_like(logits).scatter_(1, truth[:, None], 1.0).clamp_min(1e-4)
        reverse = -(logits.softmax(1) * p.log()).sum(1)
        total = total + weight * factor * (reverse * ~ignored).mean()
    return total


def uncertainty(labels: Labelled, classes: int) -> Tensor:
    """Eq. 6."""
    found = []
    for entropy, organ in zip(labels.entropy, labels.everything):
        each = [entropy[organ == c].sum() / ((organ == c).sum() + 1) for c in range(classes)]
        found.append(torch.stack(each).sum() / classes)
    return torch.stack(found)


def scheduled(u: Tensor, bank: Tensor, how: Settings) -> Tensor:
    """w(U): Eq. 8 and Note S8."""
    if not len(bank):
        return torch.ones_like(u)
    fields, progress = how.method.uncertainty, how.r / (how.method.uncertainty.weigh_until - 1)
    tail = torch.quantile(bank, fields.tail)

    def norm(value: Tensor) -> Tensor:
        return (value - bank.mean()) / (bank.max() - bank.min())

    if fields.scheduler == "tail-shift":
        found = [2 - math.e ** (norm(one) - (progress if one > tail else 0.0)) for one in u]
    elif fields.scheduler == "base-decrement":
        found = [2 - ((fields.base - math.e) * progress + math.e) ** norm(one) for one in u]
    else:
        reach = norm(tail) - norm(bank.min())
        centre = norm(bank.min()) + reach * (2 * progress if progress <= 0.5 else 2 - 2 * progress)
        bell = torch.exp(-((norm(u) - centre) ** 2) / (2 * fields.width**2)) / (math.sqrt(2 * math.pi) * fields.width)
        return ((1 - fields.blend) * bell + fields.blend * (2 - norm(u).exp())).clamp_min(0)
    return torch.stack(found).clamp_min(0)


@torch.no_grad()
def main_teacher(here: Hospital, w: Model, batch: Batch, labels: Labelled, how: Any) -> tuple[Tensor, Tensor]:
    """Eq. 5 by case: the labels, and the voxels on which both teachers disagree."""
    answer = loaded(here.task.network(), w).eval()(batch.images).argmax(1)
    truth, ignored = [], []
    for case, model in enumerate(answer):
        own = [1 + here.task.labels.index(label) for label in batch.labels_of(case) or ()]
        teachers, drawn = labels.everything[case], batch.truth[case].long()
        foreground = model > 0
        agreed = ((teachers == model) & foreground).sum() >= how.agreement * foreground.sum()
        model = torch.where(torch.isin(model, torch.tensor(own)), 0, model)  # what the site annotates, it knows
        teachers = labels.others[case]
        if how.labels == "intersection" and agreed:
            label, doubt = torch.where(model == teachers, model, 0), model != teachers
        else:
            label, doubt = model.clone(), torch.zeros_like(model).bool()
        for organ in range(1, 1 + len(here.task.labels)) if how.guard else ():
            theirs = teachers == organ
            if (theirs & (model == organ)).sum() < 0.7 * theirs.sum():
                stray = (label == organ) & ~theirs
                label[stray], doubt[stray] = 0, True
                label[theirs], doubt[theirs] = organ, False
        truth.append(torch.where(drawn > 0, drawn, label))
        ignored.append(doubt & (drawn == 0))
    return torch.stack(truth), torch.stack(ignored)


@dataclass
class Masks:
    """sUSAM's masks at one site in one round (Eqs. 11 to 13)."""

    here: Hospital
    round: Round
    how: Settings
    disputed: Tensor | None
    missed: bool  # the site has seen no update yet, so it makes masks of each batch

    @property
    def updates(self) -> bool:
        return self.how.climbs and self.how.waited == 0

    def mask(self, slope: Model, number: int) -> Tensor:
        """M_L ∪ M_E of a batch; between updates that of the last update's M_L with the new M_G."""
        fields, memory = self.how.method.sharpness, self.here.memory
        steep = torch.cat([g.flatten() for g in slope.values()]).abs()
        if self.updates or self.missed:
            memory["chosen"] = largest(steep, fields.keep_share)
        if self.updates:
            before = memory.get("momentum", torch.zeros_like(steep))
            memory["momentum"] = fields.momentum * before + (1 - fields.momentum) * steep
        chosen: Tensor = memory["chosen"]
        if self.disputed is None:
            return chosen
        since = replace(self.round, index=self.round.index - self.how.waited)
        generator = self.here.site.generator(since, f"explored {number}" if self.updates or self.missed else "explored")
        candidates = torch.nonzero(self.disputed & ~chosen)[:, 0]
        lots = torch.rand(len(candidates), generator=generator)
        mask = chosen.clone()
        mask[candidates[lots.argsort(descending=True)[: int(fields.explore_share * len(mask))]]] = True
        return mask


def largest(values: Tensor, share: float) -> Tensor:
    """The ⌊share · d⌋ largest of d values."""
    mask = torch.zeros_like(values).bool()
    mask[values.argsort(descending=True)[: int(share * len(values))]] = True
    return mask


def like(mask: Tensor, tensors: Model) -> list[Tensor]:
    parts = mask.split([tensor.numel() for tensor in tensors.values()])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors.values(), strict=True)]


# ------------------------------------------------------------------------------------------- the comparisons

OFF = {
    "study__rounds": 3,
    "method__noise__arce": 0.0,
    "method__uncertainty__scheduler": "none",
    "method__uncertainty__parts": "none",
    "method__main_teacher__labels": "pretrained",
    "method__sharpness__strategy": "none",
}
NOISE = {"method__noise__arce": 0.5, "method__noise__growth": 1.0, "method__noise__start": 2.0}
UNCERTAINTY = {
    "method__uncertainty__scheduler": "tail-shift",
    "method__uncertainty__weigh_from": 2.0,
    "method__uncertainty__weigh_until": 4.0,
}
TRUST = {"method__uncertainty__parts": "decoder", "method__uncertainty__trust_from": 2.0}
MAIN = {
    "method__main_teacher__labels": "intersection",
    "method__main_teacher__start": 2.0,
    "method__main_teacher__agreement": 0.5,
    "method__main_teacher__guard": False,
}
SHARP = {
    "method__sharpness__strategy": "susam",
    "method__sharpness__start": 1.0,
    "method__sharpness__mask_every": 2,
}
GUARD = {"method__main_teacher__guard": True}
TOGETHER = {**OFF, **NOISE, **UNCERTAINTY, **TRUST, **MAIN, **GUARD, **SHARP, "study__rounds": 4}
AWAY = {"study__away": {"bea": [3]}}
LIVE = {"method__teachers__labels": "live"}
PLAIN = {
    "task__network": "plain-unet",
    "task__residual_units": None,
    "task__supervision": [0.3],
    "task__loss": "dice+ce",
}
CASES = {
    "aRCE": ("momentum", {**OFF, **NOISE}),
    "WS tail shift": ("adamw", {**OFF, **UNCERTAINTY}),
    "UA": ("momentum", {**OFF, **TRUST, **LIVE}),
    "GMT": ("momentum", {**OFF, **MAIN}),
    "GMT with its guard": ("adamw", {**OFF, **MAIN, **GUARD}),
    "sUSAM": ("momentum", {**OFF, **SHARP}),
}
MORE = {
    **{f"{name}, live": ("adamw", {**fields, **LIVE}) for name, (_, fields) in CASES.items()},
    **{f"{name}, supervised": ("momentum", {**fields, **PLAIN}) for name, (_, fields) in CASES.items()},
    "WS base decrement": ("momentum", {**OFF, **UNCERTAINTY, "method__uncertainty__scheduler": "base-decrement"}),
    "WS round trip": ("adamw", {**OFF, **UNCERTAINTY, "method__uncertainty__scheduler": "round-trip"}),
    "UA of the whole": ("adamw", {**OFF, **TRUST, "method__uncertainty__parts": "whole"}),
    "UA of the encoder": ("adamw", {**OFF, **TRUST, "method__uncertainty__parts": "encoder"}),
    "GMT without teachers": ("adamw", {**OFF, **MAIN, "method__main_teacher__labels": "global"}),
    "sUSAM, residual, clipped": ("adamw", {**OFF, **SHARP, "task__residual_units": 1, "local__clip": 0.5}),
    "sUSAM, an update missed": ("momentum", {**OFF, **SHARP, "study__rounds": 4, "study__away": {"bea": [1]}}),
    "together, a site away": ("adamw", {**TOGETHER, **AWAY}),
    "together, fresh": ("adamw fresh", {**TOGETHER, **AWAY}),
    "together, supervised": ("adamw", {**TOGETHER, **PLAIN}),
}


pytestmark = pytest.mark.usefixtures("smooth")


def decoder_of(changes: Mapping[str, Any]) -> tuple[str, ...]:
    return ("decoder.", "head.") if changes.get("task__network") == "plain-unet" else DECODER


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_a_naive_loop_ends_with_the_same_model(case: str, uneven: Path, tmp_path: Path) -> None:
    how, changes = {**CASES, **MORE}[case]
    done = played(small_study(uneven, "ufps", how, **changes), tmp_path)
    ours = ufps(Replay.of(done.stage), decoder_of(changes))
    start = first(done.stage.task)
    assert apart(done.server.global_, ours.w, start, felt(done.stage.task.network(), start)) < NEAR
    assert (done.server.disputed is None) == (ours.disputed is None)


def test_all_modules_in_the_engines_own_run_with_a_site_away(uneven: Path, tmp_path: Path) -> None:
    study = small_study(uneven, "ufps", "momentum", **TOGETHER, **AWAY, study__score_every=9)
    folder = run_in_process(study, tmp_path).folder
    theirs: Any = packet_files.load(folder / "last.safetensors", study.method.Server)
    play = Replay.of(Stage(study, tmp_path / "again"))
    ours, start = ufps(play), first(play.task)
    assert apart(theirs.global_, ours.w, start, felt(play.task.network(), start)) < NEAR
    assert ours.disputed is not None and theirs.disputed is not None
    assert (ours.disputed != theirs.disputed).float().mean() < 0.01


# ------------------------------------------------------------------------------------------- volumes


@pytest.mark.slow
@pytest.mark.parametrize("labels", ["cached", "live"])
def test_all_modules_on_volumes(labels: str, tmp_path: Path) -> None:
    """Three hospitals, four organs, a supervised encoder; the fourth hospital is outside."""
    write_phantom("abdomen", folder := tmp_path / "abdomen", cases=14, size=24)
    small = {"study__rounds": 3, "study__score_every": 9, "method__teachers__rounds": 2}
    small |= {"local__lr": 0.01, "local__schedule": "constant"}
    starts = {key: value for key, value in TOGETHER.items() if key.startswith("method__")}
    tables = [f'data.federation="{folder}"', "preprocess.size=[8, 12, 12]", "task.widths=[4, 8, 8]"]
    changes = {**starts, **small, "method__teachers__labels": labels}
    tables += [f"{key.replace('__', '.')}={toml(value)}" for key, value in changes.items()]
    done = played(load_study(STUDIES / "abdomen_ufps.toml", tables), tmp_path / "run")
    ours, start = ufps(Replay.of(done.stage), ("decoder.", "head.")), first(done.stage.task)
    assert apart(done.server.global_, ours.w, start, felt(done.stage.task.network(), start, dimensions=3)) < NEAR


def toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)
