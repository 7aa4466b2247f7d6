"""The demo on built-in phantoms: six hospitals, four methods, a table, a report and some routed predictions."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from consilium import simulation
from consilium.data.phantoms import write_phantom
from consilium.data.site_folder import read_federation
from consilium.machine import default_workers
from consilium.prediction import Prediction, predict
from consilium.ready_studies import folder_of_studies
from consilium.reporting import write_report
from consilium.reports.comparing import compare
from consilium.reports.reading import read_run
from consilium.reports.tables import Comparison, show
from consilium.study_reading import load_study
from consilium.wires.processes import Pool

DEFAULT_ROUNDS = 100
CASES, SIZE = 440, 64
METHODS = ("pooled", "local", "fedavg", "fedsm")


class DemoWatcher(Protocol):
    def say(self, text: str) -> None: ...
    def show(self, event: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """The result of the demo."""

    folder: Path
    comparison: Comparison
    predictions: list[Prediction]

    def show(self) -> None:
        from rich.console import Console

        console = Console()
        show(self.comparison)
        console.print("A few test images through the super model, as a hospital would use it:")
        for p in self.predictions:
            said = f"  {'/'.join(Path(p.image).parts[-3:])} -> {p.model}: {p.why}"
            console.print(said, highlight=False, soft_wrap=True)
        console.print(f"\nReport: {self.folder / 'report.html'}   Runs: {self.folder / 'runs'}")


def run_demo(to: Path, rounds: int, seed: int, workers: int | None, watcher: DemoWatcher) -> Outcome:
    """Draw the hospitals, train four methods, compare and report; finished parts are skipped."""
    data = to / f"retina-s{seed}"
    if not data.exists():
        watcher.say(f"drawing {CASES} eye photographs at six hospitals in {data}")
        write_phantom("retina", data, CASES, SIZE, seed)
    changes = [f'data.federation="{data.resolve()}"', f"study.rounds={rounds}", f"study.seed={seed}"]
    studies = {name: load_study(folder_of_studies() / f"demo_{name}.toml", changes) for name in METHODS}
    with Pool(default_workers() if workers is None else max(1, workers)) as pool:
        # pooled training has one site and uses one process: local training uses the others meanwhile
        with ThreadPoolExecutor(2) as pair:
            watch = {"pooled": None, "local": watcher.show}
            both = [pair.submit(simulation.run, studies[n], to / "runs", pool=pool, watch=w) for n, w in watch.items()]
            results = [future.result() for future in both]
        results += [simulation.run(studies[n], to / "runs", pool=pool, watch=watcher.show) for n in ("fedavg", "fedsm")]
    folders = [result.folder for result in results]
    comparison = compare([read_run(folder) for folder in folders])
    sites = read_federation(data).sites.values()
    images = [next(case.image for case in site.cases if case.split == "test") for site in sites]
    predictions = predict(folders[-1], images, to / "predictions")
    write_report(folders, to / "report.html", "Six hospitals, four ways to train")
    return Outcome(to, comparison, predictions)
