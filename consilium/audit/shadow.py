"""The paper's attack (UFPS, Note S10): a shadow imitates the target, an attack model learns from it who was a member.

The attacker has half of the members and the true mask of every case, which is hard to have: a rough upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from consilium.analysis.opening import OpenRun
from consilium.audit.signals import CaseKey, Populations, Signal, signal_of, whole_cases
from consilium.audit.statistics import Numbers, Power, decided, power
from consilium.audit.targets import Target
from consilium.audit.training import LossOfOutput, ShadowPlan, train_shadow
from consilium.batch import Batch
from consilium.randomness import derive
from consilium.task import Task
from consilium.tasks.segmentation import Segmentation
from consilium.weights import Weights

FEWEST = 4  # of every population; with fewer there is nothing to learn an attack from
SURE_SHARE = 0.6  # of the known non-members, those the target is surest of train the shadow


@dataclass(frozen=True)
class ShadowAttack:
    """What the attack found, and how well the shadow imitated the target on cases it had not seen."""

    power: Power
    imitation: dict[str, float]  # "dice" and "hd", or "accuracy", against the target's own answers

    def to_json(self) -> dict[str, Any]:
        return {**self.power.to_json(), "imitation": {key: round(v, 6) for key, v in self.imitation.items()}}


def shadow_attack(
    run: OpenRun, people: Populations, target: Target, seen: dict[CaseKey, Signal], epochs: int, least_steps: int = 0
) -> ShadowAttack | str:
    """Attack one model; a sentence where there are too few cases.

    Args:
        run: the run whose model it is.
        people: members, non-members and known non-members of the target.
        target: the model.
        seen: what the target's answers tell of all these cases.
        epochs: of the shadow's training.
        least_steps: a shadow of few cases is trained for more epochs, until it has made so many steps.
    """
    known, unknown = sorted(people.known, key=_order), people.unknown
    if min(map(len, (known, unknown, people.outsiders, people.others))) < FEWEST:
        return f"the shadow attack needs {FEWEST} cases of every kind; give the site more, or audit a model of more."
    calm = sorted(people.outsiders, key=lambda key: (seen[key].uncertainty, *_order(key)))
    sure = math.ceil(SURE_SHARE * len(calm))
    steps = math.ceil((len(known) + sure) / run.study.local.batch_size)
    plan = ShadowPlan(max(epochs, math.ceil(least_steps / steps)), people.seed, f"shadow of {target.name}")
    task = run.study.task
    shadow = train_shadow(run, people, [*known, *calm[:sure]], target, plan, _imitate(task, target))
    taught = {
        key: signal_of(task, key, _answer(task, shadow, target, batch), batch, target.labels)
        for key, batch in whole_cases(run, people, [*known, *people.outsiders])
    }
    model = _attack_model(_rows(taught, known), _rows(taught, people.outsiders))
    # the paper tests on the shadow's answers; a shadow that never saw a case says nothing of it, the target may
    inside, outside = (model(_rows(seen, keys)) for keys in (unknown, people.others))
    by_class = decided(inside >= 0, outside >= 0)
    found = power(inside, outside, derive(people.seed, target.name, "shadow"), by_class)
    return ShadowAttack(found, _imitation(run, people, target, shadow, calm[sure:]))


def _order(key: CaseKey) -> tuple[str, str]:
    return key.site, key.case


def _answer(task: Task, shadow: Weights, target: Target, batch: Batch) -> Tensor:
    return task.infer(shadow, batch.images, target.network, target.labels)


def _imitate(task: Task, target: Target) -> LossOfOutput:
    """The study's loss with the target's answers in place of the truth."""

    def loss(output: Any, batch: Batch) -> Tensor:
        shown = None if target.labels is None else (target.labels,) * len(batch.cases)
        pseudo = replace(batch, truth=_pseudo(task, target, batch.images), labels=shown)
        return task.loss(output, pseudo, target.labels)

    return loss


def _pseudo(task: Task, target: Target, images: Tensor) -> Tensor:
    """The target's decisions as a truth: mask values (batch, *spatial), or classes (batch,)."""
    assert target.answer is not None
    decisions = torch.stack([task.decide(output) for output in target.answer(images)])
    if target.labels is None:
        return decisions
    values = torch.tensor([0, *(1 + task.labels.index(label) for label in target.labels)])
    return values[decisions.long()]


def _rows(seen: dict[CaseKey, Signal], keys: Sequence[CaseKey]) -> Numbers:
    return np.array([seen[key].features for key in keys], dtype=np.float64)


def _attack_model(members: Numbers, others: Numbers) -> Any:
    """A logistic regression on standardised features: the log-odds that cases are members."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), LogisticRegression(class_weight="balanced", max_iter=1000))
    rows = np.concatenate([members, others])
    model.fit(rows, np.repeat([1, 0], [len(members), len(others)]))
    return model.decision_function


def _imitation(
    run: OpenRun, people: Populations, target: Target, shadow: Weights, keys: Sequence[CaseKey]
) -> dict[str, float]:
    task, found = run.study.task, dict[str, list[float]]()
    for _, batch in whole_cases(run, people, keys):
        answers, truth = _answer(task, shadow, target, batch), _pseudo(task, target, batch.images)
        if isinstance(task, Segmentation) and target.labels is not None:
            answers = _wide(task, answers, target.labels)
        for output, mask in zip(answers, truth):
            for mark in task.score(output, mask, True, target.labels):
                if mark.metric in ("dice", "hd", "accuracy") and math.isfinite(mark.value):
                    found.setdefault(mark.metric, []).append(mark.value)
    return {metric: sum(values) / len(values) for metric, values in sorted(found.items())}


def _wide(task: Segmentation, output: Tensor, labels: Sequence[str]) -> Tensor:
    """Logits of background and some labels as logits of all; the others are never chosen."""
    wide = output.new_full((len(output), len(task.labels) + 1, *output.shape[2:]), -1e4)
    wide[:, [0, *(1 + task.labels.index(label) for label in labels)]] = output
    return wide
