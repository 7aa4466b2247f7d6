"""What an attacker sees of a case: its loss under a model, how unsure that model is, how its answer fits the truth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from consilium.analysis.opening import OpenRun
from consilium.audit.statistics import Numbers
from consilium.audit.targets import Target
from consilium.batch import Batch
from consilium.data.cache import open_site
from consilium.data.cases import Cases
from consilium.data.site_arrays import SiteArrays
from consilium.learning.uncertainty import uncertainty
from consilium.randomness import numpy_generator
from consilium.task import Task
from consilium.tasks.segmentation import Segmentation
from consilium.validation import annotated_at
from consilium.weights import SiteName

_TINY = 1e-7


@dataclass(frozen=True)
class CaseKey:
    """One case of one site."""

    site: SiteName
    case: str


@dataclass(frozen=True)
class Signal:
    """One case under one model."""

    key: CaseKey
    loss: float  # the task's own, with the true mask
    uncertainty: float  # UFPS's equation 6
    # loss, soft Dice loss, cross entropy, cross entropy inside, mean entropy, uncertainty
    features: tuple[float, ...]


@dataclass(frozen=True)
class Populations:
    """The cases of an audit: members, non-members to test on, and those an attacker may know not to be members.

    Patients are disjoint: a case of a patient who is among the members is no non-member.
    """

    arrays: Mapping[SiteName, SiteArrays]
    members: tuple[CaseKey, ...]
    others: tuple[CaseKey, ...]  # test cases
    outsiders: tuple[CaseKey, ...]  # validation cases: known not to be members
    seed: int

    @cached_property
    def known(self) -> frozenset[CaseKey]:
        """Half of the members of every site, which the paper's attacker knows."""
        found: set[CaseKey] = set()
        for site in self.arrays:
            own = [key for key in self.members if key.site == site]
            order = numpy_generator(self.seed, "known", site).permutation(len(own))
            found |= {own[i] for i in order[: len(own) // 2]}
        return frozenset(found)

    @property
    def unknown(self) -> tuple[CaseKey, ...]:
        return tuple(key for key in self.members if key not in self.known)


def populations(run: OpenRun, sites: Sequence[SiteName], seed: int) -> Populations:
    """Of the training cases of these sites against test cases of the same sites."""
    arrays = {site: _arrays(run, site) for site in sites}
    splits: dict[str, list[CaseKey]] = {"train": [], "valid": [], "test": []}
    for site, part in arrays.items():
        patients = {part.cases[i].patient for i in part.indices("train", unlabelled=True)}
        for split, found in splits.items():
            cases = [part.cases[i] for i in part.indices(split)]
            found += [CaseKey(site, case.name) for case in cases if split == "train" or case.patient not in patients]
    return Populations(arrays, tuple(splits["train"]), tuple(splits["test"]), tuple(splits["valid"]), seed)


def _arrays(run: OpenRun, site: SiteName) -> SiteArrays:
    """A site's cases with the labels it annotates, in test cases too: else the truth itself would tell them apart."""
    annotated = annotated_at(run.study, run.federation, site)
    return open_site(run.federation, run.federation.sites[site], run.study.preprocess, annotated=annotated)


def regrouped(arrays: SiteArrays, keys: Sequence[CaseKey], site: SiteName, split: str) -> SiteArrays:
    """A site's arrays with these cases in one split and all others in none."""
    chosen = {key.case for key in keys if key.site == site}
    cases = tuple(replace(case, split=split if case.name in chosen else "") for case in arrays.cases)
    return replace(arrays, cases=cases)


def whole_cases(run: OpenRun, people: Populations, keys: Sequence[CaseKey]) -> Iterator[tuple[CaseKey, Batch]]:
    """Each case alone, unaugmented; a volume trained as slices is one case."""
    sliced = bool(run.study.preprocess.slices)
    for site, arrays in people.arrays.items():
        data = Cases((regrouped(arrays, keys, site, "test"),), (), run.study.task_fields.patch, sliced)
        for batch in data.whole("test", 1):
            yield CaseKey(site, batch.volume or batch.cases[0]), batch


def signals(run: OpenRun, people: Populations, keys: Sequence[CaseKey], target: Target) -> dict[CaseKey, Signal]:
    """What a model's answers tell of these cases."""
    answer = target.answer
    assert answer is not None
    task = run.study.task
    return {
        key: signal_of(task, key, answer(batch.images), batch, target.labels)
        for key, batch in whole_cases(run, people, keys)
    }


def signal_of(task: Task, key: CaseKey, output: Tensor, batch: Batch, labels: tuple[str, ...] | None) -> Signal:
    """Of one case from its logits (batch, channels, *spatial) or (1, classes); `labels` are those of the outputs."""
    loss = float(task.loss(output, batch, labels))
    if not isinstance(task, Segmentation):
        chances = output.double().softmax(1).clamp_min(_TINY)
        doubt = float(-(chances * chances.log()).sum())
        true = float(chances[0, int(batch.truth[0])])
        return Signal(key, loss, doubt, (loss, 1 - true, -float(np.log(true)), loss, doubt, doubt))
    outputs = task.labels if labels is None else labels
    if task.overlapping:
        chances = output.float().sigmoid()
        entropy = _entropy(torch.stack([chances, 1 - chances]).movedim(0, 1)).mean(1)
        decided = (chances > 0.5).long().argmax(1) + (chances > 0.5).any(1).long()
    else:
        every = output.float().softmax(1)
        chances, entropy, decided = every[:, 1:], _entropy(every), every.argmax(1)
    shown = batch.labels_of(0) or task.labels
    judged = [label for label in outputs if label in shown]
    chances = chances[:, [outputs.index(label) for label in judged]].movedim(1, 0).flatten(1).double()
    channels = task.channels_of(batch.truth)[:, [task.labels.index(label) for label in judged]]
    truth = channels.movedim(1, 0).flatten(1).double()
    doubt = float(uncertainty(entropy.flatten()[None], decided.flatten()[None], len(outputs) + 1))
    fits = 1 - (2 * (chances * truth).sum(1) + 1) / (chances.sum(1) + truth.sum(1) + 1)
    wrong = -(chances.clamp_min(_TINY).log() * truth + (1 - chances).clamp_min(_TINY).log() * (1 - truth))
    inside = (wrong * truth).sum(1) / (truth.sum(1) + 1)
    means = (float(fits.mean()), float(wrong.mean()), float(inside.mean()), float(entropy.mean()), doubt)
    return Signal(key, loss, doubt, (loss, *means))


def _entropy(chances: Tensor) -> Tensor:
    """(batch, classes, …) to (batch, …)."""
    return -(chances * chances.clamp_min(_TINY).log()).sum(1)


def centred(keys: Sequence[CaseKey], scores: Numbers) -> Numbers:
    """Scores less the median of all cases of their site, members or not: sites differ, and that tells of nobody."""
    sites = np.array([key.site for key in keys])
    middle = {site: np.median(scores[sites == site]) for site in np.unique(sites)}
    return np.asarray(scores - np.array([middle[site] for site in sites]))


def selector_scores(
    run: OpenRun, people: Populations, keys: Sequence[CaseKey], closeness: Callable[[Tensor, SiteName], Tensor]
) -> dict[CaseKey, float]:
    """How much each case is its own site's to a selector; of a volume the mean over slices."""
    return {key: float(closeness(batch.images, key.site).mean()) for key, batch in whole_cases(run, people, keys)}
