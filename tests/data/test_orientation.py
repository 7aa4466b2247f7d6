"""Volumes of every orientation give the same arrays, and masks go back to the file's own grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import SimpleITK
from nibabel.orientations import axcodes2ornt, io_orientation, ornt_transform
from numpy.typing import NDArray

from consilium import simulation
from consilium.analysis.gallery import examples
from consilium.analysis.opening import Runs
from consilium.analysis.overlays import shown_cases
from consilium.data.cache import open_site
from consilium.data.check import check
from consilium.data.images import orientation, read_image, read_mask
from consilium.data.mask_files import invert, turned_back, write_mask
from consilium.data.orientation import CODES, axes_between, turned
from consilium.data.preprocess import Preprocess, fingerprint, forward, forward_mask
from consilium.data.site_folder import Case, read_federation
from consilium.data.site_writing import write_federation_toml, write_site
from consilium.errors import StudyError
from consilium.prediction import predict
from consilium.reporting import _overlays
from consilium.reports.reading import read_run
from consilium.study import Study
from consilium.study_reading import load_study, make_study
from tests.dicom_files import write_series

RNG = np.random.default_rng(0)
VOLUME = RNG.integers(0, 900, (4, 5, 6)).astype(np.int16)  # file order (x, y, z)
MASK = (VOLUME > 600).astype(np.uint8)
AFFINE = np.array([[0.5, 0, 0, -3], [0, 0.75, 0, 7], [0, 0, 3, 11], [0, 0, 0, 1]])  # RAS
HOW = Preprocess(spacing=(2.0, 0.6, 0.6), size=(7, 9, 8))


def stored(array: NDArray[Any], affine: NDArray[Any], code: str) -> Any:
    """The same volume with its voxels written in another order."""
    image = nibabel.Nifti1Image(array, affine)
    return image.as_reoriented(ornt_transform(io_orientation(affine), axcodes2ornt(code)))


def nifti(path: Path, array: NDArray[Any], affine: NDArray[Any], code: str) -> Path:
    nibabel.save(stored(array, affine, code), path)
    return path


def metaimage(path: Path, array: NDArray[Any], affine: NDArray[Any], code: str) -> Path:
    """As NIfTI would lie, written by ITK with direction cosines in LPS."""
    image = stored(array, affine, code)
    out = SimpleITK.GetImageFromArray(np.asarray(image.dataobj).T)
    lps = np.diag([-1.0, -1, 1, 1]) @ image.affine
    steps = np.linalg.norm(lps[:3, :3], axis=0)
    out.SetSpacing(steps.tolist())
    out.SetOrigin(lps[:3, 3].tolist())
    out.SetDirection((lps[:3, :3] / steps).ravel().tolist())
    SimpleITK.WriteImage(out, str(path))
    return path


def test_there_are_48_orientations_and_each_can_be_undone() -> None:
    assert len(set(CODES)) == 48
    array = np.arange(24).reshape(2, 3, 4)
    for one in CODES:
        axes = axes_between("RAS", one)
        assert np.array_equal(turned_back(turned(array, axes), axes), array)
        assert np.array_equal(turned(turned(array, axes), axes_between(one, "RAS")), array)
    assert axes_between("RAS", "LPS") == (1, -2, -3)  # (z, y, x)
    assert axes_between("SAR", "RAS") == (3, 2, 1)
    assert axes_between("", "RAS") == axes_between("LPI", "") == ()


@pytest.mark.parametrize(("suffix", "write"), [(".nii.gz", nifti), (".mha", metaimage), (".nrrd", metaimage)])
def test_every_orientation_gives_the_same_arrays_and_masks_come_back(tmp_path: Path, suffix: str, write: Any) -> None:
    ras = read_image(nifti(tmp_path / "ras.nii.gz", VOLUME, AFFINE, "RAS"), 3, 1)
    first, first_undo = forward(ras, HOW)
    truth = forward_mask(read_mask(nifti(tmp_path / "truth.nii.gz", MASK, AFFINE, "RAS"), 3), first_undo)
    guess = RNG.random((7, 9, 8), dtype=np.float32)
    expected = invert(guess, first_undo, nearest=False) > 0.5
    assert 10 < expected.sum() < 110
    for code in CODES:
        image = read_image(write(tmp_path / f"{code}{suffix}", VOLUME, AFFINE, code), 3, 1)
        assert orientation(image) == code
        array, undo = forward(image, HOW)
        assert np.array_equal(array, first), code
        assert undo.spacing(image.spacing) == pytest.approx(first_undo.spacing(ras.spacing))
        mask = read_mask(write(tmp_path / f"m{code}{suffix}", MASK, AFFINE, code), 3)
        assert np.array_equal(forward_mask(mask, undo), truth), code
        written = write_mask((invert(guess, undo, nearest=False) > 0.5).astype(np.uint8), image, tmp_path / f"p{code}")
        again = read_image(written, 3, 1)
        assert (again.array.shape, orientation(again)) == (image.array.shape, code)
        assert np.array_equal(turned(again.array[0], axes_between(code, "RAS")), expected), code


def tilted(rng: np.random.Generator, shear: bool) -> NDArray[Any]:
    """RAS turned by up to 20 degrees about every axis, sheared by up to a fifth."""
    turn = np.eye(3)
    for axis, angle in enumerate(np.deg2rad(rng.uniform(-20, 20, 3))):
        i, j = [k for k in range(3) if k != axis]
        step = np.eye(3)
        step[i, i] = step[j, j] = np.cos(angle)
        step[i, j], step[j, i] = -np.sin(angle), np.sin(angle)
        turn = turn @ step
    skew = np.eye(3) + shear * np.triu(rng.uniform(-0.2, 0.2, (3, 3)), 1)
    affine = AFFINE.copy()
    affine[:3, :3] = turn @ skew @ np.diag([0.5, 0.75, 3])
    return affine


@pytest.mark.parametrize("shear", [False, True])
def test_oblique_and_sheared_volumes_are_turned_to_the_nearest_axes(tmp_path: Path, shear: bool) -> None:
    rng = np.random.default_rng(7)
    for code in CODES:
        affine = tilted(rng, shear)
        image = read_image(nifti(tmp_path / f"{code}.nii.gz", VOLUME, affine, code), 3, 1)
        array, undo = forward(image, Preprocess(normalise="none"))
        assert np.array_equal(array[0].T, VOLUME), code
        mask = write_mask(invert(array[0], undo, nearest=True).astype(np.uint8), image, tmp_path / f"m{code}")
        assert np.allclose(nibabel.load(mask).affine, nibabel.load(image.origin_file).affine)
        assert np.array_equal(read_mask(mask, 3).array, image.array[0].astype(np.uint8))


def test_a_dicom_series_and_its_nifti_are_the_same_array(tmp_path: Path) -> None:
    write_series(tmp_path / "scan", VOLUME.T)
    image = read_image(tmp_path / "scan", 3, 1)
    assert orientation(image) == "LAI"  # the rows run backwards, and so do the slices along their normal
    array, undo = forward(image, Preprocess(normalise="none"))
    assert np.array_equal(array[0], VOLUME.T[:, :, ::-1] - 1024.0)
    assert np.array_equal(invert(array[0], undo, nearest=True), image.array[0])


def test_what_does_not_say_its_orientation_is_used_as_stored(tmp_path: Path) -> None:
    nibabel.save(nibabel.Nifti1Image(VOLUME, None), tmp_path / "a.nii")  # both codes of its header are 0
    np.save(tmp_path / "a.npy", VOLUME.T)
    for name in ("a.nii", "a.npy"):
        picture = read_image(tmp_path / name, 3, 1)
        array, undo = forward(picture, Preprocess(normalise="none"))
        assert (orientation(picture), undo.axes) == ("", ())
        assert np.array_equal(array[0], VOLUME.T)


# ---------------------------------------------------------------------------------------------- masks and images


def test_a_mask_in_another_orientation_than_its_image_is_turned_to_it(tmp_path: Path) -> None:
    write_federation_toml(tmp_path, "segmentation", ["organ"], 3, 1)
    (tmp_path / "west").mkdir()
    cases = []
    for code in ("RAS", "LPI", "SAR"):
        nifti(tmp_path / "west" / f"{code}.nii.gz", VOLUME, AFFINE, "RAS")
        nifti(tmp_path / "west" / f"m{code}.nii.gz", MASK, AFFINE, code)
        cases.append(Case(code, code, "train", Path(f"{code}.nii.gz"), Path(f"m{code}.nii.gz")))
    nifti(tmp_path / "west" / "broken.nii.gz", MASK, np.diag([-9.0, 9, 9, 1]), "LAS")  # a header that cannot be right
    cases.append(Case("broken", "broken", "train", Path("RAS.nii.gz"), Path("broken.nii.gz")))
    write_site(tmp_path, "west", cases)
    found = check(tmp_path)
    assert found.faults == ()
    assert [one.case for one in found.findings if one.kind == "misplaced mask"] == ["broken"]
    federation = read_federation(tmp_path)
    arrays = open_site(federation, federation.sites["west"], Preprocess())
    assert all(np.array_equal(arrays.truth(i), MASK.T) for i in range(4))  # the broken one voxel by voxel, as ever


# ---------------------------------------------------------------------------------------------- studies


def test_codes_and_slices_are_checked() -> None:
    with pytest.raises(StudyError, match="orientation is 'RAL'"):
        Preprocess(orientation="RAL")
    with pytest.raises(StudyError, match="no axial slices"):
        Preprocess(orientation="SAR", slices="axial")
    assert Preprocess(orientation="LPS", slices="axial").orientation == "LPS"


def test_settings_of_0_1_keep_their_hashes() -> None:
    assert fingerprint(Preprocess(orientation="")) == "efeede54feed176c"
    assert fingerprint(Preprocess(orientation="", size=(8, 8), window=(-1, 1))) == "1a51130a376d4f72"
    assert fingerprint(Preprocess()) != "efeede54feed176c"


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sites of small volumes with a bright box in one corner, so that a mirror image is another image."""
    folder = tmp_path_factory.mktemp("volumes")
    write_federation_toml(folder, "segmentation", ["box"], 3, 1)
    for number, site in enumerate(("ada", "bea")):
        (folder / site).mkdir()
        cases = []
        for i, split in enumerate(("train", "train", "valid", "test")):
            image, mask = boxed(np.random.default_rng([number, i]))
            nifti(folder / site / f"{i}.nii.gz", image, AFFINE, ("RAS", "LPS")[number])
            nifti(folder / site / f"m{i}.nii.gz", mask, AFFINE, ("RAS", "LPS")[number])
            cases.append(Case(f"c{i}", f"p{i}", split, Path(f"{i}.nii.gz"), Path(f"m{i}.nii.gz")))
        write_site(folder, site, cases)
    return folder


def boxed(rng: np.random.Generator) -> tuple[NDArray[np.int16], NDArray[np.uint8]]:
    mask = np.zeros((16, 14, 8), np.uint8)
    x, y, z = rng.integers(0, 3, 3)
    mask[x : x + 6, y : y + 5, z : z + 3] = 1
    return (rng.normal(100, 20, mask.shape) + 200 * mask).astype(np.int16), mask


def small_study(folder: Path, rounds: int = 8, **preprocess: Any) -> Study:
    tables: dict[str, dict[str, Any]] = {
        "study": {"rounds": rounds, "score_every": rounds},
        "data": {"federation": str(folder)},
        "preprocess": {"size": [8, 16, 16], **preprocess},
        "task": {"widths": [4, 8], "residual_units": 0},
        "local": {"batch_size": 1, "lr": 0.03},
        "method": {"name": "fedavg"},
    }
    return make_study(tables)


def test_a_volume_in_any_orientation_is_predicted_alike(tmp_path: Path, volumes: Path) -> None:
    image, mask = boxed(np.random.default_rng(99))
    (tmp_path / "in").mkdir()
    codes = ("RAS", "LPI", "PIR", "SLA")
    for code in codes:
        nifti(tmp_path / "in" / f"{code}.nii.gz", image, AFFINE, code)
    for name, how in (("whole", {}), ("slices", {"slices": "axial", "size": [16, 16]})):
        run = simulation.run(small_study(volumes, **how), tmp_path / "runs", workers=0).folder
        predict(run, [tmp_path / "in"], tmp_path / name)
        found = {code: nibabel.load(tmp_path / name / f"{code}.nii.gz") for code in codes}
        first = np.asarray(found["RAS"].dataobj)
        assert 2 * (first * mask).sum() / (first.sum() + mask.sum()) > 0.4  # it has learned where the box is
        for code, other in found.items():
            assert other.shape == nibabel.load(tmp_path / "in" / f"{code}.nii.gz").shape
            assert np.allclose(other.affine, nibabel.load(tmp_path / "in" / f"{code}.nii.gz").affine)
            assert np.array_equal(np.asarray(nibabel.as_closest_canonical(other).dataobj), first), code


@pytest.mark.parametrize("how", [{}, {"orientation": ""}, {"orientation": "SAR"}], ids=str)
def test_pictures_of_volumes_are_radiological(how: dict[str, Any], tmp_path: Path, volumes: Path) -> None:
    """The box lies left and behind: on a slice that is right and below, however a volume is stored or used."""
    run = simulation.run(small_study(volumes, rounds=1, **how), tmp_path, workers=0).folder
    opened = Runs([run]).opened
    example, *_ = examples(opened[0])
    pictures = [(example.image, example.outlines["box"])]
    for shown in shown_cases(opened, ["ada", "bea"]):
        slices = shown.truth[0].any((1, 2))
        z = int(slices.argmax())
        pictures.append((shown.image[0, z], shown.truth[0, z]))
        assert np.nonzero(slices)[0].mean() < len(slices) / 2  # they run from the feet
    pictures += [(overlay.image, overlay.truth["box"]) for overlay in _overlays([read_run(run)])]
    assert len(pictures) == 5
    for image, box in pictures:
        rows, columns = np.nonzero(box)
        assert rows.mean() > box.shape[0] / 2 and columns.mean() > box.shape[1] / 2
        assert image[box].mean() > image[~box].mean()


def test_a_run_of_0_1_is_read_as_it_was_made(tmp_path: Path, volumes: Path) -> None:
    new, old = small_study(volumes), small_study(volumes, orientation="")
    assert new.preprocess.orientation == "RAS"
    text = old.to_toml()
    (tmp_path / "study.toml").write_text(text.replace('orientation = ""\n', ""))
    again = load_study(tmp_path / "study.toml")
    assert again == old
    assert again.hash == old.hash != new.hash
    (tmp_path / "study.toml").write_text(new.to_toml())
    assert load_study(tmp_path / "study.toml") == new


def test_pictures_have_no_orientation(federation: Path) -> None:
    tables: dict[str, Any] = {"data": {"federation": str(federation)}, "method": {"name": "fedavg"}}
    assert make_study(tables).preprocess.orientation == ""
    with pytest.raises(StudyError, match="is for volumes"):
        make_study({**tables, "preprocess": {"orientation": "LPS"}})
