"""A site's ledger: what it released, by artefact and round, under which noise, and what that comes to.

The entries stand in the log of what left the site, one line per message (`consilium/policy.py`), so that a message and
its price are written in one step. A message that left twice in a round, to the last bit and after the same passes,
tells nothing new and counts once: a killed and resumed run spends nothing twice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from consilium import tree
from consilium.privacy.accounting import Use, accountant_of, composed
from consilium.privacy.dp import Privacy
from consilium.privacy.sampling import GAUSSIAN, UNPROTECTED
from consilium.site import Spent

Line = Mapping[str, Any]  # of a site's log
TRAINING, VALIDATION, COUNTS = "training", "validation", "counts"  # whose data an entry is made of
_COUNTS = ("steps", "cases", "n")


@dataclass(frozen=True)
class Entry:
    """One release."""

    run: str
    round: int | None  # as users count; None: at roll call
    spent: Spent

    @property
    def use(self) -> Use:
        return Use(self.spent.noise, self.spent.rate, self.spent.steps)


def entries_of(content: Any, do: str, privacy: Privacy, spent: Sequence[Spent]) -> tuple[Spent, ...]:
    """What a message costs: `content` is a method's uplink where `do` is "train"; `spent` is what training cost."""
    if do == "card":
        return (Spent(("numbers of cases",), UNPROTECTED, of=COUNTS),)
    if do == "score":
        return (Spent(("scores",), UNPROTECTED, of=VALIDATION),)
    if do != "train":
        return ()
    sent = [field.name for field in dataclasses.fields(content) if _says(getattr(content, field.name))]
    counts = tuple(name for name in sent if name in _COUNTS)
    rest = tuple(name.rstrip("_") for name in sent if name not in counts)
    numbers = (Spent(counts, UNPROTECTED, of=COUNTS),) if counts else ()
    if privacy.by_update:
        return (Spent(rest, GAUSSIAN, privacy.update.noise, clip=privacy.clip), *numbers)
    if spent:
        return (*spent, *numbers)
    of = VALIDATION if privacy.by_patient and not _has_trained(content) else TRAINING
    return (Spent(rest, UNPROTECTED, of=of), *numbers) if rest else numbers


def _has_trained(content: Any) -> bool:
    """Whether a message holds a model after steps: of a private study without a pass of DP-SGD, no noise covers it."""
    return bool(tree.split(content).weights) and getattr(content, "steps", 1) > 0


def _says(value: Any) -> bool:
    """Whether a field of a message has anything in it; losses of a private study are taken out and are 0."""
    return value is not None and not (isinstance(value, (int, float, str, tuple, dict)) and not value)


def as_json(entries: Iterable[Spent]) -> list[dict[str, Any]]:
    return [asdict(entry) for entry in entries]


def ledger(lines: Iterable[Line]) -> list[Entry]:
    """The entries of a log, each message once.

    Two passes may end in the same message, where the model stays at the site: then both count.
    """
    different = {_release(line): line for line in lines}
    return [entry for line in different.values() for entry in _entries(line)]


def _release(line: Line) -> tuple[Any, ...]:
    """What makes a line a release of its own: its message, its round, and the passes behind it."""
    passes = tuple(entry.get("drawn", "") for entry in line.get("spent", ()))
    return line["run"], line["what"], line.get("round"), line["sha256"], passes


def _entries(line: Line) -> Iterator[Entry]:
    if "spent" in line:
        for entry in line["spent"]:
            yield Entry(line["run"], line.get("round"), Spent(**{**entry, "what": tuple(entry["what"])}))
    elif line["what"] == "train":  # before there were ledgers, only updates as a whole had noise
        noise = float(line.get("noise", 0.0))
        kind = GAUSSIAN if noise else UNPROTECTED
        yield Entry(line["run"], line.get("round"), Spent(("update",), kind, noise / 2))


def total(entries: Iterable[Entry], delta: float, accountant: str = "rdp") -> float:
    """The ε of the training patients over all entries; infinite if something of them left without noise."""
    uses = [entry.use for entry in entries if entry.spent.of == TRAINING]
    if any(use.noise <= 0 for use in uses):
        return math.inf
    return composed(uses, delta, accountant)


def within(entries: Sequence[Entry], most: float, delta: float, accountant: str = "rdp") -> bool:
    """Whether a budget holds; the slower accountant is asked only where the faster one says no."""
    return total(entries, delta) <= most or (accountant != "rdp" and total(entries, delta, accountant) <= most)


def totals(entries: Sequence[Entry], delta: float, accountant: str = "rdp") -> dict[str, Any]:
    """ε and δ, what counted them, how many releases had noise, and what left without any."""
    training = [entry for entry in entries if entry.spent.of == TRAINING]
    bare = sorted({name for entry in entries if entry.spent.kind == UNPROTECTED for name in entry.spent.what})
    spent = total(entries, delta, accountant)
    return {
        "epsilon": spent if math.isfinite(spent) else None,
        "delta": delta,
        "accountant": accountant_of([entry.use for entry in training], accountant),
        "draws": sum(entry.spent.steps for entry in training),
        "unprotected": bare,
    }
