"""A step of sUSAM against a plain step of the same network on the same batch, and what its masks cost of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from benchmarks.measuring import Measured, Repeat, load, median_ratio, timed, typical
from consilium.learning.cmidg import cmidg
from consilium.learning.optimizers import optimizer
from consilium.learning.sharpness import explored, flat, masked, momentum, moved, perturbation, top
from consilium.local_training import Local
from consilium.networks.plain_unet import PlainUNet
from consilium.networks.unet import UNet

HOW = Local(optimizer="adamw", lr=1e-4)
LABELS = 5


@dataclass(frozen=True)
class Setting:
    what: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of a batch of images
    steps: int  # in a repeat


SETTINGS = (
    Setting("the 2-D U-Net, batch 8 of 128 × 128", lambda: UNet().build(2, 1, LABELS), (8, 1, 128, 128), 3),
    Setting("the plain 3-D U-Net, batch 2 of 32 × 64 × 64",
            lambda: PlainUNet(widths=(16, 32, 64, 128), supervision=()).build(3, 1, LABELS), (2, 1, 32, 64, 64), 1),
)  # fmt: skip


def sparse_steps(folder: Path, repeats: int) -> list[Measured]:
    """The dearest step there is: one of a round in which the masks are found anew, batch by batch."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [line for setting in SETTINGS for line in _compare(setting, repeats)]
    finally:
        torch.set_num_threads(threads)


def _compare(setting: Setting, repeats: int) -> list[Measured]:
    torch.manual_seed(0)
    images, truth = torch.rand(setting.shape), torch.randint(LABELS, (setting.shape[0], *setting.shape[2:]))
    if images.dim() == 4:
        images = images.contiguous(memory_format=torch.channels_last)
    ours, plain = _Step(setting.build(), images, truth), _Step(setting.build(), images, truth)
    ours.sparse(), plain.plain(), ours.masks()
    times: tuple[list[Repeat], list[Repeat], list[Repeat]] = ([], [], [])
    for _ in range(repeats):
        in_turn = [(timed(ours.sparse), timed(plain.plain), timed(ours.masks)) for _ in range(setting.steps)]
        for found, column in zip(times, zip(*in_turn)):
            found.append(column)
    sparse, bare, masks = (median(typical(repeat) for repeat in found) for found in times)
    facts = {"parameters": sum(p.numel() for p in ours.network.parameters()), "load": load()}
    in_time = {"in processor time": median_ratio(times[0], times[1], "chain")}
    return [
        Measured("susam", f"a step of sUSAM, {setting.what}", sparse, "a plain step", bare, "s",
                 median_ratio(times[0], times[1]), 2.3, facts=in_time | facts),
        Measured("susam", f"its masks, {setting.what}", masks, "a plain step", bare, "s",
                 median_ratio(times[2], times[1]), 0.10, facts=facts),
    ]  # fmt: skip


class _Step:
    """A network and its optimiser, and the steps it can take."""

    def __init__(self, network: nn.Module, images: Tensor, truth: Tensor) -> None:
        if images.dim() == 4:
            network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.network, self.images, self.truth = network, images, truth
        self.weights = dict(network.named_parameters())
        self.stepper = optimizer(list(self.weights.values()), HOW, HOW.lr)
        self.generator = torch.Generator().manual_seed(0)
        size = sum(p.numel() for p in self.weights.values())
        self.contested = torch.rand(size, generator=self.generator) < 0.5
        self.slope = torch.randn(size, generator=self.generator)
        self.kept = self.slope.abs()

    def plain(self) -> None:
        self._descend(self._gradient(self.images))

    def sparse(self) -> None:
        ascent = self._gradient(cmidg(self.images, self.generator))
        self.slope = flat(ascent)
        mask = self.masks()
        with moved(self.network, masked(perturbation(self.weights, ascent, 0.7, 0.001), mask)):
            slope = self._gradient(self.images)
        self._descend(slope)

    def masks(self) -> Tensor:
        """M_L ∪ M_E and the momentum of one batch; M_L,mo is found once a round."""
        self.kept = momentum(self.kept, self.slope, 0.9)
        local = top(self.slope.abs(), 0.4)
        return local | explored(local, self.contested, 0.1, self.generator)

    def _gradient(self, images: Tensor) -> dict[str, Tensor]:
        loss = nn.functional.cross_entropy(self.network(images), self.truth)
        loss.item()
        return dict(zip(self.weights, torch.autograd.grad(loss, list(self.weights.values()))))

    def _descend(self, slope: dict[str, Tensor]) -> None:
        for name, parameter in self.weights.items():
            parameter.grad = slope[name]
        self.stepper.step()
        self.stepper.zero_grad(set_to_none=True)
