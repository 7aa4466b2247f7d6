"""Messages between hospitals as changes of the last order: the bits of a simulation, whatever a site has lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from consilium import engine, packet_files, simulation
from consilium.differences import Version
from consilium.federation.admin import for_federation
from consilium.federation.forecasting import forecast_study
from consilium.hospital import Hospital
from consilium.messages import Request
from consilium.run_folder import RunFolder
from consilium.study import Study
from consilium.transport import packed, unpacked
from consilium.tree import Packet, PacketError
from consilium.wires import held
from consilium.wires.flare import Body, FlareAnswer, FlareWire
from consilium.wires.holdings import Holdings
from tests.federation.test_service_and_wire import Direct, events, index_of
from tests.toy import SIZES, toy_study


def changes(body: Body, path: Path) -> int:
    """How many tensors of a message are changes."""
    path.write_bytes(body)
    return sum(len(entry) == 4 for entry in json.loads(packet_files.read(path).header)["packed"].values())


Before = Callable[["Watched", str, Request], None]


class Watched(Direct):
    """A line that counts changes, by site and round."""

    def __init__(self, study: Study, hospitals: Mapping[str, Hospital], place: Path, before: Before) -> None:
        super().__init__(study, hospitals)
        self.place, self.before = place, before
        self.down: dict[tuple[str, int], int] = {}
        self.up: dict[tuple[str, int], int] = {}

    def ask(self, site: str, request: Request, body: Body, seconds: float, room: int) -> FlareAnswer:
        self.before(self, site, request)
        answer = super().ask(site, request, body, seconds, room)
        if request.do == "train":
            key = site, index_of(request)
            self.down[key] = changes(body, self.place / f"{site}.body")
            self.up[key] = changes(answer.body, self.place / f"{site}.body") if answer.body else -1
        return answer


def run(study: Study, to: Path, before: Before = lambda line, site, request: None) -> tuple[RunFolder, Watched]:
    """Deploy a study; `before` happens to a site before it is asked."""
    data = Path(study.data.federation)
    hospitals = {name: Hospital(name, str(data / name), str(to / name), ("blob",), "cpu") for name in SIZES}
    study = for_federation(study, tuple(SIZES))
    folder, line = RunFolder.create(study, to / "server"), Watched(study, hospitals, to, before)
    engine.run(study, FlareWire(study, folder, line), folder)
    return folder, line


def counts(found: Mapping[tuple[str, int], int], round: int) -> list[int]:
    return [found[site, round] for site in sorted(SIZES)]


def test_changes_travel_both_ways_and_give_the_bits_of_the_simulation(federation: Path, tmp_path: Path) -> None:
    study = toy_study(federation, "fedsm", study__rounds=2, study__compress=True)
    folder, line = run(study, tmp_path)
    assert counts(line.down, 0) == [0, 0, 0]  # no site has anything yet
    assert min(counts(line.up, 0) + counts(line.down, 1) + counts(line.up, 1)) > 0
    simulated = simulation.run(study, tmp_path / "simulated", workers=0).folder
    assert (folder.path / "last.safetensors").read_bytes() == (simulated / "last.safetensors").read_bytes()


def test_a_site_that_lost_the_last_order_is_sent_all_of_the_next(federation: Path, tmp_path: Path) -> None:
    """It says that it cannot read the change; whoever merges never sees wrong bits."""

    def lose(line: Watched, site: str, request: Request) -> None:
        if site == "bea" and index_of(request) == 1 and request.do == "train":
            line.sites["bea"]._held.clear()

    study = toy_study(federation, study__compress=True, study__rounds=4, study__score_every=4)
    folder, line = run(study, tmp_path, lose)
    assert line.down["bea", 1] > 0
    assert line.up["bea", 1] == -1  # no answer
    (lost,) = [event for event in events(folder, "lost") if event["site"] == "bea"]
    assert "damaged" in lost["why"]
    assert line.down["bea", 2] == 0
    assert line.up["bea", 2] > 0
    assert line.down["bea", 3] > 0
    assert line.down["ada", 2] > 0


OLD, NEW = (torch.linspace(1, high, 5000) for high in (2, 2.001))


def test_a_reply_is_a_change_of_its_own_sites_order_only(tmp_path: Path) -> None:
    orders = {"ada": Packet("{}", {"w": OLD}), "bea": Packet("{}", {"w": OLD + 1})}
    names = {id(order): held.contents(order) for order in orders.values()}
    holdings = Holdings()
    holdings.keep(orders, names, tmp_path)
    assert list(tmp_path.iterdir()) == []  # files without a name: nothing is left of a server that was killed
    (name,) = names[id(orders["ada"])].values()
    sent = packed(Packet("{}", {"w": NEW}), "exact", True, {"w": Version(name, OLD)})
    assert torch.equal(unpacked(sent, 1 << 20, holdings.ordered("ada")).tensors["w"], NEW)
    for other in ("bea", "cid"):
        with pytest.raises(PacketError, match="not held here"):
            unpacked(sent, 1 << 20, holdings.ordered(other))


def test_an_order_is_a_change_of_one_that_its_site_has_confirmed(tmp_path: Path) -> None:
    order = Packet("{}", {"w": OLD})
    contents = held.contents(order)
    holdings = Holdings()
    holdings.keep({"ada": order, "bea": order}, {id(order): contents}, tmp_path)
    assert not holdings.versions("ada")
    for site in ("ada", "bea"):
        holdings.confirm(site, "train", frozenset(contents.values()))
    assert holdings.versions("ada")["w"].name == contents["w"]
    assert holdings.versions("ada") is holdings.versions("bea")  # one file, and one message for both
    holdings.forget("ada")
    assert not holdings.versions("ada")
    assert not holdings.ordered("ada")
    assert holdings.versions("bea")


def test_a_forecast_counts_the_orders_that_are_kept(federation: Path) -> None:
    plain, packing = (
        forecast_study(toy_study(federation, study__compress=compress), 8).exchanges[-1] for compress in (False, True)
    )
    assert packing.spool == plain.spool + plain.down  # one for all sites
