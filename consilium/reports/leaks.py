"""What left each site in a run, for the page: fields, bytes, what they could reveal, and what attacks found."""

from __future__ import annotations

from dataclasses import dataclass, field

from consilium.reports.embedding import EmbeddedImage


@dataclass(frozen=True)
class LeftField:
    """One field of the messages that sites sent."""

    name: str
    phase: str
    times: str  # by a site, over the run
    once: str  # its size in one message
    total: str  # over all sites and messages
    reveals: str


@dataclass(frozen=True)
class LeftSite:
    """One site's messages."""

    site: str
    cases: str
    messages: int
    total: str
    epsilon: str
    refused: str  # what was not merged or not sent


@dataclass(frozen=True)
class LeakPage:
    """What a data-protection officer needs to know of one run."""

    run: str
    fields: tuple[LeftField, ...]
    sites: tuple[LeftSite, ...]
    privacy: str  # a sentence
    beside: tuple[tuple[str, str], ...]  # what leaves beside the updates, and what it could reveal
    bar: str  # of the audit; empty: there was none
    audited: tuple[tuple[str, ...], ...] = ()  # model, attack, AUC, TPR, verdict
    pictures: tuple[EmbeddedImage, ...] = field(default=())
