"""Every personal method against a naive loop of its own, with a real 2-D network on the same batches.

The loops follow the papers and `docs/methods`, in plain contiguous torch. Weights may differ by rounding: below a
thousandth of the way that they have gone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from consilium.learning.discriminant import symmetric
from consilium.methods.routers import GLOBAL
from consilium.toy_federation import PLAIN_SGD
from tests.replay import fedsm_loops as sm
from tests.replay import personal_loops as loops
from tests.replay.naive import Ended, Play, State, apart, combined, ended
from tests.replay.personal_loops import Models
from tests.toy import toy_study

SGD = {"optimizer": "sgd", "lr": 0.05, "momentum": 0.9, "schedule": "decay", "decay": 0.5}
ADAM = {"optimizer": "adam", "lr": 0.01}
FRESH = {"optimizer_state": "fresh"}
PLAIN = {**PLAIN_SGD, "lr": 0.1, "schedule": "decay", "decay": 0.5}

CLOSED = {"confidence": 0.5}
NETWORK = {"selector_lr": 0.01, "confidence": 0.5}
EXTRA = {"selector_lr": 0.01, "selector_rounds": 2}
MOREAU = {"strength": 2.0, "inner_lr": 0.05, "lr": 0.2, "inner_steps": 2, "server_mix": 0.7}
META = {"inner_lr": 0.05}
CURVED = {**META, "hessian": "free"}
RELATED = {"relation_lr": 0.05, "mu": 4.0, "scheduler_rounds": 2}

Case = tuple[str, dict[str, Any], dict[str, Any], Callable[[Play], Models]]
# a name: the method, its fields, how sites train, the loop
QUICK: dict[str, Case] = {
    "fedavg": ("fedavg", {}, ADAM, loops.fedavg),
    "fedavg, fresh": ("fedavg", {}, {**ADAM, **FRESH}, loops.fedavg),
    "fedprox": ("fedprox", {"mu": 2.0}, ADAM, loops.fedprox),
    "scaffold": ("scaffold", {}, PLAIN, loops.scaffold),
    "fedasam": ("fedasam", {"rho": 0.3}, SGD, loops.fedasam),
    "fedsm": ("fedsm", CLOSED, ADAM, sm.models_alone),
    "fedsm, synchronised": ("fedsm", {**NETWORK, "selector_training": "synchronised"}, ADAM, sm.fedsm),
    "fedsm, moments": ("fedsm", {**NETWORK, "selector_training": "moments"}, SGD, sm.fedsm),
    "fedsm-extra": ("fedsm-extra", EXTRA, ADAM, sm.fedsm_extra),
    "fedsm-ensemble": ("fedsm-ensemble", EXTRA, ADAM, sm.fedsm_ensemble),
    "fedavg-finetune": ("fedavg-finetune", {"finetune_epochs": 2, "finetune_lr": 0.02}, ADAM, loops.fedavg_finetune),
    "fedprox-finetune": ("fedprox-finetune", {"mu": 2.0}, SGD, partial(loops.fedprox, adapts=True)),
    "fedavg-local": ("fedavg-local", {}, SGD, loops.fedavg_local),
    "apfl": ("apfl", {"mix": 0.4}, ADAM, loops.apfl),
    "apfl, adaptive": (
        "apfl",
        {"mix": 0.4, "adaptive": True},
        {**SGD, "lr": 0.3, "schedule": "constant"},
        partial(loops.apfl, adaptive=True),
    ),
    "per-fedavg": ("per-fedavg", META, SGD, loops.per_fedavg),
    "per-fedavg, hessian": ("per-fedavg", CURVED, SGD, loops.per_fedavg),
    "pfedme": ("pfedme", MOREAU, {}, loops.pfedme),
    "apple": ("apple", RELATED, SGD, loops.apple),
    "fedamp": ("fedamp", {"sigma": 2.0, "step": 0.8, "strength": 0.5}, ADAM, loops.fedamp),
    "heurfedamp": ("heurfedamp", {"sigma": 500.0}, SGD, partial(loops.fedamp, heuristic=True)),
    "fedfomo": ("fedfomo", {}, ADAM, loops.fedfomo),
    "fedbn": ("fedbn", {}, ADAM, loops.fedbn),
    "local": ("local", {}, SGD, loops.local),
    "pooled": ("pooled", {}, ADAM, loops.local),
}
OTHERS: dict[str, Case] = {
    name: ("fedsm", {**CLOSED, "personal": name, "personal_fields": fields}, SGD, partial(sm.other_personal, loop=loop))
    for name, fields, loop in (
        ("finetune", {}, loops.fedavg_finetune),
        ("apfl", {"mix": 0.4}, loops.apfl),
        ("perfedavg", META, loops.per_fedavg),
        ("pfedme", MOREAU, loops.pfedme),
    )
}
RARE: dict[str, Case] = {
    "fedsm, paper": ("fedsm", {**NETWORK, "selector_training": "paper"}, ADAM, sm.fedsm),
}
STEPS = {"sgd": SGD, "adam": ADAM, "sgd, fresh": {**SGD, **FRESH}, "adam, fresh": {**ADAM, **FRESH}}
OWN_STEPS = ("scaffold", "pfedme")  # no optimiser of the study's
MORE: dict[str, Case] = {
    f"{name} ({how})": (method, fields, local, loop)
    for name, (method, fields, _, loop) in {**QUICK, **RARE}.items()
    if "," not in name or name.startswith(("fedsm", "apfl", "per-"))
    for how, local in STEPS.items()
    if method not in OWN_STEPS
}

VARIANTS: dict[str, dict[str, Any]] = {
    "epochs": {"local__epochs": 2},
    "decayed": {"local__weight_decay": 0.1},
    "clipped": {"local__clip": 0.1},
    "deep": {"task__norm": "instance", "task__widths": [4, 6, 8], "task__residual_units": 0},
    "batch": {"task__norm": "batch"},
}
WITHOUT = {  # which methods have no such variant, or no rule of their paper for it
    "decayed": OWN_STEPS,
    "clipped": (*OWN_STEPS, "apfl", "apple", "per-fedavg"),
    "batch": ("apfl", "apple", "per-fedavg", "pfedme"),
}
VARIED = [
    (variant, name)
    for variant in VARIANTS
    for name, (method, *_) in QUICK.items()
    if method not in WITHOUT.get(variant, ())
]


def replayed(case: Case, federation: Path, runs: Path, **changes: Any) -> dict[str, float]:
    """How far every model of a run is from that of the naive loop."""
    method, fields, local, loop = case
    tables = {f"local__{key}": value for key, value in local.items()}
    tables |= {f"method__{key}": value for key, value in fields.items()}
    late = method in ("fedsm-extra", "fedsm-ensemble")
    changes = {"task__norm": "group", "task__residual_units": 1, "study__rounds": 3 + late, **changes}
    if method == "per-fedavg":
        changes["local__batch_size"] = 2  # a step takes two batches or three
    if method != "pooled":
        changes["study__away"] = {"cid": [2, 4] if late else [2]}
    study = toy_study(federation, method, **tables, **changes)
    play = Play(study)
    run = ended(study, runs)
    return {name: apart(ours(run, name), model, start(play, name)) for name, model in loop(play).items()}


def ours(run: Ended, name: str) -> Mapping[str, Tensor]:
    """A model of the package by the name that the loops give it."""
    (server, memories), (kind, _, site) = run, name.partition(" of ")
    if not site:
        return getattr(server, {"global": "global_"}.get(kind, kind))
    if kind == "core":
        return server.cores[site]
    memory = memories.get(site)
    if kind == "p":
        return {"p": torch.tensor([share for _, share in sorted(memory.p.items())])}
    if kind == "mix":
        return {"mix": torch.tensor(memory.mix, dtype=torch.float64)}
    kept = [getattr(memory, alike) for alike in (kind, "local", "pooled") if hasattr(memory, alike)]
    return kept[0] if kept else server.personal[site]


def start(play: Play, name: str) -> State:
    """Where a model began."""
    kind, _, site = name.partition(" of ")
    if kind == "selector":
        late = play.study.method_name != "fedsm"
        return play.first("selector", [*([GLOBAL] if late else []), *play.sites])
    if kind == "core":
        return play.first(draw=list(play.sites).index(site))
    if kind == "p":
        return {"p": torch.tensor(list(play.n.values())) / sum(play.n.values())}
    if kind == "mix":
        return {"mix": torch.tensor(play.method.mix, dtype=torch.float64)}
    return combined((0.0 if kind == "c" else 1.0, play.first()))


@pytest.mark.parametrize("name", QUICK)
def test_a_method_is_its_naive_loop(name: str, federation: Path, tmp_path: Path) -> None:
    """Three sites, of which one is away in the second round; the server's last state and the sites' memories."""
    found = replayed(QUICK[name], federation, tmp_path)
    assert max(found.values()) < 1e-3, found


@pytest.mark.parametrize("gain", [1.0, pytest.param(0.0, marks=pytest.mark.slow)])
def test_the_selector_in_closed_form_and_its_threshold(gain: float, federation: Path, tmp_path: Path) -> None:
    study = toy_study(federation, "fedsm", method__needed_gain=gain, task__norm="group")
    play = Play(study)
    server, _ = ended(study, tmp_path)
    theirs = sm.closed_form(play, sm.models_alone(play))
    ours = server.discriminant
    assert (ours.shrinkage, ours.temperature) == (theirs.shrinkage, theirs.temperature)
    assert server.confidence == theirs.gamma
    assert ours.limits == pytest.approx(theirs.limits, rel=1e-3)
    for name, mean in theirs.means.items():
        torch.testing.assert_close(ours.means[name], mean, rtol=1e-4, atol=1e-6)
    within = symmetric(ours.covariance, len(theirs.within))
    assert float((within - theirs.within).norm()) < 1e-4 * float(theirs.within.norm())


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_personal_models_of_fedsm_by_another_method(name: str, federation: Path, tmp_path: Path) -> None:
    found = replayed(OTHERS[name], federation, tmp_path)
    assert max(found.values()) < 1e-3, found


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_with_every_optimiser(name: str, federation: Path, tmp_path: Path) -> None:
    found = replayed(MORE[name], federation, tmp_path)
    assert max(found.values()) < 1e-3, found


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "name"), VARIED)
def test_with_other_networks_and_steps(variant: str, name: str, federation: Path, tmp_path: Path) -> None:
    """Before a norm of each channel a shift has no gradient but rounding, which Adam would make a whole step of."""
    method, fields, local, loop = QUICK[name]
    if variant in ("deep", "batch") and method not in OWN_STEPS:
        local = SGD
    found = replayed((method, fields, local, loop), federation, tmp_path, **VARIANTS[variant])
    assert max(found.values()) < 1e-3, found
