"""Starts a network from the weights of an earlier run, a package or a safetensors file."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from torch import Tensor

from consilium.errors import StudyError

LEAST = 0.5  # the least share of matching tensors; below, it is another network
_PREFERRED = ("", "global/", "model/")  # of several models in a file, the shared one is preferred


@lru_cache(maxsize=2)
def read_tensors(path: str) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, or of the best state of a run folder or the only model of a package."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    place = Path(path)
    file = place
    if place.is_dir():
        named = [place / "best.safetensors", *sorted(place.rglob("*.safetensors"))]
        found = [one for one in named if one.is_file()]
        if not found:
            raise StudyError(
                f"[task] initial = {path!r}: the folder holds no .safetensors; name a finished run or a file."
            )
        file = found[0]
    if file.suffix != ".safetensors":
        raise StudyError(f"[task] initial = {path!r}: weights are read from .safetensors files only.")
    try:
        tensors: dict[str, Tensor] = load_file(file)
    except FileNotFoundError:
        raise StudyError(f"[task] initial = {path!r}: there is no such file.") from None
    except (OSError, SafetensorError) as error:
        raise StudyError(f"[task] initial = {path!r} cannot be read ({error}); copy it again.") from error
    return tensors


def started(own: Mapping[str, Tensor], path: str) -> dict[str, Tensor]:
    """A network's tensors with those of a file in their place, where name and shape are the same.

    Names may begin with the name of a model in the file ("global/…") and lack the "net." of a padded network. Other
    outputs keep the seeded start, so a network for other labels can begin from it.
    """
    tensors = read_tensors(path)
    best: dict[str, Tensor] = {}
    for prefix in _prefixes(own, tensors):
        found = {
            name: t for name in own if (t := _named(tensors, prefix, name)) is not None and t.shape == own[name].shape
        }
        if len(found) > len(best):
            best = found
    if len(best) < LEAST * len(own):
        raise StudyError(
            f"[task] initial = {path!r} holds {len(best)} of the network's {len(own)} tensors; name weights of the "
            "same network with the same widths."
        )
    return {name: best[name].to(tensor.dtype).clone() if name in best else tensor for name, tensor in own.items()}


def _prefixes(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> list[str]:
    first = next(iter(own))
    found = {
        name.removesuffix(end) for name in tensors for end in (first, first.removeprefix("net.")) if name.endswith(end)
    }
    return sorted(found, key=lambda prefix: (prefix not in _PREFERRED, prefix))


def _named(tensors: Mapping[str, Tensor], prefix: str, name: str) -> Tensor | None:
    found = tensors.get(prefix + name)
    return tensors.get(prefix + name.removeprefix("net.")) if found is None else found
