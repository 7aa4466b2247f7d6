"""The BatchNorm policy of a study: which normalisation tensors stay at the site instead of being averaged.

It works on packets, so methods need not know it. A model has the same field name in every message. Without the site's
own name in the path, `personal/hk/…` in a release is the `personal/…` of hk's order and reply.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from consilium.errors import StudyError
from consilium.local_training import Local
from consilium.method import Method
from consilium.task import Task
from consilium.tree import Packet, message
from consilium.weights import SiteName, Weights


@lru_cache
def _kept_type(memory: type) -> type:
    """The content of a site's memory: the method's memory, and the site's own normalisation by path."""

    @message
    class Kept:
        memory: Any
        norm: Weights | None

    Kept.__annotations__["memory"] = memory
    return Kept


@dataclass(frozen=True)
class LocalNorm:
    """The names of the tensors that stay; none for the policy "average"."""

    names: frozenset[str]
    site: SiteName

    @classmethod
    def of(cls, task: Task, policy: str, site: SiteName) -> LocalNorm:
        if policy == "average":
            return cls(frozenset(), site)
        with torch.device("meta"):
            network = task.network()
        return cls(frozenset(_norm_names(network, policy)), site)

    def kept(self, method: Method) -> type:
        return _kept_type(method.Memory)

    def remembers(self, method: Method, local: Local) -> bool:
        """Whether a site has anything to keep from round to round."""
        return bool(self.names) or method.remembers(local)

    def onto(self, packet: Packet, own: Weights | None) -> Packet:
        """An incoming packet with the site's own normalisation in place of the shared one."""
        if not self.names or own is None:
            return packet
        return Packet(
            packet.header, _Overlaid(packet.tensors, {p: k for p in packet.tensors if (k := self._key(p)) in own}, own)
        )

    def off(self, reply: Packet, order: Packet, before: Weights | None) -> tuple[Packet, Weights | None]:
        """An outgoing packet with the server's normalisation in place of the site's own, and the site's own."""
        if not self.names:
            return reply, None
        theirs = {self._key(path): path for path in order.tensors}
        local = {path: key for path in reply.tensors if (key := self._key(path)) is not None and key in theirs}
        # a phase that sends no model leaves the site's normalisation as it was
        alone = [path for path in reply.tensors if self._key(path) is not None and path not in local]
        if alone:  # fail closed: local normalisation must not be in this reply
            raise StudyError(f"this method would send '{alone[0]}', which local.batchnorm keeps at the site.")
        own = Weights({**(before or {}), **{key: reply.tensors[path] for path, key in local.items()}})
        tensors = {
            path: order.tensors[theirs[local[path]]] if path in local else tensor
            for path, tensor in reply.tensors.items()
        }
        return Packet(reply.header, tensors), own

    def _key(self, path: str) -> str | None:
        """The path without the site's own name, if its tensor stays."""
        *fields, name = path.split("/")
        return "/".join([f for f in fields if f != self.site] + [name]) if name in self.names else None


class _Overlaid(Mapping[str, Tensor]):
    """A packet's tensors with some replaced."""

    def __init__(self, under: Mapping[str, Tensor], keys: Mapping[str, str | None], own: Weights) -> None:
        self._under, self._keys, self._own = under, keys, own

    def __getitem__(self, path: str) -> Tensor:
        key = self._keys.get(path)
        return self._own[key] if key is not None else self._under[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._under)

    def __len__(self) -> int:
        return len(self._under)


def _norm_names(network: nn.Module, policy: str) -> list[str]:
    """By module type: the statistics of every BatchNorm, and with "local" its weight and bias too."""
    names = []
    for prefix, module in network.named_modules():
        if isinstance(module, _BatchNorm):
            parts = [name for name, _ in module.named_buffers()]
            if policy == "local":
                parts += [name for name, _ in module.named_parameters()]
            names += [f"{prefix}.{part}" for part in parts]
    if not names:
        raise StudyError(f"[local] batchnorm = '{policy}', but the network has no BatchNorm; use 'average'.")
    return names
