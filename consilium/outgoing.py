"""What leaves a site passes these steps, in this order, and no other way leads out.

`STEPS` is the list to read: each is one function, and what it does is its first line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from consilium.local_norm import LocalNorm
from consilium.messages import AnswerHead, Request, ScoreSheet, SiteFacts
from consilium.policy import KEY_ALIAS, Policy
from consilium.privacy.dp import Noise, refuse_not_finite
from consilium.privacy.ledger import entries_of
from consilium.site import Spent
from consilium.study import Study
from consilium.transport import Rounding
from consilium.tree import Packet, flatten
from consilium.weights import Weights


@dataclass(frozen=True)
class Outgoing:
    """Something that is about to leave a site."""

    content: Any  # `SiteFacts`, a method's uplink, a `ScoreSheet`, or None: nothing but the head
    head: AnswerHead  # seconds, memory and, at roll call, the facts
    packet: Packet | None = None  # the content as it travels
    own: Weights | None = None  # the normalisation that stays


@dataclass(frozen=True)
class SiteRules:
    """What the steps need to know of the site, and of what it was asked."""

    study: Study
    policy: Policy
    norm: LocalNorm | None = None
    order: Packet | None = None  # what came in
    before: Weights | None = None  # the site's own normalisation as it was
    keep: Callable[[Weights | None], None] = lambda own: None  # store what stays
    spent: tuple[Spent, ...] = ()  # what training cost, by DP-SGD


def strip_what_must_not_leave(out: Outgoing, site: SiteRules, request: Request) -> Outgoing:
    """Take out the loss of a private study: it is a number of the training cases that no noise covers."""
    if request.do != "train" or not site.study.privacy.on:
        return out
    losses = {f.name: 0.0 for f in dataclasses.fields(out.content) if is_loss(f.name)}
    return replace(out, content=replace(out.content, **losses))


def is_loss(field: str) -> bool:
    """Whether a field of an uplink is a loss on the training cases."""
    return field == "loss" or field.endswith("_loss")


def hide_names(out: Outgoing, site: SiteRules, request: Request) -> Outgoing:
    """Put an alias in place of every case's name, and of every hash of names or pixels."""
    alias = site.policy.alias
    if isinstance(out.content, SiteFacts):
        facts = out.content
        hidden = replace(facts, table=alias(facts.table), arrays=alias(facts.arrays), key=alias(KEY_ALIAS))
        return replace(out, content=hidden)
    if isinstance(out.content, ScoreSheet):
        return replace(out, content=replace(out.content, cases=tuple(map(alias, out.content.cases))))
    return out


def pack(out: Outgoing, site: SiteRules, request: Request) -> Outgoing:
    """Make the message a packet of named tensors: from here on, what is seen is what travels."""
    if out.content is None or isinstance(out.content, SiteFacts):  # facts travel in the head
        return out
    return replace(out, packet=flatten(out.content))


def keep_local_normalisation(out: Outgoing, site: SiteRules, request: Request) -> Outgoing:
    """Put the server's normalisation back where the study keeps the site's own at home."""
    if request.do != "train" or site.norm is None or out.packet is None or site.order is None:
        return out
    packet, own = site.norm.off(out.packet, site.order, site.before)
    return replace(out, packet=packet, own=own)


def clip_and_add_noise(out: Outgoing, site: SiteRules, request: Request) -> Outgoing:
    """Clip a private study's update and add noise to every value of it."""
    if request.do != "train" or out.packet is None or site.order is None or request.round is None:
        return out
    noise = Noise(site.study.privacy, site.policy.secret)
    return replace(out, packet=noise.over(out.packet, site.order, request.run, request.round))


def round_for_transport(out: Outgoing, site: SiteRules, request: Request) -> Outgoing:
    """Round the update's numbers to those that travel, where the study sends them in two bytes."""
    if request.do != "train" or out.packet is None:
        return out
    return replace(out, packet=Rounding(site.study.plan.transport).of(out.packet))


def refuse_what_is_not_finite(out: Outgoing, site: SiteRules, request: Request) -> Outgoing:
    """Let no update leave that holds NaN or infinity."""
    if request.do == "train" and out.packet is not None:
        refuse_not_finite(out.packet, "the update")
    return out


def log_and_let_go(out: Outgoing, site: SiteRules, request: Request) -> Outgoing:
    """Hold what leaves against the site's limits and write it down; only then may it leave.

    The connection says whose it is and which order it answers: nothing in the message does.
    """
    card = out.content if isinstance(out.content, SiteFacts) else None
    out = replace(out, head=replace(out.head, card=card))
    entries = entries_of(out.content, request.do, site.study.privacy, site.spent)
    site.policy.let_go(request, out.head, out.packet, site.study, entries)
    return out


def store_what_stays(out: Outgoing, site: SiteRules, request: Request) -> Outgoing:
    """Store the memory of the round, with the site's own normalisation: of an update that may not leave, nothing is."""
    if request.do == "train":
        site.keep(out.own)
    return out


STEPS = (
    strip_what_must_not_leave,
    hide_names,
    pack,
    keep_local_normalisation,
    clip_and_add_noise,
    round_for_transport,
    refuse_what_is_not_finite,
    log_and_let_go,
    store_what_stays,
)


def leave(content: Any, head: AnswerHead, site: SiteRules, request: Request) -> Outgoing:
    """What leaves of `content`, after every step; `head` is what was measured beside it."""
    out = Outgoing(content, head)
    for step in STEPS:
        out = step(out, site, request)
    return out
