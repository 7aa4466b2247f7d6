"""What methods share whose sites fetch the models of a few others: the budget, and who gets what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch

from consilium.errors import StudyError
from consilium.site import Roster, SiteCard, Task
from consilium.weights import SiteName

Wants = Mapping[SiteName, tuple[SiteName, ...]]  # site → the peers whose models it has asked for
T = TypeVar("T")


def check_peers(budget: int, roster: Roster) -> None:
    """M must be a number of peers there are."""
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
    """What a site is sent before it has asked for anything: M peers at random."""
    return {
        site: drawn(peers_of(site, roster), budget or len(roster), task.generator("first peers", site))
        for site in roster
    }


def drawn(names: list[SiteName], number: int, generator: torch.Generator) -> tuple[SiteName, ...]:
    """Some of the names, all with the same chance; in name order, so that the order says nothing."""
    order = torch.randperm(len(names), generator=generator).tolist()
    return tuple(sorted(names[i] for i in order[:number]))


def asked(models: Mapping[SiteName, T], wants: Wants, site: SiteCard, budget: int) -> dict[SiteName, T]:
    """The models a site has asked for, at most M; a name nobody bears is passed over."""
    peers = [name for name in dict.fromkeys(wants[site.name]) if name in models and name != site.name]
    return {name: models[name] for name in peers[: budget or len(peers)]}
