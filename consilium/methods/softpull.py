"""SoftPull: the server moves every site's model towards the mean of the others (FedSM, equation 11)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from torch import Tensor

from consilium.site import Roster
from consilium.weights import HELD, SMALL, Computed, SiteName, Weights, sum_of_tensors


def weak_pull(pull: float, roster: Roster) -> list[str]:
    """The warning that λ is below 1/K."""
    if pull >= 1 / len(roster):
        return []
    return [
        f"pull = {pull} is below 1/K = {1 / len(roster):.3f}: the other sites then weigh more in a personal model than "
        "its own site."
    ]


def pulled(personal: Mapping[SiteName, Weights], pull: float) -> dict[SiteName, Weights]:
    """SoftPull, equation 11: w_k ← λ w_k + (1 − λ)/(K − 1) Σ_{j≠k} w_j; a single model stays as it is.

    Models that are large together are computed when they are read, so that a server needs memory for one, not for K.

    >>> pulled({k: Weights({"w": torch.tensor(x)}) for k, x in zip("abc", (1.0, 2.0, 6.0))}, 0.7)["a"]["w"].item()
    1.899999976158142
    """
    if len(personal) == 1:
        return dict(personal)
    other = (1 - pull) / (len(personal) - 1)
    names = sorted(personal)
    held: dict[SiteName, dict[str, Tensor]] = {name: {} for name in names}
    sums: dict[str, Tensor] = {}  # of tensors that are computed when they are read
    size = 0
    for key in personal[names[0]]:  # tensor by tensor, so that each model is read once
        tensors = [personal[name][key] for name in names]
        size += sum(tensor.nbytes for tensor in tensors)
        if not tensors[0].is_floating_point():
            all_of_them = None
        elif size > HELD:
            sums[key] = sum_of_tensors(tensors)
            _forget(personal.values(), key, tensors[0])
            continue
        else:
            all_of_them = sum_of_tensors(tensors)
        for name, own in zip(names, tensors):
            held[name][key] = own if all_of_them is None else own * (pull - other) + all_of_them * other

    def tensor(name: SiteName, key: str) -> Tensor:
        if key not in sums:
            return held[name][key]
        own = personal[name][key]
        new = own * (pull - other) + sums[key] * other
        _forget([personal[name]], key, own)
        return new

    if not sums:
        return {name: Weights.over(tensors) for name, tensors in held.items()}
    return {name: Weights.over(Computed(personal[name], partial(tensor, name))) for name in names}


def _forget(models: Iterable[Weights], key: str, like: Tensor) -> None:
    """Free the memory of a large tensor of models that lie in files."""
    if like.nbytes >= SMALL:
        for model in models:
            model.forget(key)
