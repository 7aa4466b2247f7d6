"""One site cut into many: the APPLE paper's shares, alike for training and test, and nothing lost."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from consilium.data.apportion import apportion
from consilium.data.check import check
from consilium.data.images import read_image
from consilium.data.partition import Cut, holdings, partition, shares
from consilium.data.site_folder import Case, Federation, read_federation
from consilium.data.site_writing import write_federation_toml, write_site
from consilium.errors import DataError, StudyError

CLASSES = [f"c{i}" for i in range(10)]


def write_one(folder: Path, training: int = 1000, test: int = 200, classes: int = 10) -> Path:
    """One site whose picture i shows the number i in its first two pixels; classes in turn."""
    count = training + test
    images = np.zeros((count, 2, 2), dtype=np.uint8)
    images[:, 0, 0], images[:, 0, 1] = np.divmod(np.arange(count), 256)
    write_federation_toml(folder, "classification", CLASSES[:classes], 2, 1)
    (folder / "all").mkdir(parents=True)
    np.save(folder / "all/stack.npy", images)
    parts = ["train"] * (training - training // 5) + ["valid"] * (training // 5) + ["test"] * test
    cases = [Case(f"k{i}", f"p{i}", part, Path(f"stack.npy#{i}"), CLASSES[i % classes]) for i, part in enumerate(parts)]
    write_site(folder, "all", cases, source="made here", licence="none")
    return folder


@pytest.fixture
def one(tmp_path: Path) -> Path:
    return write_one(tmp_path / "one")


def numbers(federation: Federation) -> list[int]:
    """The number each picture shows, of all sites; it must be that of its case."""
    found = []
    for site in federation.sites.values():
        for case in site.cases:
            first, second = (int(v) for v in read_image(case.image, 2, 1).array[0, 0])
            assert case.name == f"k{256 * first + second}"
            found.append(256 * first + second)
    return found


def test_practical_shares_are_the_paper_s() -> None:
    held = shares(Cut("practical", 12), 10)
    for column in held.T:
        assert sorted(column) == pytest.approx([0.01] * 10 + [0.1, 0.8])
    assert len({tuple(column) for column in held.T}) > 3  # each class has its own order


@pytest.mark.parametrize("classes", [9, 10, 11])
def test_pathological_shares_are_the_paper_s(classes: int) -> None:
    for seed in range(20):
        held = shares(Cut("pathological", 12, seed), classes)
        assert ((held > 0).sum(axis=1) == 2).all(), seed  # two classes per site, never the same twice
        assert held.sum(axis=0) == pytest.approx(np.ones(classes)), seed
        assert set((held > 0).sum(axis=0)) <= {1, 2, 3, 4}, seed


def test_dirichlet_s_alpha_is_its_evenness() -> None:
    even, uneven = (shares(Cut("dirichlet", 12, alpha=alpha), 500) for alpha in (100.0, 0.05))
    assert even.sum(axis=0) == pytest.approx(np.ones(500))
    assert even.max() < 0.2 < 0.9 < uneven.max()


@pytest.mark.parametrize("scheme", ["pathological", "practical", "dirichlet"])
def test_nothing_is_lost_and_nothing_is_twice(scheme: str, one: Path, tmp_path: Path) -> None:
    federation = partition(one, tmp_path / "cut", Cut(scheme, 12))
    assert sorted(numbers(federation)) == list(range(1200))
    finding = check(tmp_path / "cut")
    assert finding.faults == ()
    assert list(finding.counts) == [f"site{i:02d}" for i in range(1, 13)]
    assert all(splits["train"] and splits["valid"] for splits in finding.counts.values())
    for site in federation.sites.values():
        training = sum(case.split != "test" for case in site.cases)
        assert finding.counts[site.name]["valid"] == max(1, round(0.15 * training))
        assert (site.licence, site.source[:9]) == ("none", "made here")
    tested = {case.name for site in federation.sites.values() for case in site.cases if case.split == "test"}
    assert tested == {f"k{i}" for i in range(1000, 1200)}  # published test cases stay test cases


def test_practical_by_hand(tmp_path: Path) -> None:
    """100 training and 30 test cases of a class: 80, 10 and ten of 1; 17, 3 and ten of 1, so that all test."""
    one = write_one(tmp_path / "one", 1000, 300)
    held = holdings(partition(one, tmp_path / "cut", Cut("practical", 12)))
    for label in CLASSES:
        training = [splits[label]["train"] + splits[label]["valid"] for splits in held.values()]
        test = [splits[label]["test"] for splits in held.values()]
        assert sorted(training, reverse=True) == [80, 10] + [1] * 10
        assert sorted(test, reverse=True) == [17, 3] + [1] * 10
        assert training.index(80) == test.index(17)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 4))])
@pytest.mark.parametrize("test", [30, 120, 200])
def test_few_test_cases_are_cut_like_the_training_cases(test: int, seed: int, tmp_path: Path) -> None:
    """With 12 test cases of a class, one for each of 12 sites would test everyone on all classes alike."""
    how = Cut("practical", 12, seed)
    held = holdings(partition(write_one(tmp_path / "one", 720, test), tmp_path / "cut", how))
    exact = shares(how, 10) * test / 10
    dealt = np.array([[splits["test"] for splits in classes.values()] for classes in held.values()])
    assert np.abs(dealt - exact).max() < 2
    assert np.abs(dealt.sum(axis=1) - exact.sum(axis=1)).max() < 1.5
    assert (dealt.sum(axis=0) == test // 10).all()
    if exact.sum(axis=1).min() >= 1:
        assert dealt.sum(axis=1).min() >= 1  # every site tests


def test_training_and_test_are_cut_alike(tmp_path: Path) -> None:
    one = write_one(tmp_path / "one", 4000, 2000)
    held = holdings(partition(one, tmp_path / "cut", Cut("pathological", 12, seed=3)))
    for site, classes in held.items():
        for label, splits in classes.items():
            training = splits["train"] + splits["valid"]
            assert splits["test"] == pytest.approx(training / 2, abs=1.5), (site, label)
        assert sum(any(splits.values()) for splits in classes.values()) == 2


def test_a_cut_is_the_same_again(one: Path, tmp_path: Path) -> None:
    for to, seed in (("a", 0), ("b", 0), ("c", 1)):
        partition(one, tmp_path / to, Cut("pathological", 5, seed))
    a, b, c = ((tmp_path / to / "site1/cases.csv").read_text() for to in "abc")
    assert a == b
    assert a != c
    assert (tmp_path / "a/site1/stack.npy").read_bytes() == (tmp_path / "b/site1/stack.npy").read_bytes()


def test_test_cases_have_a_share_of_their_own(one: Path, tmp_path: Path) -> None:
    half, all_tests = (
        partition(one, tmp_path / str(share), Cut("practical", 3, share=0.5, test_share=share)) for share in (None, 1.0)
    )

    def count(federation: Federation) -> Counter[str]:
        return Counter(case.split for site in federation.sites.values() for case in site.cases)

    assert count(half)["test"] == 100
    assert count(all_tests) == {**count(half), "test": 200}
    with pytest.raises(StudyError, match="--test-share 0"):
        Cut("practical", 3, test_share=0.0)


def test_a_share_keeps_every_class(one: Path, tmp_path: Path) -> None:
    federation = partition(one, tmp_path / "cut", Cut("dirichlet", 3, share=0.1))
    labels = Counter(str(case.label) for site in federation.sites.values() for case in site.cases)
    assert labels == dict.fromkeys(CLASSES, 12)  # 10 of 100 and 2 of 20
    more = partition(one, tmp_path / "more", Cut("dirichlet", 3, share=0.3))
    assert set(numbers(federation)) < set(numbers(more))


def test_classes_per_site(one: Path, tmp_path: Path) -> None:
    held = holdings(partition(one, tmp_path / "cut", Cut("pathological", 4, classes_per_site=5)))
    assert [sum(any(splits.values()) for splits in classes.values()) for classes in held.values()] == [5] * 4


def test_a_patient_stays_at_one_site_and_in_one_split(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    write_federation_toml(folder, "classification", ["a", "b"], 2, 1)
    (folder / "all").mkdir(parents=True)
    cases = []
    for i in range(60):  # pictures as files; three of each patient
        Image.fromarray(np.full((3, 3), i, np.uint8)).save(folder / f"all/{i}.png")
        split = "test" if i // 3 % 4 == 0 else "train"
        cases.append(Case(f"k{i}", f"p{i // 3}", split, Path(f"{i}.png"), "ab"[i // 3 % 2]))
    write_site(folder, "all", cases)
    federation = partition(folder / "all", tmp_path / "cut", Cut("practical", 3))
    places: dict[str, set[tuple[str, str]]] = {}
    for site in federation.sites.values():
        for case in site.cases:
            places.setdefault(case.patient, set()).add((site.name, case.split))
            assert read_image(case.image, 2, 1).array[0, 0, 0] == int(case.name[1:])
    assert len(places) == 20
    assert all(len(where) == 1 for where in places.values())


def test_a_missing_class_is_said_by_check(one: Path, tmp_path: Path) -> None:
    partition(one, tmp_path / "cut", Cut("pathological", 12))
    notes = [note for note in check(tmp_path / "cut").notes if "has no case of the class" in note]
    assert len(notes) == 12


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (lambda: Cut("practicle", 12), "no scheme 'practicle'; did you mean 'practical'"),
        (lambda: Cut("practical", 2), "--sites 2: a practical partition needs 3 or more"),
        (lambda: Cut("pathological", 1), "needs 2 or more"),
        (lambda: Cut("practical", 12, alpha=1.0), "--alpha is only for --scheme dirichlet"),
        (lambda: Cut("dirichlet", 12, classes_per_site=3), "--classes-per-site is only for --scheme pathological"),
        (lambda: Cut("dirichlet", 12, alpha=0.0), "--alpha 0.0: it must be above zero"),
        (lambda: Cut("dirichlet", 12, share=0.0), "--share 0.0"),
        (lambda: Cut("dirichlet", 12, share=1.5), "--share 1.5"),
        (lambda: Cut("pathological", 12, classes_per_site=11), "there are only 10 classes"),
    ],
)
def test_a_wrong_option(how: object, words: str, one: Path, tmp_path: Path) -> None:
    assert callable(how)
    with pytest.raises(StudyError, match=words):
        partition(one, tmp_path / "cut", how())


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (Cut("dirichlet", 501), "1000 training cases are too few for 501 sites"),
        (
            Cut("practical", 101),
            r"class 'c0' has 100 training cases, but 101 of 101 sites are to hold it; lower --sites",
        ),
        (Cut("pathological", 400, classes_per_site=5), r"has 100 training cases, but 200 of 400 sites"),
        (Cut("dirichlet", 12, share=0.01), "10 training cases are too few for 12 sites"),
        (Cut("dirichlet", 40, alpha=0.001), "in any of 200 draws; raise --alpha"),
    ],
)
def test_more_sites_than_the_cases_allow(how: Cut, words: str, one: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=words):
        partition(one, tmp_path / "cut", how)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_a_source_that_cannot_be_cut(one: Path, federation: Path, tmp_path: Path) -> None:
    how, to = Cut("practical", 3), tmp_path / "to"
    with pytest.raises(DataError, match="nowhere is not a folder"):
        partition(tmp_path / "nowhere", to, how)
    with pytest.raises(DataError, match=r"no federation\.toml in it or beside it"):
        partition(tmp_path, to, how)
    with pytest.raises(DataError, match="is a segmentation"):
        partition(federation, to, how)
    with pytest.raises(DataError, match="is not empty"):
        partition(one, one, how)
    cut = partition(one, tmp_path / "three", how)
    with pytest.raises(DataError, match="has 3 sites; name the folder of the one to cut"):
        partition(cut.folder, to, how)
    table = one / "all/cases.csv"
    table.write_text(table.read_text().replace(",train,", ",,"))
    with pytest.raises(DataError, match="800 cases of site 'all' have no split; draw them with"):
        partition(one, to, how)
    assert not to.exists()


def test_a_broken_stack_is_refused(one: Path, tmp_path: Path) -> None:
    np.save(one / "all/stack.npy", np.zeros((5, 2, 2), np.uint8))
    with pytest.raises(DataError, match=r"stack\.npy cannot be cut"):
        partition(one, tmp_path / "cut", Cut("practical", 3))
    assert not (tmp_path / "cut").exists()


def test_apportioned_by_hand() -> None:
    assert apportion({"a": 0.8, "b": 0.1, "c": 0.1}, 15, least=0) == {"a": 12, "b": 2, "c": 1}
    assert apportion({"a": 0.98, "b": 0.01, "c": 0.01}, 5) == {"a": 3, "b": 1, "c": 1}
    assert apportion({"a": 0.98, "b": 0.01, "c": 0.01}, 5, least=0) == {"a": 5, "b": 0, "c": 0}


def test_the_table_and_the_figure(one: Path, tmp_path: Path) -> None:
    from consilium.reports.holdings import draw, write_table

    held = holdings(partition(one, tmp_path / "cut", Cut("pathological", 12)))
    write_table(held, tmp_path / "p.csv")
    rows = list(csv.DictReader((tmp_path / "p.csv").read_text().splitlines()))
    assert len(rows) == 24
    assert sum(int(row["train"]) + int(row["valid"]) + int(row["test"]) for row in rows) == 1200
    draw(held, tmp_path / "p.png")
    with Image.open(tmp_path / "p.png") as figure:
        pixels = np.asarray(figure.convert("RGB")).reshape(-1, 3)
    assert (pixels == (0, 114, 178)).all(axis=1).sum() > 2000  # the dots


def test_a_partition_of_a_partition_s_site(one: Path, tmp_path: Path) -> None:
    cut = partition(one, tmp_path / "cut", Cut("dirichlet", 2, alpha=50.0))
    again = partition(cut.folder / "site2", tmp_path / "again", Cut("dirichlet", 2, alpha=50.0))
    assert sorted(numbers(again)) == sorted(numbers(read_federation_of(cut, "site2")))


def read_federation_of(federation: Federation, site: str) -> Federation:
    whole = read_federation(federation.folder)
    return Federation(
        whole.folder, whole.task, whole.labels, 2, 1, whole.contains, {site: whole.sites[site]}
    )  # fmt: skip
