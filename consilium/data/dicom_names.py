"""What a DICOM header says about a person: which elements hold something, never what; and a copy without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from consilium.data.dicom import require_dicom

PERSONAL = {
    "PatientName": "0010|0010",
    "PatientBirthDate": "0010|0030",
    "OtherPatientIDs": "0010|1000",
    "OtherPatientNames": "0010|1001",
    "PatientAddress": "0010|1040",
    "PatientMotherBirthName": "0010|1060",
    "MilitaryRank": "0010|1080",
    "PatientTelephoneNumbers": "0010|2154",
    "ResponsiblePerson": "0010|2297",
    "ReferringPhysicianName": "0008|0090",
}
_ID = "0010|0020"
_REMOVED = ("anon", "removed", "unknown", "none", "deidentified", "de-identified", "pseudo", "19000101", "00010101")


def personal_elements(path: Path) -> tuple[str, ...]:
    """The elements of a file's header that still hold something about a person; values such as "anonymous" are none."""
    import SimpleITK

    reader = SimpleITK.ImageFileReader()
    reader.SetImageIO("GDCMImageIO")
    reader.SetFileName(str(path))
    reader.ReadImageInformation()

    def said(key: str) -> str:
        return str(reader.GetMetaData(key)) if reader.HasMetaDataKey(key) else ""

    return tuple(name for name, key in PERSONAL.items() if _tells(said(key), said(_ID)))


def write_without_names(path: Path, to: Path) -> None:
    """A copy of a DICOM file whose personal elements are empty; pixels and geometry are those of the original."""
    require_dicom()
    from pydicom import dcmread

    header: Any = dcmread(path, force=True)
    for name in personal_elements(path):
        setattr(header, name, "")
    header.save_as(to)


def _tells(value: str, pseudonym: str) -> bool:
    plain = value.strip(" ^\0").lower()
    return bool(plain) and not any(word in plain for word in _REMOVED) and plain != pseudonym.strip().lower()
