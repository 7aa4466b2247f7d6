"""The log of what left a site: only ever added to, and chained, so that nobody changes or removes a line unnoticed.

Every line has its number and the SHA-256 of the line before it; `.left.head` has those of the last, so that lines are
missed at the end too. Logs of version 0.1 have no chain: the first line after them holds a hash of them all.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consilium.errors import RunError
from consilium.files import append_lines, make_folder, read_json, write_json

LOG = "left.jsonl"
HEAD = ".left.head"
FAILED = "failed"  # what a line says of an answer that is nothing but a reason
UNKNOWN = "(unknown)"  # the run of a line that cannot be read or is gone: it counts for every run

Line = Mapping[str, Any]


@dataclass(frozen=True)
class _Written:
    """A line as it stands in the file."""

    number: int  # in the file
    text: str
    facts: Line | None  # None: it cannot be read

    @property
    def torn(self) -> bool:
        """A crash cut it short, before the message left."""
        return self.facts is None and not self.text.endswith("}")

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True)
class ChainCheck:
    """What the chain of a log says."""

    lines: int
    chained: int  # of these
    faults: tuple[str, ...]  # in order; the first names the first broken line
    missing: int = 0  # lines that are gone or cannot be trusted


def append(facts: Line, memory: Path, durable: bool = False, private: bool = False) -> None:
    """Add a line and chain it to the one before; whoever calls holds the lock of the log.

    Lines that were cut off leave a gap in the numbers, so that they are missed for ever.
    """
    before = [line for line in _lines(memory / LOG) if line.facts is not None]
    head = _head(memory)
    cut_unseen = head is None and any("before" in (line.facts or {}) for line in before)
    number = max(_number(before[-1]) if before else 0, head[0] if head else 0) + 1 + cut_unseen
    text = json.dumps({**facts, "line": number, "before": _link(before)})
    append_lines(text + "\n", memory / LOG, durable, private)
    last = {"line": number, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    write_json(last, memory / HEAD, durable=False, private=private)


def left(memory: Path) -> Iterator[Line]:
    """Every message that left a site, of all studies.

    A line cut short by a crash is dropped: its message did not leave. For every line that was changed, removed or
    cannot be read there is one more of an unknown run, as costly as the costliest that is known.
    """
    known: list[Line] = []
    for path in sorted(memory.glob(f"*/{LOG}")):  # version 0.1 had one log per run, in its folder
        known += [{"run": path.parent.name, **line.facts} for line in _lines(path) if line.facts is not None]
    known += [{"run": memory.name, **line.facts} for line in _lines(memory / LOG) if line.facts is not None]
    yield from known
    missing = check_chain(memory).missing
    trained = [line for line in known if line.get("what") == "train"]
    for number in range(missing):
        most = max((int(line["bytes"]) for line in known), default=0)
        lost = {"run": UNKNOWN, "round": None, "sha256": f"{UNKNOWN} {number}"}
        spent = {"spent": trained[-1]["spent"]} if trained and "spent" in trained[-1] else {}
        yield {**lost, "what": "train", "bytes": most, **spent}
        yield {**lost, "what": "score", "bytes": 0, "spent": []}


def of_run(lines: Sequence[Line], run: str) -> list[Line]:
    """The lines of one run, and those of which nobody knows."""
    return [line for line in lines if line["run"] in (run, UNKNOWN)]


def of_study(lines: Sequence[Line], run: str) -> list[Line]:
    """The lines of all runs of a run's study, and those of which nobody knows."""
    study = study_of(run)
    return [line for line in lines if line["run"] == UNKNOWN or study_of(str(line["run"])) == study]


def study_of(run: str) -> str:
    """`<name>-s<seed>-<hash>` of a run's name, which may have the number of a repetition after it."""
    found = re.fullmatch(r"(.+-s[0-9]+-[0-9a-f]+)-[0-9]+", run)
    return found[1] if found else run


def different(what: str, lines: Iterable[Line]) -> int:
    """How many messages of a kind left; one that left again in its round, to the last bit, counts once."""
    return len({(line["run"], line.get("round"), line["sha256"]) for line in lines if line["what"] == what})


def seconds(lines: Iterable[Line]) -> float:
    """How long a site worked for what left, failures too."""
    return sum(float(line.get("facts", {}).get("seconds", 0.0)) for line in lines)


def check_chain(memory: Path) -> ChainCheck:
    """Whether a site's log is what was written, line by line."""
    faults: list[str] = []
    whole: list[_Written] = []
    missing = chained = 0
    lines = _lines(memory / LOG)
    for line in lines:
        if line.facts is None:
            if not line.torn:
                faults.append(f"line {line.number} cannot be read")
                missing += 1
            continue
        if "before" in line.facts and any(line.text == other.text for other in whole[_number(line) - 1 :][:1]):
            faults.append(f"line {line.number} is there twice")
            continue
        if "before" in line.facts:
            chained += 1
            gap = _number(line) - 1 - (_number(whole[-1]) if whole else 0)
            if gap > 0:
                faults.append(f"{_count(gap)} missing or cannot be read before line {line.number}")
                missing += gap
            elif gap < 0 or line.facts["before"] != _link(whole):
                faults.append(f"line {whole[-1].number if whole else line.number} is not what was written")
                missing += 1
        elif chained:
            faults.append(f"line {line.number} was added without the chain")
        whole.append(line)
    if chained:
        missing += _check_head(memory, whole, faults)
    unreadable = sum(line.facts is None and not line.torn for line in lines)
    return ChainCheck(len(whole), chained, tuple(faults), max(missing - unreadable, unreadable))


def _check_head(memory: Path, whole: Sequence[_Written], faults: list[str]) -> int:
    """How many lines at the end are missing or changed, by what was noted of the last."""
    if (head := _head(memory)) is None:
        faults.append(f"{HEAD} is missing or damaged, so lines at the end could be missing unseen")
        return 0
    number, sha256 = head
    last = _number(whole[-1])
    if number > last:
        faults.append(f"{_count(number - last)} missing after line {whole[-1].number}")
        return number - last
    same = [line for line in whole if _number(line) == number]
    if same and same[-1].sha256 != sha256:
        faults.append(f"line {same[-1].number} is not what was written")
        return 1
    return 0


def _head(memory: Path) -> tuple[int, str] | None:
    """The number and the hash of the last line, as noted when it was written."""
    try:
        head = read_json(memory / HEAD)
        return int(head["line"]), str(head["sha256"])
    except (RunError, KeyError, TypeError, ValueError):
        return None


def _count(lines: int) -> str:
    return f"{lines} line is" if lines == 1 else f"{lines} lines are"


def _link(before: Sequence[_Written]) -> str:
    """What the next line says of those before it."""
    if not before:
        return ""
    if "before" in (before[-1].facts or {}):
        return before[-1].sha256
    return hashlib.sha256("\n".join(line.text for line in before).encode()).hexdigest()  # from before there was a chain


def _number(line: _Written) -> int:
    """A line's own number; those of older versions are counted."""
    found = (line.facts or {}).get("line")
    return found if isinstance(found, int) else line.number


def _lines(path: Path) -> list[_Written]:
    if not path.exists():
        return []
    texts = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [_Written(number, text, _read(text)) for number, text in enumerate(texts, start=1)]


def _read(text: str) -> Line | None:
    try:
        facts = json.loads(text)
        return facts if isinstance(facts, dict) and "what" in facts and int(facts["bytes"]) >= 0 else None
    except (ValueError, TypeError, KeyError):
        return None


@contextmanager
def locked(memory: Path) -> Iterator[None]:
    """Two studies of one hospital count one after the other."""
    make_folder(memory, private=True, durable=True)
    with os.fdopen(os.open(memory / f".{LOG}.lock", os.O_RDWR | os.O_CREAT, 0o600), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
