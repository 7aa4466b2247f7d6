"""An update that cannot be merged is left out, the journal says why, and the run goes on.

One run of toy FedAvg serves all: in every round two of its three sites send something wrong, each time another thing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from consilium import engine
from consilium.contract import Tampered, with_packet
from consilium.messages import Envelope, Reply
from consilium.run_folder import RunFolder
from consilium.tree import Packet, flatten, message
from consilium.weights import SiteName, Weights
from tests.toy import toy_study

Spoil = Callable[[Packet], Packet]


def put(change: Callable[[torch.Tensor], torch.Tensor]) -> Spoil:
    """Change one tensor of the reply."""

    def spoil(packet: Packet) -> Packet:
        path = min(packet.tensors)
        return Packet(packet.header, {**packet.tensors, path: change(packet.tensors[path])})

    return spoil


def first(value: float) -> Spoil:
    """One value of one tensor."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.clone()
        changed.view(-1)[0] = value
        return changed

    return put(change)


def missing(packet: Packet) -> Packet:
    return Packet(packet.header, {path: packet.tensors[path] for path in sorted(packet.tensors)[1:]})


def extra(packet: Packet) -> Packet:
    return Packet(packet.header, {**packet.tensors, "global/extra": torch.zeros(1)})


def listed(change: Callable[[list[str]], list[str]], tensors: Mapping[str, torch.Tensor] | None = None) -> Spoil:
    """Header and tensors agree with each other, but not with the study's network."""

    def spoil(packet: Packet) -> Packet:
        head = json.loads(packet.header)
        shape = json.loads(head["message"])
        names = change(shape["tree"]["global_"])
        shape["tree"]["global_"] = names
        kept = {f"global/{name}": {**packet.tensors, **(tensors or {})}[f"global/{name}"] for name in names}
        return Packet(json.dumps({**head, "message": json.dumps(shape)}), kept)

    return spoil


def loss_of(value: str) -> Spoil:
    return number("loss", value)


def number(field: str, value: str) -> Spoil:
    def spoil(packet: Packet) -> Packet:
        head = json.loads(packet.header)
        shape = json.loads(head["message"])
        shape["tree"][field] = json.loads(value)
        return Packet(json.dumps({**head, "message": json.dumps(shape)}), packet.tensors)

    return spoil


@message
class Uninvited:
    global_: Weights


def other_message(packet: Packet) -> Packet:
    return flatten(Uninvited(Weights({"w": torch.zeros(1)})))


KINDS: dict[str, tuple[Spoil, str]] = {
    "NaN": (first(float("nan")), "holds values that are not finite"),
    "infinity": (first(float("inf")), "holds values that are not finite"),
    "shape": (put(lambda tensor: tensor.reshape(-1, 1)), "where the study's network has"),
    "type": (put(lambda tensor: tensor.double()), "float64, where the study's network has"),
    "a missing tensor": (missing, "the packet has no tensor 'global/"),
    "a tensor too many": (extra, "unexpected tensors: ['global/extra']"),
    "a shorter network": (listed(lambda names: names[1:]), "has other tensors than the study's network"),
    "another network": (listed(lambda names: [*names, "x"], {"global/x": torch.zeros(1)}), "network (x)"),
    "another order": (listed(lambda names: names[::-1]), "in another order"),
    "another message": (other_message, "here is a Uninvited, where a GlobalModel.Uplink is expected"),
    "a loss that is no number": (loss_of('"low"'), "'loss' should be float, not str"),
    "a loss that is not finite": (loss_of("NaN"), "'loss' is nan, not from -0.001 to 1e+09"),
    "a value of 3e38": (first(3e38), "holds values that are too large"),
    "a loss of 1e300": (loss_of("1e300"), "'loss' is 1e+300, not from -0.001 to 1e+09"),
    "steps below nothing": (number("steps", "-30"), "'steps' is"),
    "steps of 10^15": (number("steps", str(10**15)), "'steps' is"),
    "a text for a number": (number("steps", '"3"'), "'steps' should be int, not str"),
    "truncated": (lambda packet: packet, "is damaged or not a safetensors file"),  # on its way, see Cut
}
SPOILT = {kind: (("ada", "bea")[i % 2], i // 2) for i, kind in enumerate(KINDS)}  # which site spoils which round


class Cut(Tampered):
    """Loses the end of a reply on its way."""

    def ask(self, requests: Mapping[SiteName, Any]) -> Iterator[tuple[SiteName, Any]]:
        site, index = SPOILT["truncated"]
        for name, answer in super().ask(requests):
            request = requests[name]
            if name == site and request.request.do == "train" and request.request.round.index == index:
                answer = replace(answer, size=answer.size - 100)
            yield name, answer


@pytest.fixture(scope="module")
def spoilt(federation: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    by_place = {place: KINDS[kind][0] for kind, place in SPOILT.items()}

    def hand(site: str, head: Envelope, reply: Reply) -> Reply:
        spoil = by_place.get((site, head.round.index))
        return with_packet(reply, spoil) if spoil and reply.packet is not None else reply

    rounds = -(-len(KINDS) // 2)
    study = toy_study(federation, study__rounds=rounds, study__score_every=rounds, local__batch_size=12)
    folder = RunFolder.create(study, tmp_path_factory.mktemp("spoilt"))
    engine.run(study, Cut(study, folder.path, hand), folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_update_is_left_out_and_said(kind: str, spoilt: RunFolder) -> None:
    site, index = SPOILT[kind]
    here = [e for e in spoilt.events() if e.get("round") == index + 1 and e.get("site") == site]
    assert [event["event"] for event in here] == ["lost" if kind == "truncated" else "refused"]
    assert KINDS[kind][1] in here[0]["why"]


def test_the_run_goes_on_without_it(spoilt: RunFolder) -> None:
    """cid alone is merged every round; the rest counts where it was sound."""
    assert spoilt.finished
    rounds = -(-len(KINDS) // 2)
    trained = [(e["round"], e["site"]) for e in spoilt.events() if e["event"] == "train"]
    assert [round for round, site in trained if site == "cid"] == list(range(1, rounds + 1))
    assert not {(index + 1, site) for site, index in SPOILT.values()} & set(trained)


def test_nothing_of_a_refused_update_is_in_the_model(spoilt: RunFolder, federation: Path) -> None:
    server = spoilt.states.last(toy_study(federation).method).server
    assert all(torch.isfinite(tensor).all() for tensor in server.global_.values())


def test_a_tally_of_another_length_is_left_out(federation: Path, tmp_path: Path) -> None:
    """FedSM's calibration sends 13 sums; a site that sends two must not stop the run."""

    def shorten(packet: Packet) -> Packet:
        head = json.loads(packet.header)
        shape = json.loads(head["message"])
        shape["tree"]["scores"] = [1.0, 2.0]
        return Packet(json.dumps({**head, "message": json.dumps(shape)}), packet.tensors)

    def hand(site: str, head: Envelope, reply: Reply) -> Reply:
        return with_packet(reply, shorten) if (site, head.round.phase) == ("bea", "calibrate") else reply

    study = toy_study(federation, "fedsm", study__rounds=1, local__batch_size=12)
    folder = RunFolder.create(study, tmp_path)
    engine.run(study, Tampered(study, folder.path, hand), folder)
    assert [event["site"] for event in folder.events() if event["event"] == "refused"] == ["bea"]
