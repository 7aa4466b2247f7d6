"""Should an optimiser keep its state from round to round? Both ways by validation, on phantoms and on real volumes.

    python -m benchmarks.optimizer_state retina prostate --to trials
    python -m benchmarks.optimizer_state FOLDER --to trials      # of the Decathlon's hippocampus: images/ and labels/

Every method is trained both ways with the same settings. The score is the validation site mean at the round best on
validation; no test score is read. FedSM's global model is FedAvg's, bit by bit, so one run tells of both. A second call
trains nothing again; `--until 22:30` starts no run after that time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consilium import simulation
from consilium.data.phantoms import write_phantom
from consilium.data.site_folder import Case
from consilium.data.site_writing import write_federation_toml, write_site
from consilium.demo import CASES, SIZE
from consilium.reports.reading import read_run
from consilium.run_folder import RunFolder
from consilium.scores.means import summarise
from consilium.study import Study
from consilium.study_reading import make_study

METHODS = ("fedsm", "local", "pooled")
STATES = ("kept", "fresh")
UNET = {"network": "unet2d", "widths": [8, 16, 32, 64], "residual_units": 0}
ROUNDS = {"retina": 30, "hippocampus": 10, "prostate": 15}
PER_SITE = 16  # volumes of the hippocampus


@dataclass(frozen=True)
class Trial:
    """One run."""

    data: str
    method: str
    state: str
    seed: int
    lr: float

    def study(self, folder: Path) -> Study:
        """Its study; the federation must be in `folder`."""
        slices = {} if self.data == "retina" else {"slices": "axial"}
        size = [48, 48] if self.data == "hippocampus" else [64, 64]
        normalise = {"normalise": "zscore"} if self.data == "hippocampus" else {}
        return make_study(
            {
                "study": {"rounds": ROUNDS[self.data], "score_every": 5, "seed": self.seed, "firewall": "off"},
                "data": {"federation": str(folder)},
                "preprocess": {"size": size, **slices, **normalise},
                "task": UNET,
                "local": {"optimizer": "adam", "lr": self.lr, "batch_size": 8, "optimizer_state": self.state},
                "method": {"name": self.method, **({"selector_lr": 1e-2} if self.method == "fedsm" else {})},
            }
        )


def draw(data: str, source: Path | None, folder: Path, seed: int) -> None:
    """The federation of one seed, if it is not there."""
    if folder.exists():
        return
    if data == "retina":
        write_phantom("retina", folder, CASES, SIZE, seed)
    elif data == "prostate":
        write_phantom("prostate", folder, 90, 64, seed)
    else:
        assert source is not None
        cut_hippocampus(source, folder, seed)


def cut_hippocampus(source: Path, folder: Path, seed: int) -> None:
    """Four sites by how an image was stored, which tells where it comes from: bytes, and three ranges of numbers."""
    import nibabel
    import numpy as np

    sites: dict[str, list[Path]] = {"bytes": [], "low": [], "middle": [], "large": []}
    for path in sorted((source / "images").glob("*.nii.gz")):
        image: Any = nibabel.load(path)
        top = float(np.asarray(image.dataobj).max())
        small = "low" if top < 2000 else "middle"
        kind = "bytes" if image.get_data_dtype() == np.uint8 else "large" if top > 1e5 else small
        sites[kind].append(path)
    write_federation_toml(folder, "segmentation", ["anterior", "posterior"], 3, 1)
    for name, paths in sites.items():
        generator = np.random.default_rng([seed, len(paths)])
        paths = [paths[i] for i in sorted(generator.permutation(len(paths))[:PER_SITE])]
        order = generator.permutation(len(paths))
        splits = {int(place): _split(rank / len(paths)) for rank, place in enumerate(order)}
        cases = []
        for number, path in enumerate(paths):
            case = path.name.removesuffix(".nii.gz")
            links = [folder / name / part / path.name for part in ("images", "labels")]
            for link in links:
                link.parent.mkdir(parents=True, exist_ok=True)
                link.write_bytes((source / link.parent.name / path.name).read_bytes())
            cases.append(Case(case, case, splits[number], *links))
        write_site(folder, name, cases)


def _split(place: float) -> str:
    return "train" if place < 0.5 else "valid" if place < 0.75 else "test"


def levels(run: Path) -> dict[str, float]:
    """Validation site means by model, at the round best on validation; FedSM's global model is called FedAvg's."""
    view = read_run(run)
    assert view.headline is not None
    metric, label = view.headline.metric, view.headline.label
    found = summarise(view.best_rows, "valid")
    names = {view.headline.model: view.method, **({"global": "fedavg"} if view.parts else {})}
    return {name: found[model][metric][label]["site_mean"] for model, name in names.items()}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.optimizer_state", description=__doc__.split("\n")[0])
    parser.add_argument("data", nargs="+", help="retina, prostate, or the folder of the Decathlon's hippocampus")
    parser.add_argument("--to", type=Path, default=Path("trials"))
    parser.add_argument("--seed", type=int, action="append", help="default: 0, 1 and 2")
    parser.add_argument("--method", action="append", choices=METHODS, help="default: all")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--until", default="", help="HH:MM after which no further run is started", metavar="HH:MM")
    options = parser.parse_args()
    sources = {Path(name).name: Path(name) for name in options.data}
    trials = [
        Trial(data, method, state, seed, options.lr)
        for method in options.method or METHODS
        for seed in options.seed or (0, 1, 2)
        for data in sources
        for state in STATES
    ]
    found: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for trial in trials:
        folder = options.to / f"{trial.data}-s{trial.seed}"
        draw(trial.data, sources[trial.data], folder, trial.seed)
        study = trial.study(folder)
        run = RunFolder.path_of(study, options.to / "runs")
        if not (run / "summary.json").exists():
            if options.until and time.strftime("%H:%M") >= options.until:
                continue
            simulation.resume(run) if run.exists() else simulation.run(study, options.to / "runs")
        for name, level in levels(run).items():
            found.setdefault((trial.data, name), {}).setdefault(trial.state, {})[trial.seed] = level
            print(f"{trial.data} {name} seed {trial.seed} {trial.state}: {level:.4f}", flush=True)
    for line in table(found):
        print(line)
    return 0


def table(found: Mapping[tuple[str, str], Mapping[str, Mapping[int, float]]]) -> Iterator[str]:
    """By data and method: means over the seeds that were trained both ways, and the differences seed by seed."""
    yield f"{'data':12} {'method':8} {'kept':>7} {'fresh':>7}  kept - fresh, by seed"
    for (data, method), pair in found.items():
        both = sorted(pair.get("kept", {}).keys() & pair.get("fresh", {}).keys())
        if both:
            means = [statistics.fmean(pair[state][seed] for seed in both) for state in STATES]
            gaps = " ".join(f"{pair['kept'][seed] - pair['fresh'][seed]:+.4f}" for seed in both)
            yield f"{data:12} {method:8} {means[0]:7.4f} {means[1]:7.4f}  {gaps}"


if __name__ == "__main__":
    sys.exit(main())
