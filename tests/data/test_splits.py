"""Drawing splits: by patient, reproducible, and never touching what is assigned."""

from __future__ import annotations

import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consilium.data.site_folder import Case, read_federation
from consilium.data.site_writing import write_federation_toml, write_site
from consilium.data.splits import draw_splits
from consilium.errors import DataError

SHARES = (0.5, 0.25, 0.25)


def make(folder: Path, patients: list[tuple[str, str]], site: str = "west") -> Path:
    """A site with one case per (patient, split)."""
    write_federation_toml(folder, "classification", ["x"], 2, 1)
    (folder / site).mkdir(exist_ok=True)
    (folder / site / "a.png").touch()
    cases = [Case(f"c{i}", patient, split, Path("a.png"), "x") for i, (patient, split) in enumerate(patients)]
    write_site(folder, site, cases)
    return folder


def splits(folder: Path, site: str = "west") -> list[str]:
    return [case.split for case in read_federation(folder).sites[site].cases]


def test_a_draw_by_hand(tmp_path: Path) -> None:
    make(tmp_path, [(f"p{i}", "") for i in range(8)])
    assert draw_splits(tmp_path, SHARES, 0) == {"west": {"train": 4, "valid": 2, "test": 2, "empty": 0}}


def test_every_site_draws_for_itself_and_the_same_again(tmp_path: Path) -> None:
    for place in ("one", "two"):
        for site in ("west", "east"):
            make(tmp_path / place, [(f"p{i}", "") for i in range(20)], site)
        draw_splits(tmp_path / place, SHARES, 7)
    assert splits(tmp_path / "one") == splits(tmp_path / "two")
    assert splits(tmp_path / "one") != splits(tmp_path / "one", "east")
    make(tmp_path / "three", [(f"p{i}", "") for i in range(20)])
    draw_splits(tmp_path / "three", SHARES, 8)
    assert splits(tmp_path / "one") != splits(tmp_path / "three")


def test_the_order_of_the_table_changes_nothing(tmp_path: Path) -> None:
    names = [f"p{i}" for i in range(9)]
    for place, order in (("one", names), ("two", names[::-1])):
        draw_splits(make(tmp_path / place, [(name, "") for name in order]), SHARES, 0)
    assert splits(tmp_path / "one") == splits(tmp_path / "two")[::-1]


def test_what_is_assigned_stays_and_a_known_patient_keeps_its_split(tmp_path: Path) -> None:
    make(tmp_path, [("p1", "test"), ("p2", "test"), ("p1", ""), ("p3", ""), ("p4", "")])
    draw_splits(tmp_path, SHARES, 0)
    # of four patients two are wanted for training and one for validation; both test patients are there already
    assert splits(tmp_path)[:3] == ["test", "test", "test"]
    assert "test" not in splits(tmp_path)[3:]


def test_cases_without_a_mask_go_to_training_and_change_no_other_draw(tmp_path: Path) -> None:
    names = [f"p{i}" for i in range(8)]
    plain, more = tmp_path / "plain", tmp_path / "more"
    for folder, bare in ((plain, 0), (more, 5)):
        write_federation_toml(folder, "segmentation", ["x"], 2, 1)
        (folder / "west").mkdir()
        (folder / "west" / "a.png").touch()
        cases = [Case(name, name, "", Path("a.png"), Path("a.png")) for name in names]
        cases += [Case(f"u{i}", f"u{i}", "", Path("a.png"), None) for i in range(bare)]
        write_site(folder, "west", cases, ["x"])
        draw_splits(folder, SHARES, 0)
    assert splits(more) == [*splits(plain), *["train"] * 5]
    table = more / "west" / "cases.csv"
    table.write_text(table.read_text().replace("u0,u0,train", "u0,p0,").replace("p0,p0,train", "p0,p0,test"))
    with pytest.raises(DataError, match=r"patient 'p0' is in .* and has a case without a mask"):
        draw_splits(more, SHARES, 0)


def test_a_complete_table_is_not_rewritten(tmp_path: Path) -> None:
    make(tmp_path, [("p1", "train"), ("p2", "test")])
    before = (tmp_path / "west" / "cases.csv").stat()
    draw_splits(tmp_path, SHARES, 0)
    after = (tmp_path / "west" / "cases.csv").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_other_columns_are_kept(tmp_path: Path) -> None:
    make(tmp_path, [("p1", "")])
    path = tmp_path / "west" / "cases.csv"
    path.write_text("age,case,patient,split,image,label\n44,c0,p1,,a.png,x\n")
    draw_splits(tmp_path, (1, 0, 0), 0)
    assert path.read_text() == "age,case,patient,split,image,label\n44,c0,p1,train,a.png,x\n"
    assert [p.name for p in path.parent.iterdir() if "partial" in p.name] == []


@pytest.mark.parametrize("shares", [(0.5, 0.5, 0.5), (-0.5, 1.0, 0.5), (float("nan"), 0.5, 0.5), (0.5, 0.5)])
def test_shares_must_add_up(tmp_path: Path, shares: tuple[float, float, float]) -> None:
    with pytest.raises(DataError, match=r"add up to 1; try 0\.5,0\.25,0\.25"):
        draw_splits(make(tmp_path, [("p1", "")]), shares, 0)


def test_a_broken_table_is_left_alone(tmp_path: Path) -> None:
    make(tmp_path, [("p1", ""), ("p2", "")])
    make(tmp_path, [("p1", "sometimes")], "zoo")
    with pytest.raises(DataError, match="'sometimes' is unknown"):
        draw_splits(tmp_path, SHARES, 0)
    assert "c0,p1,,a.png" in (tmp_path / "west" / "cases.csv").read_text()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=60), st.integers(0, 5), st.sampled_from([SHARES, (0.8, 0, 0.2)])
)
def test_patients_stay_together_and_shares_hold_within_one_patient(
    patients: list[int], seed: int, shares: tuple[float, float, float]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = make(Path(name), [(f"p{i}", "") for i in patients])
        draw_splits(folder, shares, seed)
        cases = read_federation(folder).sites["west"].cases
    split_of = defaultdict(set)
    for case in cases:
        split_of[case.patient].add(case.split)
    assert all(len(found) == 1 for found in split_of.values())
    number = Counter(next(iter(found)) for found in split_of.values())
    for split, share in zip(("train", "valid", "test"), shares, strict=True):
        assert abs(number[split] - share * len(split_of)) < 1
