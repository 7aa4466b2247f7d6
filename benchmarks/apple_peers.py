"""A local step of APPLE against steps of its authors' form and of PFLlib's, and against their own code, in turn."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.apple import SITES, Step, mixed_step, plain_step
from benchmarks.measuring import Measured, Repeat, load, median_ratio, timed, typical
from benchmarks.peers.checkouts import Arguments, Stepped, open_checkout, stand_in
from consilium.networks.cnn import CNN

STEPS = 3
RATE, MOMENTUM, P_RATE = 0.01, 0.9, 0.001
OURS, PLAIN = "consilium", "a plain step"
AUTHORS, PFLLIB = "the code of APPLE's authors", "PFLlib itself"
LIMITS = {"the authors' form, ours": 5.0, AUTHORS: 5.0, "PFLlib's form, ours": 1.5, PFLLIB: 1.5}


def local_steps(folder: Path, repeats: int) -> list[Measured]:
    """The paper's network, its batch of 256 and its twelve sites."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        torch.manual_seed(0)
        seen = in_turn(contestants(torch.rand(256, 1, 28, 28), torch.randint(10, (256,))), repeats)
    finally:
        torch.set_num_threads(threads)
    for line in table(seen):
        print(line, flush=True)
    return [against(seen, name, limit) for name, limit in LIMITS.items() if name in seen]


def contestants(images: Tensor, classes: Tensor) -> dict[str, Step]:
    def loss(output: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, classes)

    laid_out = images.contiguous(memory_format=torch.channels_last)
    found = {
        OURS: mixed_step(build, laid_out, loss),
        PLAIN: plain_step(build, laid_out, loss),
        "the authors' form, ours": authors_form(images, loss),
        "PFLlib's form, ours": pfllib_form(images, loss),
    }
    for name, variable, itself in ((AUTHORS, "BENCH_APPLE_AUTHORS", authors), (PFLLIB, "BENCH_PFLLIB", pfllib)):
        if checkout := os.environ.get(variable):
            found[name] = itself(checkout, images, classes)
    return found


def build() -> nn.Module:
    return CNN().build(2, 1, 10)


# ---------------------------------------------------------------------------------------------- forms, written by us


class NFold(nn.Module):
    """A layer of every site at once: Σ_j p_j layer_j(x), the authors' way to write a mixture."""

    def __init__(self, layers: Sequence[nn.Module], p: nn.Parameter) -> None:
        super().__init__()
        self.layers, self.p = nn.ModuleList(layers), p

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[0](x) * self.p[0]
        for j, layer in enumerate(self.layers[1:], start=1):
            y = y + layer(x) * self.p[j]
        return y


def authors_form(images: Tensor, loss: Callable[[Tensor], Tensor]) -> Step:
    """An N-fold network; autograd goes through all of it, and only the first site's layers and p are trained."""
    cores = [build() for _ in range(SITES)]
    p = nn.Parameter(torch.full((SITES,), 1 / SITES))
    for core in cores[1:]:
        core.requires_grad_(False)
    own = list(cores[0].parameters())
    layers = [NFold(each, p) if list(each[0].parameters()) else each[0] for each in zip(*map(children, cores))]
    network = nn.Sequential(*layers)
    stepper = torch.optim.SGD([{"params": own}, {"params": [p], "lr": P_RATE}], lr=RATE, momentum=MOMENTUM)

    def step() -> None:
        stepper.zero_grad()
        loss(network(images)).backward()  # type: ignore[no-untyped-call]
        stepper.step()

    return step


def children(network: nn.Module) -> list[nn.Module]:
    return list(network.children())


def pfllib_form(images: Tensor, loss: Callable[[Tensor], Tensor]) -> Step:
    """The mixture is written into a network, tensor by tensor and core by core; so is the gradient of p read."""
    cores = [list(build().parameters()) for _ in range(SITES)]
    network = build()
    mixed, p = list(network.parameters()), [1 / SITES] * SITES

    def step() -> None:
        for tensor in mixed:
            tensor.data = torch.zeros_like(tensor.data)
        for share, core in zip(p, cores):
            for tensor, part in zip(mixed, core):
                tensor.data += part.data.clone() * share
        found = loss(network(images))
        network.zero_grad()
        found.backward()  # type: ignore[no-untyped-call]
        slopes = [tensor.grad for tensor in mixed if tensor.grad is not None]
        for part, slope in zip(cores[0], slopes):
            part.data = part.data - RATE * slope * p[0]
        for j, core in enumerate(cores):
            pulls = [torch.mean(slope * part.data).item() for slope, part in zip(slopes, core)]
            p[j] -= P_RATE * sum(pulls) / len(pulls)

    return step


# ------------------------------------------------------------------------------------------- their code, a checkout


def authors(checkout: str, images: Tensor, classes: Tensor) -> Step:
    """`train_one_round` of the authors, for their first client. PySyft, whose workers only name who holds a model,
    and torchvision, for the data, are left out; so is the search for anomalies that their file switches on.
    """
    open_checkout(checkout, "", "train_APPLE.py")
    stand_in("syft", TorchHook=lambda torch: None)
    stand_in("torchvision", "transforms", "datasets")
    theirs = _imported("train_APPLE", ("utils",))
    torch.autograd.set_detect_anomaly(False)
    theirs.Net.get = theirs.Net.send = lambda model, *_: model
    options = SimpleNamespace(
        lr_net=RATE, lr_coef=P_RATE, decay=1.0, num_local_epochs=1, num_rounds=160, log_step=10**9,
        mu=0.1, reg_last_round_over_total_round=0.1, scheduler="exponential", limit_downloaded_models=10000,
    )  # fmt: skip
    servers = [theirs.Net(1, 10) for _ in range(SITES)]
    clients = [theirs.ClientNet(SITES, 1, 10)]
    cases, p = [1] * SITES, [[1 / SITES] * SITES]

    def loop(loader: Stepped) -> None:
        theirs.train_one_round(
            options, servers, clients, p, cases, None, 0, nn.CrossEntropyLoss(), "cpu", None, [(None, loader)]
        )  # fmt: skip

    return Stepped(loop, (images, classes))


def pfllib(checkout: str, images: Tensor, classes: Tensor) -> Step:
    """`clientAPPLE.train` of PFLlib, for its first client."""
    open_checkout(checkout, "system", "flcore/clients/clientapple.py")
    stand_in("h5py")
    theirs = _imported("flcore.clients.clientapple", ("flcore", "utils"))
    options = Arguments(
        model=build(), num_clients=SITES, local_learning_rate=RATE / SITES, dr_learning_rate=P_RATE, mu=0.1, L=1.0,
        global_rounds=160, batch_size=len(images),
    )  # fmt: skip
    client = theirs.clientAPPLE(options, 0, len(images), 0, train_slow=False, send_slow=False)
    client.set_models([copy.deepcopy(options.model) for _ in range(SITES)])
    client.p0 = [1 / SITES] * SITES

    def loop(loader: Stepped) -> None:
        client.load_train_data = lambda: loader
        client.train(0)

    return Stepped(loop, (images, classes))


def _imported(module: str, packages: Sequence[str]) -> Any:
    """A module of the checkout opened last; both checkouts have a package `utils`, so its names are forgotten."""
    with contextlib.redirect_stdout(io.StringIO()):
        found = import_module(module)
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[name]
    return found


# --------------------------------------------------------------------------------------------------------- figures


def in_turn(steps: Mapping[str, Step], repeats: int) -> dict[str, list[Repeat]]:
    """Every contestant's steps, one of each in turn; the first is not timed."""
    for step in steps.values():
        step()
    seen: dict[str, list[Repeat]] = {name: [] for name in steps}
    for _ in range(repeats):
        turns = [{name: timed(step) for name, step in steps.items()} for _ in range(STEPS)]
        for name, repeat in seen.items():
            repeat.append([turn[name] for turn in turns])
    return seen


def table(seen: Mapping[str, Sequence[Repeat]]) -> list[str]:
    lines = [
        f"A step of APPLE, the paper's CNN, {SITES} cores, batch 256, one thread, load {load()}; medians",
        "| | a step | processor time | times ours |",
        "|---|---|---|---|",
    ]
    for name in (OURS, PLAIN, *LIMITS):
        if name not in seen:
            lines.append(f"| {name} | not run |")
            continue
        seconds, own = (1e3 * median(typical(repeat, of) for repeat in seen[name]) for of in ("seconds", "own"))
        lines.append(
            f"| {name} | {seconds:.1f} ms | {own:.1f} ms | {median_ratio(seen[name], seen[OURS], 'own'):.2f} |"
        )
    return lines


def against(seen: Mapping[str, Sequence[Repeat]], name: str, limit: float) -> Measured:
    """In processor time: all steps take one thread, so this is what they take on a quiet machine."""
    ours, theirs = (median(typical(repeat, "own") for repeat in seen[who]) for who in (OURS, name))
    facts = {"in seconds": median_ratio(seen[name], seen[OURS]), "load": load()}
    return Measured(
        "apple-peers", "processor time of a step of APPLE, batch 256", ours, name, theirs, "s",
        median_ratio(seen[name], seen[OURS], "own"), limit, gain=True, facts=facts,
    )  # fmt: skip
