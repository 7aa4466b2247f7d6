"""Raw trees of published datasets, written from their publishers' descriptions and not from the importers.

Every tree has the clutter that the real one has, and one deliberate oddity, which its docstring names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import SimpleITK as sitk  # noqa: N813
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from pydicom import dcmread
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, MRImageStorage, generate_uid

WIDTH, HEIGHT = 96, 72
DISC, CUP = (30, 20, 66, 56), (38, 28, 58, 48)  # boxes (left, top, right, bottom)


def photograph(width: int = WIDTH, height: int = HEIGHT, number: int = 0) -> Image.Image:
    """A smooth fundus with a bright disc; every number looks different."""
    y, x = np.mgrid[:height, :width]
    red = 120 + 40 * np.exp(-((x - 48) ** 2 + (y - 38) ** 2) / 400) + 3 * number
    field = ((x - width / 2) / (width / 2)) ** 2 + ((y - height / 2) / (height / 2)) ** 2 < 1
    values = np.stack([red, red * 0.5, red * 0.2], axis=-1) * field[..., None]
    return Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))


def ellipse(box: tuple[int, int, int, int], value: int = 255, width: int = WIDTH, height: int = HEIGHT) -> NDArray[Any]:
    drawn = Image.new("L", (width, height), 0)
    ImageDraw.Draw(drawn).ellipse(box, fill=value)
    return np.asarray(drawn)


def put(path: Path, picture: Image.Image | NDArray[Any], **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    (picture if isinstance(picture, Image.Image) else Image.fromarray(picture)).save(path, **options)


def text(path: Path, words: str = "x\n") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(words)


def soft(box: tuple[int, int, int, int], experts: int = 4) -> NDArray[Any]:
    """The mean of experts who draw nested ellipses: 255 where all agree, 64 where one does."""
    left, top, right, bottom = box
    drawn = [ellipse((left + s, top + s, right - s, bottom - s), 1) for s in range(experts)]
    return np.rint(np.sum(drawn, axis=0) * (255 / experts)).astype(np.uint8)


def drishti(root: Path) -> Path:
    """Oddity: the truth of the test lies in `Test_GT`, and photographs in folders by diagnosis."""
    top = root / "Drishti-GS1_files" / "Drishti-GS1_files"
    text(top / "README.txt")
    for half, truth, numbers in (("Training", "GT", (2, 4, 8, 10)), ("Test", "Test_GT", (1, 3, 5))):
        for n in numbers:
            name = f"drishtiGS_{n:03d}"
            kind = "NORMAL" if n % 2 else "GLAUCOMA"
            put(top / half / "Images" / kind / f"{name}.png", photograph(number=n))
            put(top / half / truth / name / "SoftMap" / f"{name}_ODsegSoftmap.png", soft(DISC))
            put(top / half / truth / name / "SoftMap" / f"{name}_cupsegSoftmap.png", soft(CUP))
            text(top / half / truth / name / "AvgBoundary" / f"{name}_ODAvgBoundary.txt", "30 38\n")
            text(top / half / truth / name / f"{name}_cdrValues.txt", "0.5 0.5 0.5 0.5\n")
    return root


def riga(root: Path) -> Path:
    """Oddity: Magrabi's women have capital names (`Image2prime.tif`), and one grader's file is missing."""
    raters = range(1, 7)
    folders = {
        "BinRushed/BinRushed1": ("image{}", "jpg", 2),
        "BinRushed/BinRushed1-Corrected": ("image{}", "jpg", 2),
        "BinRushed/BinRushed2": ("image{}", "jpg", 2),
        "Magrabia/MagrabiaMale": ("image{}", "tif", 2),
        "Magrabia/MagrabiFemale": ("Image{}", "tif", 2),
        "MESSIDOR": ("image{}", "tif", 3),
    }
    for at, (folder, (stem, kind, count)) in enumerate(folders.items()):
        for n in range(1, count + 1):
            plain = photograph(number=n + 4 * at)
            options = {"quality": 97} if kind == "jpg" else {}
            put(root / folder / f"{stem.format(n)}prime.{kind}", plain, **options)
            for rater in raters:
                if (folder, n, rater) == ("MESSIDOR", 3, 6):
                    continue
                drawn = plain.copy()
                pen = ImageDraw.Draw(drawn)
                shift = rater % 2
                for left, top, right, bottom in (DISC, CUP):
                    pen.ellipse((left + shift, top, right, bottom), outline=(20, 20, 220), width=2)
                put(root / folder / f"{stem.format(n)}-{rater}.{kind}", drawn, **options)
    text(root / "READ ME.txt")
    return root


def rimone_r3(root: Path) -> Path:
    """Oddity: masks of both experts and outlines as text lie beside the average, and one photograph ends in .JPG."""
    for group, names in (("Healthy", ("N-1-L", "N-2-R")), ("Glaucoma and suspects", ("G-1-L", "S-3-R", "G-10-R"))):
        for at, name in enumerate(names):
            pair = Image.new("RGB", (2 * WIDTH, HEIGHT))
            pair.paste(photograph(number=at), (0, 0))
            pair.paste(photograph(number=at + 20), (WIDTH, 0))
            ending = "JPG" if name == "G-10-R" else "jpg"
            put(root / "RIM-ONE r3" / group / "Stereo Images" / f"{name}.{ending}", pair, format="JPEG", quality=97)
            for structure, box in (("Disc", DISC), ("Cup", CUP)):
                put(root / "RIM-ONE r3" / group / "Average_masks" / f"{name}-{structure}-Avg.png", ellipse(box))
                for expert in ("1", "2"):
                    folder = root / "RIM-ONE r3" / group / f"Expert{expert}_masks"
                    put(folder / f"{name}-{structure}-exp{expert}.png", ellipse(DISC))
                    text(folder / f"{name}-{structure}-exp{expert}.txt", "30 38\n")
    return root


def rimone_r2(root: Path) -> Path:
    """Oddity: the masks are three-channel bitmaps."""
    for group, numbers in (("Normal", (1, 2, 3)), ("Glaucoma and Glaucoma suspicious", (4, 5))):
        for n in numbers:
            put(root / "RIM-ONE r2" / group / f"Im{n:03d}.jpg", photograph(number=n), quality=97)
            put(root / "RIM-ONE r2" / group / f"Im{n:03d}-gs_mask.bmp", np.repeat(ellipse(DISC)[..., None], 3, axis=-1))
    return root


def rimone_dl(root: Path) -> Path:
    """Oddity: the same photographs lie there twice, partitioned by hospital and at random."""
    cases = (("normal", "r1_Im001"), ("normal", "r2_Im002"), ("glaucoma", "r3_G-1-L"), ("glaucoma", "r2_Im010"))
    for at, (group, name) in enumerate(cases):
        for partition, half in (
            ("by_hospital", "test_set" if at % 2 else "training_set"),
            ("randomly", "test_set" if at < 2 else "training_set"),
        ):
            folder = root / "RIM-ONE_DL_images" / f"partitioned_{partition}" / half / group
            put(folder / f"{name}.png", photograph(number=at))
        for structure, box in (("Disc", DISC), ("Cup", CUP)):
            folder = root / "RIM-ONE_DL_reference_segmentations" / group
            put(folder / f"{name}-1-{structure}-T.png", ellipse(box))
            text(folder / f"{name}-1-{structure}-T.txt", "30 38\n")
    return root


def refuge(root: Path) -> Path:
    """Oddity: archives unpacked with their own name twice over, and a validation whose masks end in .BMP."""
    mask = np.full((HEIGHT, WIDTH), 255, np.uint8)
    mask[ellipse(DISC) > 0] = 128
    mask[ellipse(CUP) > 0] = 0
    truth = root / "Annotation-Training400" / "Annotation-Training400"
    for letter, group, numbers in (("g", "Glaucoma", (1, 2)), ("n", "Non-Glaucoma", (1, 2, 3))):
        for n in numbers:
            name = f"{letter}{n:04d}"
            put(root / "REFUGE-Training400" / "Training400" / group / f"{name}.jpg", photograph(number=n), quality=97)
            put(truth / "Disc_Cup_Masks" / group / f"{name}.bmp", mask)
    text(truth / "Fovea_location.xlsx")
    for n in (1, 2, 3):
        put(
            root / "REFUGE-Validation400" / "REFUGE-Validation400" / f"V{n:04d}.jpg",
            photograph(number=n + 8),
            quality=97,
        )
        put(root / "REFUGE-Validation400-GT" / "Disc_Cup_Masks" / f"V{n:04d}.BMP", mask, format="BMP")
        put(root / "REFUGE-Test400" / "Test400" / f"T{n:04d}.jpg", photograph(number=n + 12), quality=97)
    return root


def box_volume(shape: tuple[int, int, int], *boxes: tuple[int, tuple[slice, slice, slice]]) -> NDArray[Any]:
    volume = np.zeros(shape, np.uint8)
    for value, place in boxes:
        volume[place] = value
    return volume


def write_mr(folder: Path, volume: NDArray[Any], names: list[str], description: str, patient: str) -> None:
    """A DICOM series of (z, y, x) values, 0.5 mm pixels, slices 3 mm apart from foot to head; a file name per slice."""
    folder.mkdir(parents=True, exist_ok=True)
    series, study, frame = generate_uid(), generate_uid(), generate_uid()
    for z, plane in enumerate(volume):
        data = Dataset()
        data.file_meta = FileMetaDataset()
        data.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
        data.SOPClassUID = data.file_meta.MediaStorageSOPClassUID = MRImageStorage
        data.SOPInstanceUID = data.file_meta.MediaStorageSOPInstanceUID = generate_uid()
        data.SeriesInstanceUID, data.StudyInstanceUID, data.FrameOfReferenceUID = series, study, frame
        data.Modality, data.PatientID, data.PatientName = "MR", patient, patient
        data.PatientBirthDate, data.PatientSex, data.StudyID, data.AccessionNumber = "", "M", "1", ""
        data.StudyDate, data.StudyTime, data.ReferringPhysicianName = "", "", ""
        data.SeriesDescription, data.SeriesNumber, data.InstanceNumber = description, 4, z + 1
        data.PositionReferenceIndicator = ""
        data.ImagePositionPatient = [-5.0, -6.0, 10.0 + 3.0 * z]
        data.ImageOrientationPatient = [1, 0, 0, 0, 1, 0]
        data.PixelSpacing, data.SliceThickness = [0.5, 0.5], 3.0
        data.Rows, data.Columns, data.SamplesPerPixel = *plane.shape, 1
        data.PhotometricInterpretation = "MONOCHROME2"
        data.BitsAllocated, data.BitsStored, data.HighBit, data.PixelRepresentation = 16, 12, 11, 0
        data.PixelData = plane.astype(np.uint16).tobytes()
        data.save_as(folder / names[z], enforce_file_format=True)


SHAPE = (5, 16, 20)  # (z, y, x) of the prostates
GLAND = (slice(1, 4), slice(4, 12), slice(6, 14))


def gland_image(number: int, shape: tuple[int, int, int] = SHAPE) -> NDArray[Any]:
    values = np.arange(np.prod(shape)).reshape(shape) % 97 + 100 + number
    values[GLAND] += 300
    return values.astype(np.int16)


def i2cvb(root: Path) -> Path:
    """Oddity: the files of the Siemens scanner are numbered from head to foot, the masks' files from foot to head."""
    up = [f"Image{n + 1:05d}.dcm" for n in range(SHAPE[0])]
    patients = (("GE", "384"), ("GE", "390"), ("Siemens", "410"), ("Siemens", "428260"), ("Siemens", "1036"))
    for at, (maker, number) in enumerate(patients):
        folder = root / maker / f"Patient {number}"
        write_mr(folder / "T2W", gland_image(at), up[::-1] if maker == "Siemens" else up, "T2W", number)
        truth = box_volume(SHAPE, (255, GLAND))
        write_mr(folder / "GT" / "prostate", truth, up, "GT", number)
        write_mr(
            folder / "GT" / "pz", box_volume(SHAPE, (255, (slice(1, 2), slice(4, 6), slice(6, 8)))), up, "GT", number
        )
        write_mr(folder / "ADC", gland_image(at), up, "ADC", number)
    return root


def itk(
    values: NDArray[Any], spacing: tuple[float, float, float] = (0.5, 0.5, 3.0), components: bool = False
) -> sitk.Image:
    image = sitk.GetImageFromArray(values, isVector=components)
    image.SetSpacing(spacing)
    image.SetOrigin((-5.0, -6.0, 10.0))
    return image


def save(image: sitk.Image, path: Path, compress: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    sitk.WriteImage(image, str(path), compress)


def nci_isbi(root: Path) -> Path:
    """Oddity: one mask ends in `_correctedLabels`, and a patient has a localiser beside T2."""
    zones = box_volume(SHAPE, (1, GLAND), (2, (slice(2, 3), slice(5, 9), slice(7, 12))))
    files = [f"1-{n + 1:02d}.dcm" for n in range(SHAPE[0])]
    for archive, patients in (
        ("Prostate-3T", ("Prostate3T-01-0001", "Prostate3T-01-0002", "Prostate3T-01-0003")),
        (
            "PROSTATE-DIAGNOSIS",
            ("ProstateDx-01-0001", "ProstateDx-01-0006", "ProstateDx-01-0055", "ProstateDx-01-0007"),
        ),
    ):
        for at, name in enumerate(patients):
            study = root / archive / name / "07-02-2008-NA-MR PROSTATE-19671"
            write_mr(study / "4-t2tsetra-98209", gland_image(at), files, "t2_tse_tra", name)
            if name == "ProstateDx-01-0001":
                write_mr(study / "1-localizer-11111", gland_image(9)[:2], files[:2], "localizer", name)
            ending = "_correctedLabels" if name == "ProstateDx-01-0006" else ""
            save(itk(zones), root / "NCI-ISBI 2013 Training" / "Training" / f"{name}{ending}.nrrd", compress=True)
    return root


def promise12(root: Path) -> Path:
    """Oddity: in one case the word is `_Segmentation`, and the test data, without masks, lie beside."""
    for n in (0, 1, 17, 40):
        folder = root / f"TrainingData_Part{1 + (n > 16) + (n > 33)}"
        word = "Segmentation" if n == 17 else "segmentation"
        save(itk(gland_image(n)), folder / f"Case{n:02d}.mhd")
        save(itk(box_volume(SHAPE, (1, GLAND)).astype(np.int8)), folder / f"Case{n:02d}_{word}.mhd")
    save(itk(gland_image(50)), root / "TestData" / "Case00.mhd")
    return root


def nifti(path: Path, values: NDArray[Any], affine: NDArray[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(values, affine), path)  # type: ignore[attr-defined]


LPS = np.diag([-0.7, -0.7, 5.0, 1.0])


def msd_prostate(root: Path) -> Path:
    """Oddity: the shadow files of a Mac (`._prostate_00.nii.gz`) that the real archive holds."""
    top = root / "Task05_Prostate"
    names = [f"prostate_{n:02d}" for n in (0, 1, 10, 47)]
    for at, name in enumerate(names):
        first = gland_image(at).transpose(2, 1, 0)
        nifti(
            top / "imagesTr" / f"{name}.nii.gz", np.stack([first, first[::-1] + 1000], axis=-1).astype(np.float32), LPS
        )
        zones = box_volume(SHAPE, (1, GLAND), (2, (slice(2, 3), slice(5, 9), slice(7, 12)))).transpose(2, 1, 0)
        nifti(top / "labelsTr" / f"{name}.nii.gz", zones, LPS)
        text(top / "imagesTr" / f"._{name}.nii.gz", "Mac")
        text(top / "labelsTr" / f"._{name}.nii.gz", "Mac")
    nifti(top / "imagesTs" / "prostate_03.nii.gz", np.zeros((20, 16, 5, 2), np.float32), LPS)
    listed = [{"image": f"./imagesTr/{name}.nii.gz", "label": f"./labelsTr/{name}.nii.gz"} for name in names]
    described = {
        "name": "PROSTATE", "tensorImageSize": "4D", "modality": {"0": "T2", "1": "ADC"},
        "labels": {"0": "background", "1": "PZ", "2": "TZ"}, "numTraining": 4, "training": listed,
        "test": ["./imagesTs/prostate_03.nii.gz"],
    }  # fmt: skip
    text(top / "dataset.json", json.dumps(described))
    return root


def prostatex_masks(root: Path) -> Path:
    """Oddity: masks of the zones and of lesions lie beside those of the gland."""
    for at, (name, series) in enumerate((("0000", 4), ("0001", 10), ("0004", 5), ("0012", 4))):
        nifti(root / "Files/prostate/Images" / f"ProstateX-{name}_t2_tse_tra_{series}.nii.gz", gland_image(at).T, LPS)
        mask = box_volume(SHAPE, (1, GLAND)).T
        nifti(root / "Files/prostate/mask_prostate" / f"ProstateX-{name}.nii.gz", mask, LPS)
        nifti(root / "Files/prostate/mask_pz" / f"ProstateX-{name}.nii.gz", mask, LPS)
        nifti(root / "Files/prostate/mask_tz" / f"ProstateX-{name}.nii.gz", mask, LPS)
        nifti(root / "Files/lesions/Masks/T2" / f"ProstateX-{name}-Finding1-t2_tse_tra0_ROI.nii.gz", mask, LPS)
    text(root / "Files/prostate/image_list.csv", "id,t2\nProstateX-0000,ProstateX-0000_t2_tse_tra_4.nii.gz\n")
    return root


def prostatex_seg(root: Path) -> Path:
    """Oddity: sagittal series and apparent diffusion lie in the same study; SEGs hold zones as four segments."""
    import highdicom
    from pydicom.sr.codedict import codes

    files = [f"1-{n + 1:02d}.dcm" for n in range(SHAPE[0])]
    for at, name in enumerate(("ProstateX-0004", "ProstateX-0007", "ProstateX-0015")):
        study = root / "PROSTATEx" / name / "10-18-2011-NA-MR prostaat kanker detectie-05711"
        write_mr(study / "5.000000-t2tsetra-00702", gland_image(at), files, "t2_tse_tra", name)
        write_mr(study / "4.000000-t2tsesag-71291", gland_image(at + 5), files, "t2_tse_sag", name)
        slices = [dcmread(study / "5.000000-t2tsetra-00702" / file) for file in files]
        zones = np.zeros((*SHAPE, 4), np.uint8)
        zones[1:4, 4:12, 6:10, 0] = 1  # peripheral
        zones[1:4, 4:12, 10:13, 1] = 1  # transition
        zones[1:4, 4:8, 13:14, 2] = 1  # anterior stroma
        zones[1:4, 8:12, 13:14, 3] = 1  # urethra
        words = ("Peripheral zone", "Transition Zone", "Anterior fibromuscular stroma", "Urethra")
        who = highdicom.AlgorithmIdentificationSequence("hand", codes.DCM.ArtificialIntelligence, "1")
        kind = highdicom.seg.SegmentAlgorithmTypeValues.SEMIAUTOMATIC
        parts = [
            highdicom.seg.SegmentDescription(n + 1, word, codes.SCT.AnatomicalStructure, codes.SCT.Prostate, kind, who)
            for n, word in enumerate(words)
        ]
        made = highdicom.seg.Segmentation(
            slices, zones, highdicom.seg.SegmentationTypeValues.BINARY, parts, highdicom.UID(), 300, highdicom.UID(), 1,
            "hand", "hand", "1", "0", omit_empty_frames=True,
        )  # fmt: skip
        (study / "300.000000-Segmentation-99999").mkdir()
        made.save_as(study / "300.000000-Segmentation-99999" / "1-1.dcm")
    return root


ABDOMEN = (24, 20, 8)  # (x, y, z)
SPOTS = [
    (slice(2 + 5 * (n % 4), 5 + 5 * (n % 4)), slice(2 + 5 * (n // 4), 5 + 5 * (n // 4)), slice(2, 6)) for n in range(16)
]


def organs(values: int) -> NDArray[Any]:
    """The labels 1 … values, each a block of 3 × 3 × 4 voxels in a place of its own."""
    return box_volume(ABDOMEN, *((n + 1, SPOTS[n]) for n in range(values)))


def ct(number: int) -> NDArray[Any]:
    values = np.full(ABDOMEN, -1000, np.int16)
    values[1:-1, 1:-1] = 40 + number
    return values


def word(root: Path) -> Path:
    """Oddity: masks are 64-bit floats, and a desktop's files lie in the folders."""
    top = root / "WORD-V0.1.0"
    for part, numbers in (("Tr", (2, 4, 5, 6)), ("Val", (1, 3)), ("Ts", (7,))):
        for n in numbers:
            nifti(top / f"images{part}" / f"word_{n:04d}.nii.gz", ct(n), LPS)
            nifti(top / f"labels{part}" / f"word_{n:04d}.nii.gz", organs(16).astype(np.float64), LPS)
        text(top / f"images{part}" / ".DS_Store")
    text(top / "dataset.json", json.dumps({"labels": {"0": "background", "1": "liver"}}))
    return root


def abdomenct1k(root: Path) -> Path:
    """Oddity: one mask was kept back, and parts of the images have the name of the set or not."""
    for n, part in (
        (1, "AbdomenCT-1K-ImagePart1"),
        (2, "AbdomenCT-1K-ImagePart1"),
        (400, "ImagePart2"),
        (1061, "ImagePart3"),
        (900, "ImagePart3"),
    ):
        nifti(root / part / f"Case_{n:05d}_0000.nii.gz", ct(n % 50), LPS)
        if n != 900:
            nifti(root / "Mask" / f"Case_{n:05d}.nii.gz", organs(4), LPS)
    return root


def amos(root: Path) -> Path:
    """Oddity: a mask whose header differs from its image's in the last digits, and an MR between the CTs."""
    top = root / "amos22"
    for part, numbers in (("Tr", (1, 4, 5, 507)), ("Va", (8, 13, 518)), ("Ts", (2, 600))):
        for n in numbers:
            nifti(top / f"images{part}" / f"amos_{n:04d}.nii.gz", ct(n % 40), LPS)
            if part != "Ts":
                off = LPS + (np.diag([2e-6, 0, 0, 0]) if n == 4 else 0)
                nifti(top / f"labels{part}" / f"amos_{n:04d}.nii.gz", organs(15), off)
    listed = [
        {"image": f"./imagesTr/amos_{n:04d}.nii.gz", "label": f"./labelsTr/amos_{n:04d}.nii.gz"} for n in (1, 4, 5, 507)
    ]
    text(top / "dataset.json", json.dumps({"labels": {"0": "background", "1": "spleen"}, "training": listed}))
    return root


def btcv(root: Path) -> Path:
    """Oddity: the images run from right to left and one label file is not packed."""
    mirrored = np.diag([0.7, -0.7, 5.0, 1.0])
    for n in (1, 2, 40):
        nifti(root / "RawData/Training/img" / f"img{n:04d}.nii.gz", ct(n), mirrored)
        ending = "nii" if n == 2 else "nii.gz"
        nifti(root / "RawData/Training/label" / f"label{n:04d}.{ending}", organs(13), mirrored)
    nifti(root / "RawData/Testing/img/img0061.nii.gz", ct(9), mirrored)
    return root


def nnunet(root: Path) -> Path:
    """Oddity: files are nrrd, and there are two channels."""
    top = root / "Dataset123_Knee"
    for name in ("knee_001", "knee_002", "knee_003", "knee_104"):
        for channel in range(2):
            save(itk(gland_image(channel)), top / "imagesTr" / f"{name}_{channel:04d}.nrrd")
        save(
            itk(box_volume(SHAPE, (2, GLAND), (1, (slice(1, 2), slice(4, 6), slice(6, 8))))),
            top / "labelsTr" / f"{name}.nrrd",
        )
    save(itk(gland_image(7)), top / "imagesTs" / "knee_200_0000.nrrd")
    save(itk(gland_image(7)), top / "imagesTs" / "knee_200_0001.nrrd")
    described = {
        "channel_names": {"0": "T1", "1": "PD"}, "labels": {"background": 0, "tibia": 1, "femur": 2},
        "numTraining": 4, "file_ending": ".nrrd",
    }  # fmt: skip
    text(top / "dataset.json", json.dumps(described))
    return root


def bids(root: Path) -> Path:
    """Oddity: a subject has two sessions, and another has no mask."""
    text(root / "dataset_description.json", '{"Name": "x", "BIDSVersion": "1.8.0"}')
    text(root / "participants.tsv", "participant_id\tage\nsub-01\t60\n")
    text(root / "derivatives/manual/dataset_description.json", '{"Name": "x", "BIDSVersion": "1.8.0"}')
    for subject, session in (("01", "1"), ("01", "2"), ("02", "1"), ("03", "1"), ("04", "1")):
        stem = f"sub-{subject}_ses-{session}"
        folder = Path(f"sub-{subject}/ses-{session}/anat")
        nifti(root / folder / f"{stem}_T1w.nii.gz", gland_image(int(subject)).T, LPS)
        text(root / folder / f"{stem}_T1w.json", "{}")
        nifti(root / folder / f"{stem}_T2w.nii.gz", gland_image(int(subject) + 9).T, LPS)
        if subject != "04":
            mask = box_volume(SHAPE, (1, GLAND), (2, (slice(2, 3), slice(5, 9), slice(7, 12)))).T
            nifti(root / "derivatives/manual" / folder / f"{stem}_desc-hand_dseg.nii.gz", mask, LPS)
    return root
