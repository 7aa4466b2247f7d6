"""A hospital's decisions about studies: each is of one study, to the last setting, and signed with the hospital's key.

    <memory>/review/<sha256>.toml    a study that waits, or that was decided on
    <memory>/review/<sha256>.json    the decision

A study that differs in anything but where its files lie is another study, and needs a decision of its own.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from consilium.errors import RunError
from consilium.files import make_folder, read_json, write_bytes, write_json
from consilium.study import Study

APPROVED, REJECTED = "approved", "rejected"
FOLDER = "review"
WAITING = 100  # studies that are kept for review at most: an administrator could send any number


def study_digest(study: Study) -> str:
    """SHA-256 of all that decides what a study does at a hospital; device and files are the hospital's own."""
    tables = study.tables()
    tables.pop("code", None)
    del tables["data"]["federation"], tables["local"]["device"], tables["study"]["track"]
    return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Decision:
    """What a person said of one study."""

    study: str  # its digest
    verdict: str  # APPROVED or REJECTED
    by: str
    time: str
    why: str = ""


@dataclass(frozen=True)
class WaitingStudy:
    """A study that is kept for review."""

    digest: str
    text: str  # TOML
    decision: Decision | None


@dataclass(frozen=True)
class Decisions:
    """The decisions in a hospital's memory folder."""

    memory: Path
    secret: bytes  # the hospital's key: a decision that it did not sign does not count

    def of(self, digest: str) -> Decision | None:
        """What was decided on a study; None if nothing was, or if the file is not what was written."""
        try:
            facts = dict(read_json(self._path(digest, "json")))
            signature = facts.pop("signature")
            found = Decision(**facts)
        except (RunError, KeyError, TypeError, ValueError):
            return None
        good = found.study == digest and found.verdict in (APPROVED, REJECTED)
        return found if good and hmac.compare_digest(str(signature), self._signature(found)) else None

    def keep_waiting(self, study: Study) -> bool:
        """Keep a study for review; False if too many wait already."""
        digest = study_digest(study)
        path = self._path(digest, "toml")
        if path.exists():
            return True
        if sum(found.decision is None for found in self.all()) >= WAITING:
            return False
        make_folder(path.parent, private=True, durable=True)
        write_bytes(study.to_toml(places=False).encode(), path, durable=True, private=True)
        return True

    def decide(self, study: Study, decision: Decision) -> None:
        """Sign a decision; a later one takes its place."""
        path = self._path(decision.study, "json")
        make_folder(path.parent, private=True, durable=True)
        write_bytes(study.to_toml(places=False).encode(), self._path(decision.study, "toml"), True, private=True)
        write_json({**asdict(decision), "signature": self._signature(decision)}, path, durable=True, private=True)

    def all(self) -> list[WaitingStudy]:
        """Every study that was kept, those without a decision first, then the latest."""
        paths = (self.memory / FOLDER).glob("*.toml")
        found = [
            WaitingStudy(path.stem, path.read_text(encoding="utf-8", errors="replace"), self.of(path.stem))
            for path in sorted(paths, key=lambda path: -path.stat().st_mtime)
        ]
        return sorted(found, key=lambda study: study.decision is not None)

    def _path(self, digest: str, suffix: str) -> Path:
        return self.memory / FOLDER / f"{digest}.{suffix}"

    def _signature(self, decision: Decision) -> str:
        text = "review " + json.dumps(asdict(decision), sort_keys=True)
        return hmac.new(self.secret, text.encode(), hashlib.sha256).hexdigest()
