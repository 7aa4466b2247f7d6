"""Sites that lie: what they make of an honest reply, and a wire that lets them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from consilium import engine
from consilium.contract import with_packet
from consilium.messages import Envelope, Reply
from consilium.run_folder import RunFolder
from consilium.study import Study
from consilium.tree import Packet
from consilium.wires.in_process import InProcess

Tensors = Mapping[str, Tensor]
Kept = dict[int, tuple[Tensors, Tensors]]  # where a liar began and what it would honestly have answered, by round
Lie = Callable[[Tensors, Tensors, Kept], Tensors]  # from the start and the honest reply of now
MODELS = ("global", "personal", "core")  # what is lied about; gradients and control variates stay honest


def _floating(change: Callable[[str, Tensor], Tensor], reply: Tensors) -> dict[str, Tensor]:
    false = {path for path, tensor in reply.items() if tensor.is_floating_point() and path.startswith(MODELS)}
    return {path: change(path, tensor) if path in false else tensor for path, tensor in reply.items()}


def scale(times: float) -> Lie:
    return lambda start, reply, kept: _floating(
        lambda path, tensor: start[path] + times * (tensor - start[path]), reply
    )


def negate(start: Tensors, reply: Tensors, kept: Kept) -> Tensors:
    """The model itself with the other sign, not only its change."""
    return _floating(lambda path, tensor: -tensor, reply)


def shift(by: float) -> Lie:
    return lambda start, reply, kept: _floating(lambda path, tensor: tensor + by, reply)


def replay(round: int) -> Lie:
    """The very models of an earlier round."""
    return lambda start, reply, kept: _floating(lambda path, tensor: kept[round][1][path], reply)


def rebase(round: int) -> Lie:
    """The change of an earlier round, on top of what was sent now."""

    def lie(start: Tensors, reply: Tensors, kept: Kept) -> Tensors:
        before, after = kept[round]
        return _floating(lambda path, tensor: start[path] + (after[path] - before[path]), reply)

    return lie


LIES: dict[str, Lie] = {
    "scaled by 10": scale(10.0),
    "scaled by 100": scale(100.0),
    "flipped": scale(-1.0),
    "negated": negate,
    "shifted by 0.1": shift(0.1),
    "shifted by -1": shift(-1.0),
    "replayed": replay(2),
    "replayed as a change": rebase(3),
}


class Lying(InProcess):
    """A wire at whose end one site tells lies in some rounds."""

    def __init__(self, study: Study, folder: Path, site: str, lies: Mapping[int, Lie], kept: Kept) -> None:
        super().__init__(study, folder)
        self.site, self.lies, self.kept = site, lies, kept

    def train(self, orders: Mapping[str, Packet], head: Envelope) -> Iterator[tuple[str, Reply]]:
        number = head.round.number
        for name, reply in super().train(orders, head):
            if name != self.site or reply.packet is None:
                yield name, reply
                continue
            sent, honest = (
                {path: tensor.clone() for path, tensor in packet.tensors.items()}
                for packet in (orders[name], reply.packet)
            )
            # what is not sent to a site, it has from the last round in which it was believed
            believed = [round for round in sorted(self.kept) if round < number and round not in self.lies]
            start = {**(self.kept[believed[-1]][1] if believed else {}), **sent}
            self.kept[number] = start, honest
            lie = self.lies.get(number)
            told = lie(start, honest, self.kept) if lie else honest
            yield name, with_packet(reply, lambda packet, told=told: Packet(packet.header, told))  # type: ignore[misc]


def run_lying(
    study: Study, runs: Path, site: str, lies: Mapping[int, Lie], kept: Kept | None = None, watch: Any = None
) -> RunFolder:
    folder = RunFolder.create(study, runs, watch)
    engine.run(study, Lying(study, folder.path, site, lies, {} if kept is None else kept), folder)
    return folder
