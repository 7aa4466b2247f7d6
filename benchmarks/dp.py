"""A step of DP-SGD with the patient as unit against a plain step, at the demo's sizes, beside opacus's own ways."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from benchmarks.measuring import Measured, Repeat, load, median_ratio, timed, typical
from consilium.batch import Batch
from consilium.learning.optimizers import optimizer
from consilium.learning.per_patient import PatientGradients
from consilium.local_training import Local
from consilium.networks.unet import UNet
from consilium.privacy.sampling import covered

CASES, SIDE, STEPS = 8, 64, 4
CLIP, NOISE = 1.0, 1.0
MODES = ("hooks", "functorch", "ew", "ghost")  # opacus's

Step = Callable[[], object]


def private_steps(folder: Path, repeats: int) -> list[Measured]:
    """The demo's U-Net and batch of 8, all of different patients, with clipping, noise and the optimiser's step.

    In processor time: each is one thread. Opacus's modes, of single cases and without noise, are facts beside it.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        images = torch.rand(CASES, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
        masks = torch.rand(CASES, 2, SIDE, SIDE, generator=torch.Generator().manual_seed(1)).round()
        plain = _plain(images, masks)
        ours, theirs = _timed(_private(images, masks), plain, repeats)
        facts: dict[str, object] = {}
        for mode in MODES:
            try:
                facts[f"opacus {mode}"] = median_ratio(*_timed(_opacus(mode, images, masks), plain, repeats), "chain")
            except (RuntimeError, NotImplementedError) as error:
                facts[f"opacus {mode}"] = f"cannot ({str(error).splitlines()[0][:60]})"
        mine, bare = (median(typical(repeat, "chain") for repeat in found) for found in (ours, theirs))
        what = f"a private step of the demo's U-Net, {CASES} patients of {SIDE} × {SIDE}"
        ratio = median_ratio(ours, theirs, "chain")
        return [Measured("dp", what, mine, "a plain step", bare, "s", ratio, 2.5, facts={**facts, "load": load()})]
    finally:
        torch.set_num_threads(threads)


def _network() -> nn.Module:
    torch.manual_seed(0)
    return UNet(widths=(8, 16, 32, 64), residual_units=0).build(2, 3, 2).train()


def _criterion() -> Callable[[Tensor, Tensor], Tensor]:
    from monai.losses import DiceLoss

    return DiceLoss(sigmoid=True)  # type: ignore[no-any-return]


def _fast(images: Tensor) -> Tensor:
    return images.contiguous(memory_format=torch.channels_last)


def _plain(images: Tensor, masks: Tensor) -> Step:
    network, loss = _network().to(memory_format=torch.channels_last), _criterion()  # type: ignore[call-overload]
    parameters, placed = list(network.parameters()), _fast(images)
    stepper = optimizer(parameters, Local(), 1e-3)

    def step() -> None:
        loss(network(placed), masks).backward()
        stepper.step()
        for parameter in parameters:
            parameter.grad = None

    return step


def _private(images: Tensor, masks: Tensor) -> Step:
    network, loss = _network().to(memory_format=torch.channels_last), _criterion()  # type: ignore[call-overload]
    parameters = dict(network.named_parameters())
    patients, stepper = PatientGradients(network), optimizer(list(parameters.values()), Local(), 1e-3)
    batch = Batch(_fast(images), masks, ("",) * CASES, patients=tuple(range(CASES)))

    def step() -> None:
        found = patients.summed(parameters, [batch], lambda output, part: loss(output, part.truth), CLIP)
        noised = covered(found.gradient, CLIP, NOISE, b"key", "global") / CASES
        start = 0
        for parameter in parameters.values():
            parameter.grad = torch.empty_like(parameter).copy_(
                noised[start : start + parameter.numel()].view_as(parameter)
            )
            start += parameter.numel()
        stepper.step()

    return step


def _opacus(mode: str, images: Tensor, masks: Tensor) -> Step:
    """The clipped sum of the cases' gradients; without noise and without the optimiser's step."""
    from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleModuleFastGradientClipping
    from opacus.grad_sample.utils import wrap_model

    loss = _criterion()
    if mode == "ghost":
        ghost = GradSampleModuleFastGradientClipping(_network(), loss_reduction="sum", max_grad_norm=CLIP)

        def twice() -> None:
            output = ghost(images)
            each = torch.stack([loss(output[i : i + 1], masks[i : i + 1]) for i in range(CASES)])
            each.sum().backward(retain_graph=True)
            scale = ghost.get_clipping_coef()
            for parameter in ghost.parameters():
                parameter.grad = None
            ghost.disable_hooks()
            (each * scale).sum().backward()
            ghost.enable_hooks()

        return twice
    wrapped = wrap_model(_network(), grad_sample_mode=mode, loss_reduction="mean" if mode == "ew" else "sum")

    def step() -> list[Tensor]:
        for parameter in wrapped.parameters():
            parameter.grad = parameter.grad_sample = None  # type: ignore[attr-defined]
        output = wrapped(images)
        torch.stack([loss(output[i : i + 1], masks[i : i + 1]) for i in range(CASES)]).sum().backward()
        each = [parameter.grad_sample for parameter in wrapped.parameters()]  # type: ignore[attr-defined]
        lengths = torch.stack([part.flatten(1).square().sum(1) for part in each]).sum(0).sqrt()
        scale = (CLIP / lengths).clamp(max=1.0)
        return [torch.einsum("i,i...->...", scale, part) for part in each]

    return step


def _timed(ours: Step, theirs: Step, repeats: int) -> tuple[list[Repeat], list[Repeat]]:
    """Both in turn, so that both meet the same weather; the first step of each is not timed."""
    ours()
    theirs()
    found: tuple[list[Repeat], list[Repeat]] = ([], [])
    for _ in range(repeats):
        spent = [[timed(step) for step in (ours, theirs)] for _ in range(STEPS)]
        for i, laps in enumerate(zip(*spent)):
            found[i].append(list(laps))
    return found
