"""How benchmarks/real_federations.py cuts real volumes into sites: by their images alone, and every volume once."""

from __future__ import annotations

from pathlib import Path

import nibabel
import numpy as np

from benchmarks.real_federations import TEST, VALID, Pair, appearance, by_appearance, drawn, prostatex, split
from consilium.data.site_folder import read_federation


def volume(path: Path, values: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(values.astype(np.float32), np.eye(4)), path)
    return path


def test_appearance_does_not_depend_on_brightness_and_contrast(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).random((6, 6, 6))
    one, other = (volume(tmp_path / f"{k}.nii.gz", k * noise + k) for k in (1, 5))
    assert np.allclose(appearance(one), appearance(other), atol=1e-5)


def test_sites_by_appearance_are_cut_at_the_medians(tmp_path: Path) -> None:
    """A ramp is smoother than noise; squared, both lean to the bright side."""
    ramp = np.linspace(0, 1, 216).reshape(6, 6, 6)
    noise = np.random.default_rng(0).permutation(ramp.ravel()).reshape(6, 6, 6)
    kinds = {"smooth-dark": ramp, "smooth-bright": ramp**3, "sharp-dark": noise, "sharp-bright": noise**3}
    pairs = [(volume(tmp_path / f"{name}.nii.gz", values), Path(name)) for name, values in kinds.items()]
    assert {name: found[0][1].name for name, found in by_appearance(pairs).items()} == {name: name for name in kinds}


def test_a_draw_takes_every_volume_once() -> None:
    pairs: list[Pair] = [(Path(f"i{k}"), Path(f"l{k}")) for k in range(60)]
    sites = drawn(pairs, {"large": 12, "small": 4})
    assert len({pair for found in sites.values() for pair in found}) == 16 + 2 * (VALID + TEST)
    parts = split(sites["small"], 4, 0)
    assert [len(found) for found in parts.values()] == [4, VALID, TEST]
    assert len({pair for found in parts.values() for pair in found}) == 4 + VALID + TEST


def test_in_seven_folds_every_volume_tests_once(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for k in range(14):
        volume(tmp_path / "in" / "Images" / f"P{k:02d}_t2.nii.gz", generator.random((4, 4, 4)))
        volume(tmp_path / "in" / "mask_prostate" / f"P{k:02d}.nii.gz", np.ones((4, 4, 4)))
    prostatex(tmp_path / "in", tmp_path / "out")
    tested: list[str] = []
    for fold in range(7):
        sites = read_federation(tmp_path / "out" / f"prostatex-fold{fold}").sites
        assert sorted(len([c for c in site.cases if c.split == "train"]) for site in sites.values()) == [5, 5]
        tested += [case.name for site in sites.values() for case in site.cases if case.split == "test"]
    assert sorted(tested) == [f"P{k:02d}" for k in range(14)]
