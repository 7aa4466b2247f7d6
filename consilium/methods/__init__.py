"""Every method, by the name a study gives it."""

from __future__ import annotations

from consilium.method import Method
from consilium.methods.apfl import APFL
from consilium.methods.apple import APPLE
from consilium.methods.cond_dec import CondDec
from consilium.methods.cps_pl import CPSPL
from consilium.methods.dod import DOD
from consilium.methods.fedalign_pl import FedAlignPL
from consilium.methods.fedamp import FedAMP
from consilium.methods.fedasam import FedASAM
from consilium.methods.fedasam_pl import FedASAMPL
from consilium.methods.fedavg import FedAvg
from consilium.methods.fedavg_finetune import FedAvgFinetune
from consilium.methods.fedavg_foreground import FedAvgForeground
from consilium.methods.fedavg_local import FedAvgLocal
from consilium.methods.fedavg_pl import FedAvgPL
from consilium.methods.fedcrld import FedCRLD
from consilium.methods.fedfomo import FedFomo
from consilium.methods.fedprox import FedProx
from consilium.methods.fedprox_finetune import FedProxFinetune
from consilium.methods.fedprox_pl import FedProxPL
from consilium.methods.fedsm import FedSM
from consilium.methods.fedsm_ensemble import FedSMEnsemble
from consilium.methods.fedsm_extra import FedSMExtra
from consilium.methods.heurfedamp import HeurFedAMP
from consilium.methods.local import LocalTraining
from consilium.methods.menu_net import MENUNet
from consilium.methods.moon_pl import MOONPL
from consilium.methods.ms_kd_pl import MSKDPL
from consilium.methods.partly_local import FedBN, MultiDecoder, MultiEncoder, MultiHead
from consilium.methods.per_fedavg import PerFedAvg
from consilium.methods.pfedme import PFedMe
from consilium.methods.pooled import Pooled
from consilium.methods.scaffold import Scaffold
from consilium.methods.solo import Solo
from consilium.methods.ufps import UFPS

METHODS: dict[str, type[Method]] = {
    "local": LocalTraining,
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
    "moon-pl": MOONPL,
    "fedalign-pl": FedAlignPL,
    "fedasam-pl": FedASAMPL,
    "cps-pl": CPSPL,
    "ms-kd-pl": MSKDPL,
    "ufps": UFPS,
    "fedavg-foreground": FedAvgForeground,
    "cond-dec": CondDec,
    "fedbn": FedBN,
    "multi-head": MultiHead,
    "multi-encoder": MultiEncoder,
    "multi-decoder": MultiDecoder,
    "dod": DOD,
    "fedcrld": FedCRLD,
    "menu-net": MENUNet,
}

ALIASES = {"separate": "local", "centralized": "pooled"}
