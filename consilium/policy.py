"""What a site allows: everything in a simulation; what a hospital does is in hospital_policy.py."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from consilium.errors import DataError
from consilium.files import make_folder, write_bytes
from consilium.left_lines import line_of
from consilium.left_log import append, left
from consilium.messages import AnswerHead, Request
from consilium.privacy.ledger import ledger, total, within
from consilium.site import Spent
from consilium.stopwatch import Stopwatch
from consilium.study import Study
from consilium.tree import Packet

KEY = 32  # bytes of a hospital's key
KEY_ALIAS = "(key)"  # its alias tells one key from another


class Refused(Exception):
    """A request is not carried out; `word`, one of `REASONS`, is all that the server learns."""

    def __init__(self, word: str, why: str) -> None:
        super().__init__(why)
        self.word = word


class Policy(Protocol):
    """The rules of one site."""

    @property
    def secret(self) -> bytes:
        """Noise is drawn from it."""
        ...

    def alias(self, name: str) -> str:
        """A case's name as the server may read it."""
        ...

    @property
    def stopwatch(self) -> Stopwatch:
        """What one round may take."""
        ...

    def check(self, study: Study, cases: int) -> None:
        """`Refused` if the study may not run here, at a site with so many cases."""
        ...

    def check_cache(self, size: int) -> None:
        """`Refused` if the preprocessed images take too many bytes."""
        ...

    def before(self, request: Request, study: Study) -> None:
        """`Refused` if a request is not even begun."""
        ...

    def let_go(
        self, request: Request, head: AnswerHead, packet: Packet | None, study: Study, spent: Sequence[Spent] = ()
    ) -> None:
        """Write down what is about to leave, and what it costs its patients; `Refused` if it may not."""
        ...


@dataclass(frozen=True)
class Permissive:
    """A simulated site without rules of its own: everything leaves, under its own name.

    Of a private study it keeps a ledger in its folder, and it stops where the study's own ε is used up.
    """

    secret: bytes
    memory: Path | None = None

    def alias(self, name: str) -> str:
        return name

    @property
    def stopwatch(self) -> Stopwatch:
        return Stopwatch()

    def check(self, study: Study, cases: int) -> None: ...

    def check_cache(self, size: int) -> None: ...

    def before(self, request: Request, study: Study) -> None: ...

    def let_go(
        self, request: Request, head: AnswerHead, packet: Packet | None, study: Study, spent: Sequence[Spent] = ()
    ) -> None:
        if not study.privacy.on or self.memory is None:
            return
        line = line_of(request, packet, spent)
        for word, why in over_target(line, list(left(self.memory)), study):
            raise Refused(word, why)
        make_folder(self.memory)
        append(line, self.memory)


def simulated_secret(study: Study, site: str) -> bytes:
    """A simulation has no secrets, and its noise must be the same when it is repeated."""
    return f"{study.plan.seed}|{site}".encode()


def alias_of(name: str, secret: bytes) -> str:
    """A keyed hash of a whole name."""
    return hmac.new(secret, name.encode(), hashlib.sha256).hexdigest()[:16]


def over_target(line: Mapping[str, Any], past: list[Mapping[str, Any]], study: Study) -> Iterator[tuple[str, str]]:
    """Whether a message would take a run over the ε that its study promises."""
    privacy = study.privacy
    if not privacy.epsilon or line["what"] != "train":
        return
    entries = ledger([*past, line])
    if not within(entries, privacy.epsilon, privacy.delta, privacy.accountant):
        spent = total(entries, privacy.delta, privacy.accountant)
        yield "budget", f"ε of this run would be {spent:.3g}, and the study promises {privacy.epsilon:g}"


# ------------------------------------------------------------------------------------------ the key


def read_key(path: Path) -> bytes:
    """The hospital's key, made once and never sent; one that is not whole is refused, never replaced."""
    if not path.exists():
        make_folder(path.parent, private=True, durable=True)
        write_bytes(secrets.token_hex(KEY).encode(), path, durable=True, private=True)
    try:
        key = bytes.fromhex(path.read_text(encoding="ascii"))
    except ValueError:
        key = b""
    if len(key) != KEY:
        raise DataError(
            f"{path} is not a whole key of {KEY} bytes: restore it from a backup. A new one, made if you remove it, "
            "gives every case another alias, and memories and logs of runs under way no longer go with it."
        )
    return key
