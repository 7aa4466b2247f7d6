"""One round: send orders, check replies, merge once."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from consilium.engine.active import ActiveRun, round3
from consilium.engine.repair import stop_without_memory, trained_again
from consilium.errors import WorkError
from consilium.intake import accepted, by_size, new_parts, spoilt
from consilium.messages import SCORED, Envelope, Reply
from consilium.method import Phase
from consilium.privacy.firewall import Verdict, judged
from consilium.privacy.measuring import Update, updates_of
from consilium.privacy.past import History
from consilium.randomness import numpy_generator
from consilium.site import SLICES, Round
from consilium.timeline import called, present
from consilium.tree import Packet, flatten
from consilium.weights import SiteName
from consilium.wording import command


class PendingOrders(NamedTuple):
    """Orders that were sent, and their replies."""

    head: Envelope
    asked: Sequence[SiteName]
    sizes: Mapping[SiteName, int]  # of the orders, in bytes
    replies: Iterator[tuple[SiteName, Reply]]


Event = tuple[str, Mapping[str, Any]]  # a future log entry: name and facts


class RoundReplies(NamedTuple):
    """The result of a round's orders."""

    replies: Mapping[SiteName, Any]  # the replies to merge
    history: History
    events: Sequence[Event]  # logged when the round is committed
    forgot: Sequence[SiteName] = ()  # sites that lost their memory and continue as new sites


def send(
    active: ActiveRun,
    server: Any,
    phase: Phase,
    round: Round,
    merged: Mapping[SiteName, int],
    later: Sequence[Mapping[SiteName, int]],
) -> PendingOrders:
    """Send the orders; sites keep the memories of states that will be scored `later`."""
    asked = _asked(active, phase, round)
    orders = {name: active.method.send(server, active.roster[name], round) for name in asked}
    packets = flattened(orders)
    wanted = {name: [rounds[name] for rounds in later if name in rounds] for name in asked}
    head = Envelope(active.folder.path.name, active.study.method_name, round, dict(merged), wanted)
    sizes = {name: packet.nbytes() for name, packet in packets.items()}
    return PendingOrders(head, asked, sizes, active.wire.train(packets, head))


_DIVERGED = (
    ", but a resumed run would get the same answers. A loss or weights out of range mean that the training diverged: "
    "give it a smaller learning rate."
)
Came = dict[SiteName, tuple[Reply, Any | None, str]]  # a site's reply, its message, or the reason why there is none


def collect(
    active: ActiveRun, sent: PendingOrders, server: Any, phase: Phase, round: Round, history: History
) -> RoundReplies:
    """Collect the replies; an unusable one is left out and logged, and its site drops it too."""
    place = {"round": round.number, "phase": phase.name}
    absent = [name for name in active.roster if name not in sent.asked]
    events: list[Event] = [("away", {**place, "site": name}) for name in absent]
    came, updates = _awaited(active, sent, server, round)
    by_name = {name: updates[name] for name in sorted(updates)}  # independent of the order of answers
    firewall, steady = active.study.plan.firewall, active.study.method.steady
    verdicts, history = judged(firewall, history, by_name, active.roster, phase.name, steady)
    replies: dict[SiteName, Any] = {}
    forgot: list[SiteName] = []
    lost, gone, failed = "", 0, 0
    for name, (reply, uplink, lost_here) in sorted(came.items()):
        facts = {**place, "site": name}
        active.memory_mb[name] = reply.memory_mb
        verdict = verdicts.get(name)
        refusing = verdict and (firewall.mode == "refuse" or verdict.absurd)
        odd = verdict.why if verdict and refusing else ""
        if uplink is None or odd:
            lost = odd or lost_here
            gone += reply.packet is None and reply.error != "infinite"
            failed += reply.error == "failed"
            if reply.error == "memory" and active.study.plan.rejoin:
                forgot.append(name)
                events.append(("rejoined", {**facts, "why": lost}))
            events.append(("lost" if reply.packet is None else "refused", {**facts, "why": lost, **_told(verdict)}))
            continue
        replies[name] = uplink
        work = _work(reply, uplink, sent.sizes[name], active.study.privacy.on)
        events.append(("train", {**facts, **work, **_told(verdict, "odd")}))
    if len(replies) < max(1, active.study.plan.min_sites):
        active.folder.journal.notes(events)
        rejected = bool(lost) and not gone
        answers = f"{len(replies)} of {len(sent.sizes)} {'answers could be used' if rejected else 'sites answered'}"
        code = 0 < gone == failed
        raise _too_few(active, f"{called(phase, round)}: {answers}", lost, rejected, code)
    return RoundReplies(replies, history, events, forgot)


def _work(reply: Reply, uplink: Any, size: int, private: bool) -> dict[str, Any]:
    """The log's figures of a merged reply to an order of this size."""
    assert reply.packet is not None
    losses = {key: value for key, value in vars(uplink).items() if key.endswith("_loss") and isinstance(value, float)}
    return {
        "loss": None if private else getattr(uplink, "loss", None),  # private: it was not sent
        "steps": getattr(uplink, "steps", None),
        **losses,
        "seconds": round3(reply.seconds),
        "bytes_down": size if reply.sent is None else reply.sent,
        "bytes_up": reply.packet.nbytes() if reply.came is None else reply.came,
    }


def _too_few(active: ActiveRun, answers: str, lost: str, rejected: bool, code: bool) -> WorkError:
    """`lost`: the last reason why a reply could not be used; `rejected`: all of them came; `code`: none, it raised."""
    reason = f" (the last reason: {lost})" if lost else ""
    resume = command("resume", active.folder.path)
    remedy = f"; when the sites are back, {resume}."
    if code:
        remedy = f". When that is mended, {resume}; with other code of your own, `consilium run STUDY.toml --again`."
    if rejected:
        remedy = _DIVERGED
    return WorkError(
        f"{answers}, but min_sites is {active.study.plan.min_sites}{reason}. Everything before it is saved{remedy}"
    )


def _awaited(
    active: ActiveRun, sent: PendingOrders, server: Any, round: Round
) -> tuple[Came, dict[SiteName, Mapping[str, Update]]]:
    """Collect replies and their updates until there are enough; damaged memories are repaired."""
    came: Came = {}
    updates: dict[SiteName, Mapping[str, Update]] = {}

    def measure(name: SiteName, uplink: Any) -> None:
        if active.study.plan.firewall.mode != "off":
            order = active.method.send(server, active.roster[name], round)
            updates[name] = updates_of(uplink, active.method.started_from(server, active.roster[name], order))

    good = 0
    enough = active.study.plan.quorum_of(len(sent.sizes)) if active.wire.closes_early else len(sent.sizes)
    for name, reply in sent.replies:
        uplink, why = _accepted(active, name, reply, sent.head)
        came[name] = reply, uplink, why
        if uplink is not None:
            measure(name, uplink)
        good += uplink is not None
        if good >= enough and len(came) < len(sent.sizes):
            break
    if isinstance(sent.replies, Generator):
        sent.replies.close()  # the other replies are not needed
    for name in sorted(name for name, (reply, _, _) in came.items() if reply.error == "memory"):
        reply = trained_again(active, name, server, sent.head) or came[name][0]
        came[name] = reply, *_accepted(active, name, reply, sent.head)
        stop_without_memory(active, reply)
        if came[name][1] is not None:
            measure(name, came[name][1])
    for name in sent.sizes:
        if name not in came:
            said = f"the round closed with {good} of {len(sent.sizes)} sites, a quorum"
            came[name] = Reply(None, lost=said), None, said
    return came, updates


class MergedState(NamedTuple):
    server: Any
    computed: bool  # its models are computed whenever they are read: commit it before it is used


def merged_state(
    active: ActiveRun, server: Any, replies: Mapping[SiteName, Any], phase: Phase, round: Round
) -> MergedState:
    """The server's state after a round; raises an error that names the sites if its values are not usable."""
    merged = active.method.merge(server, replies, round)
    parts = new_parts(merged, server)
    if fault := spoilt(parts):
        worst = "; ".join(f"{name}'s reach {value:.3g}" for name, value in by_size(replies)[:3])
        raise WorkError(
            f"{called(phase, round)}: the merged state {fault}, and is discarded. Of the replies' values {worst}. "
            f"Everything before it is saved; when the site is repaired, {command('resume', active.folder.path)}."
        )
    return MergedState(merged, any(part.computed for part in parts))


def _asked(active: ActiveRun, phase: Phase, round: Round) -> list[SiteName]:
    """The sites of this round: all but those away, or a seeded draw of them."""
    plan = active.study.plan
    here = present(plan.away, active.line, active.roster, phase, round)
    if phase.counts and 0 < plan.sites_per_round < len(here):  # all sites adapt and calibrate
        draw = numpy_generator(plan.seed, "sites per round", round.index)
        here = sorted(str(name) for name in draw.choice(here, plan.sites_per_round, replace=False))
    return here


def _accepted(active: ActiveRun, name: SiteName, reply: Reply, head: Envelope) -> tuple[Any | None, str]:
    if reply.packet is None:
        return None, reply.lost
    expected = active.method.blank(active.task, active.roster, active.roster[name], head.round)
    return accepted(reply.packet, active.method.Uplink, expected, _declared(active, name))


def _declared(active: ActiveRun, name: SiteName) -> dict[str, int]:
    """By split: the greatest number of cases that a site can report, by its roll call."""
    facts = [active.roll.facts[name]] if name in active.roll.facts else list(active.roll.facts.values())  # pooled
    slices = SLICES if active.study.preprocess.slices else 1  # of a volume; training counts only slices with a label
    train = sum(each.cases if slices > 1 else each.n for each in facts)
    scored = {split: sum(each.scored.get(split, 0) for each in facts) for split in SCORED}
    return {split: cases * slices for split, cases in {"train": train, **scored}.items()}


def _told(verdict: Verdict | None, if_odd: str = "refused") -> dict[str, Any]:
    """The firewall's verdict as a log entry."""
    if verdict is None:
        return {}
    said = {"verdict": if_odd, "why": verdict.why} if verdict.why else {"verdict": "accepted"}
    return {"firewall": {**said, "figures": verdict.figures}}


def flattened(orders: Mapping[SiteName, Any]) -> dict[SiteName, Packet]:
    """One packet for all sites with the same order, so that a wire writes it only once."""
    made: dict[tuple[int, ...], Packet] = {}
    packets = {}
    for name, order in orders.items():
        if order is not None:
            fields = tuple(id(value) for value in vars(order).values())
            packets[name] = made[fields] if fields in made else made.setdefault(fields, flatten(order))
    return packets
