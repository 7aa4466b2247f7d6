"""The checks that every method must pass, and tools to run them on a toy federation.

`consilium contract mine.py:Method` checks a user's own method; the project's tests check all of its methods.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from consilium import engine, packet_files, simulation, tree
from consilium.errors import StudyError, WorkError
from consilium.messages import Envelope, Reply
from consilium.method import Maybe
from consilium.run_folder import RunFolder
from consilium.simulation import Result
from consilium.site_opening import open_worker, place_in
from consilium.study import Study
from consilium.timeline import timeline
from consilium.toy_federation import toy_study, write_toy
from consilium.tree import Packet, flatten, unflatten
from consilium.wires.in_process import InProcess
from consilium.worker import Worker


class Interrupted(Exception):
    """Stands for a crash."""


def run_in_process(study: Study, runs: Path, watch: Callable[[Any], None] | None = None) -> Result:
    folder = RunFolder.create(study, runs, watch)
    return Result(folder.path, engine.run(study, InProcess(study, folder.path), folder))


def crash_after(event: str, round: int) -> Callable[[Mapping[str, Any]], None]:
    """A watcher that ends the run at an event of a round."""

    def watch(seen: Mapping[str, Any]) -> None:
        if seen["event"] == event and seen.get("round") == round:
            raise Interrupted

    return watch


def copy_at(events: Collection[str], round: int, run: Path, to: Path) -> Callable[[Mapping[str, Any]], None]:
    """A watcher that copies a run's folder into `to/<event>` at the first such event of a round.

    The copy is what a process that is killed there leaves, and the run itself goes on. It keeps its name, on which the
    noise of a private study depends.
    """

    def watch(seen: Mapping[str, Any]) -> None:
        if seen["event"] in events and seen.get("round") == round and not (to / seen["event"]).exists():
            shutil.copytree(run, to / seen["event"] / run.name)

    return watch


def run_and_copy(study: Study, runs: Path, event: str = "round", round: int = 2) -> tuple[Result, Path]:
    """A whole run, and its folder as it was at an event of a round."""
    path, to = RunFolder.path_of(study, runs), runs / "killed"
    return run_in_process(study, runs, copy_at([event], round, path, to)), to / event / path.name


class Tampered(InProcess):
    """An in-process wire whose replies pass through a function that may change or drop them."""

    def __init__(self, study: Study, folder: Path, hand: Callable[[str, Envelope, Reply], Reply]) -> None:
        super().__init__(study, folder)
        self.hand = hand

    def train(self, orders: Mapping[str, Packet], head: Envelope) -> Iterator[tuple[str, Reply]]:
        for name, reply in super().train(orders, head):
            yield name, self.hand(name, head, reply)


def run_tampered(study: Study, runs: Path, hand: Callable[[str, Envelope, Reply], Reply]) -> RunFolder:
    folder = RunFolder.create(study, runs)
    engine.run(study, Tampered(study, folder.path, hand), folder)
    return folder


def without_packet(reply: Reply) -> Reply:
    return replace(reply, packet=None, lost="the link broke")


def with_packet(reply: Reply, change: Callable[[Packet], Packet]) -> Reply:
    assert reply.packet is not None
    return replace(reply, packet=change(reply.packet))


def state(result: Result | RunFolder) -> bytes:
    """The bytes of the last server state."""
    path = result.folder if isinstance(result, Result) else result.path
    return (path / "last.safetensors").read_bytes()


def digest(item: Any) -> str:
    """A hash of all content of a message."""
    apart = tree.split(item)
    parts = [
        apart.shape(),
        *(w.digest for w in apart.weights.values()),
        *(str(t.tolist()) for t in apart.tensors.values()),
    ]
    return hashlib.sha256("|".join(parts).encode()).hexdigest()


class Stage:
    """A study opened for tests: its sites' workers and the server, one step at a time."""

    def __init__(self, study: Study, runs: Path) -> None:
        folder = RunFolder.create(study, runs)
        self.study, self.method, self.task = study, study.method, study.task
        self.wire = InProcess(study, folder.path)
        self.roster = self.wire.roll_call().members
        federation = study.federation()
        self.workers: dict[str, Worker] = {
            site: open_worker(study, federation, site, self.roster, place_in(folder.path, site)) for site in self.roster
        }
        self.rounds = [round for _, round in timeline(self.method, study.plan.rounds)]
        self.server = self.method.start(self.task, self.roster)

    def train(self, site: str, order: Packet, index: int, merged: int) -> Packet:
        """The packet that a site returns for an order."""
        head = Envelope("run", self.study.method_name, self.rounds[index], {site: merged})
        packet = self.workers[site].train(order, head.request("train", site, "")).packet
        assert packet is not None
        return packet

    def round(self, index: int) -> None:
        replies: dict[str, Any] = {}
        for site in self.workers:
            order = self.method.send(self.server, self.roster[site], self.rounds[index])
            packet = self.train(site, flatten(order), index, index - 1)
            replies[site] = unflatten(packet, self.method.Uplink)
        self.server = self.method.merge(self.server, replies, self.rounds[index])


# ------------------------------------------------------------------------------------------- the promises


def second_round(study: Study) -> int:
    """The index in the run of the paper's second round."""
    return [round.index for phase, round in timeline(study.method, study.plan.rounds) if phase.counts][1]


def losses(result: Result) -> dict[int, float]:
    """Training loss by round of the first phase, summed over sites."""
    folder = RunFolder.open(result.folder)
    first = folder.study.method.phases(3)[0].name
    events = [e for e in folder.events() if e["event"] == "train" and e["phase"] == first]
    rounds = sorted({e["round"] for e in events})
    return {r: sum(e["loss"] for e in events if e["round"] == r) for r in rounds}


def learns(whole: Result, share: float = 0.95) -> None:
    """The summed training loss of the last round is below `share` of the first round's."""
    by_round = losses(whole)
    assert by_round[max(by_round)] < share * by_round[1], f"summed training loss by round: {by_round}"


def resumes(path: Path, whole: Result) -> None:
    """The folder of a run that was killed, resumed, ends with the bytes of the whole run."""
    assert not (path / "summary.json").exists(), "a summary was written by a run that was killed"
    resumed = simulation.resume(path, workers=0)
    assert state(resumed) == state(whole), "the resumed run ends with other weights"
    for file in ("best.safetensors", "scores.csv"):
        assert (path / file).read_bytes() == (whole.folder / file).read_bytes(), f"{file} differs after a resume"


def goes_on_with_one_reply(study: Study, runs: Path) -> RunFolder:
    """In round 2 one reply is lost and one has invalid values: the third alone is merged, and the run continues.

    Returns the run's folder.
    """
    second = second_round(study)

    def spoil(packet: Packet) -> Packet:
        path = max(packet.tensors)
        return Packet(packet.header, {**packet.tensors, path: packet.tensors[path] * torch.nan})

    def hand(site: str, head: Envelope, reply: Reply) -> Reply:
        if head.round.index != second or site == "cid":
            return reply
        return without_packet(reply) if site == "ada" else with_packet(reply, spoil)

    folder = run_tampered(study, runs, hand)
    events = list(folder.events())
    (lost,) = [e for e in events if e["event"] == "lost"]
    (refused,) = [e for e in events if e["event"] == "refused"]
    assert (lost["site"], refused["site"]) == ("ada", "bea")
    assert "not finite" in refused["why"]
    round = next(round for _, round in timeline(study.method, study.plan.rounds) if round.index == second)
    merged = [e for e in events if e["event"] == "train"]
    assert [e["site"] for e in merged if (e["round"], e["phase"]) == (round.number, round.phase)] == ["cid"]
    assert {e["site"] for e in merged if e["round"] > round.number} >= {"ada", "bea", "cid"}, "a site stayed away"
    parts = tree.split(packet_files.load(folder.path / "last.safetensors", folder.study.method.Server))
    tensors = [tensor for weights in parts.weights.values() for tensor in weights.values()]
    assert all(torch.isfinite(t).all() for t in (*tensors, *parts.tensors.values())), "the state is not finite"
    return folder


def after_one_round(study: Study, runs: Path) -> Stage:
    stage = Stage(study, runs)
    stage.round(0)
    return stage


def repeats_an_order(stage: Stage) -> None:
    """After the first round, an order that is delivered twice gets the same answer twice."""
    site, worker = next(iter(stage.workers.items()))
    order = flatten(stage.method.send(stage.server, stage.roster[site], stage.rounds[1]))
    first, second = (packet_files.to_bytes(stage.train(site, order, 1, 0)) for _ in range(2))
    assert first == second, "the second answer to the same order is another"
    kept = [0, 1] if worker.norm.remembers(stage.method, worker.site.local) else []
    assert worker.memories.rounds() == kept


def keeps_its_inputs(stage: Stage) -> None:
    """After the first round, no function of a method changes its arguments: order, memory, server state, replies,
    release."""
    method, round = stage.method, stage.rounds[1]
    server, before = stage.server, digest(stage.server)
    replies = {}
    for site, worker in stage.workers.items():
        order = method.send(server, stage.roster[site], round)
        memory = method.remember(worker.site)
        given = (digest(order), digest(memory))
        replies[site], _ = method.train(worker.site, memory, order, round)
        assert (digest(order), digest(memory)) == given, f"train changed its arguments at {site}"
    sent = {site: digest(reply) for site, reply in replies.items()}
    method.merge(server, replies, round)
    released = method.release(server, next(iter(stage.roster.values())))
    shown = digest(released)
    method.deploy(stage.task, None, released).answer(torch.rand(2, 1, 16, 16))
    assert digest(server) == before, "merge, release or deploy changed the server's state"
    assert {site: digest(reply) for site, reply in replies.items()} == sent, "merge changed the replies"
    assert digest(released) == shown, "deploy changed the release"


def declares_its_uplinks(study: Study, runs: Path) -> None:
    """`blank` has the shapes and types of the real uplink: in the first and the last round, or, with phases after
    training, whose orders need what came before, in every round.
    """
    stage = Stage(study, runs)
    site = next(iter(stage.workers))
    every_round = not stage.method.phases(study.plan.rounds)[-1].counts
    for index in range(len(stage.rounds)) if every_round else (0, len(stage.rounds) - 1):
        order = stage.method.send(stage.server, stage.roster[site], stage.rounds[index])
        got: Any = unflatten(
            stage.train(site, flatten(order), index, index - 1 if every_round else -1), stage.method.Uplink
        )
        if every_round:
            stage.round(index)
        blank = stage.method.blank(stage.task, stage.roster, stage.roster[site], stage.rounds[index])
        for field, part in vars(blank).items():
            sent = getattr(got, field)
            if isinstance(part, Maybe):
                blank = dataclasses.replace(blank, **{field: None if sent is None else part.like})
            elif isinstance(part, torch.Tensor):
                assert (sent.shape, sent.dtype) == (part.shape, part.dtype), f"blank declares another {field}"
                blank = dataclasses.replace(blank, **{field: None})
        real, expected = (
            {path: {k: (t.shape, t.dtype) for k, t in part.items()} for path, part in tree.split(item).weights.items()}
            for item in (got, blank)
        )
        assert real == expected, f"blank declares {list(expected)}, the site sends {list(real)}"


def check_contract(name: str, say: Callable[[str], None], **fields: Any) -> int:
    """Run all checks on one method and report each; returns the number of failed checks.

    Args:
        name: the method, `fedavg` or `mine.py:Method`.
        say: called with one line per check.
        fields: keys of [method].
    """
    broken = 0
    with tempfile.TemporaryDirectory(prefix="consilium-contract-") as place:
        folder = Path(place)
        study = toy_study(write_toy(folder / "toy"), name, **{f"method__{key}": value for key, value in fields.items()})
        whole, killed = run_and_copy(study, folder / "whole")
        promises: dict[str, Callable[[], object]] = {
            "it learns: the training loss falls in three rounds": lambda: learns(whole, 1.0),
            "a killed run that is resumed has the same bits": lambda: resumes(killed, whole),
            "one reply is enough, and the run goes on": lambda: goes_on_with_one_reply(study, folder / "hurt"),
            "an order that comes twice changes nothing": lambda: repeats_an_order(
                after_one_round(study, folder / "twice")
            ),
            "no verb changes what it is given": lambda: keeps_its_inputs(after_one_round(study, folder / "inputs")),
            "blank declares what a site sends": lambda: declares_its_uplinks(study, folder / "blank"),
        }
        for promise, kept in promises.items():
            try:
                kept()
            except (AssertionError, StudyError, WorkError, ValueError, TypeError, RuntimeError) as error:
                broken += 1
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                say(f"BROKEN  {promise}: {reason}")
            else:
                say(f"kept    {promise}")
    return broken
