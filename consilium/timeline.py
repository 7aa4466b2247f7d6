"""Every round of a run with its phase, the sites that take part, and the name of a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from consilium.method import Method, Phase
from consilium.site import Roster, Round
from consilium.weights import SiteName

Line = Sequence[tuple[Phase, Round]]


def timeline(method: Method, rounds: int, score_every: int = 0) -> list[tuple[Phase, Round]]:
    """Every round of a run, with its phase; some rounds and the last of each phase are scored."""
    line: list[tuple[Phase, Round]] = []
    aside = 0  # rounds so far that are not the paper's; their numbers continue those of the paper's
    for phase in method.phases(rounds):
        if phase.counts:
            aside = sum(not other.counts for other, _ in line)
        for step in range(phase.rounds):
            last = step + 1 == phase.rounds
            scored = phase.counts and score_every > 0 and (last or (step + 1) % score_every == 0)
            line.append((phase, Round(len(line), phase.name, step, phase.rounds, aside, scored)))
    return line


def first_rounds(method: Method, rounds: int) -> list[Round]:
    """The first round of every phase, as `timeline` has it; its size does not grow with the rounds."""
    found: dict[str, Round] = {}
    index = uncounted = aside = 0
    for phase in method.phases(rounds):
        aside = uncounted if phase.counts else aside
        found.setdefault(phase.name, Round(index, phase.name, 0, phase.rounds, aside))
        index += phase.rounds
        uncounted += 0 if phase.counts else phase.rounds
    return list(found.values())


def away_as(phase: Phase, round: Round, rounds: int) -> int | str:
    """How `[study] away` names a round: by its number, or as "teacher:1" where that is the number of another round."""
    return round.number if phase.counts or round.number > rounds else f"{phase.name}:{round.number}"


def present(
    away: Mapping[SiteName, Sequence[int | str]], line: Line, roster: Roster, phase: Phase, round: Round
) -> list[SiteName]:
    """The sites that are not `away`, as `[study] away` says, in this round."""
    paper = sum(phase.counts for phase, _ in line)
    names = {phase.name, away_as(phase, round, paper)}
    return [site for site in roster if not names & set(away.get(site, ()))]


def called(phase: Phase, round: Round) -> str:
    """The name of a round in a sentence."""
    if phase.counts:
        return f"round {round.number}"
    return f"the phase '{phase.name}'" + (f", step {round.step + 1}" if round.total > 1 else "")
