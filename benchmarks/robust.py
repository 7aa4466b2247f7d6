"""Attack × defence × method: what the firewall and the standard rules do to the same lies and to honest odd sites.

    python -m benchmarks.robust --to DIR [--method fedavg --method fedsm] [--seed 0]

Prostate phantoms, which no threshold of the firewall was set or revised on: six sites whose scanners differ. One site
(the largest) lies from the sixth round on, in the last attack from the first. A cell is the test Dice of the last
state, the site mean over the *other* sites (under FedSM of their personal models); the last line has the Dice of the
oddest honest site while nobody lies.
What is there is not run again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from consilium.data.phantoms import write_phantom
from consilium.run_folder import RunFolder
from consilium.study import Study
from consilium.study_reading import make_study
from tests.privacy.liars import LIES, Lie, run_lying, scale

ROUNDS, HONEST = 10, 5
LIAR = "prostatex"
TRUSTED = "msd"  # of FLTrust: an honest site, chosen by its name before any run
LOCAL = {"scaffold": {"optimizer": "sgd", "momentum": 0.0, "lr": 0.5}}  # its equations are of plain steps
MODEL = {"fedsm": "personal"}  # its global model is FedAvg's
ATTACKS: dict[str, tuple[Lie | None, int]] = {  # and how many honest rounds come before it
    "nobody lies": (None, HONEST),
    "scaled by 10": (LIES["scaled by 10"], HONEST),
    "flipped": (LIES["flipped"], HONEST),
    "flipped, times 5": (scale(-5.0), HONEST),
    "negated": (LIES["negated"], HONEST),
    "shifted by 0.1": (LIES["shifted by 0.1"], HONEST),
    "replayed": (LIES["replayed"], HONEST),
    "flipped from the first round on": (LIES["flipped"], 0),
}
DEFENCES: dict[str, dict[str, Any]] = {
    "mean": {"firewall": "off"},
    "firewall": {"firewall": "refuse"},
    "norm-bounding": {"firewall": "off", "aggregation": "norm-bounding"},
    "median": {"firewall": "off", "aggregation": "median"},
    "trimmed-mean": {"firewall": "off", "aggregation": "trimmed-mean"},
    "krum": {"firewall": "off", "aggregation": "krum"},
    "multi-krum": {"firewall": "off", "aggregation": "multi-krum"},
    "centred-clipping": {"firewall": "off", "aggregation": "centred-clipping"},
    "fltrust": {"firewall": "off", "aggregation": {"rule": "fltrust", "trusted": TRUSTED}},
    "firewall + trimmed-mean": {"firewall": "refuse", "aggregation": "trimmed-mean"},
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.robust", description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, required=True, help="a folder for data, runs and cells.json")
    parser.add_argument("--method", action="append", help="default: fedavg")
    parser.add_argument("--attack", action="append", choices=list(ATTACKS), help="default: all")
    parser.add_argument("--defence", action="append", choices=list(DEFENCES), help="default: all")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    data = prostate(options.to, options.seed)
    path = options.to / "cells.json"
    cells: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for method in options.method or ["fedavg"]:
        for attack in options.attack or ATTACKS:
            lie, honest = ATTACKS[attack]
            for defence in options.defence or DEFENCES:
                how = DEFENCES[defence]
                key = f"{method}|{options.seed}|{attack}|{defence}"
                if key not in cells:
                    cells[key] = _cell(method, lie, honest, how, data, options.to / "runs" / key, options.seed)
                    path.write_text(json.dumps(cells, indent=1))
                    print(key, cells[key], flush=True)
        print(_table(cells, method, options.seed))


def prostate(to: Path, seed: int) -> Path:
    """The federation; drawn where it is not there."""
    data = to / f"prostate-s{seed}"
    if not data.exists():
        write_phantom("prostate", data, cases=60, size=32, seed=seed)
    return data


def study_of(method: str, data: Path, seed: int, how: Mapping[str, Any]) -> Study:
    """The study that a defence is tried in."""
    return make_study(
        {
            "study": {"rounds": ROUNDS, "score_every": ROUNDS, "seed": seed, **how},
            "data": {"federation": str(data)},
            "preprocess": {"orientation": "LPS", "slices": "axial", "size": [32, 32]},
            "task": {"network": "unet2d", "widths": [8, 16, 32], "residual_units": 0},
            "local": {"batch_size": 8, **LOCAL.get(method, {"optimizer": "adam", "lr": 3e-3})},
            "method": {"name": method, **({"confidence": 1.0} if method == "fedsm" else {})},
        }
    )


def _cell(
    method: str, lie: Lie | None, honest: int, how: Mapping[str, Any], data: Path, runs: Path, seed: int
) -> dict[str, Any]:
    study = study_of(method, data, seed, how)
    lies = dict.fromkeys(range(honest + 1, ROUNDS + 1), lie) if lie is not None else {}
    folder = run_lying(study, runs, LIAR, lies)
    sites = folder.summary()["last"]["scores"][MODEL.get(method, "global")]["dice"]["mean"]["sites"]
    others = {site: value for site, value in sites.items() if site != LIAR}
    return {"dice": sum(others.values()) / len(others), "least": min(others.values()), **_refusals(folder)}


def _refusals(folder: RunFolder) -> dict[str, int]:
    """How many updates the firewall refused, of the liar and of honest sites."""
    refused = [event["site"] for event in folder.events() if event["event"] == "refused"]
    return {"liar": refused.count(LIAR), "honest": len(refused) - refused.count(LIAR)}


def _table(cells: Mapping[str, Any], method: str, seed: int) -> str:
    """Of what has been run."""

    def line(said: str, attack: str, figure: str) -> str:
        row = [cells.get(f"{method}|{seed}|{attack}|{defence}") for defence in DEFENCES]
        return f"| {said} | " + " | ".join(f"{cell[figure]:.3f}" if cell else "" for cell in row) + " |"

    lines = [f"| {method} | " + " | ".join(DEFENCES) + " |", "|---|" + "---|" * len(DEFENCES)]
    lines += [line(attack, attack, "dice") for attack in ATTACKS]
    return "\n".join([*lines, line("nobody lies, the oddest site", "nobody lies", "least")])


if __name__ == "__main__":
    main()
