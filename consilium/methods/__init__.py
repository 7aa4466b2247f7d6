"""Every method, by the name a study gives it."""

from __future__ import annotations

from consilium.method import Method
from consilium.methods.fedavg import FedAvg
from consilium.methods.fedprox import FedProx
from consilium.methods.fedsm import FedSM
from consilium.methods.local import Local
from consilium.methods.pooled import Pooled
from consilium.methods.scaffold import Scaffold

METHODS: dict[str, type[Method]] = {
    "local": Local,
    "pooled": Pooled,
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "fedsm": FedSM,
}

ALIASES = {"separate": "local", "centralized": "pooled"}
