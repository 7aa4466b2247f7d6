"""What a network sees in an image, as a few numbers: the encoder's activations, pooled stage by stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor, nn

from consilium.errors import StudyError
from consilium.networks.parts import CONVOLUTIONS, encoder_convolutions
from consilium.site import Task

_TRIED_SIDES = (64, 32, 28, 128, 224)  # of an image without values, to count features with


def pooled_activations(network: nn.Module, images: Tensor) -> Tensor:
    """The mean and the standard deviation of every channel of every encoder stage, (batch, features), float64.

    Of a stage the first convolution counts, before normalisation: afterwards an image's brightness and contrast, by
    which scanners differ most, are gone. Stages are told by the structure of our U-Nets. Of any other network they are
    the first convolutions of each image size on the way down; a network without any is answered with a sentence.
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
    """While it is open, what the encoder's stages give; of an unknown network, found by the sizes of the images."""
    stages: list[Tensor] = []
    known = encoder_convolutions(network)
    decoding: list[bool] = []

    def by_module(_: nn.Module, __: object, output: Tensor) -> None:
        stages.append(output)

    def by_size(_: nn.Module, __: object, output: Tensor) -> None:
        if stages and _pixels(output) > _pixels(stages[-1]):
            decoding.append(True)  # on the way up: the decoder has no stages of its own
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
    """Windows of a patch's size that cover an image side by side, the last ones pushed inside; () is the whole."""
    if not patch:
        return [tuple(slice(0, side) for side in sides)]
    starts = [
        [*range(0, max(1, side - size + 1), size), *([side - size] if side > size and side % size else [])]
        for side, size in zip(sides, patch)
    ]
    return [tuple(slice(s, s + size) for s, size in zip(corner, patch)) for corner in product(*starts)]


@lru_cache(maxsize=16)
def feature_count(task: Task) -> int:
    """How many features a task's network gives, counted without data."""
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
