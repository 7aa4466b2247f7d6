"""Combines models of several sites into one prediction; sites may annotate different labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from consilium.errors import NotForOutsiders
from consilium.methods.merged import merged_logits
from consilium.predictor import Answer, ModelChoice, Predictor, WithOthers
from consilium.task import Task
from consilium.tasks.segmentation import Segmentation
from consilium.weights import SiteName


def channels_of(task: Task, labels: Sequence[str]) -> list[int]:
    """The indices of the background channel and of these labels' channels."""
    return [0, *(1 + task.labels.index(label) for label in labels)]


def own_channels(task: Task, output: Tensor, labels: Sequence[str], inverse: bool = False) -> Tensor:
    """The channels that a site's model knows: (batch, 1 + labels, *spatial) if labels exclude each other, else all.

    If the model was not trained to tell background from organs that the site does not annotate, both become background.
    With `inverse`, its background already covers everything that is not its own.
    """
    if not isinstance(task, Segmentation) or task.overlapping:
        return output
    chosen = channels_of(task, labels)
    if inverse or task.unannotated != "unknown":
        return output[:, chosen]
    unknown = [i for i in range(output.shape[1]) if i not in chosen[1:]]
    return torch.cat([output[:, unknown].logsumexp(1, keepdim=True), output[:, chosen[1:]]], dim=1)


class SiteModels(Predictor):
    """Models of sites that may annotate different labels; together they predict all labels. They run one by one."""

    of = ""

    def __init__(
        self,
        task: Task,
        output: Callable[[SiteName, Tensor], Tensor],  # of a site's model for images, as `own_channels` gives it
        labels: Mapping[SiteName, tuple[str, ...]],
        when: str,
        model: str = "personal",
        background: str = "product",
        passes: Mapping[SiteName, int] | None = None,  # of a site's model per case; None: one each
    ) -> None:
        self.task, self.output, self.labels = task, output, labels
        self.when, self.model, self.background = when, model, background
        self.each = passes or dict.fromkeys(labels, 1)

    def only(self, site: SiteName, model: str) -> SiteModels:
        """One site's model alone."""
        labels, passes = {site: self.labels[site]}, {site: self.each[site]}
        one = SiteModels(self.task, self.output, labels, self.when, model, self.background, passes)
        one.of = site
        return one

    @property
    def passes(self) -> int:
        return sum(self.each.values())

    def answer(self, images: Tensor, volume: bool = False) -> Answer:
        outputs = [(known, self.output(name, images)) for name, known in sorted(self.labels.items())]
        why = "the only model" if len(outputs) == 1 else f"{len(outputs)} sites' answers together"
        choice = ModelChoice(self.model, self.of, why=why)
        return Answer(self._together(outputs), (choice,) * len(images))

    def _together(self, outputs: Sequence[tuple[Sequence[str], Tensor]]) -> Tensor:
        task = self.task
        if isinstance(task, Segmentation) and not task.overlapping:
            # without a learned background there is nothing to multiply: its logit is 0 for every model
            background = "mean" if task.unannotated == "ignored" else self.background
            return merged_logits(outputs, task.labels, background)
        if not isinstance(task, Segmentation):
            return torch.stack([output for _, output in outputs]).mean(0)
        voices = [
            [output[:, i] for known, output in outputs if label in known] or [output[:, i] for _, output in outputs]
            for i, label in enumerate(task.labels)
        ]
        return torch.stack([torch.stack(found).mean(0) for found in voices], dim=1)


def personal_predictor(models: SiteModels, home: SiteName, labels: Mapping[SiteName, tuple[str, ...]]) -> Predictor:
    """The headline model: a site's own model if all sites annotate the same labels, else all models together.

    Args:
        models: the shared models and the site's own.
        home: the site that predicts; empty for an outside hospital.
        labels: the labels that each site of the federation annotates.
    """
    if not models.labels:
        raise NotForOutsiders("the sites' local parts were not shared, so there is no model for a hospital outside.")
    if home in models.labels and (len(models.labels) == 1 or len(set(labels.values())) == 1):
        others = [models.only(name, "personal") for name in sorted(models.labels) if name != home]
        return WithOthers(models.only(home, "personal"), elsewhere=others)
    own = (models.only(home, "local"),) if home in models.labels else ()
    return WithOthers(models, own, [models.only(name, "local") for name in sorted(models.labels) if name != home])
