"""The likelihood-ratio attack (Carlini et al. 2022): is a case's loss more like with it in training, or without?

Shadows are trained on random halves of members and non-members; every case is in exactly half of them.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from consilium.analysis.opening import OpenRun
from consilium.audit.signals import CaseKey, Populations, signal_of, whole_cases
from consilium.audit.statistics import Numbers, Power, decided, power
from consilium.audit.targets import Target
from consilium.audit.training import ShadowPlan, train_shadow
from consilium.errors import RunError
from consilium.files import read_json, write_json
from consilium.randomness import derive, numpy_generator

SHADOWS = 16
_LEAST_SPREAD = 1e-3


@dataclass(frozen=True)
class LiraSettings:
    """How many shadows, how long they are trained, and where they are kept."""

    shadows: int
    epochs: int
    folder: Path


@dataclass(frozen=True)
class ShadowGroup:
    """Targets that the same shadows stand for: networks of one kind, trained on the same sites' cases."""

    target: Target  # the first of them
    people: Populations

    @property
    def keys(self) -> list[CaseKey]:
        return [*self.people.members, *self.people.others]

    @property
    def name(self) -> str:
        sites = self.target.sites
        return "-".join([self.target.network, sites[0] if len(sites) == 1 else f"{len(sites)}-sites"])


def group_of(target: Target) -> tuple[object, ...]:
    """What targets must share to share their shadows."""
    return target.sites, target.network, target.labels


def halves(cases: int, shadows: int, seed: int) -> NDArray[np.bool_]:
    """(shadows, cases): which cases train which shadow; every case is in half of them."""
    generator = numpy_generator(seed, "halves")
    pattern = np.arange(shadows) < shadows // 2
    return np.stack([generator.permutation(pattern) for _ in range(cases)], axis=1)


def shadow_losses(run: OpenRun, group: ShadowGroup, settings: LiraSettings) -> Numbers:
    """The loss of every case under every shadow (shadows, cases); shadows that were made before are read."""
    keys, folder = group.keys, _folder(run, group, settings)
    inside = halves(len(keys), settings.shadows, group.people.seed)
    found = np.empty((settings.shadows, len(keys)))
    for number in range(settings.shadows):
        path = folder / f"{number:03d}.json"
        losses = read_json(path) if path.exists() else None
        if not (isinstance(losses, list) and len(losses) == len(keys)):
            chosen = [key for key, one in zip(keys, inside[number]) if one]
            losses = _losses(run, group, chosen, ShadowPlan(settings.epochs, group.people.seed, f"lira {number}"))
            folder.mkdir(parents=True, exist_ok=True)
            write_json(losses, path)
        found[number] = losses
    return found


def missing(run: OpenRun, group: ShadowGroup, settings: LiraSettings) -> int:
    """How many shadows of a group are still to be trained."""
    folder = _folder(run, group, settings)
    return sum(not (folder / f"{number:03d}.json").exists() for number in range(settings.shadows))


def _losses(run: OpenRun, group: ShadowGroup, chosen: Sequence[CaseKey], plan: ShadowPlan) -> list[float]:
    target, task = group.target, run.study.task
    shadow = train_shadow(run, group.people, chosen, target, plan)
    found = {
        key: signal_of(task, key, task.infer(shadow, batch.images, target.network, target.labels), batch, target.labels)
        for key, batch in whole_cases(run, group.people, group.keys)
    }
    return [found[key].loss for key in group.keys]


def _folder(run: OpenRun, group: ShadowGroup, settings: LiraSettings) -> Path:
    """Named by all that the shadows depend on, so that nothing stale is read."""
    facts = [run.study.hash, settings.shadows, settings.epochs, group.people.seed, group.target.network]
    labels, cases = group.target.labels, [(key.site, key.case) for key in group.keys]
    digest = hashlib.sha256(json.dumps([facts, labels, cases]).encode()).hexdigest()[:12]
    return settings.folder / f"{group.name}-{digest}"


def confidence(loss: Numbers) -> Numbers:
    """log(p / (1 − p)) of p = exp(−loss), which is nearly normal where the loss is not."""
    return np.asarray(-np.log(np.expm1(np.clip(loss, 1e-6, 50.0))))


def likelihood_ratios(target: Numbers, shadows: Numbers, inside: NDArray[np.bool_]) -> Numbers:
    """log N(φ; in) − log N(φ; out) of every case.

    Args:
        target: the loss of every case under the model that is attacked, (cases,).
        shadows: under every shadow, (shadows, cases).
        inside: which cases trained which shadow, (shadows, cases).

    The spread is common to all cases, as the authors advise for few shadows.
    """
    seen, rated = confidence(target), confidence(shadows)
    logs = []
    for where in (inside, ~inside):
        counts = where.sum(0)
        mean = (rated * where).sum(0) / counts
        free = max(1, int(where.sum()) - len(mean))
        spread = max(_LEAST_SPREAD, float(np.sqrt((((rated - mean) ** 2) * where).sum() / free)))
        logs.append(-0.5 * ((seen - mean) / spread) ** 2 - np.log(spread))
    return np.asarray(logs[0] - logs[1])


def lira_attack(
    run: OpenRun, group: ShadowGroup, target: Target, losses: Mapping[CaseKey, float], settings: LiraSettings
) -> Power:
    """Attack one model with the shadows of its group; `losses` are the model's own."""
    keys, members = group.keys, len(group.people.members)
    inside = halves(len(keys), settings.shadows, group.people.seed)
    own = np.array([losses[key] for key in keys])
    ratios = likelihood_ratios(own, shadow_losses(run, group, settings), inside)
    one, two = ratios[:members], ratios[members:]
    return power(one, two, derive(group.people.seed, target.name, "lira"), decided(one >= 0, two >= 0))


def check_shadows(shadows: int) -> None:
    if shadows < 4 or shadows % 2:
        raise RunError(f"--shadows {shadows}: it must be even and at least 4, so that each case is in half of them.")


def estimate(run: OpenRun, groups: Sequence[ShadowGroup], settings: LiraSettings) -> tuple[int, float]:
    """How many shadows are to be trained, and about how many seconds that takes, from one epoch of the first."""
    todo = [(group, missing(run, group, settings)) for group in groups]
    left = sum(count for _, count in todo)
    if not left:
        return 0, 0.0
    first = next(group for group, count in todo if count)
    half = first.keys[::2]
    began = time.monotonic()
    train_shadow(run, first.people, half, first.target, ShadowPlan(1, 0, "estimate"))
    per_case = (time.monotonic() - began) / max(1, len(half))
    return left, sum(count * per_case * (settings.epochs * len(g.keys) / 2 + len(g.keys)) for g, count in todo)
