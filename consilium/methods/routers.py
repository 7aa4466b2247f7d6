"""Selectors in use: for every image, the probability of each site and whether the image is an outlier."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from consilium.errors import UserError
from consilium.learning.discriminant import Discriminant, Space, probabilities
from consilium.learning.regression import LossForecast, Regression
from consilium.task import Task
from consilium.tasks.inference import loaded
from consilium.weights import SiteName, Weights

GLOBAL = "(global)"  # the selector's class of the global model; no site can be called that
NUMBERS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


@dataclass(frozen=True)
class Routes:
    """A selector's output for a batch of images."""

    chances: Tensor  # (batch, classes)
    outliers: tuple[str, ...]  # by image: why it is an outlier; empty: it is none


class Router(ABC):
    """A selector in use."""

    classes: list[str]  # the sites it can choose, and perhaps the global model

    @abstractmethod
    def routes(self, images: Tensor, whole: bool = False) -> Routes:
        """Route every image (batch, channels, *spatial); `whole`: they are slices of one volume, routed together."""

    @abstractmethod
    def seen(self, images: Tensor) -> Tensor:
        """The features that it decides by, (batch, features)."""

    def reason(self, site: SiteName, sure: float, threshold: float) -> str:
        """Why the model of this site answers."""
        return f"most like {site} ({sure:.3f} > {threshold:g})"


class NetworkRouter(Router):
    """A trained network with one output per class."""

    def __init__(self, task: Task, weights: Weights, classes: Sequence[str]) -> None:
        self.task, self.weights, self.classes = task, weights, list(classes)

    def routes(self, images: Tensor, whole: bool = False) -> Routes:
        chances = self.task.infer(self.weights, images, "selector", labels=self.classes).softmax(1)
        if whole:  # the mean over slices
            chances = chances.mean(0, keepdim=True).expand_as(chances)
        return Routes(chances, ("",) * len(images))

    def seen(self, images: Tensor) -> Tensor:
        return penultimate(loaded(self.task, self.weights, "selector", self.classes), images.to(self.task.device))


class DiscriminantRouter(Router):
    """A linear discriminant on the features of a model; it also finds outliers by their distance from every site."""

    def __init__(self, task: Task, weights: Weights, found: Discriminant) -> None:
        self.task, self.weights, self.found = task, weights, found
        self.classes, self.space = found.sites, Space(found)

    def routes(self, images: Tensor, whole: bool = False) -> Routes:
        features = self.task.features(self.weights, images)
        if whole:
            features = features.mean(0, keepdim=True).expand_as(features)
        squared = self.space.squared(features)
        return Routes(
            probabilities(squared, self.found.temperature).float(), tuple(map(self._outlier_reason, squared.sqrt()))
        )

    def seen(self, images: Tensor) -> Tensor:
        return self.space.whitened(self.task.features(self.weights, images), self.found.shrinkage)

    def _outlier_reason(self, distances: Tensor) -> str:
        """Why an image with these distances to the sites is an outlier; empty if it is near a site."""
        limits = [self.found.limits.get(site, math.inf) for site in self.classes]
        if any(distance <= limit for distance, limit in zip(distances.tolist(), limits)):
            return ""
        near = int(distances.argmin())
        many = NUMBERS[len(limits)] if len(limits) < len(NUMBERS) else len(limits)
        gap = f"distance {float(distances[near]):.3g} > {limits[near]:.3g}"
        return f"unlike all {many} sites (nearest {self.classes[near]}, {gap})"


class RegressionRouter(Router):
    """Chooses the model with the least expected loss; probabilities are a softmax of the negative losses."""

    def __init__(self, task: Task, weights: Weights, found: Regression, classes: Sequence[str]) -> None:
        self.task, self.weights, self.classes = task, weights, list(classes)
        self.forecast = LossForecast(found)

    def routes(self, images: Tensor, whole: bool = False) -> Routes:
        features = self.seen(images)
        if whole:
            features = features.mean(0, keepdim=True).expand_as(features)
        return Routes((-self.forecast.expected(features)).softmax(1).float(), ("",) * len(images))

    def seen(self, images: Tensor) -> Tensor:
        return self.task.features(self.weights, images)

    def reason(self, site: SiteName, sure: float, threshold: float) -> str:
        return f"the model of {site} is expected to have the least loss"


def penultimate(network: nn.Module, images: Tensor) -> Tensor:
    """The input of the network's last linear layer, (batch, features), on the CPU."""
    linear = [module for module in network.modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise UserError("the selector has no linear layer, so it has no last hidden features to show.")
    caught: list[Tensor] = []
    hook = linear[-1].register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0].detach().cpu()))
    try:
        with torch.no_grad():
            network(images)
    finally:
        hook.remove()
    return caught[-1].flatten(1)
