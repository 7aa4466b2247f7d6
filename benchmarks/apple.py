"""A local step of APPLE, which mixes twelve cores, against a plain step of the same network on the same batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from benchmarks.measuring import Measured, Repeat, load, median_ratio, timed, typical
from consilium.learning.mixture import Mixture
from consilium.learning.optimizers import optimizer
from consilium.local_training import Local
from consilium.networks.cnn import CNN
from consilium.networks.unet import UNet

SITES = 12
HOW = Local(optimizer="sgd", momentum=0.9, lr=0.01)

Step = Callable[[], None]


def local_steps(folder: Path, repeats: int) -> list[Measured]:
    """The paper's network with its batch of 256, and the 2-D U-Net at the sizes of the retina studies and of the demo.

    APPLE reads the matrix of cores twice per step, whatever the batch: the less work a step is, the more that counts.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        torch.manual_seed(0)
        classes = torch.randint(10, (256,))
        cnn = _compare(
            "the paper's CNN, batch 256", lambda: CNN().build(2, 1, 10), torch.rand(256, 1, 28, 28),
            lambda output: nn.functional.cross_entropy(output, classes), repeats, 5, 1.10,
        )  # fmt: skip
        return [cnn, _unet(256, repeats, 1, 1.10), _unet(64, repeats, 5, 1.40)]
    finally:
        torch.set_num_threads(threads)


def _unet(side: int, repeats: int, steps: int, limit: float) -> Measured:
    masks = torch.rand(8, 2, side, side).round()
    return _compare(
        f"the 2-D U-Net, batch 8 of {side} × {side}", lambda: UNet().build(2, 3, 2), torch.rand(8, 3, side, side),
        lambda output: nn.functional.binary_cross_entropy_with_logits(output, masks), repeats, steps, limit,
    )  # fmt: skip


def _compare(
    what: str, build: Callable[[], nn.Module], images: Tensor, loss: Callable[[Tensor], Tensor],
    repeats: int, steps: int, limit: float,
) -> Measured:  # fmt: skip
    images = images.contiguous(memory_format=torch.channels_last)
    ours, plain = mixed_step(build, images, loss), plain_step(build, images, loss)
    for step in (ours, plain):
        step()
    mine: list[Repeat] = []
    theirs: list[Repeat] = []
    for _ in range(repeats):
        pairs = [(timed(ours), timed(plain)) for _ in range(steps)]  # in turn, so that both meet the same weather
        mine.append([pair[0] for pair in pairs])
        theirs.append([pair[1] for pair in pairs])
    mixed, bare = (median(typical(repeat) for repeat in found) for found in (mine, theirs))
    facts = {"in processor time": median_ratio(mine, theirs, "chain"), "load": load()}
    return Measured(
        "apple", f"a step of APPLE with {SITES} cores, {what}", mixed, "a plain step", bare, "s",
        median_ratio(mine, theirs), limit, facts=facts,
    )  # fmt: skip


def mixed_step(build: Callable[[], nn.Module], images: Tensor, loss: Callable[[Tensor], Tensor]) -> Step:
    cores = [dict(build().named_parameters()) for _ in range(SITES)]
    with torch.no_grad():
        mixture = Mixture(_laid_out(build()), cores, 0, [1 / SITES] * SITES)
    steppers = [optimizer([mixture.core], HOW, 0.01), optimizer([mixture.p], HOW, 0.001)]

    def step() -> None:
        found = loss(mixture(images))
        found.item()
        mixture.backward(found)
        for stepper in steppers:
            stepper.step()

    return step


def plain_step(build: Callable[[], nn.Module], images: Tensor, loss: Callable[[Tensor], Tensor]) -> Step:
    network = _laid_out(build())
    stepper = optimizer(list(network.parameters()), HOW, 0.01)

    def step() -> None:
        found = loss(network(images))
        found.item()
        found.backward()  # type: ignore[no-untyped-call]
        stepper.step()
        stepper.zero_grad(set_to_none=True)

    return step


def _laid_out(network: nn.Module) -> nn.Module:
    return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]
