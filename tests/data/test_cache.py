"""The cache: built once, shared by processes, never stale, rebuilt when damaged."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from consilium.data import cache as cache_module
from consilium.data import cache_pieces, file_hashes
from consilium.data.cache import open_site
from consilium.data.cache_place import cache_root
from consilium.data.mask_files import invert
from consilium.data.preprocess import Preprocess
from consilium.data.site_arrays import SiteArrays
from consilium.data.site_folder import Case, read_federation
from consilium.data.site_writing import write_federation_toml, write_site
from consilium.errors import DataError, StudyError, WorkError

HOW = Preprocess(size=(8, 8))
LONG_AGO = 10**18  # ns; in 2001


def make(
    folder: Path, cases: int = 3, labels: tuple[str, ...] = ("disc", "cup"), annotated: tuple[str, ...] = ()
) -> None:
    """A site `west` of grey 12×10 images whose masks hold 1 in the first rows and 2 below them."""
    contains = {"disc": ["cup"]} if labels == ("disc", "cup") else {}
    write_federation_toml(folder, "segmentation", labels, 2, 1, contains)
    rows = []
    for i in range(cases):
        image, mask = folder / "west" / "images" / f"{i}.png", folder / "west" / "labels" / f"{i}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        mask.parent.mkdir(parents=True, exist_ok=True)
        save(image, np.full((12, 10), 51 * (i % 5), np.uint8))
        save(mask, np.repeat([[1], [2], [0]], 4, axis=0).repeat(10, axis=1))
        rows.append(Case(f"c{i}", f"p{i}", ("train", "valid", "test")[i % 3], image, mask))
    write_site(folder, "west", rows, annotated)


def save(path: Path, array: Any) -> None:
    Image.fromarray(np.asarray(array, np.uint8)).save(path)
    os.utime(path, ns=(LONG_AGO, LONG_AGO))  # a file as old as this is trusted by its times


def opened(tmp_path: Path, how: Preprocess = HOW, **more: Any) -> SiteArrays:
    federation = read_federation(tmp_path / "fed")
    return open_site(federation, federation.sites["west"], how, tmp_path / "cache", **more)


@pytest.fixture
def fed(tmp_path: Path) -> Path:
    make(tmp_path / "fed")
    return tmp_path / "fed"


def test_arrays_are_what_preprocessing_gives(tmp_path: Path, fed: Path) -> None:
    arrays = opened(tmp_path)
    assert len(arrays) == 3
    assert [arrays.indices(split) for split in ("train", "valid", "test", "")] == [[0], [1], [2], []]
    for i in range(3):
        assert arrays.image(i).shape == (1, 8, 8)
        assert arrays.image(i).dtype == np.float32
        assert np.allclose(arrays.image(i), 0.2 * i)
    truth = arrays.truth(0)
    assert isinstance(truth, np.ndarray)
    assert truth[:, 0].tolist() == [1, 1, 1, 2, 2, 0, 0, 0]
    assert invert(truth, arrays.undo(0), nearest=True).shape == (12, 10)


def test_views_are_read_only_and_aligned(tmp_path: Path, fed: Path) -> None:
    arrays = opened(tmp_path, Preprocess(size=(7, 5)))
    for i in range(3):
        image, truth = arrays.image(i), arrays.truth(i)
        assert isinstance(truth, np.ndarray)
        assert image.ctypes.data % 64 == 0
        assert truth.ctypes.data % 64 == 0
        assert not image.flags.writeable
        assert not truth.flags.writeable
        assert image.base is not None


def test_images_of_different_sizes_keep_them(tmp_path: Path, fed: Path) -> None:
    save(fed / "west" / "images" / "1.png", np.zeros((5, 6)))
    save(fed / "west" / "labels" / "1.png", np.zeros((5, 6)))
    arrays = opened(tmp_path, Preprocess())
    assert [arrays.image(i).shape for i in range(3)] == [(1, 12, 10), (1, 5, 6), (1, 12, 10)]


def test_classes_are_indices(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    write_federation_toml(folder, "classification", ["cyst", "stone"], 2, 1)
    (folder / "west").mkdir()
    save(folder / "west" / "a.png", np.zeros((3, 3)))
    cases = [Case("a", "a", "train", Path("a.png"), "stone"), Case("b", "b", "train", Path("a.png"), "cyst")]
    write_site(folder, "west", cases)
    arrays = opened(tmp_path)
    assert [arrays.truth(i) for i in range(2)] == [1, 0]


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    reads: list[str] = []
    examine, file_hash = cache_pieces.examine, file_hashes.file_hash
    monkeypatch.setattr(cache_pieces, "examine", lambda *a: (reads.append("decoded"), examine(*a))[1])
    monkeypatch.setattr(file_hashes, "file_hash", lambda path: (reads.append("hashed"), file_hash(path))[1])
    return reads


def test_nothing_is_read_twice(tmp_path: Path, fed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = count_reads(monkeypatch)
    first = opened(tmp_path)
    assert (reads.count("hashed"), reads.count("decoded")) == (6, 3)
    assert opened(tmp_path).folder == first.folder
    assert len(reads) == 9


def test_a_young_file_is_hashed_again(tmp_path: Path, fed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock may not have ticked between two changes."""
    os.utime(fed / "west" / "images" / "0.png")
    opened(tmp_path)
    reads = count_reads(monkeypatch)
    opened(tmp_path)
    assert reads == ["hashed"]


CHANGES = [
    # what changes, whether the arrays are built anew
    ("a pixel", True),
    ("a mask", True),
    ("size", True),
    ("labels", True),
    ("the time of a file", False),
    ("a split", False),
    ("annotated", False),
]


@pytest.mark.parametrize(("what", "anew"), CHANGES)
def test_the_key_is_content_and_settings(tmp_path: Path, fed: Path, what: str, anew: bool) -> None:
    before = opened(tmp_path).folder
    how, image, mask = HOW, fed / "west" / "images" / "0.png", fed / "west" / "labels" / "0.png"
    if what == "a pixel":
        save(image, np.eye(12, 10))
    elif what == "a mask":
        save(mask, np.eye(12, 10))
    elif what == "size":
        how = Preprocess(size=(4, 4))
    elif what == "labels":
        write_federation_toml(fed, "segmentation", ["disc", "rim"], 2, 1)
    elif what == "the time of a file":
        os.utime(image)
    elif what == "a split":
        table = fed / "west" / "cases.csv"
        table.write_text(table.read_text().replace("train", "test"))
    else:
        (fed / "west" / "site.toml").write_text('name = "west"\nannotated = ["disc"]\n')
    assert (opened(tmp_path, how).folder != before) is anew


def test_a_new_split_is_seen_at_once(tmp_path: Path, fed: Path) -> None:
    opened(tmp_path)
    table = fed / "west" / "cases.csv"
    table.write_text(table.read_text().replace("train", "test"))
    assert opened(tmp_path).indices("test") == [0, 2]


ANNOTATED = [
    # labels, annotated, what the values 0, 1, 2 become
    (("liver", "spleen"), ("liver", "spleen"), [0, 1, 2]),
    (("liver", "spleen"), ("liver",), [0, 1, 0]),
    (("liver", "spleen"), ("spleen",), [0, 0, 2]),
    (("disc", "cup"), ("disc",), [0, 1, 1]),  # the cup lies in the disc, so its voxels are disc
    (("disc", "cup"), ("cup",), [0, 0, 2]),
]


@pytest.mark.parametrize(("labels", "annotated", "become"), ANNOTATED)
def test_what_a_site_does_not_annotate_is_not_there(
    tmp_path: Path, labels: tuple[str, ...], annotated: tuple[str, ...], become: list[int]
) -> None:
    make(tmp_path / "fed", labels=labels, annotated=annotated)
    truth = opened(tmp_path).truth(0)
    assert isinstance(truth, np.ndarray)
    assert truth[:, 0].tolist() == [become[v] for v in (1, 1, 1, 2, 2, 0, 0, 0)]
    everything = opened(tmp_path, annotated=labels).truth(0)
    assert isinstance(everything, np.ndarray)
    assert everything[:, 0].tolist() == [1, 1, 1, 2, 2, 0, 0, 0]


def test_an_unknown_annotated_label_is_refused(tmp_path: Path, fed: Path) -> None:
    with pytest.raises(StudyError, match=r"annotated names .disk., .* did you mean .disc."):
        opened(tmp_path, annotated=["disk"])


def damage(folder: Path, how: str) -> None:
    if how == "images cut":
        os.truncate(folder / "images.bin", 100)
    elif how == "masks longer":
        with (folder / "masks.bin").open("ab") as file:
            file.write(b"more")
    elif how == "masks gone":
        (folder / "masks.bin").unlink()
    elif how == "index gone":
        (folder / "index.json").unlink()
    elif how == "index cut":
        os.truncate(folder / "index.json", 30)
    elif how == "index of another shape":
        (folder / "index.json").write_text(json.dumps({"cases": {}}))
    elif how == "a case missing":
        index = file_hashes.unsealed(folder / "index.json")
        (folder / "index.json").write_bytes(file_hashes.sealed({**index, "cases": index["cases"][1:]}))
    elif how == "of 0.1":
        index = file_hashes.unsealed(folder / "index.json")
        sizes = {name: (folder / name).stat().st_size for name in cache_module.ARRAYS}
        (folder / "index.json").write_text(json.dumps({"sizes": sizes, "cases": index["cases"]}))
    elif how == "images empty":
        os.truncate(folder / "images.bin", 0)
    else:
        name = {"a pixel": "images.bin", "a label": "masks.bin", "the index": "index.json"}[how]
        content = bytearray((folder / name).read_bytes())
        place = content.rindex(b'"start"') + 10 if name == "index.json" else 70
        content[place] ^= 1
        (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    "how",
    [
        *("images cut", "masks longer", "masks gone", "index gone", "index cut", "index of another shape"),
        *("a case missing", "a pixel", "a label", "the index", "images empty", "of 0.1"),
    ],
)
def test_a_damaged_cache_is_built_again(tmp_path: Path, fed: Path, how: str) -> None:
    before = opened(tmp_path)
    folder, expected = before.folder, [before.image(i).copy() for i in range(3)]
    damage(folder, how)
    arrays = opened(tmp_path)
    assert arrays.folder == folder
    assert all(np.array_equal(arrays.image(i), expected[i]) for i in range(3))
    assert [int(np.asarray(arrays.truth(i)).sum()) for i in range(3)] == [56] * 3
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]  # nothing is left beside it


def test_damaged_notes_about_files_are_harmless(tmp_path: Path, fed: Path) -> None:
    folder = opened(tmp_path).folder
    for path in (tmp_path / "cache" / "files").iterdir():
        path.write_text("[1, 2")
    assert opened(tmp_path).folder == folder


def test_a_turned_bit_in_the_notes_about_files_changes_nothing(tmp_path: Path, fed: Path) -> None:
    """With another digest there a run would be told that its site has other cases."""
    folder = opened(tmp_path).folder
    (path,) = (tmp_path / "cache" / "files").iterdir()
    facts = json.loads(path.read_text())
    facts["files"]["images/0.png"][-1] = "0" * 64
    path.write_text(json.dumps(facts))
    assert opened(tmp_path).folder == folder


def test_a_process_reads_the_arrays_through_once(tmp_path: Path, fed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(tmp_path)
    read: list[str] = []
    content = cache_module.file_sha256
    monkeypatch.setattr(cache_module, "file_sha256", lambda path: (read.append(path.name), content(path))[1])
    monkeypatch.setattr(cache_module, "_checked", {})  # another process
    for _ in range(3):
        opened(tmp_path)
    assert read == ["images.bin", "masks.bin"]


def test_the_cache_is_its_owners_alone(tmp_path: Path, fed: Path) -> None:
    """Whatever the umask, and where an earlier version left its folders open."""
    (tmp_path / "cache" / "arrays").mkdir(parents=True)
    (tmp_path / "cache" / "arrays").chmod(0o755)
    before = os.umask(0)
    try:
        opened(tmp_path)
    finally:
        os.umask(before)
    for path in (tmp_path / "cache").glob("*/*"):
        assert path.parent.stat().st_mode & 0o077 == 0 and path.stat().st_mode & 0o077 == 0, path


def test_arrays_stay_open_when_the_cache_is_deleted(tmp_path: Path, fed: Path) -> None:
    arrays = opened(tmp_path)
    shutil.rmtree(tmp_path / "cache")
    assert np.allclose(arrays.image(1), 0.2)
    assert np.allclose(opened(tmp_path).image(1), 0.2)


def test_what_a_killed_build_left_is_swept_away(tmp_path: Path, fed: Path) -> None:
    left = tmp_path / "cache" / "arrays" / ".building-west-old"
    young = tmp_path / "cache" / "arrays" / ".building-west-young"
    for path in (left, young):
        path.mkdir(parents=True)
    os.utime(left, ns=(LONG_AGO, LONG_AGO))
    opened(tmp_path)
    assert not left.exists()
    assert young.exists()


class _Stopped(Exception):
    """As if the power went."""


@pytest.fixture
def never_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_pieces, "SMALL", 0)


def _after_two(done: int, total: int) -> None:
    if done == 2:
        raise _Stopped


def test_a_build_that_was_stopped_goes_on(
    tmp_path: Path, fed: Path, never_small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = opened(tmp_path)
    wanted = {name: (whole.folder / name).read_bytes() for name in (*cache_module.ARRAYS, "index.json")}
    shutil.rmtree(whole.folder)
    with pytest.raises(_Stopped):
        opened(tmp_path, progress=_after_two)
    reads = count_reads(monkeypatch)
    steps: list[tuple[int, int]] = []
    again = opened(tmp_path, progress=lambda done, total: steps.append((done, total)))
    assert reads.count("decoded") == 1  # of three
    assert steps == [(1, 3), (2, 3), (3, 3)]
    assert {name: (again.folder / name).read_bytes() for name in wanted} == wanted
    assert [path.name for path in again.folder.parent.iterdir()] == [again.folder.name]


def test_a_damaged_piece_is_made_again(tmp_path: Path, fed: Path, never_small: None) -> None:
    with pytest.raises(_Stopped):
        opened(tmp_path, progress=_after_two)
    (pieces,) = (tmp_path / "cache" / "arrays").glob(".pieces-*")
    piece = pieces / "1"
    piece.write_bytes(piece.read_bytes()[:-1] + b"\x07")
    assert np.allclose(opened(tmp_path).image(1), 0.2)


def test_a_build_ends_well_when_another_has_finished_the_site_before(
    tmp_path: Path, fed: Path, never_small: None
) -> None:
    """The faster one removes the pieces of both."""
    faster: list[SiteArrays] = []

    def overtaken(done: int, total: int) -> None:
        if done == 1:
            faster.append(opened(tmp_path))

    slower = opened(tmp_path, progress=overtaken)
    assert slower.folder == faster[0].folder
    assert [float(slower.image(i).mean()) for i in range(3)] == pytest.approx([0, 0.2, 0.4])
    assert [path.name for path in slower.folder.parent.iterdir()] == [slower.folder.name]


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EEXIST])
def test_a_piece_that_cannot_be_kept_because_its_folder_goes_away_is_used_all_the_same(
    tmp_path: Path, fed: Path, never_small: None, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(cache_pieces, "write_parts", failing(number))
    assert np.allclose(opened(tmp_path).image(1), 0.2)


def test_a_full_disk_is_told_while_pieces_are_kept(
    tmp_path: Path, fed: Path, never_small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_pieces, "write_parts", failing(errno.ENOSPC))
    with pytest.raises(WorkError, match=r"No space left.*free space there"):
        opened(tmp_path)


def failing(number: int) -> Callable[..., int]:
    def fail(*given: object, **more: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.federation
def test_several_processes_write_the_bytes_of_one(tmp_path: Path, fed: Path) -> None:
    one = opened(tmp_path)
    wanted = {name: (one.folder / name).read_bytes() for name in (*cache_module.ARRAYS, "index.json")}
    shutil.rmtree(one.folder)
    save(fed / "west" / "images" / "1.png", np.full((12, 10), 51))  # its time changes, not its content
    several = opened(tmp_path, workers=2)
    assert {name: (several.folder / name).read_bytes() for name in wanted} == wanted


@pytest.mark.federation
def test_several_processes_list_all_faults(tmp_path: Path, fed: Path) -> None:
    for i in (0, 2):
        (fed / "west" / "images" / f"{i}.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"(?s)0\.png.*2\.png"):
        opened(tmp_path, workers=2)


def _open_together(place: str, barrier: Barrier, answers: Any) -> None:
    federation = read_federation(Path(place) / "fed")
    build = cache_module._build

    def build_and_wait(*a: Any) -> None:
        build(*a)
        barrier.wait(150)  # both have built before either renames

    cache_module._build = build_and_wait
    arrays = open_site(federation, federation.sites["west"], HOW, Path(place) / "cache")
    answers.put((str(arrays.folder), float(arrays.image(2).mean())))


@pytest.mark.federation
@pytest.mark.parametrize("damaged", [pytest.param(False, marks=pytest.mark.slow), True])
def test_two_processes_building_at_once_both_end_well(tmp_path: Path, fed: Path, damaged: bool) -> None:
    if damaged:
        damage(opened(tmp_path).folder, "images cut")
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(2), context.Queue()
    both = [context.Process(target=_open_together, args=(str(tmp_path), barrier, answers)) for _ in range(2)]
    for process in both:
        process.start()
    got = [answers.get(timeout=180) for _ in both]
    for process in both:
        process.join(180)
        assert process.exitcode == 0
    assert got[0] == got[1]
    assert got[0][1] == pytest.approx(0.4)
    assert len(list((tmp_path / "cache" / "arrays").iterdir())) == 1


def test_all_faults_of_a_site_are_listed(tmp_path: Path, fed: Path) -> None:
    west = fed / "west"
    (west / "images" / "0.png").write_bytes(b"")
    save(west / "labels" / "0.png", np.full((12, 10), 7))
    save(west / "labels" / "1.png", np.zeros((4, 4)))
    with pytest.raises(DataError) as caught:
        opened(tmp_path)
    first, *lines = str(caught.value).splitlines()
    assert first == "3 faults in the images of site 'west'; nothing was done."
    for line, words in zip(
        lines,
        [
            "west/images/0.png, case 'c0': is empty",
            "west/labels/0.png, case 'c0': has the mask values 7, which are not in labels (0 background, 1 disc,",
            "west/labels/1.png, case 'c1': is 4×4 but its image is 12×10",
        ],
        strict=True,
    ):
        assert words in line
    assert list((tmp_path / "cache" / "arrays").iterdir()) == []


def test_settings_that_do_not_fit_the_images_name_each_file(tmp_path: Path, fed: Path) -> None:
    with pytest.raises(DataError) as caught:
        opened(tmp_path, Preprocess(spacing=(1, 1)))
    assert str(caught.value).count("does not say its spacing") == 3


def test_memory_holds_one_case(tmp_path: Path) -> None:
    make(tmp_path / "fed", cases=40)
    opened(tmp_path)  # libraries are imported on first use
    tracemalloc.start()
    opened(tmp_path, Preprocess(size=(200, 200)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    one = 200 * 200 * 4
    assert peak < 10 * one  # all forty would be 40


def test_where_the_cache_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("CONSILIUM_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root() == tmp_path / ".cache" / "consilium"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_root() == Path("/xdg/consilium")
    monkeypatch.setenv("CONSILIUM_CACHE", "/own")
    assert cache_root() == Path("/own")


def test_a_cache_that_cannot_be_written_says_what_to_do(tmp_path: Path, fed: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(WorkError, match="set CONSILIUM_CACHE"):
        opened(tmp_path)


def test_patients_arrays_are_private(tmp_path: Path, fed: Path) -> None:
    assert opened(tmp_path).folder.stat().st_mode & 0o077 == 0


def test_cases_keep_table_order(tmp_path: Path, fed: Path) -> None:
    federation = read_federation(fed)
    site = federation.sites["west"]
    backwards = replace(site, cases=site.cases[::-1])
    arrays = open_site(federation, backwards, HOW, tmp_path / "cache")
    assert [float(arrays.image(i).mean()) for i in range(3)] == pytest.approx([0.4, 0.2, 0.0])
