"""Features of an image: the activations of the encoder's stages, pooled over positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor, nn

from consilium.errors import StudyError
from consilium.networks.parts import CONVOLUTIONS, encoder_convolutions
from consilium.task import Task

_TRIED_SIDES = (64, 32, 28, 128, 224)  # image sizes to try when features are counted without data


def pooled_activations(network: nn.Module, images: Tensor) -> Tensor:
    """The mean and the standard deviation of every channel of every encoder stage, (batch, features), float64.

    The features come from a stage's first convolution, before normalisation, which removes brightness and contrast.
    These differ most between scanners. Stages are known for our U-Nets. In any other network they are the first
    convolutions of each image size in the encoder; a network without any raises StudyError.
    """
    with torch.no_grad(), _caught_stages(network) as stages:
        network(images)
    if not stages:
        raise StudyError(
            "this network has no convolution (nn.Conv2d, nn.Conv3d) that sees the image, so there are no features to "
            "tell sites apart by; set [method] selector_training = 'synchronised'."
        )
    parts = []
    for stage in stages:
        values = stage.float().flatten(2)
        parts += [values.mean(2), values.std(2, unbiased=False)]
    pooled = torch.cat(parts, 1)
    return pooled if pooled.is_meta else pooled.double().cpu()


@contextmanager
def _caught_stages(network: nn.Module) -> Iterator[list[Tensor]]:
    """Inside the context, collect the outputs of the encoder's stages; in an unknown network, found by image sizes."""
    stages: list[Tensor] = []
    known = encoder_convolutions(network)
    decoding: list[bool] = []

    def by_module(_: nn.Module, __: object, output: Tensor) -> None:
        stages.append(output)

    def by_size(_: nn.Module, __: object, output: Tensor) -> None:
        if stages and _pixels(output) > _pixels(stages[-1]):
            decoding.append(True)  # this is the decoder, whose layers are not used
        if not decoding and (not stages or _pixels(output) < _pixels(stages[-1])):
            stages.append(output)

    convolutions = [module for module in network.modules() if isinstance(module, CONVOLUTIONS)]
    hooks = [module.register_forward_hook(by_module if known else by_size) for module in known or convolutions]
    try:
        yield stages
    finally:
        for hook in hooks:
            hook.remove()


def _pixels(output: Tensor) -> int:
    return output.shape[2:].numel()


def windows(sides: Sequence[int], patch: Sequence[int]) -> list[tuple[slice, ...]]:
    """Windows of a patch's size that cover an image; the last ones are moved inside. () is the whole image."""
    if not patch:
        return [tuple(slice(0, side) for side in sides)]
    starts = [
        [*range(0, max(1, side - size + 1), size), *([side - size] if side > size and side % size else [])]
        for side, size in zip(sides, patch)
    ]
    return [tuple(slice(s, s + size) for s, size in zip(corner, patch)) for corner in product(*starts)]


@lru_cache(maxsize=16)
def feature_count(task: Task) -> int:
    """The number of features of a task's network, counted without data."""
    with torch.device("meta"):
        network = task.network().eval()
    sentence = ""
    for side in _TRIED_SIDES:
        images = torch.empty((1, task.channels, *(side,) * task.dimensions), device="meta")
        try:
            return pooled_activations(network, images).shape[1]
        except StudyError:
            raise
        except (RuntimeError, ValueError) as error:  # built for images of another size
            sentence = sentence or str(error).split("\n", 1)[0]
    raise StudyError(
        f"the network's features cannot be counted ({sentence}); set [method] selector_training = 'synchronised'."
    )
