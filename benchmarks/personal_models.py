"""What separates FedSM's personal models from pooled training: λ, the optimiser's state, the shares of the average.

    python -m benchmarks.personal_models alike --to trials
    python -m benchmarks.personal_models FOLDER --to trials      # of the Decathlon's hippocampus: images/ and labels/

`alike` is the retina phantom whose sites share cameras. Every row is one run; the selector is the closed form, and one
row has a network instead. Scores are Dice, site means, of each model at its own best round on validation; test scores
chose nothing. A second call trains nothing again; `--until "17 01:05"` (day and time) starts no run after that.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.optimizer_state import UNET, cut_hippocampus
from consilium import simulation
from consilium.data.phantoms import write_phantom
from consilium.demo import CASES, SIZE
from consilium.reports.reading import read_run
from consilium.run_folder import RunFolder
from consilium.scores.means import summarise
from consilium.study import Study
from consilium.study_reading import make_study

ROUNDS = {"alike": 60, "hippocampus": 30}
FEDSM = {"name": "fedsm", "selector_training": "discriminant"}
FINETUNED = {**FEDSM, "personal": "finetune", "personal_fields": {"finetune_epochs": 5}}
ROWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # [method] and [local]
    "FedSM, λ 0.7": (FEDSM, {}),
    "pooled (bound)": ({"name": "pooled"}, {}),
    "each site alone": ({"name": "local"}, {}),
    "FedSM, λ 0.7, selector network": ({"name": "fedsm", "selector_lr": 1e-2}, {}),
    "FedSM, λ 0.9": ({**FEDSM, "pull": 0.9}, {}),
    "FedSM, λ 0.5": ({**FEDSM, "pull": 0.5}, {}),
    "FedSM, λ 0.7, fresh optimiser": (FEDSM, {"optimizer_state": "fresh"}),
    "FedSM, λ 0.7, uniform shares": ({**FEDSM, "shares": "uniform"}, {}),
    "FedSM, global model fine-tuned": (FINETUNED, {}),
}
PARTS = ("super", "personal", "global", "pooled", "local")


def study_of(data: str, folder: Path, seed: int, row: str) -> Study:
    """One row's study; the federation must be in `folder`."""
    method, local = ROWS[row]
    hippocampus = data == "hippocampus"
    return make_study(
        {
            "study": {"rounds": ROUNDS[data], "score_every": 5, "seed": seed, "firewall": "off"},
            "data": {"federation": str(folder)},
            "preprocess": {"size": [48, 48], "slices": "axial", "normalise": "zscore"}
            if hippocampus
            else {"size": [SIZE, SIZE]},
            "task": UNET,
            "local": {"optimizer": "adam", "lr": 1e-3, "batch_size": 8, **local},
            "method": method,
        }
    )


def draw(data: str, source: Path, folder: Path, seed: int) -> None:
    """The federation of one seed, if it is not there."""
    if not folder.exists():
        if data == "alike":
            write_phantom("retina", folder, CASES, SIZE, seed, alike=0.25)
        else:
            cut_hippocampus(source, folder, seed)


def levels(run: Path) -> dict[str, tuple[float, float]]:
    """Validation and test site means by model, and the share of images routed right."""
    view = read_run(run)
    assert view.headline is not None
    metric, label = view.headline.metric, view.headline.label
    valid, test = (summarise(view.best_rows, split) for split in ("valid", "test"))
    found = {m: (valid[m][metric][label]["site_mean"], test[m][metric][label]["site_mean"]) for m in PARTS if m in test}
    if "routed" in test.get("super", {}):
        found["routed"] = (valid["super"]["routed"][""]["site_mean"], test["super"]["routed"][""]["site_mean"])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.personal_models", description=__doc__.split("\n")[0])
    parser.add_argument("data", nargs="+", help="alike, or the folder of the Decathlon's hippocampus")
    parser.add_argument("--to", type=Path, default=Path("trials"))
    parser.add_argument("--seed", type=int, action="append", help="default: 0, 1 and 2")
    parser.add_argument("--row", action="append", type=int, help="only these rows, counted from 1")
    parser.add_argument("--until", default="", help="day and time after which no further run is started")
    options = parser.parse_args()
    rows = [name for i, name in enumerate(ROWS, start=1) if not options.row or i in options.row]
    found: dict[tuple[str, str], dict[int, dict[str, tuple[float, float]]]] = {}
    for source in map(Path, options.data):
        data = source.name
        for row in rows:
            for seed in options.seed or (0, 1, 2):
                folder = options.to.absolute() / f"{data}-s{seed}"
                draw(data, source, folder, seed)
                study = study_of(data, folder, seed, row)
                run = RunFolder.path_of(study, options.to / "runs")
                if not (run / "summary.json").exists():
                    if options.until and time.strftime("%d %H:%M") >= options.until:
                        continue
                    simulation.resume(run) if run.exists() else simulation.run(study, options.to / "runs")
                found.setdefault((data, row), {})[seed] = levels(run)
                told = ", ".join(f"{m} {v:.4f} / {t:.4f}" for m, (v, t) in found[data, row][seed].items())
                print(f"{data}, {row}, seed {seed} (validation / test): {told}", flush=True)
    for (data, row), seeds in found.items():
        means = []
        for part in (*PARTS, "routed"):
            values = [one[part] for one in seeds.values() if part in one]
            if values:
                valid, test = (statistics.fmean(value[i] for value in values) for i in (0, 1))
                means.append(f"{part} {valid:.4f} / {test:.4f}")
        print(f"{data:12} {row:32} seeds {','.join(map(str, seeds))}: {', '.join(means)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
