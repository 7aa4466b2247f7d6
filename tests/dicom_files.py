"""Synthetic DICOM files, written by the tests themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydicom import dcmread
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

PERSON = "Nightingale^Florence"  # must not be found in anything that leaves a site
PERSON_ID = "HN-1820-0512"


def write_series(
    folder: Path,
    stored: NDArray[Any],
    step: float = 3.0,
    slope: float = 1.0,
    intercept: float = -1024.0,
    first: int = 0,
    **tags: Any,
) -> str:
    """A CT of (z, y, x) stored values as files in an order that is not that of their places; returns the series' UID.

    Pixels are 0.5 mm apart along x and 0.6 mm along y; rows run backwards, as in a prone scan. The first slice
    lies `first` steps above the usual place.
    """
    folder.mkdir(parents=True, exist_ok=True)
    series, study, frame = generate_uid(), generate_uid(), generate_uid()
    for z, plane in enumerate(stored):
        data = Dataset()
        data.file_meta = FileMetaDataset()
        data.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
        data.SOPClassUID = data.file_meta.MediaStorageSOPClassUID = CTImageStorage
        data.SOPInstanceUID = data.file_meta.MediaStorageSOPInstanceUID = generate_uid()
        data.SeriesInstanceUID, data.StudyInstanceUID, data.FrameOfReferenceUID = series, study, frame
        data.Modality, data.PatientName, data.PatientID = "CT", PERSON, PERSON_ID
        data.PatientBirthDate, data.PatientSex, data.StudyID, data.AccessionNumber = "18200512", "F", "1", "A1"
        data.StudyDate, data.StudyTime, data.ReferringPhysicianName = "20260101", "120000", ""
        data.SeriesNumber, data.InstanceNumber, data.PositionReferenceIndicator = 4, len(stored) - z, ""
        data.ImagePositionPatient = [10.0, 20.0, 30.0 + step * (first + z)]
        data.ImageOrientationPatient = [1, 0, 0, 0, -1, 0]
        data.PixelSpacing, data.SliceThickness = [0.6, 0.5], step
        data.RescaleSlope, data.RescaleIntercept = slope, intercept
        data.Rows, data.Columns, data.SamplesPerPixel = *plane.shape, 1
        data.PhotometricInterpretation = "MONOCHROME2"
        data.BitsAllocated, data.BitsStored, data.HighBit, data.PixelRepresentation = 16, 12, 11, 0
        data.PixelData = plane.astype(np.uint16).tobytes()
        for name, value in tags.items():
            setattr(data, name, value)
        data.save_as(folder / f"IM{(z * 7) % 11:04d}", enforce_file_format=True)
    return str(series)


def write_seg(path: Path, series: Path, mask: NDArray[Any], segments: int) -> None:
    """A DICOM SEG as archives hold them: slices without a segment are left out. `mask` is in the order of reading."""
    import highdicom  # slow to load, and few tests write these
    from pydicom.sr.codedict import codes

    algorithm = highdicom.AlgorithmIdentificationSequence("hand", codes.DCM.ArtificialIntelligence, "1")
    parts = [
        highdicom.seg.SegmentDescription(
            value, f"zone {value}", codes.SCT.AnatomicalStructure, codes.SCT.Prostate,
            highdicom.seg.SegmentAlgorithmTypeValues.SEMIAUTOMATIC, algorithm,
        )
        for value in range(1, segments + 1)
    ]  # fmt: skip
    slices = sorted((dcmread(file) for file in series.iterdir()), key=lambda one: -one.ImagePositionPatient[2])
    made = highdicom.seg.Segmentation(
        slices, np.stack([mask == value for value in range(1, segments + 1)], axis=-1).astype(np.uint8),
        highdicom.seg.SegmentationTypeValues.BINARY, parts, highdicom.UID(), 300, highdicom.UID(), 1,
        "hand", "hand", "1", "0", omit_empty_frames=True,
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    made.save_as(path)
