"""What every wire has in common: how sites are called, and what becomes of their answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from consilium import __version__, tree
from consilium.data.preprocess import fingerprint
from consilium.errors import DataError, StudyError, WireError
from consilium.messages import REASONS, SCORED, AnswerHead, Envelope, Members, Reply, RollCall, SiteFacts
from consilium.site import Roster, SiteCard
from consilium.study import Study
from consilium.transport import Rounding
from consilium.tree import Packet
from consilium.weights import SiteName
from consilium.wires.versions import incompatible

ABSENT = ("late", "gone", "away", "silent", "resting")


@dataclass(frozen=True)
class Returned:
    """What a wire brought back from one site."""

    head: AnswerHead
    packet: Packet | None = None
    why: str = ""  # in words, if there is no answer
    sent: int | None = None  # bytes of the order that travelled, where not all of it did
    came: int | None = None  # bytes of the packet on its way, where it was packed

    @property
    def said(self) -> str:
        return self.why or REASONS.get(self.head.error, "")


class SiteWire(ABC):
    """A federation whose sites answer requests. Whose an answer is, the wire knows by itself."""

    closes_early = False  # whether a round may end before all have answered

    def __init__(self, study: Study) -> None:
        self.study = study
        self.roster: Roster = {}
        self.members = ""  # the roster as it travels
        self.rejoined: dict[SiteName, str] = {}  # sites that go on without their memory, and why

    # ------------------------------------------------------------------------------------ what a wire does itself

    @abstractmethod
    def names(self) -> tuple[list[SiteName], list[SiteName]]:
        """The sites that train, and those that are only scored."""

    @abstractmethod
    def call(self, names: Sequence[SiteName]) -> Iterator[tuple[SiteName, Returned]]:
        """Ask sites for their cards."""

    @abstractmethod
    def check_cards(self, answers: Mapping[SiteName, Returned]) -> dict[SiteName, str]:
        """The sites to leave out, and why; an error if the run cannot begin."""

    @abstractmethod
    def exchange(
        self, do: str, packets: Mapping[SiteName, Packet], head: Envelope
    ) -> Iterator[tuple[SiteName, Returned]]:
        """Requests out, answers in as they come; the orders may be under way on return."""

    @abstractmethod
    def lost(self, do: str, site: SiteName, answer: Returned) -> None:
        """What it means that a site did not do what it was asked; an error if the run cannot go on."""

    def before(self) -> Mapping[str, Any]:
        """The origin.json of a run that goes on without some of its sites; empty for a run that begins."""
        return {}

    def as_roster(self, cards: Mapping[SiteName, SiteCard]) -> Roster:
        return cards

    def no_cases(self, sites: Sequence[SiteName]) -> str:
        return f"no training cases at {', '.join(sites)}; leave the site out with study.sites."

    # ------------------------------------------------------------------------------------ the four exchanges

    def roll_call(self) -> RollCall:
        """Every site's card. Of a run that goes on, those of sites that cannot answer are taken from its origin."""
        began = self.before()
        members, guests = self.names()
        if began:  # who was left out at the start stays out
            members, guests = ([name for name in names if name in began["sites"]] for names in (members, guests))
        answers = dict(self.call([*members, *guests]))
        out = self.check_cards(answers)
        if not began and out:
            named, (members, guests) = members, ([n for n in names if n not in out] for names in (members, guests))
            self._check_rest(named, members, answers, out)
        here = {name: a.head.card for name, a in answers.items() if a.head.card is not None and name not in out}
        facts = {n: here[n] if n in here else facts_before(began["sites"][n]) for n in (*members, *guests)}
        empty = [name for name in members if not facts[name].n]
        if empty or not members:
            raise DataError(self.no_cases(empty) if empty else f"no site is left to train: {_listed(out)}.")
        if not began and out:
            self._check_labels({label for name in members for label in facts[name].labels}, out)
        self.roster = self.as_roster({name: facts[name].card(name, index) for index, name in enumerate(members)})
        self.members = tree.to_text(Members(self.roster))
        return RollCall(
            self.roster, {name: name in guests for name in sorted((*members, *guests))}, facts, out, self.rejoined
        )

    def _check_rest(
        self,
        named: Sequence[SiteName],
        members: Sequence[SiteName],
        answers: Mapping[SiteName, Returned],
        out: Mapping[SiteName, str],
    ) -> None:
        """Refuse to begin with too few of the sites that a study names."""
        few = self.study.plan.too_few(len(members), len(named), self.study.pooled)
        if not few:
            return
        told = "\n".join(
            f"site '{name}' cannot take part: {why.removesuffix('.')}." for name, why in sorted(out.items())
        )
        all_absent = all(answers[name].head.error in ABSENT for name in out)
        kind = WireError if all_absent else StudyError
        remedy = "Start them, or leave" if all_absent else "Mend that, or leave"
        raise kind(f"{told}\n{few}. {remedy} them out with study.sites.")

    def _check_labels(self, drawn: Collection[str], out: Mapping[SiteName, str]) -> None:
        """Every label must be drawn by someone who is left."""
        facts = self.study.facts
        nobody = [label for label in facts.labels if label not in drawn]
        if nobody and facts.task == "segmentation":
            raise StudyError(
                f"no site that is left annotates {', '.join(map(repr, nobody))}; left out: {_listed(out)}."
            )

    def train(self, orders: Mapping[SiteName, Packet], head: Envelope) -> Iterator[tuple[SiteName, Reply]]:
        return self._replies("train", orders, head)

    def score(self, releases: Mapping[SiteName, Packet], head: Envelope) -> Iterator[tuple[SiteName, Reply]]:
        return self._replies("score", releases, head)

    def _replies(self, do: str, packets: Mapping[SiteName, Packet], head: Envelope) -> Iterator[tuple[SiteName, Reply]]:
        """Not a generator: the orders go out now, whenever the answers are looked at."""
        return self._read_replies(do, self.exchange(do, self._rounded(packets), head))

    def _rounded(self, packets: Mapping[SiteName, Packet]) -> dict[SiteName, Packet]:
        """What leaves the server, with the numbers that travel."""
        rounding = Rounding(self.study.plan.transport)
        return {name: rounding.of(packet) for name, packet in packets.items()}

    def _read_replies(
        self, do: str, answers: Iterator[tuple[SiteName, Returned]]
    ) -> Generator[tuple[SiteName, Reply], None, None]:
        with closing_with(answers):
            for name, answer in answers:
                yield name, self._reply(do, name, answer)

    def _reply(self, do: str, site: SiteName, answer: Returned) -> Reply:
        if answer.packet is None:
            self.lost(do, site, answer)
        lost = "" if answer.packet is not None else answer.said or "its answer is empty"
        head = answer.head
        return Reply(answer.packet, head.seconds, lost, head.memory_mb, answer.sent, head.error, answer.came)

    def deliver(self, releases: Mapping[SiteName, Packet], head: Envelope) -> list[SiteName]:
        missing = []
        for name, answer in self.exchange("deliver", self._rounded(releases), head):
            if answer.head.error:
                self.lost("deliver", name, answer)
                missing.append(name)
        return missing

    # ------------------------------------------------------------------------------------ cards

    def unusable(self, answer: Returned) -> str:
        """Why a card cannot be believed; empty if it can, or if there is none for another reason."""
        card = answer.head.card
        if answer.head.error == "damaged":
            return answer.said
        if answer.head.error:
            return ""
        if card is None:
            return "it has sent no card"
        most = self.study.plan.max_cases
        for split, cases in {"train": card.n + card.unlabelled, **card.scored}.items():
            if cases > most:
                kind = {"train": "training", "valid": "validation"}.get(split, split)
                return f"it says that it has {cases} {kind} cases, and [study] max_cases is {most}"
        if sum(card.scored.values()) > card.cases:
            return f"it says that it scores {sum(card.scored.values())} of {card.cases} cases"
        return ""

    def mismatch(self, answer: Returned) -> str:
        """Why a site cannot take part though it is there; empty if it can."""
        if answer.head.error and answer.head.error not in ABSENT:
            return f"{answer.said} (its own log says more)"
        card = answer.head.card
        if card is None:
            return ""
        if wrong := incompatible(__version__, card.version):
            return wrong
        ours = {
            "study": (self.study.hash, card.study),
            "preprocessing": (fingerprint(self.study.preprocess), card.preprocessing),
        }
        for what, (here, there) in ours.items():
            if here != there:
                with_ = "" if card.version == __version__ else f" (it has consilium {card.version}, not {__version__})"
                return (
                    f"it has another {what}: {there} where the server has {here}; compare the two installations{with_}"
                )
        unknown = set(card.labels) - set(self.study.facts.labels)
        return f"it has labels the study has not: {', '.join(sorted(unknown))}" if unknown else ""


@contextmanager
def closing_with(answers: Iterator[Any]) -> Iterator[None]:
    """Whoever stops looking at answers early, says so at once to whoever waits for them."""
    try:
        yield
    finally:
        if isinstance(answers, Generator):
            answers.close()


def facts_before(told: Mapping[str, Any]) -> SiteFacts:
    """What a site said when the run began, from the run's own origin.json; version 0.1 wrote a little less."""
    return SiteFacts(
        n=told["n"],
        unlabelled=told.get("unlabelled", 0),
        labels=tuple(told["labels"]),
        cases=told["cases"],
        scored=told.get("scored", dict.fromkeys(SCORED, told["cases"])),
        table=told["table"],
        arrays=told["arrays"],
        version=told["version"],
        study=told.get("study", told.get("method", "")),
        preprocessing=told.get("preprocessing", ""),
        key=told.get("key", ""),
    )


def _listed(reasons: Mapping[SiteName, str]) -> str:
    return "; ".join(f"{site}: {why}" for site, why in sorted(reasons.items()))
