"""Whether a sound reply is one that its site could have learned: neither blown up, turned round, shifted nor repeated.

An update is odd if it is both far from what is usual (in robust deviations: median and MAD, which a single liar cannot
move) and large in itself. What is usual is the site's own past, because an honest site may differ from all others for
ever; only until it has a past of its own is it held against the others of the round. docs/privacy.md gives the reasons.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from consilium.errors import StudyError
from consilium.privacy.measuring import Update, cosines, sum_of_units
from consilium.privacy.past import EMPTY, Entry, History
from consilium.site import Roster
from consilium.weights import SiteName

KNOWN = 4  # accepted updates after which a site has a past of its own
WINDOW = 10  # the latest of them count
OTHERS = 2  # others needed to hold a newcomer's length against
AGREED = 0.1  # the mean cosine of two of the others, from which on they have a common direction
VOTERS = 4  # and its direction, which takes a majority that does not hang on one site
SHORT = 10.0  # times shorter than the longest of them
SAME = 1e-5  # of its length: two updates that differ by less are one
# the smallest deviations believed, so that a very steady past makes nothing odd
SPREAD = {"length": 0.1, "turn": 0.05, "shift": 0.05, "likeness": 0.02}


@dataclass(frozen=True)
class Firewall:
    """`[study.firewall]`: what becomes of replies that are sound but odd."""

    mode: str = "observe"  # odd updates are merged and said; "refuse": they are left out; "off"
    sigmas: float = 4.0  # robust deviations from what is usual
    times: float = 5.0  # as long as usual
    turn: float = 0.5  # the usual cosine with its own direction, from which on an update can be turned round
    against: float = 0.3  # the cosine against the others' direction, of a site without a past
    shift: float = 0.5  # of the length, in one constant
    likeness: float = 0.95  # to an earlier update, as a cosine

    def __post_init__(self) -> None:
        if self.mode not in ("off", "observe", "refuse"):
            raise StudyError(f"[study.firewall] mode = {self.mode!r}: it must be one of off, observe, refuse.")
        if not (1 <= self.sigmas < math.inf and 1 < self.times < math.inf):
            raise StudyError("[study.firewall] sigmas must be at least 1, and times above 1.")
        for name in ("turn", "against", "shift", "likeness"):
            if not 0 <= getattr(self, name) < 1:
                raise StudyError(f"[study.firewall] {name} = {getattr(self, name)}: it must be in [0, 1).")


@dataclass(frozen=True)
class Verdict:
    """On one reply."""

    why: str = ""  # it is odd, in words; empty: it is not
    figures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # by part


def judged(
    rules: Firewall, history: History, updates: Mapping[SiteName, Mapping[str, Update]], roster: Roster, phase: str
) -> tuple[dict[SiteName, Verdict], History]:
    """A verdict on every reply of a round, and the history with those that are not odd."""
    parts = sorted({part for own in updates.values() for part in own})
    views = {part: _View(rules, history, updates, roster, phase, part) for part in parts}
    verdicts: dict[SiteName, Verdict] = {}
    entries: list[Entry] = []
    for site, own in updates.items():
        whys = [why for part in own for why in views[part].faults(site)]
        figures = {part: views[part].figures(site) for part in own}
        verdicts[site] = Verdict("; ".join(whys), figures)
        if not whys:
            entries += [views[part].entry(site) for part in own]
    return verdicts, history.with_entries(entries)


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
    ) -> None:
        self.rules, self.phase, self.part = rules, phase, part
        self.now = {site: own[part] for site, own in updates.items() if part in own}
        self.past = {site: history.of(phase, site, part) for site in self.now}
        self.n = {site: roster[site].n for site in self.now}
        self._likenesses: dict[SiteName, float] = {}

    def faults(self, site: SiteName) -> Iterator[str]:
        """Everything that is odd about a site's update, in words."""
        past = self.past[site]
        known = len(past.lengths) >= KNOWN
        others = [other for other in self.now if other != site]
        if self._repeated(site):
            yield f"'{self.part}' is an update that the site has sent before"
        if known:
            yield from self._unlike_itself(site, others)
        elif len(others) >= OTHERS:
            yield from self._unlike_others(site, others)

    def figures(self, site: SiteName) -> dict[str, float]:
        """What the verdict rests on, for the journal."""
        update, past = self.now[site], self.past[site]
        others = [other for other in self.now if other != site]
        found = {"length": update.length, "shift": update.shift}
        if past.lengths:
            found |= {"times_own": math.exp(self._growth(site)), "turn": self._turn(site), "likeness": self._like(site)}
        if len(others) >= OTHERS:
            found |= {"times_others": math.exp(self._ahead(site, others)), "against": self._against(site, others)}
        return {name: float(f"{value:.4g}") for name, value in found.items()}

    def entry(self, site: SiteName) -> Entry:
        """This update, as the site's past will have it."""
        update = self.now[site]
        turn, like = (self._turn(site), self._like(site)) if self.past[site].lengths else (None, None)
        key = f"{self.phase}/{site}/{self.part}"
        return Entry(key, math.log(update.length), turn, update.shift, like, update.sketch, update.seal)

    # ------------------------------------------------------------------------------------ against its own past

    def _unlike_itself(self, site: SiteName, others: Sequence[SiteName]) -> Iterator[str]:
        rules, past, update = self.rules, self.past[site], self.now[site]
        known = [other for other in others if len(self.past[other].lengths) >= KNOWN]
        grown = [self._growth(other) for other in known]
        common = max(0.0, statistics.median(grown)) if grown else 0.0  # a schedule lengthens everyone's at once
        growth = self._growth(site)
        spread = _wander(past.lengths[-WINDOW:], "length")
        if growth - common > max(math.log(rules.times), rules.sigmas * spread):
            also = f"; the others' are {math.exp(common):.3g} times theirs" if grown else ""
            yield f"'{self.part}' is {math.exp(growth):.3g} times as long as the site's updates usually are{also}"
        if self._turned(site) and not self._with_half(others):
            turn, usual = self._turn(site), statistics.median(past.turns[-WINDOW:])
            yield f"'{self.part}' points against the site's earlier updates (cosine {turn:.2f}, usually {usual:.2f})"
        recent = past.shifts[-WINDOW:]
        yield from self._shifted(update.shift, statistics.median(recent), _wander(recent, "shift"))
        like, usual = self._like(site), statistics.median(past.likenesses[-WINDOW:])
        beyond = rules.sigmas * _wander(past.likenesses[-WINDOW:], "likeness")
        short = math.log(update.length) < max(past.lengths[-WINDOW:]) - math.log(SHORT)  # it does no harm
        if like > rules.likeness and like - usual > beyond and not short and not self._repeated(site):
            yield f"'{self.part}' is nearly an earlier update (cosine {like:.3f}, usually {usual:.3f})"

    def _turned(self, site: SiteName) -> bool:
        """Its cosine would be minus the usual one; a gradient, or what keeps no direction, may turn."""
        turns = self.past[site].turns[-WINDOW:]
        if not self.now[site].start or len(self.past[site].lengths) < KNOWN:
            return False
        turn, usual = self._turn(site), statistics.median(turns)
        return (
            turn < -usual / 2 and usual > self.rules.turn and usual - turn > self.rules.sigmas * _wander(turns, "turn")
        )

    def _with_half(self, others: Sequence[SiteName]) -> bool:
        """Half of the others have turned as well: then training has, and no one site."""
        return bool(others) and 2 * sum(map(self._turned, others)) >= len(others)

    def _growth(self, site: SiteName) -> float:
        """How much longer than usual, as a logarithm."""
        return math.log(self.now[site].length) - statistics.median(self.past[site].lengths[-WINDOW:])

    def _turn(self, site: SiteName) -> float:
        return cosines(self.now[site].sketch[None], sum_of_units(self.past[site].sketches.latest(WINDOW)))[0]

    def _like(self, site: SiteName) -> float:
        if site not in self._likenesses:  # the one figure that takes a look at the whole past
            self._likenesses[site] = self.past[site].sketches.largest_cosine(self.now[site].sketch)
        return self._likenesses[site]

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

    def _unlike_others(self, site: SiteName, others: Sequence[SiteName]) -> Iterator[str]:
        rules = self.rules
        ahead = self._ahead(site, others)
        spread = _spread([self._reach(other) for other in others], "length")
        if ahead > max(math.log(rules.times), rules.sigmas * spread):
            yield f"'{self.part}' is {math.exp(ahead):.3g} times as long as the others' updates"
        against, accord = self._against(site, others), self._accord(others)
        starts = {update.start for update in self.now.values()}
        alike = len(starts) == 1 and "" not in starts and len(others) >= VOTERS  # all began at one shared model
        if alike and against < -rules.against and accord > AGREED:
            said = f"cosine {against:.2f}, theirs among themselves {accord:.2f}"
            yield f"'{self.part}' points against the others' updates ({said})"
        theirs = [self.now[other].shift for other in others]
        yield from self._shifted(self.now[site].shift, statistics.median(theirs), _spread(theirs, "shift"))

    def _ahead(self, site: SiteName, others: Sequence[SiteName]) -> float:
        """How much longer than the others', as a logarithm; theirs as they are, or as they were at first if longer.

        More cases are more steps, and the length grows with them, by a power between 1/2 (a random walk) and 1; means
        such as gradients do not grow at all. So a site is as far ahead as the kinder of the two readings says.
        """

        def by(power: float) -> float:
            theirs = statistics.median(self._reach(other) - power * math.log(self.n[other]) for other in others)
            return math.log(self.now[site].length) - power * math.log(self.n[site]) - theirs

        return min(by(0.0), by(0.75))

    def _reach(self, site: SiteName) -> float:
        """A length that was believed: who comes late learns what the others have learned long ago."""
        return max([math.log(self.now[site].length), *self.past[site].lengths[:1]])

    def _against(self, site: SiteName, others: Sequence[SiteName]) -> float:
        theirs = sum_of_units(torch.stack([self.now[other].sketch for other in others]))
        return cosines(self.now[site].sketch[None], theirs)[0]

    def _accord(self, others: Sequence[SiteName]) -> float:
        """The mean cosine between two of the others."""
        total, k = sum_of_units(torch.stack([self.now[other].sketch for other in others])), len(others)
        return ((total * total).sum().item() - k) / (k * (k - 1))

    def _shifted(self, shift: float, usual: float, spread: float) -> Iterator[str]:
        if shift > self.rules.shift and shift - usual > self.rules.sigmas * spread:
            yield f"'{self.part}' is shifted by a constant, {shift:.0%} of its length where {usual:.0%} is usual"


def _spread(values: Sequence[float], kind: str) -> float:
    """The MAD, scaled to be the standard deviation of a normal sample."""
    middle = statistics.median(values)
    return max(SPREAD[kind], 1.4826 * statistics.median(abs(value - middle) for value in values))


def _wander(values: Sequence[float], kind: str) -> float:
    """The same from one value to the next, so that a slow trend, as of lengths while training settles, is no spread."""
    steps = [after - before for before, after in pairwise(values)]
    return max(SPREAD[kind], _spread(steps, kind) / math.sqrt(2))


__all__ = ["EMPTY", "Firewall", "History", "Verdict", "judged"]
