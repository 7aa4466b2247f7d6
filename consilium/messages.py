"""Every message that crosses between the server and a site, in both directions, with the range of every value.

Nobody says who it is: the connection knows the site, and the server's own order knows run, round and phase. What is
not here, or not as declared here, does not pass (`tree.from_text`, `tree.unflatten`); a method's own messages are
declared by its `Downlink`, `Uplink` and `Release`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any

import torch
from torch import Tensor

from consilium import tree
from consilium.data.profile import DataProfile
from consilium.fields import NAME, plain
from consilium.ranges import Items, OneOf, Range, TensorRows, Text
from consilium.site import ROUNDS, Count, Label, Labels, Roster, Round, RoundIndex, SiteCard, SiteId
from consilium.tree import Packet, message
from consilium.weights import SiteName

REASONS = {
    "study": "its package cannot read the study",
    "method": "its hospital.toml does not allow the method",
    "rounds": "its hospital.toml allows no more rounds",
    "scores": "its hospital.toml allows no more scorings",
    "privacy": "its hospital.toml demands differential privacy, and this study has none or too little",
    "budget": "its privacy budget is used up",
    "bytes": "its hospital.toml allows no more bytes to leave",
    "labels": "its hospital.toml names other labels",
    "approval": "nobody there has approved this study yet (`consilium federation review` at the hospital)",
    "rejected": "a person there has rejected this study",
    "parameters": "its hospital.toml allows no network with so many parameters ([limits] model_parameters)",
    "weights": "its hospital.toml allows no network of so many bytes ([limits] model_bytes)",
    "layers": "its hospital.toml allows no network with so many layers ([limits] layers)",
    "ram": "training takes more memory than its hospital.toml allows or its machine has ([limits] memory_bytes)",
    "storage": "its hospital.toml allows no more on its disk ([limits] disk_bytes)",
    "cache": "its hospital.toml allows no preprocessed images of that size ([limits] cache_bytes)",
    "order": "the order was larger than it takes in ([limits] order_bytes)",
    "time": "its hospital.toml allows no more time ([limits] round_seconds, study_seconds)",
    "name": "its site.toml names another site than its kit",
    "data": "its tables or images have faults",
    "device": "its device cannot be used",
    "memory": "it has lost its memory of this run",
    "disk": "its disk is full or cannot be written",
    "old": "it has been asked for a later round already",
    "foreign": "the message was of another run, method or site",
    "damaged": "the message was damaged on its way",
    "infinite": "values that are not finite came in or would have left",
    "signature": "the server has not signed the release, or it is not what was signed",
    "size": "its answer is larger than this method's update",
    "late": "no answer by the deadline",
    "gone": "its process has ended",
    "silent": "it showed no sign of life",
    "resting": "it missed two rounds and has not said that it is back",
    "changed": "it is not the site that the run began with",
    "opening": "its settings or its key cannot be used",
    "away": "it is not connected",
    "failed": "training failed there",
}
POLICY = (  # a site's own rules say no
    "method", "rounds", "scores", "privacy", "budget", "bytes", "labels", "approval", "rejected", "parameters",
    "weights", "layers", "ram", "storage", "cache", "order", "time",
)  # fmt: skip
SCORED = ("valid", "test")
CASES = 1 << 24  # in one score sheet, and in one split of a site

RunName = Annotated[str, Text(200, NAME)]
Digest = Annotated[str, Text(64, "[0-9a-f]+")]
Seconds = Annotated[float, Range(0, 1e9)]
Megabytes = Annotated[float, Range(0, 1e9)]


# ------------------------------------------------------------------------------------------ server → site


@message
class Members:
    """Who takes part: the cards of all members, by name."""

    cards: Annotated[Mapping[SiteId, SiteCard], Items(1 << 16)]


@message
class Seal:
    """A signature, and the certificate of the key that made it."""

    signature: Annotated[str, Text(1 << 12, "[A-Za-z0-9+/=]+")]
    certificate: Annotated[str, Text(1 << 14, "[A-Za-z0-9+/=]+")]  # DER in base64


@message
class Request:
    """What the server asks of one site."""

    do: Annotated[str, OneOf(("card", "train", "score", "deliver"))]
    run: RunName
    method: Annotated[str, Text(200)] = ""
    round: Round | None = None
    merged: Annotated[int, Range(-1, ROUNDS)] = -1  # the last round the server merged from this site
    wanted: Annotated[tuple[RoundIndex, ...], Items(8)] = ()  # memories asked for again
    full: bool = False  # when scoring: all scores, and models of other sites too
    roster: Annotated[str, Text(1 << 24)] = ""  # `Members` as text: the same for every request, so parsed once
    header: Annotated[str, Text(1 << 24)] = ""  # the order's own, where its tensors are in a file for several
    # the order's tensors by path, and a name of each one's content: what the site holds already is not sent
    tensors: Annotated[Mapping[Annotated[str, Text(1000)], Digest], Items(1 << 20)] = field(default_factory=dict)
    profile: DataProfile | None = None  # when delivering: ranges over all training images, if the sites said them
    seal: Seal | None = None  # when delivering: the server's signature of the release


@lru_cache(maxsize=8)
def roster_of(text: str) -> Roster:
    """The roster in a request; it comes with every one and is parsed once."""
    cards = tree.from_text(text, Members).cards
    for name, card in cards.items():
        if name != card.name:
            raise tree.PacketError(f"the card of '{name}' is of '{card.name}'")
    return cards


@dataclass(frozen=True)
class Envelope:
    """Which run, method and round an order belongs to, as the server knows it."""

    run: str
    method: str
    round: Round
    merged: Mapping[SiteName, int] = field(default_factory=dict)  # the last round the server merged from a site, or −1
    wanted: Mapping[SiteName, Sequence[int]] = field(default_factory=dict)  # memories asked for again
    full: bool = False  # when scoring: all scores, and models of other sites too
    profile: DataProfile | None = None  # when delivering: what the training images were like

    def request(self, do: str, site: SiteName, roster: str) -> Request:
        """What one site is asked; it is told about itself only."""
        wanted = tuple(self.wanted.get(site, ()))
        merged = self.merged.get(site, -1)
        return Request(do, self.run, self.method, self.round, merged, wanted, self.full, roster, profile=self.profile)


# ------------------------------------------------------------------------------------------ site → server


@message
class SiteFacts:
    """What a site says of itself at roll call; its name is not among it."""

    n: Count  # training cases
    unlabelled: Count  # more training cases, without a mask
    labels: Labels  # what it annotates
    cases: Count  # in its table
    scored: Annotated[Mapping[Annotated[str, OneOf(SCORED)], Annotated[int, Range(0, CASES)]], Items(2)]  # per split
    table: Annotated[str, Text(100)]  # a hash of its table
    arrays: Annotated[str, Text(200)]  # a hash of content and preprocessing
    version: Annotated[str, Text(40)]  # of the package
    study: Annotated[str, Text(40)]  # the study's hash as the site reads it
    preprocessing: Annotated[str, Text(100)]
    profile: DataProfile | None = None  # ranges over its training images; None where they stay
    key: Annotated[str, Text(100)] = ""  # a hash of the site's key: a new one says that its memory folder is new

    def card(self, name: SiteName, index: int) -> SiteCard:
        """The card of the site at the other end of the connection."""
        return SiteCard(name, index, self.n, self.labels, self.unlabelled)


@message
class AnswerHead:
    """What comes back beside a packet; `error` is a word of `REASONS`: the site's own log says more."""

    error: Annotated[str, OneOf(("", *REASONS))] = ""
    seconds: Seconds = 0.0
    memory_mb: Megabytes = 0.0  # the answering process's peak
    card: SiteFacts | None = None


@message
class ScoredModel:
    """A model that was scored."""

    model: Annotated[str, Text(40)]  # global, personal, super …
    of: Annotated[str, Text(100, rf"({NAME})?")]  # the site it belongs to, or empty
    when: Annotated[str, OneOf(("merged", "trained", "adapted"))]


@message
class ScoreSheet:
    """A site's scores of one release. It says neither whose they are nor of which round: the server knows."""

    models: Annotated[tuple[ScoredModel, ...], Items(1 << 14)]
    cases: Annotated[tuple[Annotated[str, Text(500)], ...], Items(CASES)]
    labels: Annotated[tuple[Label, ...], Items(1 << 10)]
    metrics: Annotated[tuple[Annotated[str, Text(200)], ...], Items(1 << 14)]
    # model, split, case (−1: the site as a whole), slice (−1: the whole case), label, metric
    rows: Annotated[Tensor, TensorRows(torch.int32, 1 << 26, 6)]
    values: Annotated[Tensor, TensorRows(torch.float64, 1 << 26)]


# ------------------------------------------------------------------------------------------ behind the door


@dataclass(frozen=True)
class Reply:
    """A site's answer, or why there is none."""

    packet: Packet | None
    seconds: float = 0.0
    lost: str = ""  # why the packet is missing
    memory_mb: float = 0.0  # the answering process's peak
    sent: int | None = None  # bytes of the order that travelled, where the site held some of it already
    error: str = ""  # the word of `REASONS`, if the site said one
    came: int | None = None  # bytes of the packet on its way, where it was packed


@dataclass(frozen=True)
class RollCall:
    """Who is there: members train; members and the other audience are scored."""

    members: Roster
    audience: Mapping[SiteName, bool]  # every site that scores, and whether it is outside the federation
    facts: Mapping[SiteName, SiteFacts]
    left_out: Mapping[SiteName, str] = field(default_factory=dict)  # sites that cannot take part, and why
    rejoined: Mapping[SiteName, str] = field(default_factory=dict)  # sites that go on without their memory, and why


def card_to_json(card: SiteCard) -> dict[str, Any]:
    """A card as a run's origin.json holds it."""
    return {key: value for key, value in plain(card).items() if key != "unlabelled" or value}


def card_from_json(facts: Mapping[str, Any]) -> SiteCard:
    """A card from a run's own origin.json."""
    return SiteCard(facts["name"], facts["index"], facts["n"], tuple(facts["labels"]), facts.get("unlabelled", 0))


__all__ = [
    "CASES",
    "POLICY",
    "REASONS",
    "SCORED",
    "AnswerHead",
    "Envelope",
    "Members",
    "Reply",
    "Request",
    "RollCall",
    "ScoreSheet",
    "ScoredModel",
    "Seal",
    "SiteFacts",
    "card_from_json",
    "card_to_json",
    "roster_of",
]  # fmt: skip
