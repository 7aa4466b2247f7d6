"""What a hospital allows: what its hospital.toml says, counted from its own log of what left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consilium.caps import held_by, too_large
from consilium.consent import APPROVED, Decisions, study_digest
from consilium.fields import plain
from consilium.hospital import Limits, too_little_privacy
from consilium.left_lines import line_of
from consilium.left_log import FAILED, LOG, append, check_chain, different, left, locked, of_run, of_study, seconds
from consilium.machine import peak_memory_mb
from consilium.messages import AnswerHead, Request
from consilium.policy import Refused, alias_of, over_target
from consilium.privacy.ledger import ledger, total, within
from consilium.site import Spent
from consilium.stopwatch import Stopwatch
from consilium.store import say_once
from consilium.study import Study
from consilium.tree import Packet


@dataclass(frozen=True)
class HospitalPolicy:
    """The rules of a hospital.toml, counted from the hospital's own log of what left."""

    limits: Limits
    labels: tuple[str, ...]  # what the hospital annotates, in the order of the mask values
    secret: bytes
    memory: Path  # the hospital's folder; its log is of all studies

    def alias(self, name: str) -> str:
        return alias_of(name, self.secret)

    @property
    def stopwatch(self) -> Stopwatch:
        return Stopwatch(self.limits.round_seconds)

    @property
    def decisions(self) -> Decisions:
        return Decisions(self.memory, self.secret)

    def check(self, study: Study, cases: int) -> None:
        if tuple(study.facts.labels) != self.labels:
            raise Refused("labels", f"the study has {study.facts.labels}, this hospital {self.labels}")
        if why := too_little_privacy(self.limits, study):
            raise Refused("privacy", why)
        for word, why in too_large(self.limits, study, cases):
            raise Refused(word, why)
        self._check_approval(study)

    def _check_approval(self, study: Study) -> None:
        """Whether a person here has approved exactly this study; one that nobody knows is kept for review."""
        if not self.limits.approval:
            return
        digest = study_digest(study)
        decision = self.decisions.of(digest)
        if decision is None:
            kept = self.decisions.keep_waiting(study)
            told = f"see `consilium federation review {digest[:12]}`" if kept else "too many wait already: not kept"
            raise Refused("approval", f"hospital.toml asks for approval of every study; {told}.")
        if decision.verdict != APPROVED:
            raise Refused("rejected", f"{decision.by} rejected study {digest[:12]} on {decision.time}: {decision.why}")

    def check_cache(self, size: int) -> None:
        if self.limits.cache_bytes and size > self.limits.cache_bytes:
            most = self.limits.cache_bytes
            raise Refused("cache", f"[limits] cache_bytes = {most}, and the preprocessed images take {size}.")

    def before(self, request: Request, study: Study) -> None:
        """What the log shows to be used up is refused before any work is done."""
        self._check_approval(study)  # it may have been withdrawn
        past = list(left(self.memory))
        if not any(line["run"] == request.run for line in past if line["what"] != FAILED):
            raise Refused("foreign", f"{request.do} of {request.run}, whose roll call was not answered here")
        for word, why in (*self._spent_before(request, past), *self._used_up(of_study(past, request.run))):
            raise Refused(word, why)

    def _spent_before(self, request: Request, past: list[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
        """Which budgets have nothing left; a round that was answered before may be repeated to the last bit."""
        number = request.round.index + 1 if request.round else None
        if any((line["what"], line["run"], line.get("round")) == (request.do, request.run, number) for line in past):
            return
        for word, what, key, most, lines in self._counted(past, request.run):
            if what == request.do and most and different(what, lines) >= most:
                yield word, f"[limits] {key} = {most}, and so many have left"

    def _counted(
        self, past: list[Mapping[str, Any]], run: str
    ) -> Iterator[tuple[str, str, str, int, list[Mapping[str, Any]]]]:
        """Word, kind of message, key, limit and lines of every budget that counts messages."""
        limits, study = self.limits, of_study(past, run)
        yield "rounds", "train", "rounds", limits.rounds, past
        yield "rounds", "train", "study_rounds", limits.study_rounds, study
        yield "scores", "score", "scorings", limits.scorings, past
        yield "scores", "score", "study_scorings", limits.study_scorings, study

    def _used_up(self, here: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
        """Which caps on this machine are used up by now; `here` is what this study has sent."""
        limits = self.limits
        if limits.study_seconds and (worked := seconds(here)) > limits.study_seconds:
            yield (
                "time",
                f"[limits] study_seconds = {limits.study_seconds:g}, and this study has worked for {worked:.0f}.",
            )
        peak = int(peak_memory_mb() * 2**20)
        if limits.memory_bytes and peak > limits.memory_bytes:
            yield "ram", f"[limits] memory_bytes = {limits.memory_bytes}, and this process has held {peak}."
        if limits.disk_bytes and (size := held_by(self.memory)) > limits.disk_bytes:
            yield "storage", f"[limits] disk_bytes = {limits.disk_bytes}, and {self.memory} holds {size}."

    def let_go(
        self, request: Request, head: AnswerHead, packet: Packet | None, study: Study, spent: Sequence[Spent] = ()
    ) -> None:
        line = {**line_of(request, packet, spent), "facts": plain(head)}
        with locked(self.memory):
            past = list(left(self.memory))
            if faults := check_chain(self.memory).faults:
                say_once(f"{self.memory / LOG}: {faults[0]}; what is missing is counted as if it had cost the most.")
            for word, why in self._objections(line, past, study):
                raise Refused(word, why)
            append(line, self.memory, durable=True, private=True)  # before it leaves

    def _objections(
        self, line: Mapping[str, Any], past: list[Mapping[str, Any]], study: Study
    ) -> Iterator[tuple[str, str]]:
        """Which limits would be passed; a message that left before, to the last bit, tells nothing new."""
        limits, run, what = self.limits, str(line["run"]), line["what"]
        here, of_this = of_run(past, run), of_study(past, run)
        if limits.message_bytes and line["bytes"] > limits.message_bytes:
            yield "bytes", f"[limits] message_bytes = {limits.message_bytes}, and the message has {line['bytes']}"
        for key, most, lines in (("bytes", limits.bytes, past), ("study_bytes", limits.study_bytes, of_this)):
            before = sum(int(old["bytes"]) for old in lines)
            if most and before + line["bytes"] > most:
                yield "bytes", f"[limits] {key} = {most}, and it would be {line['bytes']} after {before}"
        for word, kind, key, most, lines in self._counted(past, run):
            count = different(what, [*lines, line])
            if kind == what and most and count > most:
                yield word, f"[limits] {key} = {most}, and this would be number {count}"
        if what == "train":
            if study.privacy.by_update and different(what, [*here, line]) > study.exchanges:
                yield "rounds", f"the study told its ε for {study.exchanges} updates, and this would be one more"
            yield from over_target(line, here, study)
            yield from self._over_budget(line, past, study)
        if what == "score" and not limits.study_scorings and different(what, [*here, line]) > 2 * study.scorings:
            yield "scores", f"the study asks for {study.scorings} scorings, and there were twice as many"

    def _over_budget(
        self, line: Mapping[str, Any], past: list[Mapping[str, Any]], study: Study
    ) -> Iterator[tuple[str, str]]:
        """Whether an update would take the hospital, or its part in a study, over its own ε."""
        limits, accountant = self.limits, study.privacy.accountant
        for key, most, lines, which in (
            ("epsilon", limits.epsilon, past, "all studies together"),
            ("study_epsilon", limits.study_epsilon, of_study(past, str(line["run"])), "this study"),
        ):
            entries = ledger([*lines, line]) if most else []
            if most and not within(entries, most, limits.delta, accountant):
                spent = total(entries, limits.delta, accountant)
                yield "budget", f"ε of {which} would be {spent:.3g}, and [limits] {key} = {most:g}"
