"""Orders that arrive at a site: of bounded size, one at a time, and nothing is kept of what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable

from consilium.caps import largest_order
from consilium.federation import parts
from consilium.federation.forecasting import forecast_study
from consilium.federation.hospital_site import HospitalSite
from consilium.federation.order_door import OrderDoor
from consilium.federation.site_job import SiteJob
from consilium.hospital import Hospital, Limits
from consilium.methods import METHODS
from consilium.wires.flare import PART, ROOM
from tests.core.test_doors import TIERS, examples
from tests.toy import toy_study

A, B = "a" * 32, "b" * 32


def part(name: Any, at: int, of: int) -> Shareable:
    message = Shareable()
    message.update({"order": name, "at": at, "of": of, "body": bytes(min(PART, of - at)), "request": name})
    return message


def door(room: int) -> OrderDoor:
    found = OrderDoor()
    found.set_room(room)
    return found


def test_an_order_that_is_too_large_is_refused_at_its_first_part() -> None:
    found = door(2 * PART)
    assert all(found.take(part(A, at, 3 * PART)) for at in range(0, 3 * PART, PART))  # settled: it is not sent again
    assert found.held() == 0
    order = found.next(0.0)
    assert order is not None
    assert (order.name, len(order.body)) == (A, 0)
    assert order.refused == f"an order of {3 * PART} bytes, and at most {2 * PART} are taken in"
    assert found.next(0.0) is None  # it is said once


def test_what_grows_beyond_its_first_announcement_is_freed() -> None:
    found = door(2 * PART)
    assert found.take(part(A, 0, 2 * PART))
    assert found.held() == PART
    assert found.take(part(A, PART, 9 * PART))
    assert found.held() == 0


def test_whole_orders_do_not_pile_up_while_a_site_works() -> None:
    """The server asks one thing at a time, so of several the last counts."""
    found = door(1000)
    for number in range(50):
        assert found.take(part(f"{number:032x}", 0, 1000))
        assert found.held() == 1000
    assert found.take(part(f"{49:032x}", 0, 1000))  # its confirmation was lost
    order = found.next(0.0)
    assert order is not None
    assert (order.name, order.text, len(order.body)) == (f"{49:032x}", f"{49:032x}", 1000)
    assert found.next(0.0) is None


def test_a_new_order_frees_the_one_that_waits() -> None:
    found = door(2 * PART)
    assert found.take(part(A, 0, PART))
    assert found.take(part(B, 0, 2 * PART))
    assert found.held() == PART
    assert found.next(0.0) is None


def test_before_a_site_knows_its_study_only_small_orders_are_taken_in() -> None:
    found = OrderDoor()
    assert found.take(part(A, 0, ROOM))
    assert not found.take(part(B, 0, ROOM + 1))  # the server sends it again
    found.set_room(2 * ROOM)
    assert found.take(part(B, 0, ROOM + 1))


@pytest.mark.parametrize("name", ["", None, 7, "A" * 32, "a" * 33, "a" * 100_000, b"a" * 32])
def test_what_is_no_part_is_not_kept(name: Any) -> None:
    found = door(1000)
    assert found.take(part(name, 0, 100))
    assert found.held() == 0
    assert found.next(0.0) is None


def test_the_site_of_a_job_goes_through_the_door() -> None:
    job = SiteJob()
    job._door.set_room(1000)
    assert job._take("", part(A, 0, 1001), None).get_return_code() == ReturnCode.OK
    assert job._take("", part(B, 0, 1000), None).get_return_code() == ReturnCode.OK
    order = job._door.next(0.0)
    assert order is not None and (order.name, order.refused) == (B, "")


odd = st.none() | st.integers(-(2**70), 2**70) | st.floats() | st.booleans() | st.text(max_size=3) | st.just([])
sizes = st.sampled_from([-1, 0, 1, 99, 100, 101, 300, 301, 2**62]) | odd
messages = st.fixed_dictionaries(
    {},
    optional={
        "order": st.sampled_from([A, B, "c" * 32]) | odd,
        "at": sizes,
        "of": sizes,
        "body": st.sampled_from([0, 1, 99, 100, 101, 300]).map(bytes) | odd,
        "request": odd,
    },
)


@pytest.mark.parametrize("number", TIERS)
def test_whatever_arrives_no_more_is_held_than_there_is_room_for(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART", 100)

    @examples(number)
    @given(st.lists(messages, max_size=12))
    def check(sent: list[dict[str, Any]]) -> None:
        found = door(300)
        for content in sent:
            message = Shareable()
            message.update(content)
            assert found.take(message) in (True, False)
            assert found.held() <= 300

    check()


MANY = ("fedsm", "apple", "scaffold")  # a model of every site, or several
DEPLOYED = sorted(name for name, method in METHODS.items() if not method.pooled)


@pytest.mark.parametrize("method", [m if m in MANY else pytest.param(m, marks=pytest.mark.slow) for m in DEPLOYED])
def test_no_study_needs_more_than_its_sites_take_in(method: str, federation: Path) -> None:
    """What honest orders and releases take is a half of it at most."""
    study = toy_study(federation, method, study__sites=["ada", "bea", "cid"], study__rounds=2)
    forecast = forecast_study(study)
    largest = max(forecast.release, *(exchange.down for exchange in forecast.exchanges))
    assert largest <= largest_order(Limits(), study) / 2


def test_an_order_of_another_size_is_the_hospitals_to_allow(federation: Path, tmp_path: Path) -> None:
    def room(**limits: int) -> int:
        rules = Limits(**limits)
        hospital = Hospital("ada", str(federation / "ada"), str(tmp_path), ("blob",), "cpu", rules)
        return HospitalSite(hospital, "ada", toy_study(federation).to_toml()).room()

    assert ROOM < room() < 2 * ROOM  # a toy of a few kilobytes
    assert room(memory_bytes=1000) == 500
    assert room(order_bytes=77) == 77
