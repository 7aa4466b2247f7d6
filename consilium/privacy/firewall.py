"""Whether a sound reply is one that its site could have learned: neither blown up, turned round, shifted nor repeated.

There are four rules: length, direction, a constant, a repetition. They are what robust means (learning/aggregation.py)
cannot do, or cannot do for methods that average nothing; docs/robust-aggregation.md has the table that decided.
An update is odd if it is both far from what is usual (in robust deviations: median and MAD, which a single liar cannot
move) and large in itself. What is usual is the site's own past, because an honest site may differ from all others for
ever; only until it has a past of its own is it held against the others of the round. docs/privacy.md gives the reasons.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from consilium.errors import StudyError
from consilium.fields import check_below_one, check_choices
from consilium.privacy.measuring import Update, cosines, sum_of_units
from consilium.privacy.past import EMPTY, AcceptedUpdate, History
from consilium.site import Roster
from consilium.weights import SiteName

KNOWN = 4  # accepted updates after which a site has a past of its own
WINDOW = 10  # the latest of them count
OTHERS = 2  # others needed to hold a newcomer against
PER_CASE = 0.75  # the power of a site's cases with which its length is expected to grow, in the second reading
ABSURD = 1e4  # times as long as usual, and longer than the model itself: no training does that, so it is never merged
DWARFS = 0.9  # of the length of what was sent: then what it began from is nothing beside the update
STEEP = 1e6  # the length of a gradient, or of what else is itself a change, that dwarfs any honest one
SAME = 1e-5  # of its length: two updates that differ by less are one
# the smallest deviations believed, so that a very steady past makes nothing odd
SPREAD = {"length": 0.1, "turn": 0.05, "shift": 0.05}


@dataclass(frozen=True)
class Firewall:
    """`[study.firewall]`: what becomes of replies that are sound but odd."""

    mode: str = "observe"  # odd updates are merged and said; "refuse": they are left out; "off"
    sigmas: float = 4.0  # robust deviations from what is usual
    times: float = 5.0  # as long as usual
    turn: float = 0.5  # the usual cosine with its own direction, from which on an update can be turned round
    shift: float = 0.5  # of the length, in one constant

    def __post_init__(self) -> None:
        check_choices(self, "study.firewall", mode=("off", "observe", "refuse"))
        if not (1 <= self.sigmas < math.inf and 1 < self.times < math.inf):
            raise StudyError("[study.firewall] sigmas must be at least 1, and times above 1.")
        check_below_one(self, "study.firewall", "turn", "shift")


@dataclass(frozen=True)
class Verdict:
    """On one reply."""

    why: str = ""  # it is odd, in words; empty: it is not
    figures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # by part
    absurd: bool = False  # it is so long that it is left out even where odd updates are only observed


def judged(
    rules: Firewall,
    history: History,
    updates: Mapping[SiteName, Mapping[str, Update]],
    roster: Roster,
    phase: str,
    steady: bool = True,
) -> tuple[dict[SiteName, Verdict], History]:
    """A verdict on every reply of a round, and the history with those that are not odd.

    Directions are judged only if the method is `steady`: if it does not turn honest updates itself.
    """
    parts = sorted({part for own in updates.values() for part in own})
    views = {part: _View(rules, history, updates, roster, phase, part, steady) for part in parts}
    verdicts: dict[SiteName, Verdict] = {}
    entries: list[AcceptedUpdate] = []
    for site, own in updates.items():
        whys = [why for part in own for why in views[part].faults(site)]
        figures = {part: views[part].figures(site) for part in own}
        verdicts[site] = Verdict("; ".join(whys), figures, any(views[part].absurd(site) for part in own))
        if not whys:
            entries += [views[part].entry(site) for part in own]
    return verdicts, history.with_entries(entries)


class _Numbers:
    """One number of every site: the median of all but one's own is found without ordering them again for each site."""

    def __init__(self, values: Mapping[SiteName, float]) -> None:
        self._values, self._ordered = values, sorted(values.values())

    def of_others(self, site: SiteName) -> list[float]:
        """In ascending order."""
        others = self._ordered.copy()
        if site in self._values:
            del others[bisect_left(others, self._values[site])]
        return others

    def median_of_others(self, site: SiteName) -> float:
        return statistics.median(self.of_others(site))


class _View:
    """One part of all replies of a round, beside everyone's past."""

    def __init__(
        self,
        rules: Firewall,
        history: History,
        updates: Mapping[SiteName, Mapping[str, Update]],
        roster: Roster,
        phase: str,
        part: str,
        steady: bool,
    ) -> None:
        self.rules, self.phase, self.part, self.steady = rules, phase, part, steady
        self.now = {site: own[part] for site, own in updates.items() if part in own}
        self.past = {site: history.of(phase, site, part) for site in self.now}
        self._others = len(self.now) - 1
        self._cases = {site: math.log(roster[site].n) for site in self.now}
        self._lengths = {site: math.log(update.length) for site, update in self.now.items()}
        self._turns = {site: self._cosine(site) for site in self.now if self.past[site].lengths}
        self._growths = {site: self._growth(site) for site in self.now if self.past[site].lengths}
        self._grown = _Numbers({site: growth for site, growth in self._growths.items() if self._known(site)})
        self._reaches = _Numbers({site: self._reach(site) for site in self.now})
        self._per_case = _Numbers({site: self._reach(site) - PER_CASE * self._cases[site] for site in self.now})
        self._shifts = _Numbers({site: update.shift for site, update in self.now.items()})
        self._turned = {site for site in self._turns if self._has_turned(site)}

    def faults(self, site: SiteName) -> Iterator[str]:
        """Everything that is odd about a site's update, in words."""
        if self._repeated(site):
            yield f"'{self.part}' is an update that the site has sent before"
        if self._known(site):
            yield from self._unlike_itself(site)
        elif self._others >= OTHERS:
            yield from self._unlike_others(site)

    def absurd(self, site: SiteName) -> bool:
        """Longer than usual by orders of magnitude, and so long that nothing of the model would be left.

        Its own past or, until it has one, the others say what is usual. Where training has come to rest, honest updates
        may grow as much, but they stay short beside the model.
        """
        update = self.now[site]
        if update.length <= (DWARFS * update.size if update.started else STEEP):
            return False
        if self._known(site):
            return self._growths[site] - self._common_growth(site) > math.log(ABSURD)
        return self._others >= OTHERS and self._ahead(site) > math.log(ABSURD)

    def figures(self, site: SiteName) -> dict[str, float]:
        """What the verdict rests on, for the journal."""
        update = self.now[site]
        found = {"length": update.length, "shift": update.shift}
        if site in self._growths:
            found |= {"times_own": math.exp(self._growths[site]), "turn": self._turns[site]}
        if self._others >= OTHERS:
            found["times_others"] = math.exp(self._ahead(site))
        return {name: float(f"{value:.4g}") for name, value in found.items()}

    def entry(self, site: SiteName) -> AcceptedUpdate:
        """This update, as the site's past will have it."""
        update = self.now[site]
        key = f"{self.phase}/{site}/{self.part}"
        return AcceptedUpdate(key, self._lengths[site], self._turns.get(site), update.shift, update.sketch, update.seal)

    # ------------------------------------------------------------------------------------ against its own past

    def _known(self, site: SiteName) -> bool:
        return len(self.past[site].lengths) >= KNOWN

    def _unlike_itself(self, site: SiteName) -> Iterator[str]:
        rules, past, common, growth = self.rules, self.past[site], self._common_growth(site), self._growths[site]
        if growth - common > math.log(rules.times):
            spread = _wander(past.lengths[-WINDOW:], "length")
            longer = growth - common > rules.sigmas * spread
            if longer and (not self._began_at_rest(site) or self._far_ahead(site)):
                known = self._grown.of_others(site)
                also = f"; the others' are {math.exp(common):.3g} times theirs" if known else ""
                yield f"'{self.part}' is {math.exp(growth):.3g} times as long as the site's updates usually are{also}"
        if site in self._turned and not self._with_half():
            turn, usual = self._turns[site], statistics.median(past.turns[-WINDOW:])
            yield f"'{self.part}' points against the site's earlier updates (cosine {turn:.2f}, usually {usual:.2f})"
        yield from self._shifted(site, past.shifts[-WINDOW:], _wander)

    def _has_turned(self, site: SiteName) -> bool:
        """Its cosine would be minus the usual one; a gradient, or what keeps no direction, may turn."""
        if not self.steady or not self.now[site].started or not self._known(site):
            return False
        turns = self.past[site].turns[-WINDOW:]
        turn, usual = self._turns[site], statistics.median(turns)
        return (
            turn < -usual / 2 and usual > self.rules.turn and usual - turn > self.rules.sigmas * _wander(turns, "turn")
        )

    def _with_half(self) -> bool:
        """Half of the others have turned as well as the site: then training has, and no one site."""
        return self._others > 0 and 2 * (len(self._turned) - 1) >= self._others

    def _common_growth(self, site: SiteName) -> float:
        """How much longer the others' updates have become, as a logarithm: a schedule lengthens everyone's at once."""
        grown = self._grown.of_others(site)
        return max(0.0, statistics.median(grown)) if grown else 0.0

    def _growth(self, site: SiteName) -> float:
        """How much longer than usual, as a logarithm."""
        return self._lengths[site] - statistics.median(self.past[site].lengths[-WINDOW:])

    def _cosine(self, site: SiteName) -> float:
        """With the direction of its latest updates."""
        return cosines(self.now[site].sketch[None], sum_of_units(self.past[site].sketches.latest(WINDOW)))[0]

    def _repeated(self, site: SiteName) -> bool:
        """The very values, or the very change on top of another model, up to rounding."""
        update, past = self.now[site], self.past[site]
        if update.seal in past.seals:
            return True
        within = max(SAME * update.length, update.blur)
        if not len(past.sketches) or within > 0.01 * update.length:  # too short to tell from rounding
            return False
        return past.sketches.has_within(update.sketch, within)

    # ------------------------------------------------------------------------------------ against the others

    def _unlike_others(self, site: SiteName) -> Iterator[str]:
        if self._far_ahead(site):
            yield f"'{self.part}' is {math.exp(self._ahead(site)):.3g} times as long as the others' updates"
        yield from self._shifted(site, self._shifts.of_others(site), _spread)

    def _far_ahead(self, site: SiteName) -> bool:
        ahead = self._ahead(site)
        if ahead <= math.log(self.rules.times):
            return False
        return ahead > self.rules.sigmas * _spread(self._reaches.of_others(site), "length")

    def _ahead(self, site: SiteName) -> float:
        """How much longer than the others', as a logarithm; theirs as they are, or as they were at first if longer.

        More cases are more steps, and the length grows with them, by a power between 1/2 (a random walk) and 1; means
        such as gradients do not grow at all. So a site is as far ahead as the kinder of the two readings says.
        """
        return min(self._beside(self._lengths[site], site))

    def _began_at_rest(self, site: SiteName) -> bool:
        """Its first update was nothing beside the others', as those of small sites under APPLE.

        When it begins to learn, what it sends is hundreds of times as long as what it sent before.
        """
        if self._others < OTHERS:
            return False
        return max(self._beside(self.past[site].lengths[0], site)) < -math.log(self.rules.times)

    def _beside(self, length: float, site: SiteName) -> Iterator[float]:
        """A length (a logarithm) beside the others': as it is, and for its number of cases."""
        yield length - self._reaches.median_of_others(site)
        yield length - PER_CASE * self._cases[site] - self._per_case.median_of_others(site)

    def _reach(self, site: SiteName) -> float:
        """A length that was believed: who comes late learns what the others have learned long ago."""
        return max([self._lengths[site], *self.past[site].lengths[:1]])

    def _shifted(
        self, site: SiteName, usual: Sequence[float], spread: Callable[[Sequence[float], str], float]
    ) -> Iterator[str]:
        shift = self.now[site].shift
        if shift <= self.rules.shift:
            return
        middle = statistics.median(usual)
        if shift - middle > self.rules.sigmas * spread(usual, "shift"):
            yield f"'{self.part}' is shifted by a constant, {shift:.0%} of its length where {middle:.0%} is usual"


def _spread(values: Sequence[float], kind: str) -> float:
    """The MAD, scaled to be the standard deviation of a normal sample."""
    middle = statistics.median(values)
    return max(SPREAD[kind], 1.4826 * statistics.median(abs(value - middle) for value in values))


def _wander(values: Sequence[float], kind: str) -> float:
    """The same from one value to the next, so that a slow trend, as of lengths while training settles, is no spread."""
    steps = [after - before for before, after in pairwise(values)]
    return max(SPREAD[kind], _spread(steps, kind) / math.sqrt(2))


__all__ = ["EMPTY", "Firewall", "History", "Verdict", "judged"]
