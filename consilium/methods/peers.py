"""Shared by methods whose sites download the models of some peers: the budget, and which site gets which models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch

from consilium.errors import StudyError
from consilium.site import Roster, SiteCard
from consilium.task import Task
from consilium.weights import SiteName

Wants = Mapping[SiteName, tuple[SiteName, ...]]  # site → the peers whose models it has asked for
T = TypeVar("T")


def check_peers(budget: int, roster: Roster) -> None:
    """Reject a federation of one site, and a budget M above the number of peers (StudyError)."""
    if len(roster) < 2:
        raise StudyError("this method learns from other sites, and there is only one; use method 'local'.")
    if budget >= len(roster):
        raise StudyError(
            f"[method] budget = {budget}: a site has {len(roster) - 1} peers; "
            f"give 1 to {len(roster) - 1}, or 0 for all of them."
        )


def peers_of(site: SiteName, roster: Roster) -> list[SiteName]:
    return [name for name in sorted(roster) if name != site]


def first_wants(task: Task, roster: Roster, budget: int) -> Wants:
    """The peers whose models a site gets before it has asked for any: M at random."""
    return {
        site: drawn(peers_of(site, roster), budget or len(roster), task.generator("first peers", site))
        for site in roster
    }


def drawn(names: list[SiteName], number: int, generator: torch.Generator) -> tuple[SiteName, ...]:
    """A random subset of the names; in name order, so that the order reveals nothing."""
    order = torch.randperm(len(names), generator=generator).tolist()
    return tuple(sorted(names[i] for i in order[:number]))


def asked(models: Mapping[SiteName, T], wants: Wants, site: SiteCard, budget: int) -> dict[SiteName, T]:
    """The models that a site asked for, at most M; unknown names are ignored."""
    peers = [name for name in dict.fromkeys(wants[site.name]) if name in models and name != site.name]
    return {name: models[name] for name in peers[: budget or len(peers)]}
