"""What stands on the outside of every order, and what comes back beside every packet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from consilium.site import Roster, Round, SiteCard
from consilium.tree import Packet
from consilium.weights import SiteName


@dataclass(frozen=True)
class Envelope:
    """Which run, method and round an order belongs to."""

    run: str
    method: str
    round: Round
    merged: Mapping[SiteName, int] = field(default_factory=dict)  # the last round the server merged from a site, or −1
    wanted: Mapping[SiteName, Sequence[int]] = field(default_factory=dict)  # memories asked for again
    full: bool = False  # when scoring: all scores, and models of other sites too

    def for_site(self, site: SiteName) -> Envelope:
        """A site is told about itself only."""
        return replace(self, merged={site: self.merged.get(site, -1)}, wanted={site: self.wanted.get(site, ())})

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "round": dict(vars(self.round))}

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Envelope:
        return cls(**{**facts, "round": Round(**facts["round"])})


@dataclass(frozen=True)
class Reply:
    """A site's answer, or why there is none."""

    packet: Packet | None
    seconds: float = 0.0
    lost: str = ""  # why the packet is missing
    memory_mb: float = 0.0  # the answering process's peak
    sent: int | None = None  # bytes of the order that travelled, where the site held some of it already


@dataclass(frozen=True)
class RollCall:
    """Who is there: members train; members and the other audience are scored."""

    members: Roster
    audience: Mapping[SiteName, bool]  # every site that scores, and whether it is outside the federation
    facts: Mapping[SiteName, Mapping[str, Any]]  # per member: version, table hash, preprocessing, remembered round


def card_to_json(card: SiteCard) -> dict[str, Any]:
    facts = {**asdict(card), "labels": list(card.labels)}
    return facts if card.unlabelled else {key: value for key, value in facts.items() if key != "unlabelled"}


def card_from_json(facts: Mapping[str, Any]) -> SiteCard:
    return SiteCard(facts["name"], facts["index"], facts["n"], tuple(facts["labels"]), facts.get("unlabelled", 0))
