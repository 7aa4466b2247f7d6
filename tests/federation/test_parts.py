"""Bodies in parts: no more memory than arrived, in order, and nothing is kept of what was given up."""

from __future__ import annotations

import tracemalloc

from nvflare.apis.shareable import Shareable

from consilium.federation import parts
from consilium.federation.parts import Assembly, cut, follows, is_part


def part(at: int, of: int, body: bytes) -> Shareable:
    message = Shareable()
    message.update({"at": at, "of": of, "body": body})
    return message


def test_an_announced_size_takes_no_memory_before_its_bytes_arrive() -> None:
    arriving = Assembly()
    announced = 1 << 40
    first = part(0, announced, bytes(parts.PART))
    assert is_part(first, 1 << 50)
    tracemalloc.start()
    assert arriving.take("a", first) == (True, None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert arriving.held() == parts.PART
    assert peak < 3 * parts.PART


def test_a_body_is_put_together_from_parts_that_may_come_twice() -> None:
    body = bytes(range(256)) * 4
    arriving = Assembly()
    whole = None
    for at in range(0, len(body), 100):
        message = part(at, len(body), body[at : at + 100])
        held, whole = arriving.take("a", message)
        assert held
        if whole is None:
            assert arriving.take("a", message) == (True, None)
    assert whole is not None
    assert bytes(whole) == body
    assert arriving.take("a", part(0, len(body), body[:100])) == (True, None)  # its confirmation was lost
    assert arriving.held() == 0


def test_an_empty_body_is_whole_at_once() -> None:
    (message,) = cut("a", b"", {"request": "{}"})
    assert Assembly().take("a", message) == (True, memoryview(b""))


def test_a_part_out_of_order_is_not_confirmed() -> None:
    arriving = Assembly()
    assert arriving.take("a", part(0, 300, bytes(100))) == (True, None)
    assert arriving.take("a", part(200, 300, bytes(100))) == (False, None)
    assert follows(part(100, 300, bytes(100)), 100) is True
    assert follows(part(0, 300, bytes(100)), 100) is None


def test_an_abandoned_order_is_freed_by_the_next() -> None:
    arriving = Assembly()
    arriving.take("a", part(0, 1000, bytes(900)))
    assert arriving.take("b", part(0, 200, bytes(100))) == (True, None)
    assert arriving.held() == 100
    assert arriving.take("a", part(900, 1000, bytes(100))) == (False, None)  # nobody waits for it any more
