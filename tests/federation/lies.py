"""What a site can send that is not true or not usable, by kind of message, with the reason that names it.

The tests of service and wire put these lies on an object's way; `odd_site.py` puts them on a real network.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from nvflare.apis.shareable import Shareable

from consilium import packet_files, tree
from consilium.federation.parts import PART, cut
from consilium.messages import ScoreSheet

DAMAGED = "damaged on its way"


def read_body(body: bytes | memoryview) -> tree.Packet:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "body.safetensors"
        path.write_bytes(body)
        packet = packet_files.read(path)
        return packet._replace(tensors={name: tensor.clone() for name, tensor in packet.tensors.items()})


# ------------------------------------------------------------------------------------ answers to an order to train


@dataclass(frozen=True)
class Lie:
    """One wrong answer. Exactly one of the three changes what is sent."""

    why: str  # what the journal says of it
    body: Callable[[bytes], bytes] | None = None
    head: Callable[[str], str] | None = None
    parts: Callable[[str, bytes, str], Iterator[Shareable]] | None = None

    def messages(self, order: str, body: bytes, head: str) -> Iterator[Shareable]:
        """The messages that carry the answer to an order, with the lie in them."""
        if self.parts is not None:
            return self.parts(order, body, head)
        body = self.body(body) if self.body else body
        return cut(order, body, {"head": self.head(head) if self.head else head})


def of_tensors(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[bytes], bytes]:
    """Change the first floating-point tensor of more than one value."""

    def changed(body: bytes) -> bytes:
        packet = read_body(body)
        name = next(n for n, t in packet.tensors.items() if t.is_floating_point() and t.numel() > 1)
        return packet_files.to_bytes(packet._replace(tensors={**packet.tensors, name: change(packet.tensors[name])}))

    return changed


def of_fields(**changes: Any) -> Callable[[bytes], bytes]:
    """Change fields of the update beside its tensors; None takes one away."""

    def changed(body: bytes) -> bytes:
        packet = read_body(body)
        header = json.loads(packet.header)
        shape = json.loads(header["message"])
        shape["tree"] = {k: v for k, v in {**shape["tree"], **changes}.items() if v is not None}
        return packet_files.to_bytes(packet._replace(header=json.dumps({**header, "message": json.dumps(shape)})))

    return changed


def of_file_header(change: Callable[[dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    """Change what the file says of its first tensor: type, shape, place."""

    def changed(body: bytes) -> bytes:
        size = int.from_bytes(body[:8], "little")
        header = json.loads(body[8 : 8 + size])
        change(next(entry for name, entry in header.items() if name != "__metadata__"))
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + body[8 + size :]

    return changed


def of_head(**changes: Any) -> Callable[[str], str]:
    """Change the measurements beside an answer."""

    def changed(head: str) -> str:
        whole = json.loads(head)
        return json.dumps({**whole, "tree": {**whole["tree"], **changes}})

    return changed


def one_part(**changes: Any) -> Callable[[str, bytes, str], Iterator[Shareable]]:
    """One message in place of the answer's parts."""

    def made(order: str, body: bytes, head: str) -> Iterator[Shareable]:
        part = Shareable()
        part.update({"order": order, "at": 0, "of": len(body), "body": body, "head": head, **changes})
        yield part

    return made


def stale(order: str, body: bytes, head: str) -> Iterator[Shareable]:
    """An answer to an order nobody gave, then one that says itself of which run, round and site it is."""
    yield from cut("f" * 32, body, {"head": head})
    yield from cut(order, of_fields(run="another", round=99, site="ada")(body), {"head": head})


ANSWERS: dict[str, Lie] = {
    "values that are no numbers": Lie("not finite", body=of_tensors(lambda t: t * math.nan)),
    "values of 3e38": Lie("values that are too large", body=of_tensors(lambda t: torch.full_like(t, 3e38))),
    "another shape": Lie("where the study's network has", body=of_tensors(lambda t: t.reshape(-1)[:-1])),
    "another type": Lie("where the study's network has", body=of_tensors(torch.Tensor.double)),
    "half of it": Lie(DAMAGED, body=lambda body: body[: len(body) // 2]),
    "2 MB too much": Lie("larger than", body=lambda body: body + b"\0" * (2 << 20)),
    "no packet": Lie(DAMAGED, body=lambda body: b"garbage"),
    "a number of steps below nothing": Lie("'steps' is -30", body=of_fields(steps=-30)),
    "10^15 steps": Lie("'steps' is 1000000000000000", body=of_fields(steps=10**15)),
    "a text for a number": Lie("'steps'", body=of_fields(steps="8")),
    "a loss that is no number": Lie("'loss' is nan", body=of_fields(loss=math.nan)),
    "a missing key": Lie("'loss'", body=of_fields(loss=None)),
    "a run, a round and a site of its own": Lie("'message' should have the fields", parts=stale),
    "a type nobody knows": Lie(DAMAGED, body=of_file_header(lambda entry: entry.update(dtype="F13"))),
    "a shape of 10^18": Lie(DAMAGED, body=of_file_header(lambda entry: entry.update(shape=[10**9, 10**9]))),
    "a header of 2^62 bytes": Lie(DAMAGED, body=lambda body: (1 << 62).to_bytes(8, "little") + body[8:]),
    "seconds that are no number": Lie(DAMAGED, head=of_head(seconds=math.nan)),
    "a text for seconds": Lie(DAMAGED, head=of_head(seconds="soon")),
    "a word of its own": Lie(DAMAGED, head=of_head(error="let me in")),
    "a deep head": Lie(DAMAGED, head=lambda head: "[" * 100_000),
    "a head that is no text": Lie(DAMAGED, parts=one_part(head=7)),
    "a part that is no bytes": Lie(DAMAGED, parts=one_part(body="x", of=1)),
    "an announced size of 2^60": Lie("larger than", parts=one_part(of=1 << 60, body=bytes(PART))),
}


# ------------------------------------------------------------------------------------ score sheets


def of_sheet(change: Callable[[ScoreSheet], ScoreSheet], body: bytes | memoryview) -> bytes:
    return packet_files.to_bytes(tree.flatten(change(tree.unflatten(read_body(body), ScoreSheet))))


def more_cases(sheet: ScoreSheet) -> ScoreSheet:
    """A fourth case per split, where the site's card says three."""
    rows = torch.cat([sheet.rows, sheet.rows[:1].clone()])
    rows[-1, 2] = len(sheet.cases)
    return replace(
        sheet, cases=(*sheet.cases, "another"), rows=rows, values=torch.cat([sheet.values, sheet.values[:1]])
    )


def every_case_twice(sheet: ScoreSheet) -> ScoreSheet:
    return replace(sheet, rows=torch.cat([sheet.rows, sheet.rows]), values=torch.cat([sheet.values, sheet.values]))


SHEETS: dict[str, tuple[Callable[[ScoreSheet], ScoreSheet], str]] = {
    "a Dice of 10⁹": (lambda sheet: replace(sheet, values=sheet.values * 0 + 1e9), "a 'dice' of 1e+09 cannot be"),
    "a Dice below nothing": (
        lambda sheet: replace(sheet, values=sheet.values - 2),
        "cannot be: it must be from 0 to 1",
    ),
    "no number": (lambda sheet: replace(sheet, values=sheet.values * math.nan), "a 'dice' of nan cannot be"),
    "more cases than its card says": (more_cases, "scores of 4 valid cases, where the site has 3"),
    "every case twice": (every_case_twice, "a case has the same score twice"),
    "another's model": (
        lambda sheet: replace(sheet, models=tuple(replace(model, of="mallory") for model in sheet.models)),
        "a model of 'mallory', which is not a member",
    ),
    "a label of its own": (lambda sheet: replace(sheet, labels=("mean",) * len(sheet.labels)), "the label 'mean'"),
    "a metric of its own": (lambda sheet: replace(sheet, metrics=("glory",) * len(sheet.metrics)), "no score 'glory'"),
    "rows of nothing": (lambda sheet: replace(sheet, rows=sheet.rows + 7), "what its sheet does not list"),
    "fewer values": (lambda sheet: replace(sheet, values=sheet.values[1:]), "scores have"),
}


def with_place(body: bytes | memoryview) -> bytes:
    """A sheet that says itself whose it is, of which round and phase, and that its site is a guest."""
    return of_fields(round=99, phase="last", site="ada", outside=True)(bytes(body))


# ------------------------------------------------------------------------------------ cards at the roll call


def edited(text: str, **changes: Any) -> str:
    """An answer's head with other values in it; `card` changes those of the card, None takes a key away."""
    whole = json.loads(text)
    for key, value in changes.items():
        parent = whole["tree"]["card"] if key in whole["tree"]["card"] or key == "name" else whole["tree"]
        parent[key] = value
        if value is None:
            del parent[key]
    return json.dumps(whole)


CARDS: dict[str, tuple[dict[str, Any], str]] = {
    "n below nothing": ({"n": -30}, "damaged"),
    "n of 10^15": ({"n": 10**15}, "damaged"),
    "more than the study's cap": ({"n": 2_000_000}, "[study] max_cases is 1000000"),
    "a text for a number": ({"n": "8"}, "damaged"),
    "a missing key": ({"cases": None}, "damaged"),
    "another's name": ({"name": "ada"}, "damaged"),
    "seconds that are no number": ({"seconds": math.nan}, "damaged"),
    "a word of its own": ({"error": "let me in"}, "damaged"),
}
