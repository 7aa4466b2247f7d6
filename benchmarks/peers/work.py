"""The work that every peer does: one network, one pass over a site's batches, data in memory. Needs torch and numpy.

The network is the file of consilium's own U-Net, so that no peer pays for an import of MONAI; with
`BENCH_NETWORK=monai` it is MONAI's, of the same weights, as most people would write it.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

WIDTHS, BATCH, RATE = (8, 16, 32, 64), 8, 1e-3
NETWORKS = Path(__file__).parents[2] / "consilium" / "networks"
Site = tuple[Tensor, Tensor]  # images (cases, 3, 64, 64) and masks (cases, 64, 64)


def sites(path: str) -> dict[str, Site]:
    """All training cases, by site, in memory."""
    with np.load(path) as held:
        names = sorted({key.partition("/")[0] for key in held})
        return {name: tuple(torch.from_numpy(held[f"{name}/{part}"]) for part in ("images", "masks")) for name in names}  # type: ignore[misc]


def network() -> nn.Module:
    torch.manual_seed(0)
    if os.environ.get("BENCH_NETWORK") == "monai":
        from monai.networks.nets import UNet

        made: nn.Module = UNet(2, 3, 2, WIDTHS, (2, 2, 2), norm=("instance", {"affine": True}))
        return made
    if str(NETWORKS) not in sys.path:
        sys.path.append(str(NETWORKS))
    from nested_unet import NestedUNet  # type: ignore[import-not-found]

    return NestedUNet(2, 3, 2, WIDTHS, 0, "instance", 0.0)  # type: ignore[no-any-return]


def train(model: nn.Module, site: Site, round: int) -> int:
    """One epoch of Adam, channels-last and fused. Returns the number of cases."""
    model.train()
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, fused=True)
    for batch, truth in batches(site, round):
        loss = dice(model(batch), truth)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return len(site[0])


def batches(site: Site, round: int) -> Iterator[tuple[Tensor, Tensor]]:
    images, masks = site
    order = np.random.default_rng(round).permutation(len(images))
    for chunk in np.array_split(order, math.ceil(len(images) / BATCH)):
        mask = masks[chunk]
        truth = torch.stack([mask > 0, mask == 2], dim=1).float()
        yield images[chunk].contiguous(memory_format=torch.channels_last), truth


def dice(output: Tensor, truth: Tensor) -> Tensor:
    likely = torch.sigmoid(output)
    hit, both = (likely * truth).sum((2, 3)), (likely + truth).sum((2, 3))
    return (1 - (2 * hit + 1e-5) / (both + 1e-5)).mean()


def average(models: list[dict[str, Tensor]], cases: list[int]) -> dict[str, Tensor]:
    total = sum(cases)
    return {key: sum(m[key] * (n / total) for m, n in zip(models, cases)) for key in models[0]}  # type: ignore[misc]


# ------------------------------------------------------------------------------------------------- marks


def mark(what: str) -> None:
    """A line of `BENCH_MARKS`: what happened, when, and the processor time that all processes had used until then."""
    path = os.environ.get("BENCH_MARKS", "")
    if path:
        line = f"{what} {time.time():.4f} {used(path)[0]:.3f}\n"
        with open(path, "a") as file:
            file.write(line)


def mark_first_step() -> None:
    """Mark the first step of any optimiser in this process."""
    held: list[Any] = []

    def stepped(*_: Any) -> None:
        if held:
            held.pop().remove()
            mark("step")

    held.append(register_optimizer_step_post_hook(stepped))


def used(marks: str) -> tuple[float, int, int]:
    """Of all processes that write to these marks: processor seconds, own memory in bytes, that of the largest.

    They are found by their environment: frameworks start processes that are nobody's children.
    """
    wanted = f"BENCH_MARKS={marks}".encode()
    ticks, pages = 0, [0]
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            resident, shared = map(int, (folder / "statm").read_text().split()[1:3])
        except OSError:  # it has just ended, or is somebody else's
            continue
        ticks += sum(map(int, fields[11:15]))  # its own and those of its children that have ended
        pages.append(resident - shared)
    size = os.sysconf("SC_PAGE_SIZE")
    return ticks / os.sysconf("SC_CLK_TCK"), sum(pages) * size, max(pages) * size
