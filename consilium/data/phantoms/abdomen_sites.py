"""The four sites of the abdomen phantom: what their patients and scanners are like.

Each spread is (mean, standard deviation) over cases. Lengths are in mm.
"""

from __future__ import annotations

from dataclasses import dataclass

from consilium.data.phantoms.volumes import Spread


@dataclass(frozen=True)
class AbdomenLook:
    """One site's patients, its scanner and its habits."""

    source: str  # the published dataset it stands for
    sizes: tuple[int, int, int]  # train, valid, test volumes of the paper
    # the patients
    girth: Spread  # size of the trunk, 1 is the standard patient
    fat: Spread  # thickness of the fat under the skin
    fatty_liver: float  # share of cases with a dark liver
    # the grid
    field: Spread  # width and height of a slice
    span: Spread  # from the lowest to the highest slice
    middle: Spread  # z of the middle slice: high shows the lungs, low the hip bones
    # the contrast medium
    arterial: Spread  # 1 is the height of the arterial phase, 0 is none
    venous: Spread  # 1 is the height of the portal venous phase
    # the picture
    offset: Spread  # of every value, in HU
    gain: Spread  # of every value, from air up
    blur: float  # standard deviation in the slice
    noise: Spread  # standard deviation, in HU
    table: str  # what the patient lies on: "flat", "curved", "" (outside the field)


LOOKS: dict[str, AbdomenLook] = {
    # before radiotherapy: slim patients on a flat table, hardly any contrast medium, smooth, reaches far down
    "word": AbdomenLook(
        source="WORD",
        sizes=(84, 12, 24),
        girth=(0.95, 0.05),
        fat=(12.0, 4.0),
        fatty_liver=0.10,
        field=(404.0, 12.0),
        span=(318.0, 8.0),
        middle=(-22.0, 8.0),
        arterial=(0.03, 0.03),
        venous=(0.28, 0.14),
        offset=(0.0, 4.0),
        gain=(1.0, 0.01),
        blur=3.2,
        noise=(11.0, 2.0),
        table="flat",
    ),
    # twelve centres, most in the portal venous phase: bright organs, a narrow field, large patients
    "abdomenct1k": AbdomenLook(
        source="AbdomenCT-1K",
        sizes=(186, 26, 54),
        girth=(1.05, 0.07),
        fat=(22.0, 7.0),
        fatty_liver=0.30,
        field=(356.0, 14.0),
        span=(262.0, 12.0),
        middle=(20.0, 9.0),
        arterial=(0.10, 0.06),
        venous=(1.00, 0.18),
        offset=(-4.0, 6.0),
        gain=(1.0, 0.02),
        blur=1.2,
        noise=(22.0, 6.0),
        table="",
    ),
    # five scanners, often the arterial phase: bright vessels and kidneys, noisy, values not calibrated
    "amos": AbdomenLook(
        source="AMOS",
        sizes=(140, 20, 40),
        girth=(0.99, 0.06),
        fat=(15.0, 5.0),
        fatty_liver=0.20,
        field=(392.0, 18.0),
        span=(290.0, 12.0),
        middle=(8.0, 10.0),
        arterial=(0.75, 0.18),
        venous=(0.45, 0.20),
        offset=(12.0, 8.0),
        gain=(1.02, 0.02),
        blur=0.6,
        noise=(34.0, 8.0),
        table="curved",
    ),
    # the hospital outside: portal venous, the largest patients in the widest range of fields
    "btcv": AbdomenLook(
        source="BTCV",
        sizes=(0, 0, 30),
        girth=(1.08, 0.07),
        fat=(24.0, 8.0),
        fatty_liver=0.35,
        field=(415.0, 24.0),
        span=(280.0, 20.0),
        middle=(12.0, 10.0),
        arterial=(0.25, 0.10),
        venous=(0.80, 0.15),
        offset=(-8.0, 5.0),
        gain=(0.99, 0.01),
        blur=2.2,
        noise=(17.0, 4.0),
        table="curved",
    ),
}

# The paper's class divisions: what each site inside the federation annotates. The hospital outside has all labels.
DIVISIONS: dict[int, dict[str, tuple[str, ...]]] = {
    1: {"word": ("kidney",), "abdomenct1k": ("spleen", "pancreas"), "amos": ("liver",)},
    2: {"word": ("spleen",), "abdomenct1k": ("liver",), "amos": ("kidney", "pancreas")},
    3: {"word": ("liver", "pancreas"), "abdomenct1k": ("kidney",), "amos": ("spleen",)},
}
