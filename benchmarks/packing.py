"""Bytes of packed messages in late rounds of the demo's FedAvg: whole, and as changes of the last order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median

import torch

from benchmarks.measuring import Measured
from consilium import engine
from consilium.data.phantoms import write_phantom
from consilium.demo import CASES, SIZE
from consilium.differences import Version
from consilium.messages import Envelope
from consilium.ready_studies import folder_of_studies
from consilium.run_folder import RunFolder
from consilium.study_reading import load_study
from consilium.transport import Rounding, packed, unpacked
from consilium.tree import Packet
from consilium.weights import SiteName
from consilium.wires.held import contents
from consilium.wires.in_process import InProcess
from consilium.wires.site_wire import Returned

LATE = 10  # rounds by round: the last so many
LIMITS = {"exact": (0.84, 0.88), "float16": (0.68, 0.77)}  # of an order and of an update, 5 % above what was measured
MEGABYTES = 6.5  # of the network whose packing is timed


class _Listening(InProcess):
    """Keeps what travels in the last rounds."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.rounds: list[tuple[Packet, dict[SiteName, Packet]]] = []

    def exchange(
        self, do: str, packets: Mapping[SiteName, Packet], head: Envelope
    ) -> Iterator[tuple[SiteName, Returned]]:
        if do != "train":
            yield from super().exchange(do, packets, head)
            return
        replies: dict[SiteName, Packet] = {}
        self.rounds = [*self.rounds[-LATE:], (_copy(next(iter(packets.values()))), replies)]
        for site, answer in super().exchange(do, packets, head):
            if answer.packet is not None:
                replies[site] = _copy(answer.packet)
            yield site, answer


def changes(folder: Path, repeats: int) -> list[Measured]:
    """Ratios of bytes, so one run of hundred rounds will do; processor time is that of one tensor of 6.5 MB."""
    eyes = folder / "packing-retina"
    write_phantom("retina", eyes, CASES, SIZE, 0)
    found = []
    for transport, limits in LIMITS.items():
        words = [f'data.federation="{eyes}"', "study.score_every=100", f'study.transport="{transport}"']
        study = load_study(folder_of_studies() / "demo_fedavg.toml", words)
        run = RunFolder.create(study, folder / transport)
        wire = _Listening(study, run.path)
        engine.run(study, wire, run)
        orders = [(new, old) for (old, _), (new, _) in zip(wire.rounds, wire.rounds[1:])]
        updates = [(reply, order) for order, replies in wire.rounds for reply in replies.values()]
        for what, pairs, limit in (("order", orders, limits[0]), ("update", updates, limits[1])):
            exact, whole, moved = (sum(map(size, pairs)) for size in (_exact, _whole(transport), _moved(transport)))
            facts = {
                "of the exact size": f"{whole / exact:.3f} and {moved / exact:.3f}",
                **_seconds(transport, repeats),
            }
            label = f"{what}s of late rounds as changes of the last order, {transport}"
            each = len(pairs) * 1000
            found.append(
                Measured("packing", label, moved / each, "whole", whole / each, "kB", moved / whole, limit, facts=facts)
            )
    return found


Pair = tuple[Packet, Packet]  # what travels, and the order that its receiver holds


def _exact(pair: Pair) -> int:
    return sum(tensor.nbytes for tensor in pair[0].tensors.values())


def _whole(transport: str) -> Callable[[Pair], int]:
    return lambda pair: packed(pair[0], transport, True).nbytes()


def _moved(transport: str) -> Callable[[Pair], int]:
    return lambda pair: packed(pair[0], transport, True, _versions(pair[1])).nbytes()


def _versions(packet: Packet) -> dict[str, Version]:
    return {path: Version(name, packet.tensors[path]) for path, name in contents(packet).items()}


def _seconds(transport: str, repeats: int) -> dict[str, str]:
    """Processor time per exact megabyte, to pack and to unpack, whole and as a change."""
    chance = torch.Generator().manual_seed(0)
    old, step = (torch.randn(int(MEGABYTES * 250_000), generator=chance) for _ in range(2))
    was, now = (Rounding(transport).of(Packet("{}", {"w": w})) for w in (old, old * (1 + 0.018 * step)))
    held = {version.name: version.tensor for version in _versions(was).values()}
    found = {}
    for label, versions in (("whole", {}), ("as a change", _versions(was))):
        sent = packed(now, transport, True, versions)
        packing = _time(lambda v=versions: packed(now, transport, True, v), repeats)  # type: ignore[misc]
        unpacking = _time(lambda s=sent: unpacked(s, 1 << 30, held), repeats)  # type: ignore[misc]
        found[f"ms per MB to pack and unpack {label}"] = f"{packing:.1f} and {unpacking:.1f}"
    return found


def _time(work: Callable[[], object], repeats: int) -> float:
    spent = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        spent.append(time.process_time() - start)
    return 1000 * median(spent) / MEGABYTES


def _copy(packet: Packet) -> Packet:
    return Packet(packet.header, {path: tensor.clone() for path, tensor in packet.tensors.items()})
