"""Whether a study can work with the sites that answered the roll call; asked before the first round."""

from __future__ import annotations

from collections.abc import Sequence

from consilium.errors import StudyError
from consilium.fields import nearest
from consilium.method import Phase, away_as
from consilium.site import Roster, Round
from consilium.study import Study
from consilium.weights import SiteName

Line = Sequence[tuple[Phase, Round]]


def admitted(study: Study, line: Line, roster: Roster) -> list[str]:
    """Refuse a study that can never reach its end; what it may not have meant is a warning."""
    _check_normalisation(study)
    if study.data.pooled and not study.method.pooled and study.method.headline != "global":
        raise StudyError("[data] pooled = true leaves one site, and this method needs several; use method 'pooled'.")
    for key in ("min_sites", "sites_per_round"):
        if getattr(study.plan, key) > len(roster):
            raise StudyError(f"[study] {key} = {getattr(study.plan, key)}: there are {len(roster)} sites.")
    phases = list(dict.fromkeys(phase.name for phase, _ in line))
    for site, told in study.plan.away.items():
        for name in (str(round).partition(":")[0] for round in told if not isinstance(round, int)):
            if name not in phases:
                raise StudyError(f"[study] away.{site}: there is no phase '{name}'; {nearest(name, phases)}")
    for phase, round in line:
        _check_attendance(study, line, roster, phase, round)
    return [*study.method.check(study.task, roster, study.local), *_left_out(study, roster)]


def present(study: Study, line: Line, roster: Roster, phase: Phase, round: Round) -> list[SiteName]:
    """The sites that are not away in this round."""
    paper = sum(phase.counts for phase, _ in line)
    names = {phase.name, away_as(phase, round, paper)}
    return [site for site in roster if not names & set(study.plan.away.get(site, ()))]


def called(phase: Phase, round: Round) -> str:
    """A round in a sentence."""
    if phase.counts:
        return f"round {round.number}"
    return f"the phase '{phase.name}'" + (f", step {round.step + 1}" if round.total > 1 else "")


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
    here = len(present(study, line, roster, phase, round))
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
