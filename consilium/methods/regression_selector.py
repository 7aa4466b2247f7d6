"""A selector in closed form: a ridge regression from an image's features to every model's loss on it.

It needs two exchanges after training. In "losses", sites send sums of features and losses over their training cases. In
"strength", they score every strength of the ridge on their validation cases.
"""

from __future__ import annotations

import torch
from torch import Tensor

from consilium.batch import Batch
from consilium.learning.discriminant import FeatureSums, summed
from consilium.learning.regression import STRENGTHS, LossForecast
from consilium.method import CasesOf
from consilium.methods.routing import headline_score
from consilium.methods.selector import Models, outputs_of
from consilium.site import Roster, Site
from consilium.task import Task
from consilium.tasks.features import feature_count

CLOSED = "regression"  # the value of `selector_training`
LOSSES, STRENGTH = "losses", "strength"  # the names of the two phases


def loss_sums(site: Site, models: Models) -> FeatureSums | None:
    """Number, mean and scatter of the features of a site's training images and the models' losses on them."""
    return summed(_features_and_losses(site, models, b) for b in site.data.whole("train", site.local.batch_size))


def _features_and_losses(site: Site, models: Models, batch: Batch) -> Tensor:
    """The features of the global model's encoder and the loss of every model, (batch, features + models)."""
    outputs = outputs_of(models, site.task, batch.images)
    losses = [
        [float(site.task.loss(output[i : i + 1], batch.only(i))) for output in outputs] for i in range(len(batch.cases))
    ]
    features = site.task.features(models.global_, batch.images)
    return torch.cat([features.double(), torch.tensor(losses, dtype=torch.float64)], 1)


def scores_by_strength(
    site: Site, models: Models, forecast: LossForecast, by_volume: bool
) -> tuple[tuple[float, ...], int]:
    """For every strength the sum of validation scores of the models it chooses, and the number of cases.

    `by_volume`: one model for a volume. Whether its slices are scored, or the volume, is the task's to say.
    """
    totals, cases = [0.0] * len(STRENGTHS), 0
    for batch in site.data.whole("valid", site.local.batch_size):
        outputs = torch.stack(outputs_of(models, site.task, batch.images))
        features = site.task.features(models.global_, batch.images)
        whole = bool(batch.volume) and site.task.decides == "volume"
        if batch.volume and by_volume:
            features = features.mean(0, keepdim=True).expand_as(features)
        found: list[list[float]] = []
        for strength in STRENGTHS:
            best = forecast.expected(features, strength).argmin(1)
            output = outputs[best, torch.arange(len(best))]
            parts = [(output.transpose(0, 1), batch.truth, 0)] if whole else [
                (output[i], batch.truth[i], i) for i in range(len(best))
            ]  # fmt: skip
            marks = [headline_score(site.task, out, truth, batch.labels_of(i)) for out, truth, i in parts]
            found.append([mark for mark in marks if mark is not None])
        totals = [total + sum(marks) for total, marks in zip(totals, found)]
        cases += len(found[0])
    return tuple(totals), cases


def blank_sums(task: Task, roster: Roster) -> FeatureSums:
    """The shapes of `loss_sums`."""
    side = feature_count(task) + 1 + len(roster)
    mean, scatter = (torch.empty(n, dtype=torch.float64, device="meta") for n in (side, side * (side + 1) // 2))
    return FeatureSums(CasesOf("train"), mean, scatter)
