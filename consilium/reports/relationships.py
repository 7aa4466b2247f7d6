"""APPLE's relationships p over rounds, from the memories of a simulation's sites: p never leaves a hospital."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consilium.errors import RunError
from consilium.files import read_json
from consilium.local_norm import LocalNorm
from consilium.methods.apple import APPLE
from consilium.reports.reading import RunView
from consilium.store import MemoryStore
from consilium.weights import SiteName, normalised


@dataclass(frozen=True, eq=False)
class Relationships:
    """p of every site that has trained, after each round it trained in."""

    sites: tuple[SiteName, ...]
    p0: Mapping[SiteName, float]
    rounds: Mapping[SiteName, tuple[int, ...]]  # counted from 1
    p: Mapping[SiteName, NDArray[np.float32]]  # (rounds, sites)

    def matrix(self) -> dict[SiteName, dict[SiteName, float]]:
        """p after the last round: who takes how much from whom."""
        return {site: dict(zip(self.sites, map(float, rows[-1]))) for site, rows in self.p.items()}

    def own(self, site: SiteName) -> NDArray[np.float32]:
        """p_ii over the rounds."""
        return self.p[site][:, self.sites.index(site)]

    def friend(self, site: SiteName) -> SiteName:
        """The peer it takes most from."""
        peers = {other: p for other, p in self.matrix()[site].items() if other != site}
        return max(peers, key=peers.__getitem__)

    def to_json(self) -> dict[str, Any]:
        return {
            "p0": dict(self.p0),
            "rounds": {site: list(rounds) for site, rounds in self.rounds.items()},
            "p": {site: dict(zip(self.sites, rows.T.tolist())) for site, rows in self.p.items()},
        }


def has_relationships(run: RunView) -> bool:
    return run.method == "apple" and (run.folder / "sites").is_dir() and (run.folder / "server" / "last.json").exists()


def read_relationships(run: RunView) -> Relationships:
    """The histories of p in the memories that go with the run's last round."""
    if run.method != "apple":
        raise RunError(f"{run.folder} has no relationships: method '{run.method}' learns none. Give a run of apple.")
    if not has_relationships(run):
        raise RunError(f"{run.folder} holds no memories: p is at the hospitals and does not leave them.")
    n = {name: card["n"] for name, card in run.origin["members"].items()}
    merged: Mapping[SiteName, int] = read_json(run.folder / "server" / "last.json")["merged"]
    kept = LocalNorm(frozenset(), "").kept(APPLE())
    rounds, p = {}, {}
    for site in sorted(merged):
        memories = MemoryStore(run.folder / "sites" / site / "memory", site)
        held: Any = memories.at(merged[site], kept)
        memory: APPLE.Memory = held.memory
        rounds[site] = tuple(index + 1 for index in memory.rounds)
        p[site] = memory.history.numpy()
    return Relationships(tuple(sorted(n)), normalised(n), rounds, p)
