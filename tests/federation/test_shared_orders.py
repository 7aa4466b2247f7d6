"""Releases that differ only in a small field are written, hashed and mapped once, for all sites together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from consilium import packet_files, simulation, tree
from consilium.hospital import Hospital
from consilium.run_folder import RunFolder
from consilium.tree import Packet, flatten
from consilium.wires import held, simulated
from tests.federation.test_service_and_wire import deploy
from tests.toy import SIZES, toy_study


def test_packets_of_the_same_tensors_share_one_body(federation: Path) -> None:
    method, task = (study := toy_study(federation, "fedsm")).method, study.task
    cards = {name: _card(name, i) for i, name in enumerate(SIZES)}
    server = method.start(task, cards)
    packets = {name: flatten(method.release(server, card)) for name, card in cards.items()}
    bodies, headers = held.shared(packets)
    assert len({id(body) for body in bodies.values()}) == 1
    assert sorted(headers) == ["bea", "cid"]
    for name in SIZES:
        again = bodies[name]._replace(header=headers.get(name, bodies[name].header))
        assert tree.unflatten(again, method.Release).home == name


def _card(name: str, index: int) -> Any:
    from consilium.site import SiteCard

    return SiteCard(name, index, SIZES[name][0], ("blob",))


def test_packets_of_other_tensors_do_not() -> None:
    import torch

    one, two = torch.ones(3), torch.ones(3)
    bodies, headers = held.shared({"a": Packet("x", {"w": one}), "b": Packet("y", {"w": two})})
    assert bodies["a"] is not bodies["b"]
    assert not headers


def test_a_fedsm_scoring_writes_its_models_once_in_simulation(
    federation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K sites, K + 2 models: one file of K + 2 models instead of K of them."""
    written: list[tuple[str, int]] = []
    write, exchange = packet_files.write, simulated.SimulatedWire.exchange
    doing: list[str] = []

    def counted(packet: Packet, path: Path, *more: Any, **named: Any) -> int:
        size: int = write(packet, path, *more, **named)
        if path.name.endswith(".order"):
            written.append((doing[-1], size))
        return size

    def told(wire: Any, do: str, *more: Any) -> Any:
        doing.append(do)
        return exchange(wire, do, *more)

    monkeypatch.setattr(simulated.packet_files, "write", counted)
    monkeypatch.setattr(simulated.SimulatedWire, "exchange", told)
    study = toy_study(federation, "fedsm", study__rounds=2, study__score_every=2)
    folder = RunFolder.open(simulation.run(study, tmp_path, workers=0).folder)
    scorings = [do for do in doing if do == "score"]
    assert len([size for do, size in written if do == "score"]) == len(scorings)
    assert {row.of for row in folder.rows() if row.model == "personal"} >= set(SIZES)


def test_a_fedsm_scoring_is_hashed_and_written_once_in_a_federation(
    federation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []
    contents = held.contents

    def counted(packet: Packet) -> dict[str, str]:
        hashed.append(len(packet.tensors))
        return contents(packet)

    monkeypatch.setattr(held, "contents", counted)
    hospitals = {
        name: Hospital(name, str(federation / name), str(tmp_path / "hospitals" / name), ("blob",), "cpu")
        for name in SIZES
    }
    study = toy_study(federation, "fedsm", study__rounds=2, study__score_every=2)
    folder = deploy(study, hospitals, tmp_path / "server")
    largest = max(hashed)
    # one scoring of round 2, of the best and perhaps the last state, the trial of calibration, the delivery
    assert hashed.count(largest) <= 5
    again = simulation.run(study, tmp_path / "again", workers=0).folder
    assert (folder.path / "last.safetensors").read_bytes() == (again / "last.safetensors").read_bytes()
    assert (folder.path / "summary.json").exists()
