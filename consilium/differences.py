"""What has changed of a tensor since a version that the receiver holds.

Bit patterns are whole numbers, so their difference is exact whatever they stand for. Numbers that moved a little have
patterns close to each other, and small differences pack well. A message names the version by its content, and both
ends hash what they hold before they use it: another version never gives wrong bits, it is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from consilium.tree import PacketError

Bytes = np.ndarray[Any, Any]  # uint8, in a row
_PATTERNS = {1: (np.uint8, np.int8), 2: (np.uint16, np.int16), 4: (np.uint32, np.int32), 8: (np.uint64, np.int64)}


class Version(NamedTuple):
    """A tensor that the receiver holds, and the name of its content."""

    name: str
    tensor: Tensor


def content_name(tensor: Tensor) -> str:
    """A digest of a tensor's type, shape and bits."""
    found = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    found.update(bytes_of(tensor).data)
    return found.hexdigest()[:32]


def bytes_of(tensor: Tensor) -> Bytes:
    """The bits of a tensor; a view of them where that is possible."""
    found: Bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return found


def change(tensor: Tensor, travels_as: torch.dtype, version: Version) -> Bytes | None:
    """The difference to a version, in the type that travels; None if there is none that the receiver could undo."""
    old = version.tensor
    if (old.dtype, old.shape) != (tensor.dtype, tensor.shape) or not tensor.numel():
        return None
    narrow = old.to(travels_as)
    if narrow is not old and not torch.equal(narrow.to(old.dtype), old):  # what is rounded or not a number may differ
        return None
    if content_name(old) != version.name:  # someone has written to it
        return None
    new, base = (_patterns(bytes_of(t), travels_as) for t in (tensor.to(travels_as), narrow))
    moved = new - base  # modulo 2^bits
    signs = (moved.view(_PATTERNS[travels_as.itemsize][1]) >> (8 * travels_as.itemsize - 1)).view(moved.dtype)
    folded: Bytes = (moved << 1) ^ signs  # −1 is 1 and 1 is 2: small steps down are small numbers too
    return folded.view(np.uint8)


def undone(moved: Bytes, travelled_as: torch.dtype, shape: list[int], kind: torch.dtype, old: Tensor | None) -> Bytes:
    """The bits that `change` was given; `old` is what is held under the name that the message says."""
    if old is None or old.dtype != kind or list(old.shape) != shape:
        raise PacketError("a packed tensor is a change of a version that is not held here")
    folded = _patterns(moved, travelled_as)
    back = (folded >> 1) ^ (~(folded & 1) + 1)
    found: Bytes = back + _patterns(bytes_of(old.to(travelled_as)), travelled_as)
    return found.view(np.uint8)


def held_as(name: object, held: Mapping[str, Tensor]) -> Tensor | None:
    """The tensor of this content, if it is held and still has that content."""
    found = held.get(name) if isinstance(name, str) else None
    return found if found is not None and content_name(found) == name else None


def _patterns(plain: Bytes, kind: torch.dtype) -> Bytes:
    return np.ascontiguousarray(plain).view(_PATTERNS[kind.itemsize][0])
