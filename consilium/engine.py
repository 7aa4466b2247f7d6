"""The only round loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from consilium.admission import admitted, called, present
from consilium.data.profile import DataProfile, joined, read_profile, scale_faults
from consilium.errors import StudyError, UserError, WorkError
from consilium.fields import plain
from consilium.files import sweep_drafts
from consilium.intake import accepted, scored
from consilium.machine import peak_memory_mb
from consilium.messages import Envelope, Reply, RollCall, card_to_json
from consilium.method import Best, Method, Phase, Valid, timeline
from consilium.plugins import plugin_hashes
from consilium.privacy.firewall import EMPTY, History, Verdict, judged
from consilium.privacy.measuring import Update, updates_of
from consilium.randomness import numpy_generator
from consilium.run_folder import RunFolder, disk_errors
from consilium.score_sheets import Scorer
from consilium.scores import ENDS, Row, run_summary, summarise, with_label_mean
from consilium.site import Roster, Round, SiteCard, Task
from consilium.study import Study
from consilium.tree import Packet, flatten
from consilium.weights import SiteName


class Wire(Protocol):
    """Carries packets; a site that fails or is late is a `Reply` without a packet.

    `train` and `score` may have sent the orders when they return; they give replies as they come, so that one is
    checked while other sites still work. Whose a reply is, and to which order, the wire knows by itself. `deliver`
    returns the sites that did not take their release.
    """

    closes_early: bool  # whether a round may end before all have answered: where sites are machines of their own

    def roll_call(self) -> RollCall: ...
    def train(self, orders: Mapping[SiteName, Packet], head: Envelope) -> Iterator[tuple[SiteName, Reply]]: ...
    def score(self, releases: Mapping[SiteName, Packet], head: Envelope) -> Iterator[tuple[SiteName, Reply]]: ...
    def deliver(self, releases: Mapping[SiteName, Packet], head: Envelope) -> Collection[SiteName]: ...
    def close(self) -> None: ...


class Sent(NamedTuple):
    """Orders that are out, and what comes back."""

    head: Envelope
    asked: Sequence[SiteName]
    sizes: Mapping[SiteName, int]  # of the orders, in bytes
    replies: Iterator[tuple[SiteName, Reply]]


Event = tuple[str, Mapping[str, Any]]  # of the journal to be: its name and facts


class Collected(NamedTuple):
    """What came of a round's orders."""

    replies: Mapping[SiteName, Any]  # those to merge
    history: History
    events: Sequence[Event]  # noted when the round is written
    forgot: Sequence[SiteName] = ()  # sites that lost their memory and go on as new ones


def run(study: Study, wire: Wire, folder: RunFolder) -> Mapping[str, Any]:
    """Train a study to its end, from wherever its folder stands; returns the summary."""
    threads = torch.get_num_threads()
    with folder.locked(), disk_errors(folder.path):
        try:
            torch.set_num_threads(1)  # averaging is bound by memory, and the cores belong to the sites
            return _Run(study, wire, folder).to_the_end()
        except UserError:
            if not folder.begun:
                folder.remove()  # a study that was refused leaves nothing behind
            raise
        finally:
            torch.set_num_threads(threads)
            wire.close()


class _Run:
    """A run under way."""

    def __init__(self, study: Study, wire: Wire, folder: RunFolder) -> None:
        self.study, self.wire, self.folder = study, wire, folder
        self.method: Method = study.method
        self.task: Task = study.task
        self.line = timeline(self.method, study.plan.rounds, study.plan.score_every)
        self.rounds = sum(phase.counts for phase, _ in self.line)  # the paper's
        sweep_drafts(folder.path)  # the run is locked, and its sites have not been asked yet
        folder.mend_journal()
        folder.mend_scores()
        study.check_size()
        self.roll = wire.roll_call()
        self.roster: Roster = self.roll.members
        folder.check_origin(self._facts(), self.roll.rejoined)
        self.profiles = _profiles(self.roll)
        wrong, odd = scale_faults(self.profiles, study.preprocess) if not folder.begun else ([], [])
        if wrong:
            raise StudyError(wrong[0])
        self.memory_mb: dict[SiteName, float] = {}
        self._since = time.perf_counter()
        for warning in (*admitted(study, self.line, self.roster), *odd):
            folder.note("warning", text=warning)

    def to_the_end(self) -> Mapping[str, Any]:
        state = self.folder.resume(self.method)
        best = self.folder.best(self.method)
        server: Any = state.server if state else self.method.start(self.task, self.roster)
        merged: dict[SiteName, int] = dict(state.merged) if state else {}
        merged |= dict.fromkeys(self.roll.rejoined, -1)
        done = state.done if state else 0
        history = state.history if state else EMPTY
        ended = self.folder.last(self.method).merged if done > self._last_counting[1].index else {}
        self._say_hello(done)
        if state:
            self._make_up(*self.line[done - 1], state.seconds)
            best = self._score_if_due(*self.line[done - 1], server, merged, best)
        write: Callable[[], Any] | None = None
        for phase, round in self.line[done:]:
            if phase.from_best and round.step == 0 and best is not None:
                server, merged = best.server, dict(best.merged)  # and the memories that go with it
            if write is None:
                self._since = time.perf_counter()  # scoring is not part of a round
            try:
                sent = self._send(server, phase, round, merged, [best.merged if best else {}, ended])
            finally:
                if write is not None:
                    server = write()  # the round before, while the sites train this one
            replies, history, events, forgot = self._collect(sent, server, phase, round, history)
            server = self.method.merge(server, replies, round)
            merged.update(dict.fromkeys(replies, round.index))
            merged.update(dict.fromkeys(forgot, -1))
            if (phase, round) == self._last_counting:
                ended = dict(merged)  # its scores are taken at the end, with the memories that go with it
            write = partial(self._commit, phase, round, server, dict(merged), history, events)
            if round.step + 1 == phase.rounds or round.scored:
                server, write = write(), None
                best = self._score_if_due(phase, round, server, merged, best)
        return self._finish(server, merged, best)

    def _commit(
        self,
        phase: Phase,
        round: Round,
        server: Any,
        merged: Mapping[SiteName, int],
        history: History,
        events: Sequence[Event],
    ) -> Any:
        """Make a round last; the server as it will be read again, so that the merged one's memory can go."""
        self.folder.notes(events, durable=True)  # first: an event told twice counts once, one that is missing is missed
        last, seconds = (phase, round) == self._last_counting, self._lap()
        server = self.folder.commit(round, server, merged, history, last, seconds)
        self._tell_round(phase, round, seconds)
        return server

    def _tell_round(self, phase: Phase, round: Round, seconds: float) -> None:
        place = {"round": round.number, "phase": phase.name, "step": round.step + 1, "steps": round.total}
        self.folder.note("round", **place, seconds=seconds)

    def _make_up(self, phase: Phase, round: Round, seconds: float) -> None:
        """Tell of the last round if its state was written, but the process died before the journal had it."""
        told = {(event["round"], event["phase"]) for event in self.folder.events() if event["event"] == "round"}
        if (round.number, phase.name) not in told:
            self._tell_round(phase, round, seconds)

    def _lap(self) -> float:
        """Seconds of this round: rounds overlap, so they count from the end of the one before."""
        now = time.perf_counter()
        seconds, self._since = round3(now - self._since), now
        return seconds

    def _facts(self) -> dict[str, Any]:
        """Who takes part, with which cases and whose code: what may not change while a run is under way."""
        return {
            "members": {name: card_to_json(card) for name, card in self.roster.items()},
            "sites": {
                name: {key: value for key, value in plain(facts).items() if key != "profile"}
                for name, facts in self.roll.facts.items()
            },
            "plugins": plugin_hashes(self.study.plugins),
        }

    def _say_hello(self, done: int) -> None:
        trained_on = self.folder.trained_on() or joined(self.profiles.values())  # of all that began, some may be away
        told = {"distribution": trained_on.to_json()} if trained_on else {}
        self.folder.write_origin({**self._facts(), **told})
        self.folder.note(
            "resume" if done else "start",
            method=self.study.method_name,
            round=sum(phase.counts for phase, _ in self.line[:done]),
            rounds=self.rounds,
            aside=sorted({phase.name for phase, _ in self.line if not phase.counts}),
            sites={n: c.n + (c.unlabelled if self.method.unlabelled else 0) for n, c in self.roster.items()},
        )
        for name, why in sorted(self.roll.left_out.items()):
            self.folder.note("left out", site=name, why=why)
        for name, why in sorted(self.roll.rejoined.items()):
            self.folder.note("rejoined", site=name, why=why)
        if self.study.privacy.on and not done:
            self.folder.note("privacy", **self._privacy())

    def _privacy(self) -> dict[str, Any]:
        """What every site gives away at most, by the noise it adds."""
        told = self.study.privacy
        return {"epsilon": round3(told.epsilon(len(self.line))), "delta": told.delta, "rounds": len(self.line)}

    # ------------------------------------------------------------------------------------ one round

    def _send(
        self,
        server: Any,
        phase: Phase,
        round: Round,
        merged: Mapping[SiteName, int],
        later: Sequence[Mapping[SiteName, int]],
    ) -> Sent:
        """Orders out; sites keep the memories that go with states that will be scored `later`."""
        asked = self._asked(phase, round)
        orders = {name: self.method.send(server, self.roster[name], round) for name in asked}
        packets = _flattened(orders)
        wanted = {name: [rounds[name] for rounds in later if name in rounds] for name in asked}
        head = Envelope(self.folder.path.name, self.study.method_name, round, dict(merged), wanted)
        sizes = {name: packet.nbytes() for name, packet in packets.items()}
        return Sent(head, asked, sizes, self.wire.train(packets, head))

    def _collect(self, sent: Sent, server: Any, phase: Phase, round: Round, history: History) -> Collected:
        """Replies in; one that cannot be used is left out, said, and forgotten by its site."""
        place = {"round": round.number, "phase": phase.name}
        absent = [name for name in self.roster if name not in sent.asked]
        events: list[Event] = [("away", {**place, "site": name}) for name in absent]
        came: dict[SiteName, tuple[Reply, Any | None, str]] = {}
        updates: dict[SiteName, Mapping[str, Update]] = {}
        good = 0
        enough = self.study.plan.quorum_of(len(sent.sizes)) if self.wire.closes_early else len(sent.sizes)
        for name, reply in sent.replies:
            uplink, why = self._accepted(name, reply, sent.head)
            came[name] = reply, uplink, why
            if uplink is not None and self.study.plan.firewall.mode != "off":
                order = self.method.send(server, self.roster[name], round)
                updates[name] = updates_of(uplink, self.method.started_from(server, self.roster[name], order))
            good += uplink is not None
            if good >= enough and len(came) < len(sent.sizes):
                break
        if isinstance(sent.replies, Generator):
            sent.replies.close()  # the others need not hurry
        for name in sent.sizes:
            if name not in came:
                said = f"the round closed with {good} of {len(sent.sizes)} sites, a quorum"
                came[name] = Reply(None, lost=said), None, said
        by_name = {name: updates[name] for name in sorted(updates)}  # whoever answers first
        verdicts, history = judged(self.study.plan.firewall, history, by_name, self.roster, phase.name)
        replies: dict[SiteName, Any] = {}
        forgot: list[SiteName] = []
        lost = ""
        for name, (reply, uplink, lost_here) in sorted(came.items()):
            facts = {**place, "site": name}
            self.memory_mb[name] = reply.memory_mb
            verdict = verdicts.get(name)
            odd = verdict.why if verdict and self.study.plan.firewall.mode == "refuse" else ""
            if uplink is None or odd:
                lost = odd or lost_here
                if reply.error == "memory" and self.study.plan.rejoin:
                    forgot.append(name)
                    events.append(("rejoined", {**facts, "why": lost}))
                events.append(("lost" if reply.packet is None else "refused", {**facts, "why": lost, **_told(verdict)}))
                continue
            replies[name] = uplink
            assert reply.packet is not None
            down = sent.sizes[name] if reply.sent is None else reply.sent
            cost = {"bytes_down": down, "bytes_up": reply.packet.nbytes()}
            loss = None if self.study.privacy.on else getattr(uplink, "loss", None)  # private: it was not sent
            work = {"loss": loss, "steps": getattr(uplink, "steps", None)}
            work |= {
                name: value
                for name, value in vars(uplink).items()
                if name.endswith("_loss") and isinstance(value, float)
            }
            seconds = {"seconds": round3(reply.seconds)}
            events.append(("train", {**facts, **work, **seconds, **cost, **_told(verdict, "odd")}))
        if len(replies) < max(1, self.study.plan.min_sites):
            self.folder.notes(events)
            raise WorkError(
                f"{called(phase, round)}: {len(replies)} of {len(sent.sizes)} sites answered, but min_sites is "
                f"{self.study.plan.min_sites}{f' (the last reason: {lost})' if lost else ''}. Everything before it is "
                f"saved; when the sites are back, `consilium resume {self.folder.path}`."
            )
        return Collected(replies, history, events, forgot)

    def _asked(self, phase: Phase, round: Round) -> list[SiteName]:
        """The sites of this round: all but those away, or a seeded draw of them."""
        plan = self.study.plan
        here = present(self.study, self.line, self.roster, phase, round)
        if phase.counts and 0 < plan.sites_per_round < len(here):  # everyone adapts and calibrates
            draw = numpy_generator(plan.seed, "sites per round", round.index)
            here = sorted(str(name) for name in draw.choice(here, plan.sites_per_round, replace=False))
        return here

    def _accepted(self, name: SiteName, reply: Reply, head: Envelope) -> tuple[Any | None, str]:
        if reply.packet is None:
            return None, reply.lost
        expected = self.method.blank(self.task, self.roster, self.roster[name], head.round)
        return accepted(reply.packet, self.method.Uplink, expected)

    # ------------------------------------------------------------------------------------ scores

    def _score_if_due(
        self, phase: Phase, round: Round, server: Any, merged: Mapping[SiteName, int], best: Best | None
    ) -> Best | None:
        if not round.scored or (round.number, phase.name) in self.folder.scored():
            return best
        rows, missing = self._score(server, merged, round, full=False)
        complete = not any(name in self.roster for name in missing)
        if complete or (best is None and (phase, round) == self._last_counting):
            # means over other sites do not compare, so a round that not all have scored cannot be the best
            now = Best(server, self._valid(rows, round), dict(merged))
            best = self.folder.keep(self.method.keep(best, now) if best and now.valid else now)
        self._seal(rows, round.number, phase.name)
        return best

    @property
    def _last_counting(self) -> tuple[Phase, Round]:
        return next((phase, round) for phase, round in reversed(self.line) if phase.counts)

    def _score(
        self, server: Any, merged: Mapping[SiteName, int], round: Round, full: bool, sites: Collection[SiteName] = ()
    ) -> tuple[list[Row], list[SiteName]]:
        """The scores of all sites, or of these, and the sites that did not answer."""
        releases = {}
        for name in sites or self.roll.audience:
            releases[name] = flatten(self.method.release(server, self.roster.get(name)))
        head = Envelope(self.folder.path.name, self.study.method_name, round, merged, full=full)
        answers: dict[SiteName, list[Row]] = {}
        lost = dict.fromkeys(releases, "")
        for name, reply in self.wire.score(releases, head):
            rows, lost[name] = (None, reply.lost) if reply.packet is None else self._scored(name, reply.packet, round)
            if rows is not None:
                answers[name] = rows
        missing = [name for name in releases if name not in answers]
        for name in missing:
            self.folder.note("unscored", round=round.number, phase=round.phase, site=name, why=lost[name])
        return [row for name in sorted(answers) for row in answers[name]], missing

    def _scored(self, name: SiteName, packet: Packet, round: Round) -> tuple[list[Row] | None, str]:
        """A site's scores, if all of them can be true: who it is, and of which round they are, only we say."""
        names, labels = frozenset(self.roll.facts), frozenset(self.task.labels)
        cases = self.roll.facts[name].scored
        return scored(packet, Scorer(name, self.roll.audience[name], cases, names, labels), round)

    def _seal(
        self, rows: list[Row], round: int, phase: str, missing: Sequence[SiteName] = (), before: Sequence[Row] = ()
    ) -> None:
        """Scores count once their event is in the journal; `before` are those of the same state that it has already."""
        self.folder.add_scores(rows)
        rows = [*before, *rows]
        model, metric = self.method.headline, self.task.headline
        if rows and not any(row.model == model for row in rows):  # a phase before the method's own model is there
            model = rows[0].model
        facts: dict[str, Any] = {}
        for split in ("valid", "test"):
            entry = summarise(with_label_mean(rows), split).get(model, {}).get(metric, {}).get("mean", {})
            facts[split] = {"site_mean": entry.get("site_mean"), "sites": entry.get("sites", {})}
        if phase in ENDS:
            facts["unscored"] = sorted(missing)
        self.folder.note("score", round=round, phase=phase, model=model, metric=metric, rows=len(rows), **facts)

    def _valid(self, rows: list[Row], round: Round) -> dict[str, Valid]:
        """The validation scores `keep` decides by: a model's site mean, `:pooled`, `:routed`, and each owner's own."""
        found: dict[str, float] = {}
        for model, metrics in summarise(with_label_mean(rows), "valid").items():
            entry = metrics.get(self.task.headline, {}).get("mean", {})
            routed = metrics.get("routed", {}).get("", {})
            values = {"": entry.get("site_mean"), ":pooled": entry.get("pooled"), ":routed": routed.get("site_mean")}
            found.update({f"{model}{key}": value for key, value in values.items() if value is not None})
            owned = any(row.of for row in rows if row.model == model)
            found.update({f"{model}/{site}": value for site, value in entry.get("sites", {}).items() if owned})
        return {key: Valid(value, round.number) for key, value in found.items()}

    # ------------------------------------------------------------------------------------ the end

    def _finish(self, server: Any, merged: Mapping[SiteName, int], best: Best | None) -> Mapping[str, Any]:
        assert best is not None
        final, last_round = self.line[-1][1], self.rounds
        end = self._last_counting[1].index
        if any(phase.from_best for phase, _ in self.line[end + 1 :]):  # adaptation and calibration refine the best
            best = self.folder.keep(replace(best, server=server, merged=dict(merged)))
        best_round = max(mark.round for mark in best.valid.values()) if best.valid else last_round
        last = self.folder.last(self.method)
        for name, state, number in (("best", best, best_round), ("last", last, last_round)):
            self._score_end(name, state, replace(final, index=number - 1, before=0, phase=name))
        undelivered = self.wire.deliver(
            {name: flatten(self.method.release(best.server, card)) for name, card in self._recipients().items()},
            Envelope(self.folder.path.name, self.study.method_name, final, best.merged),
        )
        summary = {**self._summary(best, best_round, last_round), **self._lacking(undelivered)}
        self.folder.finish(self.method, summary)
        self.folder.note("finish", seconds=summary["seconds"])
        return summary

    def _score_end(self, name: str, state: Best, round: Round) -> None:
        """All scores of the best or the last state; of a run that ended without some sites, theirs."""
        sites: Sequence[SiteName] = ()
        before: list[Row] = []
        if (round.number, name) in self.folder.scored():
            sites = self.folder.unscored().get(name, ())
            if not sites:
                return
            before = [row for row in self.folder.rows() if row.phase == name]
        if name == "last" and self.folder.best_is_last():  # a state that is both is scored once
            scored = [row for row in self.folder.rows() if row.phase == "best" and (row.site in sites or not sites)]
            rows = [replace(row, phase=name, round=round.number) for row in scored]
            missing = self.folder.unscored().get("best", ())
        else:
            rows, missing = self._score(state.server, state.merged, round, full=True, sites=sites)
        if set(missing) != set(sites) or not before:
            self._seal(rows, round.number, name, missing, before)

    def _lacking(self, undelivered: Collection[SiteName]) -> dict[str, list[SiteName]]:
        """Sites without which a run ends; a later `resume` asks them again."""
        unscored = sorted({site for sites in self.folder.unscored().values() for site in sites})
        return {key: sites for key, sites in (("unscored", unscored), ("undelivered", sorted(undelivered))) if sites}

    def _recipients(self) -> dict[SiteName, SiteCard | None]:
        """Every site; of a run that ended before, those that have no release yet."""
        names = self.folder.summary().get("undelivered", ()) if self.folder.finished else self.roll.audience
        return {name: self.roster.get(name) for name in names}

    def _summary(self, best: Best, best_round: int, last_round: int) -> Mapping[str, Any]:
        rows = self.folder.rows()
        keys = ("event", "phase", "round", "site")
        events = {tuple(event.get(key) for key in keys): event for event in self.folder.events()}.values()
        train = [event for event in events if event["event"] == "train"]
        rounds = {key: mark.round for key, mark in best.valid.items()}
        apart = bool(rounds) and self.method.headline not in rounds  # models of several rounds, chosen one by one
        summary = run_summary(
            method=self.study.method_name,
            seed=self.study.plan.seed,
            rounds=self.study.plan.rounds,
            headline_model=self.method.headline,
            headline_metric=self.task.headline,
            best_rows=[row for row in rows if row.phase == "best"],
            last_rows=[row for row in rows if row.phase == "last"],
            best_round=best_round,
            last_round=last_round,
            seconds=round3(sum(event["seconds"] for event in events if event["event"] == "round")),
            bytes_up=sum(event["bytes_up"] for event in train),
            bytes_down=sum(event["bytes_down"] for event in train),
            peak_memory_mb=round3(peak_memory_mb() + max(self.memory_mb.values(), default=0.0)),
            best_rounds=rounds,
            all_rows=rows,
            joint=[row for row in rows if row.phase not in ("best", "last")] if apart else (),
        )
        hidden = self._hidden()
        privacy = {"privacy": self._privacy()} if self.study.privacy.on else {}
        return {**summary, **({"hidden": hidden} if hidden else {}), **privacy}

    def _hidden(self) -> dict[SiteName, list[str]]:
        """What was scored on test masks though the site does not annotate it: known only because this is a trial."""
        if self.study.data.test_masks != "complete":
            return {}
        drawn = {name: facts.labels for name, facts in self.roll.facts.items()}
        unknown = {name: [x for x in self.task.labels if x not in labels] for name, labels in drawn.items()}
        return {name: labels for name, labels in sorted(unknown.items()) if labels}


def _profiles(roll: RollCall) -> dict[SiteName, DataProfile]:
    """What the training images of every site are like, of those that train and say it."""
    guests = {name for name, outside in roll.audience.items() if outside}
    told = {name: facts.profile for name, facts in sorted(roll.facts.items()) if name not in guests}
    found = {name: read_profile(plain(profile)) for name, profile in told.items() if profile is not None}
    return {name: profile for name, profile in found.items() if profile is not None}


def _told(verdict: Verdict | None, if_odd: str = "refused") -> dict[str, Any]:
    """The firewall's verdict as the journal has it."""
    if verdict is None:
        return {}
    said = {"verdict": if_odd, "why": verdict.why} if verdict.why else {"verdict": "accepted"}
    return {"firewall": {**said, "figures": verdict.figures}}


def _flattened(orders: Mapping[SiteName, Any]) -> dict[SiteName, Packet]:
    """One packet for all sites that are sent the very same things, so that a wire need write it only once."""
    made: dict[tuple[int, ...], Packet] = {}
    packets = {}
    for name, order in orders.items():
        if order is not None:
            fields = tuple(id(value) for value in vars(order).values())
            packets[name] = made[fields] if fields in made else made.setdefault(fields, flatten(order))
    return packets


def round3(number: float) -> float:
    return round(number, 3)
