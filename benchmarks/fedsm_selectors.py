"""FedSM's selectors compared: the closed form and the three trained networks, on phantoms, after few and many rounds.

    python benchmarks/fedsm_selectors.py train    --to DIR [--kind retina --seed 0]
    python benchmarks/fedsm_selectors.py evaluate --to DIR
    python benchmarks/fedsm_selectors.py cost     --to DIR
    python benchmarks/fedsm_selectors.py tables   --to DIR

The models do not depend on the selector, so one training per phantom and seed serves all: the global and the personal
models and the three selector networks learn on the same batches, as they would in runs of their own. The state after
20, 60 and 150 rounds is kept, each model at its best round so far on validation, as a run of that length keeps it
(the learning rate is constant). What is there is not made again, so the script may be stopped and started.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from consilium import packet_files, simulation
from consilium.batch import Batch
from consilium.data.phantoms import write_phantom
from consilium.federation.forecasting import forecast_study
from consilium.learning.fit import Job, fit
from consilium.method import Best, Valid
from consilium.methods.fedsm import FedSM
from consilium.methods.routing import SuperModel
from consilium.methods.selector import merged_selector, selector_job, selector_reply
from consilium.methods.softpull import pulled
from consilium.predictor import OneModel, Predictor
from consilium.site import Site
from consilium.site_opening import open_worker, site_facts
from consilium.study import Study
from consilium.study_reading import load_study
from consilium.timeline import timeline
from consilium.validation import members_of
from consilium.weights import mean

NETWORKS = ("synchronised", "moments", "paper")
STOPS, EVERY = (20, 60, 150), 5
KINDS = {"retina": (440, 64, 0.0), "alike": (440, 64, 0.25), "prostate": (60, 48, 0.0)}  # cases, pixels, shared cameras

STUDY = """
[study]
name = "{name}"
rounds = 150
seed = {seed}
[data]
federation = "{data}"
[preprocess]
size = [{pixels}, {pixels}]
{slices}
[task]
network = "unet2d"
widths = [8, 16, 32, 64]
residual_units = 0
[local]
optimizer = "adam"
lr = 1e-3
batch_size = 8
[method]
name = "fedsm"
"""


@dataclass(frozen=True)
class Setting:
    """One federation and seed."""

    kind: str
    seed: int
    to: Path

    @property
    def name(self) -> str:
        return f"{self.kind}-s{self.seed}"

    def study(self, training: str = "synchronised", *changes: str) -> Study:
        """The study, its phantom drawn if it is not there."""
        data = self.to / "data" / self.name
        cases, pixels, alike = KINDS[self.kind]
        if not data.exists():
            kind = "retina" if self.kind == "alike" else self.kind
            write_phantom(kind, data, cases, pixels, self.seed, alike=alike)
        slices = 'slices = "axial"' if self.kind == "prostate" else ""
        file = self.to / f"{self.name}.toml"
        text = STUDY.format(name=self.name, seed=self.seed, data=data, slices=slices, pixels=pixels)
        file.write_text(text, encoding="utf-8")
        return load_study(file, [f'method.selector_training="{training}"', *changes])

    def sites(self, study: Study) -> dict[str, Site]:
        federation = study.federation()
        names = members_of(study, federation)
        roster = {name: site_facts(study, federation, name)[0].card(name, i) for i, name in enumerate(names)}
        return {
            name: open_worker(study, federation, name, roster, self.to / "sites" / self.name / name).site
            for name in names
        }

    def state(self, training: str, stop: int) -> Path:
        return self.to / "states" / f"{self.name}-{training}-{stop}.safetensors"


# ------------------------------------------------------------------------------------------------ training


def train(setting: Setting) -> None:
    """All models and selectors of one setting; states are written at every stop."""
    if all(setting.state(training, stop).exists() for training in NETWORKS for stop in STOPS):
        return
    study = setting.study()
    sites = setting.sites(study)
    task, n = study.task, {name: site.card.n for name, site in sites.items()}
    methods = {training: FedSM(selector_training=training) for training in NETWORKS}
    roster = next(iter(sites.values())).roster
    servers: dict[str, Any] = {name: method.start(task, roster) for name, method in methods.items()}
    memories: dict[str, dict[str, Any]] = {name: {} for name in sites}
    best: dict[str, Best] = {}
    began = time.perf_counter()
    for _, round in timeline(methods["paper"], max(STOPS))[: max(STOPS)]:
        done = {}
        for name, site in sites.items():
            one = servers["synchronised"]
            jobs = {
                "global": Job(one.global_),
                "personal": Job(one.personal[name]),
            }
            for training in NETWORKS:
                jobs[training] = selector_job(servers[training].selector, site, training, 1e-3)
            done[name] = fit(site, jobs, round, memories[name])
            memories[name] = done[name].states
        global_ = mean({name: fits["global"].weights for name, fits in done.items()}, n)
        personal = pulled({name: fits["personal"].weights for name, fits in done.items()}, methods["paper"].pull)
        for training in methods:
            server = servers[training]
            sent = {
                name: selector_reply(training, fits[training], server.selector, server.selector_state, 1e-3)
                for name, fits in done.items()
            }
            selector, state = merged_selector(training, server.selector, server.selector_state, sent, n, 1e-3)
            servers[training] = replace(
                server, global_=global_, personal=personal, selector=selector, selector_state=state
            )
        if round.number % EVERY:
            continue
        models = of_models(servers["synchronised"], sites, round.number)
        for training, method in methods.items():
            valid = models | {"super:routed": Valid(routed(method, servers[training], sites, "valid"), round.number)}
            now = Best(servers[training], valid)
            best[training] = method.keep(best[training], now) if training in best else now
            if round.number in STOPS:
                setting.state(training, round.number).parent.mkdir(parents=True, exist_ok=True)
                packet_files.save(best[training].server, setting.state(training, round.number))
        if round.number % 10 == 0:
            seconds = time.perf_counter() - began
            print(f"{setting.name} round {round.number}: {seconds:.0f} s, " + ", ".join(
                f"{training} {best[training].valid['super:routed'].value:.2f}" for training in NETWORKS
            ) + f", global {best['paper'].valid['global:pooled'].value:.3f}", flush=True)  # fmt: skip


def scored(predictor: Predictor, site: Site, split: str) -> Iterator[float]:
    """The deciding score of every case: of a slice, or of a volume as one, as the task says."""
    for batch in site.data.whole(split, 16):
        output = predictor.answer(batch.images, bool(batch.volume)).output
        if batch.volume and site.task.decides == "volume":
            pairs = [(output.transpose(0, 1), batch.truth, 0)]
        else:
            pairs = [(output[i], batch.truth[i], i) for i in range(len(batch.cases))]
        for logits, truth, i in pairs:
            marks = site.task.score(logits, truth, False, batch.labels_of(i))
            values = [mark.value for mark in marks if mark.metric == site.task.headline]
            if values:
                yield statistics.fmean(values)


def of_models(server: Any, sites: Mapping[str, Site], number: int) -> dict[str, Valid]:
    """The validation scores by which the global and the personal models are kept."""
    pooled: list[float] = []
    found: dict[str, Valid] = {}
    for name, site in sites.items():
        pooled += scored(OneModel(site.task, server.global_), site, "valid")
        own = statistics.fmean(scored(OneModel(site.task, server.personal[name]), site, "valid"))
        found[f"personal/{name}"] = Valid(own, number)
    return {"global:pooled": Valid(statistics.fmean(pooled), number), **found}


def routed(method: FedSM, server: Any, sites: Mapping[str, Site], split: str) -> float:
    """The share of images (or slices, or volumes) whose most probable site is their own: mean over sites."""
    shares = []
    for name, site in sites.items():
        model = method.deploy(site.task, None, method.release(server, site.card))
        assert isinstance(model, SuperModel)
        right = []
        for batch in site.data.whole(split, 16):
            tops = model.routes(batch.images, bool(batch.volume)).chances.argmax(1).tolist()
            right += [model.classes[top] == name for top in tops[: decisions(model, batch)]]
        shares.append(statistics.fmean(right))
    return statistics.fmean(shares)


def decisions(model: SuperModel, batch: Batch) -> int:
    """How often the selector decides in a batch: once for a volume that is routed as a whole, else for every image."""
    return 1 if batch.volume and model.route == "volume" else len(batch.cases)


# ------------------------------------------------------------------------------------------------ evaluation


def evaluate(setting: Setting) -> None:
    """Every selector at every stop: the exchanges after training by FedSM's own verbs, then validation and test."""
    file = setting.to / "results" / f"{setting.name}.json"
    if file.exists():
        return
    study = setting.study()
    sites = setting.sites(study)
    rows = []
    for stop in STOPS:
        for training in ("discriminant", *NETWORKS):
            method = FedSM(selector_training=training)
            state = setting.state("synchronised" if training == "discriminant" else training, stop)
            server: Any = packet_files.load(state, FedSM.Server)
            began = time.perf_counter()
            for phase, round in timeline(method, stop):
                if not phase.counts:
                    replies = {
                        name: method.train(site, method.remember(site), method.send(server, site.card, round), round)[0]
                        for name, site in sites.items()
                    }
                    server = method.merge(server, replies, round)
            seconds = time.perf_counter() - began
            rows.append({"kind": setting.kind, "seed": setting.seed, "rounds": stop, "selector": training})
            rows[-1] |= {"gamma": server.confidence, "seconds_after": seconds}
            if server.discriminant:
                found = server.discriminant
                rows[-1] |= {"shrinkage": found.shrinkage, "temperature": found.temperature}
            for split in ("valid", "test"):
                rows[-1][split] = of_super(method, server, sites, split)
            print(json.dumps(rows[-1]), flush=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(rows, indent=1), encoding="utf-8")


def of_super(method: FedSM, server: Any, sites: Mapping[str, Site], split: str) -> dict[str, Any]:
    """Means over sites: routed right, found unlike all sites, and the scores of the super model and of its parts."""
    found: dict[str, list[float]] = defaultdict(list)
    for name, site in sites.items():
        model = method.deploy(site.task, None, method.release(server, site.card))
        assert isinstance(model, SuperModel)
        right, unlike = [], []
        for batch in site.data.whole(split, 16):
            routes = model.routes(batch.images, bool(batch.volume))
            for i in range(decisions(model, batch)):
                right.append(float(model.classes[int(routes.chances[i].argmax())] == name))
                unlike.append(float(bool(routes.outliers[i])))
        found["routed"].append(statistics.fmean(right))
        found["unlike"].append(statistics.fmean(unlike))
        parts = {"super": model, "global": model.fallback, "personal": model.personal[name]}
        for part, predictor in parts.items():
            found[part].append(statistics.fmean(scored(predictor, site, split)))
    return {key: statistics.fmean(values) for key, values in found.items()}


# ------------------------------------------------------------------------------------------------ cost and tables


def cost(setting: Setting) -> None:
    """Bytes of a whole run at one site, and seconds of twenty rounds, each selector in turn and all of it twice."""
    lines = []
    for training in ("discriminant", *NETWORKS):
        for network in ("vgg-small", "vgg11"):
            for stop in STOPS:
                study = setting.study(training, f"study.rounds={stop}", f'task.selector="{network}"')
                found = forecast_study(study)
                lines.append({"selector": training, "network": network, "rounds": stop, "bytes": found.up + found.down})
    seconds = defaultdict(list)
    for again in range(2):
        for training in ("discriminant", *NETWORKS):
            study = setting.study(training, "study.rounds=20", "study.score_every=20", f'study.name="t{again}"')
            done = simulation.run(study, setting.to / "runs", workers=2)
            seconds[training].append(done.summary["seconds"])
    facts = {"bytes": lines, "seconds": seconds}
    print(json.dumps(facts))
    (setting.to / "cost.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")


def tables(to: Path) -> None:
    """Means over seeds, as Markdown."""
    rows = [row for file in sorted((to / "results").glob("*.json")) for row in json.loads(file.read_text())]
    print("| phantom | rounds | selector | seeds | routed right | super | its personal models | its global model | "
          "worst super − global, validation | γ |\n|---|---|---|---|---|---|---|---|---|---|")  # fmt: skip
    for kind in KINDS:
        for stop in STOPS:
            for training in ("discriminant", *NETWORKS):
                same = [r for r in rows if (r["kind"], r["rounds"], r["selector"]) == (kind, stop, training)]
                if same:
                    means = {key: statistics.fmean(r["test"][key] for r in same) for key in same[0]["test"]}
                    gap = min(r["valid"]["super"] - r["valid"]["global"] for r in same)
                    gammas = ", ".join(f"{r['gamma']:g}" for r in same)
                    cells = [kind, stop, training, len(same), f"{means['routed']:.3f}"]
                    cells += [f"{means[part]:.4f}" for part in ("super", "personal", "global")]
                    print("| " + " | ".join(map(str, [*cells, f"{gap:+.4f}", gammas])) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("what", choices=["train", "evaluate", "cost", "tables"])
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--kind", choices=list(KINDS))
    parser.add_argument("--seed", type=int)
    given = parser.parse_args()
    torch.set_num_threads(1)
    place = given.to.absolute()
    place.mkdir(parents=True, exist_ok=True)
    if given.what == "tables":
        return tables(place)
    if given.what == "cost":
        return cost(Setting("retina", 0, place))
    for seed in (0, 1, 2) if given.seed is None else (given.seed,):
        for kind in KINDS if given.kind is None else (given.kind,):
            {"train": train, "evaluate": evaluate}[given.what](Setting(kind, seed, place))


if __name__ == "__main__":
    main()
