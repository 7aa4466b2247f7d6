"""Messages on disk by reference: every `Weights` is stored once, in a file named by its content.

Every stored file is checked before use. The name of a weights file is the digest of its content; a document and a
release contain one. A process checks a file on first use, unless it wrote the file itself.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from consilium import packet_files, tree
from consilium.errors import RunError
from consilium.files import make_folder, read_json, sync_folder, write_json
from consilium.legacy import current_memory
from consilium.message_parsing import assemble
from consilium.tree import Packet, PacketError, message
from consilium.weights import SMALL, SiteName, Weights

T = TypeVar("T")
Document = Mapping[str, Any]  # JSON: {"shape", "weights": {path: digest}, "tensors": digest or None}
RELEASE, RELEASE_FACTS = "release.safetensors", "release.json"

_log = logging.getLogger("consilium")  # warnings for a person; the work continues
_told: set[str] = set()


class DamagedError(RunError):
    """A stored file is damaged or missing."""


def say_once(sentence: str) -> None:
    """Log a warning once per process."""
    if sentence not in _told:
        _told.add(sentence)
        _log.warning("consilium: %s", sentence)


# ---------------------------------------------------------------------------------------------- documents

_DIGEST = "digest"
# keys of documents of version 0.1, which have no digest; any other key means damage
_KEYS_OF_0_1 = {"round", "merged", "server", "seconds", "firewall", "valid", "shape", "weights", "tensors"}
_KEYS_OF_0_1 |= {"run", "method"}


def write_document(facts: Mapping[str, Any], path: Path, durable: bool = True, private: bool = False) -> None:
    """Write facts as JSON, with a digest of them."""
    write_json({**facts, _DIGEST: _digest(facts)}, path, durable, private)


def read_document(path: Path) -> dict[str, Any]:
    """The facts in a document, checked; `DamagedError` if the document is damaged."""
    try:
        facts = read_json(path)
    except RunError as error:
        raise DamagedError(f"{path} is damaged: it cannot be read") from error
    digest = facts.pop(_DIGEST, None) if isinstance(facts, dict) else ""
    if digest != _digest(facts) and not (digest is None and facts.keys() <= _KEYS_OF_0_1):
        raise DamagedError(f"{path} is damaged: it is not what was written")
    return facts  # type: ignore[no-any-return]


def _digest(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


# ---------------------------------------------------------------------------------------------- weights by content


@message
class _Held:
    weights: Weights


_Stamp = tuple[int, int, int]  # identifies a checked file: inode, size, time of its last change


class Store:
    """A folder of weights, each in a file named by its content."""

    def __init__(self, folder: Path, durable: bool = True, private: bool = False) -> None:
        self.folder = folder
        self.durable = durable  # synced to disk when `put` returns
        self.private = private  # readable by the owner only
        self._known: dict[str, _Stamp] = {}  # by digest: files whose content has been checked, or was written here

    def put(self, item: Any) -> Document:
        """Store a message; existing files are not written again, unless they are damaged."""
        apart = tree.split(item)
        parts = [*apart.weights.values(), *([Weights.over(apart.tensors)] if apart.tensors else [])]
        written = [self._put(part) for part in parts]
        if self.durable and any(written):
            sync_folder(self.folder)
        return {
            "shape": apart.shape(),
            "weights": {path: part.digest for path, part in apart.weights.items()},
            "tensors": parts[-1].digest if apart.tensors else None,
        }

    def _put(self, weights: Weights) -> bool:
        """Whether a file had to be written."""
        digest, path = weights.digest, self._path(weights.digest)
        if path.exists():
            try:
                self.weights(digest)
                return False
            except PacketError as error:
                say_once(f"{error}; it was written again.")
        make_folder(self.folder, self.private, self.durable)
        packet = tree.flatten(_Held(weights))
        packet_files.write(packet, path, self.durable, self.private, sync_name=False)
        self._known[digest] = _stamp(path)
        return True

    def get(self, document: Document, kind: type[T]) -> T:
        """The message of a document; its tensors stay in their files until they are used."""
        return assemble(document["shape"], kind, _Stored(self, document))

    def weights(self, digest: str) -> Weights:
        """The weights with this digest; `PacketError` if they are damaged or missing."""
        path = self._path(digest)
        weights = packet_files.load(path, _Held).weights
        stamp = _stamp(path)
        if self._known.get(digest) != stamp:
            if _read_through(weights) != digest:
                raise PacketError(f"{path} is damaged: its content is not what its name says")
            self._known[digest] = stamp
        vars(weights)["digest"] = digest
        return weights

    def sweep(self, documents: Iterable[Document]) -> None:
        """Delete files that no document refers to."""
        held = list(self.folder.glob("*.safetensors"))
        if held:
            used = {name for document in documents for name in names_in(document)}
            self.drop(path.stem for path in held if path.stem not in used)

    def drop(self, digests: Iterable[str]) -> None:
        for digest in digests:
            self._path(digest).unlink(missing_ok=True)
            self._known.pop(digest, None)

    def _path(self, digest: str) -> Path:
        return self.folder / f"{digest}.safetensors"


def names_in(document: Document) -> set[str]:
    """The digests of all files that a document refers to."""
    return {*document["weights"].values(), *([document["tensors"]] if document["tensors"] else [])}


def _stamp(path: Path) -> _Stamp:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _read_through(weights: Weights) -> str:
    """The digest of weights in a file; their memory is released."""
    digest = weights.digest
    for name, tensor in weights.items():
        if tensor.nbytes >= SMALL:
            weights.forget(name)
    return digest


class _Stored:
    """The parts of one stored message."""

    whole = False  # an older version may have written it

    def __init__(self, store: Store, document: Document) -> None:
        self._store, self._document = store, document
        self._tensors: Weights | None = None

    def weights(self, path: str, names: list[str]) -> Weights:
        stored = self._store.weights(self._document["weights"][path])
        if list(stored) != names:
            raise PacketError(f"the stored weights of '{path}' are not those of its message")
        return stored

    def tensor(self, path: str) -> Tensor:
        if self._tensors is None:
            self._tensors = self._store.weights(self._document["tensors"])
        return self._tensors[path]


# ---------------------------------------------------------------------------------------------- at a site


class MemoryStore:
    """The memories of one site, by round, on its own disk.

    A hospital's store is `durable` and `private`. A simulation does not wait for the disk: a killed process loses
    nothing, and after a power cut a missing or damaged memory is detected.
    """

    def __init__(self, folder: Path, site: SiteName, durable: bool = False, private: bool = False) -> None:
        self.folder, self.site, self.durable, self.private = folder, site, durable, private
        self._store = Store(folder / "store", durable, private)

    def at(self, round: int, kind: type[T]) -> T | None:
        """The memory of exactly that round; None before the first. `DamagedError` if it cannot be used."""
        if round < 0:
            return None
        path = self._path(round)
        if not path.exists():
            raise RunError(
                f"site '{self.site}' lacks a round that the server merged from it: {path} is missing. "
                "Restore the site's memory folder, or start the study again with `consilium run STUDY.toml --again`."
            )
        try:
            return self._store.get(current_memory(read_document(path), kind), kind)
        except (DamagedError, PacketError, KeyError) as error:
            raise DamagedError(
                f"the memory of site '{self.site}' of round {round + 1} cannot be used: {error}. "
                "Restore the site's memory folder, or start the study again with `consilium run STUDY.toml --again`."
            ) from error

    def put(self, round: int, memory: Any, keep: Collection[int]) -> None:
        """Keep this round's memory and those named, which the server may ask for again; drop all others."""
        make_folder(self.folder, self.private, self.durable)
        write_document(self._store.put(memory), self._path(round), self.durable, self.private)
        for other in self.rounds():
            if other != round and other not in keep:
                self._path(other).unlink()
        with suppress(DamagedError):  # the references of a damaged memory are unknown: keep everything
            self._store.sweep([read_document(self._path(other)) for other in self.rounds()])

    def before(self, round: int) -> int:
        """The round of the memory before that one; -1 where there is none."""
        return max((other for other in self.rounds() if other < round), default=-1)

    def rounds(self) -> list[int]:
        return sorted(int(path.stem) for path in self.folder.glob("*.json"))

    def _path(self, round: int) -> Path:
        return self.folder / f"{round:05d}.json"


def write_release(
    release: Packet, facts: Mapping[str, Any], place: Path, durable: bool = False, private: bool = False
) -> None:
    """Store a release and its facts in a site's folder."""
    make_folder(place, private, durable)
    kept = packet_files.with_digest(release)
    packet_files.write(kept, place / RELEASE, durable, private)
    write_document({**facts, "release": packet_files.digest_of(kept)}, place / RELEASE_FACTS, durable, private)


def read_release(place: Path) -> tuple[Packet, dict[str, Any]]:
    """A release stored by `write_release`, checked; `DamagedError` says what to do if it cannot be used."""
    remedy = "restore it from a copy, or ask the administrator for the run, which `consilium federation fetch` brings"
    try:
        facts, packet = read_document(place / RELEASE_FACTS), packet_files.read(place / RELEASE)
    except (DamagedError, PacketError) as error:
        raise DamagedError(f"{error}; {remedy}.") from error
    if packet_files.digest_of(packet) != facts.get("release"):
        raise DamagedError(f"{place / RELEASE} is not the one that {RELEASE_FACTS} was written for; {remedy}.")
    if not packet_files.digest_of(packet):
        say_once(f"{place / RELEASE} was written by version 0.1, without a digest: it is used unchecked.")
    return packet, facts
