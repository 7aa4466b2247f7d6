"""Published datasets in their own layouts, small ones written here, become site folders."""

from __future__ import annotations

import gzip
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from consilium.data.check import check
from consilium.data.images import read_image
from consilium.data.importers import import_dataset
from consilium.data.importers.cifar10.importer import CLASSES
from consilium.data.importers.pickled import NotPlain, bytes_array, read_plain
from consilium.data.site_folder import Federation
from consilium.errors import DataError, StudyError

Bytes = NDArray[np.uint8]


def some(*shape: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def splits(federation: Federation) -> dict[str, int]:
    (site,) = federation.sites.values()
    return {split: sum(case.split == split for case in site.cases) for split in ("train", "valid", "test")}


# ------------------------------------------------------------------------------------------------------------ mnist


def idx(array: Bytes) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_mnist(folder: Path, packed: bool = False) -> Path:
    """40 training and 10 test pictures of 6×5, of classes 0 to 9 in turn."""
    folder.mkdir(exist_ok=True)
    for seed, (name, count) in enumerate((("train", 40), ("t10k", 10))):
        labels = (np.arange(count) % 10).astype(np.uint8)
        for kind, array in (("images-idx3", some(count, 6, 5, seed=seed)), ("labels-idx1", labels)):
            raw = idx(array)
            path = folder / f"{name}-{kind}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(raw) if packed else raw)
    return folder


@pytest.mark.parametrize("packed", [False, True])
def test_mnist(packed: bool, tmp_path: Path) -> None:
    federation = import_dataset("mnist", [write_mnist(tmp_path / "raw", packed)], tmp_path / "to")
    assert federation.labels == tuple("0123456789")
    assert (federation.task, federation.dimensions, federation.channels) == ("classification", 2, 1)
    assert splits(federation) == {"train": 34, "valid": 6, "test": 10}  # 15 % of 40 validate
    site = federation.sites["mnist"]
    np.testing.assert_array_equal(read_image(site.cases[7].image, 2, 1).array[0], some(40, 6, 5)[7])
    np.testing.assert_array_equal(read_image(site.cases[43].image, 2, 1).array[0], some(10, 6, 5, seed=1)[3])
    assert [site.cases[i].label for i in (7, 13, 43)] == ["7", "3", "3"]
    assert check(tmp_path / "to").faults == ()


def test_an_import_is_the_same_again_and_its_seed_moves_validation(tmp_path: Path) -> None:
    raw = write_mnist(tmp_path / "raw")
    for to, seed in (("a", 0), ("b", 0), ("c", 1)):
        import_dataset("mnist", [raw], tmp_path / to, "city", seed)
    a, b, c = ((tmp_path / to / "city/cases.csv").read_text() for to in "abc")
    assert a == b
    assert a != c


def cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


@pytest.mark.parametrize(
    ("packed", "damage", "words"),
    [
        (
            False,
            lambda f: cut(f / "train-images-idx3-ubyte", 7),
            "holds 1193 bytes after its head, which promises 1200",
        ),
        (True, lambda f: cut(f / "train-images-idx3-ubyte.gz", 99), "cannot be unpacked"),
        (False, lambda f: (f / "t10k-labels-idx1-ubyte").write_bytes(b"\0\0"), "is not an idx file of 1 axes"),
        (False, lambda f: (f / "t10k-labels-idx1-ubyte").unlink(), "one t10k-labels-idx1-ubyte"),
        (
            False,
            lambda f: (f / "t10k-labels-idx1-ubyte").write_bytes(idx(some(9))),
            "has 10 pictures and 9 labels",
        ),
    ],
)
def test_a_broken_mnist(packed: bool, damage: Callable[[Path], object], words: str, tmp_path: Path) -> None:
    raw = write_mnist(tmp_path / "raw", packed)
    damage(raw)
    with pytest.raises(DataError, match=words):
        import_dataset("mnist", [raw], tmp_path / "to")
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]  # nothing half made


# ---------------------------------------------------------------------------------------------------------- cifar10


def python2_batch(pixels: Bytes, labels: list[int]) -> bytes:
    """A batch as Python 2 pickled it when CIFAR-10 was published: protocol 2, texts and bytes alike as strings."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    kind = b"cnumpy\ndtype\n" + text(b"u1") + number(0) + number(1) + b"\x87R"
    kind += b"(" + number(3) + text(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + number(0) + b"\x85" + text(b"b") + b"\x87R"
    state = number(1) + b"".join(number(n) for n in pixels.shape) + b"\x86" + kind + b"\x89"
    array += b"(" + state + b"T" + struct.pack("<i", pixels.nbytes) + pixels.tobytes() + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([n]) for n in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + numbers + b"u."


def binary_batch(pixels: Bytes, labels: list[int]) -> bytes:
    return np.concatenate([np.array(labels, np.uint8)[:, None], pixels], axis=1).tobytes()


def python3_batch(protocol: int) -> Callable[[Bytes, list[int]], bytes]:
    return lambda pixels, labels: pickle.dumps({b"data": pixels, b"labels": labels}, protocol)


def write_cifar(folder: Path, batch: Callable[[Bytes, list[int]], bytes], suffix: str = "") -> Path:
    folder.mkdir()
    for seed, name in enumerate((*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")):
        (folder / f"{name}{suffix}").write_bytes(batch(some(10, 3072, seed=seed), list(range(10))))
    return folder


@pytest.mark.parametrize(
    ("batch", "suffix"),
    [(python2_batch, ""), (binary_batch, ".bin"), *((python3_batch(protocol), "") for protocol in (2, 3, 4, 5))],
)
def test_cifar10(batch: Callable[[Bytes, list[int]], bytes], suffix: str, tmp_path: Path) -> None:
    federation = import_dataset("cifar10", [write_cifar(tmp_path / "raw", batch, suffix)], tmp_path / "to")
    assert federation.labels == CLASSES
    assert federation.channels == 3
    assert splits(federation) == {"train": 42, "valid": 8, "test": 10}
    case = federation.sites["cifar10"].cases[23]  # the fourth of the third batch
    assert case.label == "cat"
    np.testing.assert_array_equal(read_image(case.image, 2, 3).array, some(10, 3072, seed=2)[3].reshape(3, 32, 32))


def test_batches_named_one_by_one(tmp_path: Path) -> None:
    raw = write_cifar(tmp_path / "raw", binary_batch, ".bin")
    federation = import_dataset("cifar10", [raw / "data_batch_2.bin", raw / "test_batch.bin"], tmp_path / "to")
    assert splits(federation) == {"train": 8, "valid": 2, "test": 10}


class Trap:
    """Would leave a file behind if it were unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def wrong_pickles(place: Path) -> dict[str, bytes]:
    right = python2_batch(some(10, 3072), list(range(10)))
    return {
        "trap": pickle.dumps({"data": Trap(place / "trap"), "labels": [0]}),
        "a list": pickle.dumps([1, 2, 3]),
        "other keys": pickle.dumps({"a": 1}),
        "real numbers": pickle.dumps({"data": np.zeros((2, 3072)), "labels": [0, 1]}),
        "another shape": pickle.dumps({"data": some(2, 100), "labels": [0, 1]}),
        "text for labels": pickle.dumps({"data": some(2, 3072), "labels": ["a", "b"]}),
        "an object": pickle.dumps({"data": some(2, 3072), "labels": [0, 1], "more": {1, 2}}),
        "cut": right[:500],
        "no pickle": b"\x89PNG and more",
        "empty": b"",
    }


@pytest.mark.parametrize("name", list(wrong_pickles(Path())))
def test_a_pickle_that_is_not_cifar(name: str, tmp_path: Path) -> None:
    raw = write_cifar(tmp_path / "raw", python2_batch)
    (raw / "data_batch_3").write_bytes(wrong_pickles(tmp_path)[name])
    with pytest.raises(DataError, match=r"data_batch_3 is not a batch of CIFAR-10 \(.*nothing in it was run"):
        import_dataset("cifar10", [raw], tmp_path / "to")
    assert not (tmp_path / "trap").exists()


def test_the_trap_works(tmp_path: Path) -> None:
    pickle.loads(wrong_pickles(tmp_path)["trap"])
    assert (tmp_path / "trap").exists()


def test_a_short_array_in_a_pickle() -> None:
    right = python2_batch(some(4, 6), [])
    assert bytes_array(read_plain(right)["data"]).shape == (4, 6)
    with pytest.raises(NotPlain, match="not as long"):
        bytes_array(read_plain(right.replace(struct.pack("<i", 6) + b"\x86", struct.pack("<i", 7) + b"\x86"))["data"])


def test_a_cifar_without_a_batch(tmp_path: Path) -> None:
    raw = write_cifar(tmp_path / "raw", binary_batch, ".bin")
    (raw / "data_batch_4.bin").unlink()
    with pytest.raises(DataError, match="data_batch_4 of CIFAR-10 not among the sources"):
        import_dataset("cifar10", [raw], tmp_path / "to")


def test_a_cut_binary_batch(tmp_path: Path) -> None:
    raw = write_cifar(tmp_path / "raw", binary_batch, ".bin")
    cut(raw / "test_batch.bin", 1)
    with pytest.raises(DataError, match="30729 bytes, not a number of records of 3073"):
        import_dataset("cifar10", [raw], tmp_path / "to")


# --------------------------------------------------------------------------------------------------------- medmnist


def write_medmnist(path: Path, shape: tuple[int, ...] = (6, 6), labels: int = 1) -> Path:
    arrays = {}
    for seed, (split, count) in enumerate((("train", 60), ("val", 20), ("test", 20))):
        arrays[f"{split}_images"] = some(count, *shape, seed=seed)
        arrays[f"{split}_labels"] = np.repeat(np.arange(count)[:, None] % 4, labels, axis=1).astype(np.uint8)
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize(("shape", "channels"), [((6, 6), 1), ((6, 6, 3), 3)])
def test_medmnist_is_merged_and_drawn_anew(shape: tuple[int, ...], channels: int, tmp_path: Path) -> None:
    federation = import_dataset("medmnist", [write_medmnist(tmp_path / "octmnist.npz", shape)], tmp_path / "to")
    assert (federation.labels, federation.channels) == (("0", "1", "2", "3"), channels)
    assert splits(federation) == {"train": 68, "valid": 12, "test": 20}
    cases = federation.sites["medmnist"].cases
    for label in federation.labels:  # 20 % of every class
        assert sum(case.split == "test" and case.label == label for case in cases) == 5
    assert check(tmp_path / "to").faults == ()


def test_the_paper_s_sets_have_names_for_their_classes(tmp_path: Path) -> None:
    path = tmp_path / "pathmnist_64.npz"
    labels = np.arange(18)[:, None] % 9
    np.savez(path, **{f"{s}_{k}": v for s in ("train", "val", "test") for k, v in (
        ("images", some(18, 4, 4, 3)), ("labels", labels))})  # fmt: skip
    federation = import_dataset("medmnist", [path], tmp_path / "to")
    assert federation.labels[0] == "adipose"
    assert federation.labels[8] == "colorectal adenocarcinoma epithelium"


def test_identical_pictures_stay_in_one_split(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    images = np.repeat(some(25, 4, 4), 4, axis=0)  # every picture four times
    np.savez(path, images=images, labels=np.repeat(np.arange(25) % 2, 4), classes=np.array(["a", "b"]))
    federation = import_dataset("mednist", [path], tmp_path / "to")
    assert check(tmp_path / "to").notes == ()
    assert all(n % 4 == 0 for n in splits(federation).values())


KEYS = [f"{split}_{kind}" for split in ("train", "val", "test") for kind in ("images", "labels")]
WRONG_NPZ: dict[str, tuple[Callable[[Path], object], str]] = {
    "3-D": (lambda p: write_medmnist(p, (6, 6, 6)), r"shape \(6, 6, 6\); only the 2-D sets"),
    "many labels": (lambda p: write_medmnist(p, labels=14), "has 14 labels for each picture; only sets with one class"),
    "not npz": (lambda p: p.write_bytes(b"hello"), "is not a readable .npz archive"),
    "an npy": (lambda p: np.save(p.with_suffix(""), some(3)) or p.with_suffix(".npy").rename(p), "is not an .npz"),
    "other keys": (lambda p: np.savez(p, x=some(3)), "has no train_images, .*; it has x"),
    "objects": (lambda p: np.savez(p, **dict.fromkeys(KEYS, np.array([{}]))), "is not a readable .npz archive"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(WRONG_NPZ))
def test_a_medmnist_of_the_wrong_kind(name: str, tmp_path: Path) -> None:
    write, words = WRONG_NPZ[name]
    write(tmp_path / "set.npz")
    with pytest.raises(DataError, match=words):
        import_dataset("medmnist", [tmp_path / "set.npz"], tmp_path / "to")
    assert not (tmp_path / "to").exists()


# ---------------------------------------------------------------------------------------------------------- mednist


def test_mednist_as_folders(tmp_path: Path) -> None:
    for seed, name in enumerate(("Hand", "CXR")):
        (tmp_path / "raw" / name).mkdir(parents=True)
        for i in range(10):
            Image.fromarray(some(6, 6, seed=10 * seed + i)).save(tmp_path / "raw" / name / f"{i}.png")
    federation = import_dataset("mednist", [tmp_path / "raw"], tmp_path / "to")
    assert federation.labels == ("CXR", "Hand")
    assert splits(federation) == {"train": 14, "valid": 2, "test": 4}
    case = federation.sites["mednist"].cases[13]
    assert case.label == "Hand"
    np.testing.assert_array_equal(read_image(case.image, 2, 1).array[0], some(6, 6, seed=3))


def test_a_folder_that_is_not_mednist(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    with pytest.raises(DataError, match="pictures in 0 folders; there must be a folder for each class"):
        import_dataset("mednist", [tmp_path / "raw"], tmp_path / "to")


# ----------------------------------------------------------------------------------------------------------- common


def test_mistakes_get_a_sentence(tmp_path: Path) -> None:
    raw = write_mnist(tmp_path / "raw")
    with pytest.raises(StudyError, match="there is no importer 'minst'; did you mean 'mnist'"):
        import_dataset("minst", [raw], tmp_path / "to")
    with pytest.raises(DataError, match=r"there is no .*nowhere; give the files"):
        import_dataset("mnist", [tmp_path / "nowhere"], tmp_path / "to")
    with pytest.raises(DataError, match="is not empty; name a new or empty folder"):
        import_dataset("mnist", [raw], raw)
    with pytest.raises(StudyError, match=r"--site '\.\./x'"):
        import_dataset("mnist", [raw], tmp_path / "to", "../x")
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]
