"""What the sites hold: counts as written in the tables, and a picture of each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from consilium.analysis import gallery
from consilium.analysis.gallery import Count, counts, examples, to_json, to_markdown
from consilium.analysis.opening import OpenRun, Runs
from consilium.data.site_folder import Case
from consilium.data.site_writing import write_federation_toml, write_site
from consilium.site import Round
from tests.toy import SIZES, toy_study


def test_counts_of_the_toy(finished: Mapping[str, Path]) -> None:
    (run,) = Runs([finished["guest"]]).opened
    table = counts(run)
    assert {site: tuple(count.cases for count in row.values()) for site, row in table.items()} == SIZES
    assert to_markdown(table, run.guests) == (
        "| site | train | valid | test | all |\n"
        "| --- | ---: | ---: | ---: | ---: |\n"
        "| ada | 8 | 3 | 3 | 14 |\n"
        "| bea | 12 | 3 | 3 | 18 |\n"
        "| all sites | 20 | 6 | 6 | 32 |\n"
        "| cid (outside) | 10 | 3 | 3 | 16 |\n"
    )
    assert to_json(table, run.guests)["outside"] == ["cid"]


def test_an_example_of_every_site(finished: Mapping[str, Path]) -> None:
    (run,) = Runs([finished["guest"]]).opened
    found = examples(run)
    assert [(one.site, one.case, one.outside) for one in found] == [
        ("ada", "ada000", False),
        ("bea", "bea000", False),
        ("cid", "cid000", True),
    ]
    assert all(one.image.shape == (16, 16) and one.outlines["blob"].any() for one in found)
    assert len(gallery.gallery(found, counts(run)).axes) == 6


def write_volumes(folder: Path) -> OpenRun:
    """Two sites of volumes; most of the label is in slice 2 of 5."""
    write_federation_toml(folder, "segmentation", ["blob"], 3, 1)
    for site in ("ada", "bea"):
        cases = []
        for i, (split, depth) in enumerate((("train", 5), ("train", 7), ("test", 6))):
            paths = [folder / site / sub / f"{i}.npy" for sub in ("images", "labels")]
            volume = np.random.default_rng(i).normal(size=(depth, 8, 8)).astype(np.float32)
            mask = np.zeros((depth, 8, 8), dtype=np.uint8)
            mask[1, 2:6, 2:6] = 1
            for path, array in zip(paths, (volume, mask), strict=True):
                path.parent.mkdir(parents=True, exist_ok=True)
                np.save(path, array)
            cases.append(Case(f"{site}{i}", f"p{i}", split, paths[0], paths[1]))
        write_site(folder, site, cases)
    study = toy_study(folder, preprocess__size=[4, 8, 8])
    return OpenRun(folder, "FedAvg", study, study.federation(), {}, None, {}, Round(0, "train", 0, 1))


def test_volumes_are_counted_in_slices_of_their_own_grid(tmp_path: Path) -> None:
    run = write_volumes(tmp_path)
    table = counts(run)
    assert table["ada"] == {"train": Count(2, 12), "valid": Count(0, 0), "test": Count(1, 6)}
    assert "| all sites | 4 (24) | 0 (0) | 2 (12) | 6 (36) |" in to_markdown(table, [])
    example = examples(run)[0]
    assert example.image.shape == (8, 8)
    assert example.note in ("slice 1 of 4", "slice 2 of 4")  # five slices became four
    assert example.outlines["blob"].sum() == 16
    gallery.count_bars(table, [])
