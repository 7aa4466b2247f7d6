"""Messages on disk by reference: every `Weights` is stored once by content, whoever holds it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from consilium import tree
from consilium.errors import RunError
from consilium.files import make_folder, read_json, write_json
from consilium.tree import PacketError, message
from consilium.weights import SiteName, Weights

T = TypeVar("T")
Document = Mapping[str, Any]  # JSON: {"shape", "weights": {path: digest}, "tensors": digest or None}


@message
class _Held:
    weights: Weights


class Store:
    """A folder of weights, each in a file named by its content."""

    def __init__(self, folder: Path, durable: bool = True, private: bool = False) -> None:
        self.folder = folder
        self.durable = durable  # on the disk, not only with the system, when `put` returns
        self.private = private  # for the owner's eyes only

    def put(self, item: Any) -> Document:
        """Store a message; what is already there costs nothing."""
        shape, weights, tensors = tree.split(item)
        return {
            "shape": shape,
            "weights": {path: self._put(part) for path, part in weights.items()},
            "tensors": self._put(Weights.over(tensors)) if tensors else None,
        }

    def _put(self, weights: Weights) -> str:
        path = self._path(weights.digest)
        if not path.exists():
            make_folder(self.folder, self.private, self.durable)
            tree.write(tree.flatten(_Held(weights)), path, self.durable, self.private)
        return weights.digest

    def get(self, document: Document, kind: type[T]) -> T:
        """The message a document refers to; its tensors stay in their files until asked for."""
        return tree.assemble(document["shape"], kind, _Stored(self, document))

    def weights(self, digest: str) -> Weights:
        weights = tree.load(self._path(digest), _Held).weights
        vars(weights)["digest"] = digest  # its name: what a site keeps for long is not read through again every round
        return weights

    def sweep(self, documents: Iterable[Document]) -> None:
        """Delete what no document refers to any more."""
        held = list(self.folder.glob("*.safetensors"))
        if held:
            used = {name for document in documents for name in (*document["weights"].values(), document["tensors"])}
            for path in held:
                if path.stem not in used:
                    path.unlink()

    def _path(self, digest: str) -> Path:
        return self.folder / f"{digest}.safetensors"


class _Stored:
    """The parts of one stored message."""

    def __init__(self, store: Store, document: Document) -> None:
        self._store, self._document = store, document

    def weights(self, path: str, names: list[str]) -> Weights:
        stored = self._store.weights(self._document["weights"][path])
        if list(stored) != names:
            raise PacketError(f"the stored weights of '{path}' are not those of its message")
        return stored

    def tensor(self, path: str) -> Tensor:
        return self._store.weights(self._document["tensors"])[path]


class MemoryShelf:
    """What one site remembers, by round, on its own disk.

    A hospital's is `durable` and `private`. A simulation does not wait for the disk: a killed process loses nothing
    either way, and after a power cut a memory that is missing is noticed.
    """

    def __init__(self, folder: Path, site: SiteName, durable: bool = False, private: bool = False) -> None:
        self.folder, self.site, self.durable, self.private = folder, site, durable, private
        self._store = Store(folder / "store", durable, private)

    def at(self, round: int, kind: type[T]) -> T | None:
        """The memory of exactly that round; None before the first."""
        if round < 0:
            return None
        path = self._path(round)
        if not path.exists():
            raise RunError(
                f"site '{self.site}' has forgotten a round that the server merged from it: {path} is missing. "
                "Restore the site's memory folder, or start the study again."
            )
        return self._store.get(read_json(path), kind)

    def put(self, round: int, memory: Any, keep: Collection[int]) -> None:
        """Keep this round's memory and those named, which the server may ask for again; drop all others."""
        make_folder(self.folder, self.private, self.durable)
        write_json(self._store.put(memory), self._path(round), self.durable, self.private)
        for other in self.rounds():
            if other != round and other not in keep:
                self._path(other).unlink()
        self._store.sweep(read_json(self._path(other)) for other in self.rounds())

    def before(self, round: int) -> int:
        """The round of the memory before that one; -1 where there is none."""
        return max((other for other in self.rounds() if other < round), default=-1)

    def rounds(self) -> list[int]:
        return sorted(int(path.stem) for path in self.folder.glob("*.json"))

    def _path(self, round: int) -> Path:
        return self.folder / f"{round:05d}.json"
