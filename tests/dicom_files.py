"""Synthetic DICOM files, written by the tests themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

PERSON = "Nightingale^Florence"  # must not be found in anything that leaves a site
PERSON_ID = "HN-1820-0512"


def write_series(
    folder: Path, stored: NDArray[Any], step: float = 3.0, slope: float = 1.0, intercept: float = -1024.0, **tags: Any
) -> str:
    """A CT of (z, y, x) stored values as files in an order that is not that of their places; returns the series' UID.

    Pixels are 0.5 mm apart along x and 0.6 mm along y; rows run backwards, as in a prone scan.
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
        data.ImagePositionPatient = [10.0, 20.0, 30.0 + step * z]
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
