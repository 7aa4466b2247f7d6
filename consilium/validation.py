"""Whether a study can work: by itself, with its federation, and with the sites that answered the roll call."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from consilium.data.site_folder import Federation
from consilium.errors import StudyError
from consilium.fields import nearest
from consilium.learning.per_patient import refuse_mixing
from consilium.machine import machine_memory
from consilium.method import Phase
from consilium.methods.averaged import check_averaging
from consilium.site import POOLED, SLICES, Roster, Round, SiteCard, pooled_card
from consilium.study import Study
from consilium.timeline import Line, called, present
from consilium.weights import SiteName
from consilium.wording import are, command, counted


def check_settings(study: Study) -> None:
    """Refuse settings that cannot go together, whatever the data; types and keys were checked when they were read."""
    size, dimensions = study.preprocess.size, study.seen.dimensions
    if study.preprocess.slices and (study.facts.dimensions != 3 or study.facts.task != "segmentation"):
        raise StudyError(f"[preprocess] slices = '{study.preprocess.slices}' is for segmentation of volumes.")
    if size and len(size) != dimensions:
        kind = "slices" if study.preprocess.slices else "images"
        raise StudyError(f"[preprocess] size = {list(size)}: the network sees {dimensions}-D {kind}.")
    assert study.task  # refuses a network, a patch or a loss that does not suit the federation
    study.privacy.check(study.method_name, study.method, study.local)
    if study.privacy.by_patient:
        with torch.device("meta"):
            refuse_mixing(study.task.network())
    if study.release.swa_from:
        check_averaging(study.method)


# Parameters × pixels of one batch, a tenth of a second. A larger network is tried without numbers: torch then imports
# its compiler, which takes a second by itself.
_QUICK = 10**9


def check_size(study: Study) -> None:
    """Refuse images that the network cannot take, before any site tries.

    A network that this machine cannot hold is refused too: the server starts it, and a simulation trains it.
    """
    shape = study.task.shape().values()
    weights = sum(tensor.nbytes for tensor in shape)
    if weights > (here := machine_memory()):
        raise StudyError(
            f"the study's network takes {weights / 1e9:,.1f} GB, and this machine has {here / 1e9:,.1f} GB of memory; "
            "take smaller [task] fields."
        )
    size = study.task_fields.patch or study.preprocess.size
    if not size:  # images keep their own sizes
        return
    quick = 2 * math.prod(size) * sum(tensor.numel() for tensor in shape) <= _QUICK
    try:
        with torch.device("cpu" if quick else "meta"), torch.random.fork_rng(devices=[]), torch.no_grad():
            study.task.network()(torch.zeros(2, study.seen.channels, *size))
    except (ValueError, RuntimeError) as error:
        if "meta" in str(error) or isinstance(error, NotImplementedError):  # a layer that needs numbers
            return
        key = "[task] patch" if study.task_fields.patch else "[preprocess] size"
        raise StudyError(
            f"{key} = {list(size)} does not suit the network ({error}); take larger images, or fewer [task] widths."
        ) from error


def members_of(study: Study, federation: Federation) -> list[SiteName]:
    """The sites that train, in name order."""
    names = sorted(study.plan.sites or federation.sites)
    for name in (*names, *study.plan.leave_out, *study.plan.away, *study.data.annotated):
        if name not in federation.sites:
            raise StudyError(f"there is no site '{name}'; the federation has {', '.join(federation.sites)}.")
    members = [name for name in names if name not in study.plan.leave_out]
    if not members:
        raise StudyError("[study] leave_out leaves no site to train.")
    return members


def annotated_at(study: Study, federation: Federation, site: SiteName) -> tuple[str, ...]:
    """The labels a site draws, in the federation's order; all else is unknown in its masks, even if it is there."""
    override = study.data.annotated.get(site, federation.sites[site].annotated)
    if override == "all":
        return federation.labels
    for label in override:
        if label not in federation.labels:
            raise StudyError(f"[data] annotated.{site}: there is no label '{label}'; choose from {federation.labels}.")
    if not override:
        raise StudyError(
            f"[data] annotated.{site} is empty: with nothing annotated there is nothing to learn at '{site}'; "
            "name a label, or leave the site out with study.leave_out."
        )
    return tuple(label for label in federation.labels if label in override)


def check_annotation(study: Study, federation: Federation, members: Sequence[SiteName]) -> None:
    """Every label must be drawn by someone who trains, or a channel of the network would never learn."""
    drawn = {label for site in members for label in annotated_at(study, federation, site)}
    nobody = [label for label in federation.labels if label not in drawn]
    if nobody and federation.task == "segmentation":
        raise StudyError(
            f"no site that trains annotates {', '.join(map(repr, nobody))}; give it to one with [data] annotated "
            "or its site.toml, or take it out of labels in federation.toml."
        )


def expected_roster(study: Study, federation: Federation, members: Sequence[SiteName]) -> Roster:
    """The roster of a roll call that all members answer, as far as their tables tell it.

    They do not tell how many slices of a volume have a label. Where slices are trained, `n` is the most that there can
    be, so that no site seems to have too few; cases without a mask are counted as volumes.
    """
    cards = {name: _card(study, federation, name, i) for i, name in enumerate(members)}
    empty = [name for name, card in cards.items() if not card.n]
    if empty:
        remedy = command("check", study.data.federation, "--split", "0.5,0.25,0.25")
        raise StudyError(
            f"no training cases at {', '.join(empty)}: draw splits with {remedy}, or leave the site out with "
            "study.leave_out."
        )
    if study.pooled:
        return {POOLED: pooled_card(cards.values(), federation.labels)}
    return cards


def _card(study: Study, federation: Federation, site: SiteName, index: int) -> SiteCard:
    most = SLICES if study.preprocess.slices else 1
    bare = sum(case.split == "train" and case.label is None for case in federation.sites[site].cases)
    return SiteCard(site, index, most * labelled_cases(federation, site), annotated_at(study, federation, site), bare)


def labelled_cases(federation: Federation, site: SiteName, split: str = "train") -> int:
    """Cases with a label, in the table of a site."""
    return sum(case.split == split and case.label is not None for case in federation.sites[site].cases)


def admitted(study: Study, line: Line, roster: Roster) -> list[str]:
    """Refuse a study that can never reach its end; what it may not have meant is a warning."""
    _check_normalisation(study)
    if study.data.pooled and not study.method.pooled and study.method.headline != "global":
        raise StudyError("[data] pooled = true leaves one site, and this method needs several; use method 'pooled'.")
    for key in ("min_sites", "sites_per_round"):
        if getattr(study.plan, key) > len(roster):
            many = f"there {are(len(roster))} {counted(len(roster), 'site')}"
            raise StudyError(f"[study] {key} = {getattr(study.plan, key)}: {many}.")
    trusted = study.plan.aggregation.trusted
    if trusted and trusted not in roster:
        raise StudyError(f"[study] aggregation.trusted = '{trusted}': no such site trains; {nearest(trusted, roster)}")
    phases = list(dict.fromkeys(phase.name for phase, _ in line))
    for site, told in study.plan.away.items():
        for name in (str(round).partition(":")[0] for round in told if not isinstance(round, int)):
            if name not in phases:
                raise StudyError(f"[study] away.{site}: there is no phase '{name}'; {nearest(name, phases)}")
    for phase, round in line:
        _check_attendance(study, line, roster, phase, round)
    return [*study.method.check(study.task, roster, study.local), *_left_out(study, roster)]


def _check_normalisation(study: Study) -> None:
    if study.local.batchnorm == "average" or not (study.plan.leave_out or study.pooled):
        return
    who = f"[study] leave_out = {list(study.plan.leave_out)} is scored without having trained"
    if study.pooled:
        who = "pooled training is scored at sites that did not train"
    raise StudyError(
        f"[local] batchnorm = '{study.local.batchnorm}' keeps normalisation at the sites that train, but {who} "
        "and would get a normalisation nobody trained; use batchnorm = 'average'."
    )


def _check_attendance(study: Study, line: Line, roster: Roster, phase: Phase, round: Round) -> None:
    """Refuse a round that can never have enough answers: no waiting would help."""
    plan = study.plan
    here = len(present(study.plan.away, line, roster, phase, round))
    limit = plan.sites_per_round if phase.counts and plan.sites_per_round else here
    if min(limit, here) >= plan.min_sites:
        return
    where = called(phase, round)
    if not here:
        raise StudyError(f"[study] away: every site is away in {where}; leave one there.")
    cause = "sites_per_round" if limit < here else "away"
    raise StudyError(
        f"[study] min_sites = {plan.min_sites}: {where} can have {min(limit, here)} of {len(roster)} sites, because of "
        f"[study] {cause}; lower min_sites or change {cause}."
    )


def _left_out(study: Study, roster: Roster) -> list[str]:
    bare = {name: card.unlabelled for name, card in roster.items() if card.unlabelled}
    if not bare or study.method.unlabelled:
        return []
    whose = ", ".join(f"{n} of {name.strip('()')}" for name, n in bare.items())
    return [f"cases without a mask are left out: {whose}; methods with teachers use them."]
