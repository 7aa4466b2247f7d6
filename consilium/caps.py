"""What a study would need at a hospital, found before anything of it is allocated, and which caps that passes.

Networks are built on the meta device, which holds shapes and no numbers. Every figure is a lower bound: a study that is
refused could not have kept within the cap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from consilium import tree
from consilium.errors import StudyError
from consilium.hospital import Limits
from consilium.machine import machine_memory
from consilium.site import Roster, SiteCard
from consilium.study import Study
from consilium.timeline import first_rounds

MOMENTS = {"adam": 2, "adamw": 2, "sgd": 1}  # tensors an optimiser keeps beside every parameter

Objection = tuple[str, str]  # a word of `REASONS`, and a sentence for the hospital's own log


class _Enough(Exception):
    """A network that is being built has passed a cap."""


@dataclass
class NetworkSize:
    """What a network has; grows while it is built."""

    parameters: int = 0
    bytes: int = 0
    layers: int = 0  # modules with parameters of their own


@dataclass(frozen=True)
class Needs:
    """What a study takes at a site, at least."""

    network: NetworkSize
    memory: int  # bytes while it trains: weights, gradients, the optimiser's moments, what the backward pass keeps
    disk: int  # bytes of one order and one release
    cache: int  # bytes of preprocessed images; 0 where their size is not known before they are read
    update: int  # bytes of the largest update


@contextmanager
def _counted(limits: Limits) -> Iterator[NetworkSize]:
    """Count networks that are built in the block; it ends as soon as one passes a cap."""
    size = NetworkSize()
    last: list[nn.Module] = []

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is None:
            return
        size.parameters += parameter.numel()
        size.bytes += parameter.numel() * parameter.element_size()
        if not last or last[0] is not module:
            size.layers += 1
            last[:] = [module]
        if next(_too_large(limits, size), None):
            raise _Enough

    hook = register_module_parameter_registration_hook(count)
    try:
        yield size
    finally:
        hook.remove()


def _too_large(limits: Limits, size: NetworkSize) -> Iterator[Objection]:
    for word, key, found in (
        ("parameters", "model_parameters", size.parameters),
        ("weights", "model_bytes", size.bytes),
        ("layers", "layers", size.layers),
    ):
        most = getattr(limits, key)
        if most and found > most:
            what = {"weights": "bytes"}.get(word, word)
            yield word, f"[limits] {key} = {most}, and the study's network has at least {found} {what}."


def too_large(limits: Limits, study: Study, cases: int = 0) -> Iterator[Objection]:
    """Which caps a study passes at a hospital with so many cases; the network's own come first."""
    network = _network(study, limits)
    yield from _too_large(limits, network)
    if next(_too_large(limits, network), None):  # anything else would have to build it whole
        return
    needs = needs_of(study, cases, network)
    memory = limits.memory_bytes or _room(study.local.device)
    cap = f"[limits] memory_bytes = {memory}" if limits.memory_bytes else f"this machine has {memory} bytes of memory"
    for word, most, found, said in (
        ("ram", memory, needs.memory, f"{cap}, and training takes at least {needs.memory}."),
        ("cache", limits.cache_bytes, needs.cache, f"[limits] cache_bytes = {limits.cache_bytes}, and the preprocessed "
         f"images take {needs.cache}."),
        ("storage", limits.disk_bytes, needs.disk, f"[limits] disk_bytes = {limits.disk_bytes}, and an order and a "
         f"release take at least {needs.disk}."),
        ("order", limits.order_bytes, network.bytes, f"[limits] order_bytes = {limits.order_bytes}, and the study's "
         f"network takes {network.bytes}."),
        ("bytes", limits.message_bytes, needs.update, f"[limits] message_bytes = {limits.message_bytes}, and an update "
         f"takes {needs.update}."),
    ):  # fmt: skip
        if most and found > most:
            yield word, said


def _network(study: Study, limits: Limits) -> NetworkSize:
    """The size of the study's network, or as much of it as passes a cap."""
    with _counted(limits) as size:
        try:
            with torch.device("meta"):
                study.task.network()
        except _Enough:
            pass
        except (RuntimeError, RecursionError) as error:  # sizes that no machine can count
            raise StudyError(f"the study's network cannot be built ({error}); it needs other [task] fields.") from error
    return size


def needs_of(study: Study, cases: int = 0, network: NetworkSize | None = None) -> Needs:
    """What a study takes at a site that has so many cases in its table."""
    network = network or _network(study, Limits(model_parameters=0, layers=0))
    moments = MOMENTS[study.local.optimizer] if study.local.optimizer != "sgd" or study.local.momentum else 0
    return Needs(
        network,
        memory=network.bytes * (2 + moments) + _saved_for_backward(study),
        disk=2 * network.bytes,
        cache=_cache(study, cases),
        update=_update(study),
    )


def largest_order(limits: Limits, study: Study) -> int:
    """Bytes that no order and no release of a study needs: four times what a model or an update of every site takes.

    Most methods send one model, some a model of every site (FedSM's release, APPLE) with something beside it.
    """
    network = _network(study, limits)
    if next(_too_large(limits, network), None):
        return 0
    sites = max(2, len({*study.plan.sites, *study.plan.leave_out}))
    return 4 * (sites + 4) * max(network.bytes, _update(study))


def _saved_for_backward(study: Study) -> int:
    """Bytes of the inputs of all layers with parameters, for one batch: the backward pass needs every one of them."""
    size = study.task_fields.patch or study.preprocess.size
    if not size:
        return 0
    seen: dict[int, Tensor] = {}  # held, so that no other tensor gets its number

    def note(module: nn.Module, inputs: tuple[Any, ...], _: Any) -> None:
        if any(True for _ in module.parameters(recurse=False)):
            seen.update({id(part): part for part in inputs if isinstance(part, Tensor)})

    try:
        with torch.device("meta"):
            network = study.task.network()
            for module in network.modules():
                module.register_forward_hook(note)
            network(torch.empty(1, study.seen.channels, *size))
    except (ValueError, RuntimeError):  # a layer that needs numbers, or two images in a batch
        return 0
    wide = 4 if study.local.precision == "float32" else 2
    return study.local.batch_size * sum(part.numel() for part in seen.values()) * wide


def _cache(study: Study, cases: int) -> int:
    size = study.preprocess.size
    if not size or study.preprocess.slices:
        return 0
    masks = math.prod(size) if study.facts.task == "segmentation" else 0
    return cases * (4 * study.facts.channels * math.prod(size) + masks)


def _update(study: Study) -> int:
    """Bytes of the largest update of any phase, with made-up numbers of cases."""
    names = study.plan.sites or ("here", "there")
    roster: Roster = {name: SiteCard(name, i, 100, study.facts.labels) for i, name in enumerate(sorted(names))}
    card = next(iter(roster.values()))
    firsts = first_rounds(study.method, study.plan.rounds)
    blanks = (study.method.blank(study.task, roster, card, round) for round in firsts)
    return max((tree.flatten(blank).nbytes() for blank in blanks if blank is not None), default=0)


def _room(device: str) -> int:
    """Bytes of this machine's memory, where training takes place in it."""
    elsewhere = device not in ("cpu", "auto") or (device == "auto" and torch.cuda.is_available())
    return 0 if elsewhere else machine_memory()


def held_by(folder: Path) -> int:
    """Bytes of all files in a folder."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() and not path.is_symlink() else 0
        except FileNotFoundError:  # another study of this hospital removed it
            continue
    return total
