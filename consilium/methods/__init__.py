"""Every method, by the name a study gives it."""

from __future__ import annotations

from consilium.method import Method
from consilium.methods.apfl import APFL
from consilium.methods.apple import APPLE
from consilium.methods.fedamp import FedAMP
from consilium.methods.fedasam import FedASAM
from consilium.methods.fedasam_pl import FedASAMPL
from consilium.methods.fedavg import FedAvg
from consilium.methods.fedavg_finetune import FedAvgFinetune
from consilium.methods.fedavg_local import FedAvgLocal
from consilium.methods.fedavg_pl import FedAvgPL
from consilium.methods.fedfomo import FedFomo
from consilium.methods.fedprox import FedProx
from consilium.methods.fedprox_finetune import FedProxFinetune
from consilium.methods.fedprox_pl import FedProxPL
from consilium.methods.fedsm import FedSM
from consilium.methods.fedsm_extra import FedSMEnsemble, FedSMExtra
from consilium.methods.heurfedamp import HeurFedAMP
from consilium.methods.local import Local
from consilium.methods.per_fedavg import PerFedAvg
from consilium.methods.pfedme import PFedMe
from consilium.methods.pooled import Pooled
from consilium.methods.scaffold import Scaffold
from consilium.methods.solo import Solo
from consilium.methods.ufps import UFPS

METHODS: dict[str, type[Method]] = {
    "local": Local,
    "pooled": Pooled,
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "fedasam": FedASAM,
    "fedsm": FedSM,
    "fedsm-extra": FedSMExtra,
    "fedsm-ensemble": FedSMEnsemble,
    "fedavg-finetune": FedAvgFinetune,
    "fedprox-finetune": FedProxFinetune,
    "fedavg-local": FedAvgLocal,
    "apfl": APFL,
    "per-fedavg": PerFedAvg,
    "pfedme": PFedMe,
    "apple": APPLE,
    "fedamp": FedAMP,
    "heurfedamp": HeurFedAMP,
    "fedfomo": FedFomo,
    "solo": Solo,
    "fedavg-pl": FedAvgPL,
    "fedprox-pl": FedProxPL,
    "fedasam-pl": FedASAMPL,
    "ufps": UFPS,
}

ALIASES = {"separate": "local", "centralized": "pooled"}
