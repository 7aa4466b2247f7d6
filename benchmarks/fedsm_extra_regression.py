"""FedSM-extra's selector in closed form, tried: a ridge regression of the models' losses on the encoder's features.

    python -m benchmarks.fedsm_selectors train --to DIR [--kind retina --seed 0]     # the models
    python -m benchmarks.fedsm_extra_regression --to DIR [--kind retina --seed 0]

FedSM-extra asks which model has the least loss on an image. Sites could send XᵀX and XᵀY of their training images, with
X the features that the discriminant uses and Y the losses of the K + 1 models; both are sums. The strength of the ridge
is the one with the best validation score, again a sum. This is held against the trained selector, after 20 of its
rounds (a third of 60) and after 60, at two learning rates, on the same fixed models: those after 60 rounds of training.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.fedsm_selectors import KINDS, Setting
from consilium import packet_files
from consilium.methods.fedsm import FedSM
from consilium.methods.fedsm_extra import FedSMExtra
from consilium.methods.routers import GLOBAL, NetworkRouter
from consilium.methods.selector import Models, outputs_of
from consilium.site import Site
from consilium.timeline import timeline

STOP = 60
RIDGES = tuple(10.0**i for i in range(-4, 4))
TRAINED = {"trained, 20 rounds, lr 1e-3": (20, 1e-3), "trained, 20 rounds, lr 1e-2": (20, 1e-2),
           "trained, 60 rounds, lr 1e-2": (60, 1e-2)}  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """The cases of one split at one site: what is routed as one (an image, or a volume) is one row."""

    rows: Tensor  # (images, features): every slice of a volume
    losses: Tensor  # (images, models)
    routed: Tensor  # (cases, features): of a volume the mean over its slices
    scores: Tensor  # (cases, models)
    networks: tuple[Tensor, ...]  # the images of every case


def look(site: Site, models: Models, split: str) -> Seen:
    """Features, losses and scores of every case by every model."""
    rows, losses, routed, scores, images = [], [], [], [], []
    for batch in site.data.whole(split, 16):
        features = site.task.features(models.global_, batch.images)
        outputs = outputs_of(models, site.task, batch.images)
        rows.append(features)
        for i in range(len(batch.cases)):
            losses.append([float(site.task.loss(output[i : i + 1], batch.only(i))) for output in outputs])
        if batch.volume:
            parts = [(features.mean(0), batch.images, batch.truth, [o.transpose(0, 1) for o in outputs], 0)]
        else:
            parts = [
                (features[i], batch.images[i : i + 1], batch.truth[i], [o[i] for o in outputs], i)
                for i in range(len(batch.cases))
            ]
        for feature, image, truth, logits, i in parts:
            found = [score(site, one, truth, batch.labels_of(i)) for one in logits]
            if None not in found:
                routed.append(feature)
                scores.append(found)
                images.append(image)
    return Seen(torch.cat(rows), torch.tensor(losses).double(), torch.stack(routed), torch.tensor(scores).double(),
                tuple(images))  # fmt: skip


def score(site: Site, logits: Tensor, truth: Tensor, labels: Any) -> float | None:
    marks = site.task.score(logits, truth, False, labels)
    values = [mark.value for mark in marks if mark.metric == site.task.headline]
    return statistics.fmean(values) if values else None


@dataclass(frozen=True)
class Ridge:
    """Predicted losses of the models, from sums over all sites' training images."""

    mean: Tensor
    scale: Tensor
    centre: Tensor  # the losses' means
    weights: Tensor  # (features, models)

    def chosen(self, features: Tensor) -> Tensor:
        """The model with the least predicted loss, of the first of equals the global one."""
        return ((features - self.mean) / self.scale @ self.weights + self.centre).argmin(1)


def ridge(sites: Sequence[Seen], strength: float) -> Ridge:
    """In closed form; everything it needs of a site is a sum: n, Σx, Σy, XᵀX, XᵀY."""
    n = sum(len(one.rows) for one in sites)
    x = torch.stack([one.rows.sum(0) for one in sites]).sum(0) / n
    y = torch.stack([one.losses.sum(0) for one in sites]).sum(0) / n
    xx = torch.stack([one.rows.T @ one.rows for one in sites]).sum(0) - n * torch.outer(x, x)
    xy = torch.stack([one.rows.T @ one.losses for one in sites]).sum(0) - n * torch.outer(x, y)
    scale = (xx.diagonal() / n).clamp_min(1e-12).sqrt()
    gram = xx / torch.outer(scale, scale) + strength * n * torch.eye(len(scale), dtype=torch.float64)
    return Ridge(x, scale, y, torch.linalg.solve(gram, xy / scale[:, None]))


def site_mean(choices: Mapping[str, Tensor], seen: Mapping[str, Seen]) -> float:
    """The site mean of the scores of the chosen models."""
    return statistics.fmean(
        float(seen[name].scores.gather(1, choice[:, None]).mean()) for name, choice in choices.items()
    )


def trained(sites: Mapping[str, Site], models: Models, rounds: int, lr: float) -> NetworkRouter:
    """FedSM-extra's own selector phase, from these models."""
    method = FedSMExtra(selector_rounds=rounds, selector_lr=lr)
    task, roster = next(iter(sites.values())).task, next(iter(sites.values())).roster
    server: Any = replace(method.start(task, roster), global_=models.global_, personal=models.personal)
    memories: dict[str, Any] = {name: method.remember(site) for name, site in sites.items()}
    for phase, round in timeline(method, rounds + 1):
        if phase.name == "selector":
            replies = {}
            for name, site in sites.items():
                order = method.send(server, site.card, round)
                replies[name], memories[name] = method.train(site, memories[name], order, round)
            server = method.merge(server, replies, round)
    return NetworkRouter(task, server.selector, [GLOBAL, *models.personal])


def by_network(router: NetworkRouter, seen: Seen) -> Tensor:
    """The class of every case; of a volume its slices' mean probabilities decide, as in use."""
    tops = [router.routes(images, len(images) > 1).chances[0].argmax() for images in seen.networks]
    return torch.stack(tops)


def compare(setting: Setting, changes: Sequence[str]) -> dict[str, dict[str, float]]:
    """Validation and test site means of every way to choose, on one federation and seed."""
    study = setting.study("synchronised", *changes)
    sites = setting.sites(study)
    server: Any = packet_files.load(setting.state("synchronised", STOP), FedSM.Server)
    models = Models(server.global_, {name: server.personal[name] for name in sites})
    seen = {s: {name: look(site, models, s) for name, site in sites.items()} for s in ("train", "valid", "test")}
    fits = {strength: ridge(list(seen["train"].values()), strength) for strength in RIDGES}

    def by_ridge(fit: Ridge, split: str) -> float:
        return site_mean({name: fit.chosen(one.routed) for name, one in seen[split].items()}, seen[split])

    best = max(RIDGES, key=lambda strength: by_ridge(fits[strength], "valid"))
    found = {"regression": {split: by_ridge(fits[best], split) for split in ("valid", "test")} | {"ridge": best}}
    names = list(sites)
    fixed: dict[str, Callable[[str, Seen], Tensor]] = {
        "global model": lambda name, one: torch.zeros(len(one.scores), dtype=torch.long),
        "personal model at home": lambda name, one: torch.full((len(one.scores),), 1 + names.index(name)),
        "best model of every case (oracle)": lambda name, one: one.scores.argmax(1),
    }
    for words, choose in fixed.items():
        found[words] = {
            split: site_mean({name: choose(name, one) for name, one in seen[split].items()}, seen[split])
            for split in ("valid", "test")
        }
    for words, (rounds, lr) in TRAINED.items():
        router = trained(sites, models, rounds, lr)
        found[words] = {
            split: site_mean({name: by_network(router, one) for name, one in seen[split].items()}, seen[split])
            for split in ("valid", "test")
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--kind", choices=list(KINDS), action="append")
    parser.add_argument("--seed", type=int, action="append")
    parser.add_argument("--set", action="append", default=[], help="a change of the study, as in `consilium run`")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for kind in given.kind or KINDS:
        every = []
        for seed in given.seed or (0, 1, 2):
            every.append(compare(Setting(kind, seed, given.to.absolute()), given.set))
            print(kind, seed, json.dumps(every[-1]), flush=True)
        for words in every[0]:
            means = [statistics.fmean(one[words][split] for one in every) for split in ("valid", "test")]
            print(f"| {kind} | {words} | {means[0]:.4f} | {means[1]:.4f} |", flush=True)


if __name__ == "__main__":
    main()
