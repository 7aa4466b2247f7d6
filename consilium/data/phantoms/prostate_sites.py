"""The six sites of the prostate phantom: what their scanners do to a pelvis.

Patients are alike everywhere; each spread is (mean, standard deviation) over cases. Lengths are in mm.
"""

from __future__ import annotations

from dataclasses import dataclass

from consilium.data.phantoms.volumes import Spread


@dataclass(frozen=True)
class ProstateLook:
    """One site's scanner and its habits."""

    source: str  # the published dataset it stands for
    sizes: tuple[int, int, int]  # train, valid, test volumes in the paper's table 8
    # the grid
    field: Spread  # width and height of a slice, rounded to 2
    thickness: Spread  # from slice to slice, rounded to 0.1
    # the sequence
    echo: Spread  # echo time, ms: a long one darkens muscle and gland and leaves water bright
    repetition: Spread  # repetition time, ms
    strength: float  # field strength in tesla: a weak field shortens T1
    # the coils
    surface: Spread  # how much brighter the skin side is than the middle
    uneven: float  # standard deviation of the random part of the bias field, logarithmic
    endorectal: float  # share of cases with a coil in the rectum, which is bright around it
    # the picture
    blur: float  # standard deviation in the slice
    noise: Spread  # Rician, of fat's signal
    gamma: Spread  # of the stored values: above 1 darkens all but the brightest
    ceiling: float  # values above it are cut, of fat's value
    gain: Spread  # stored value of fat


LOOKS: dict[str, ProstateLook] = {
    # the odd one: long echo, no correction of the coils' brightness, dark in the middle, noisy
    "i2cvb": ProstateLook(
        source="I2CVB",
        sizes=(10, 5, 4),
        field=(178.0, 2.0),
        thickness=(4.0, 0.0),
        echo=(145.0, 5.0),
        repetition=(3600.0, 200.0),
        strength=3.0,
        surface=(1.25, 0.2),
        uneven=0.12,
        endorectal=0.0,
        blur=0.7,
        noise=(0.075, 0.010),
        gamma=(1.22, 0.05),
        ceiling=3.0,
        gain=(230.0, 25.0),
    ),
    # short echo, shadows lifted: a flat grey picture
    "msd": ProstateLook(
        source="MSD Prostate",
        sizes=(16, 8, 8),
        field=(160.0, 2.0),
        thickness=(3.2, 0.0),
        echo=(76.0, 4.0),
        repetition=(4200.0, 200.0),
        strength=3.0,
        surface=(0.15, 0.05),
        uneven=0.10,
        endorectal=0.0,
        blur=1.1,
        noise=(0.040, 0.006),
        gamma=(0.72, 0.03),
        ceiling=1.6,
        gain=(620.0, 60.0),
    ),
    # evenly lit, hard contrast, bright values cut off
    "nci3t": ProstateLook(
        source="NCI-ISBI 3T",
        sizes=(18, 9, 8),
        field=(166.0, 3.0),
        thickness=(3.0, 0.0),
        echo=(120.0, 5.0),
        repetition=(4500.0, 300.0),
        strength=3.0,
        surface=(0.30, 0.10),
        uneven=0.12,
        endorectal=0.0,
        blur=0.5,
        noise=(0.050, 0.008),
        gamma=(1.18, 0.04),
        ceiling=1.3,
        gain=(950.0, 90.0),
    ),
    # a weak field and a coil in the rectum: glaring around it, dim elsewhere
    "ncidx": ProstateLook(
        source="NCI-ISBI Dx",
        sizes=(18, 9, 8),
        field=(146.0, 3.0),
        thickness=(3.6, 0.0),
        echo=(105.0, 6.0),
        repetition=(5000.0, 500.0),
        strength=1.5,
        surface=(0.10, 0.05),
        uneven=0.15,
        endorectal=0.60,
        blur=0.5,
        noise=(0.045, 0.010),
        gamma=(0.90, 0.05),
        ceiling=4.0,
        gain=(520.0, 80.0),
    ),
    # many hospitals in one: everything varies
    "promise12": ProstateLook(
        source="PROMISE12",
        sizes=(25, 12, 13),
        field=(168.0, 6.0),
        thickness=(3.3, 0.15),
        echo=(108.0, 18.0),
        repetition=(4300.0, 700.0),
        strength=3.0,
        surface=(0.45, 0.35),
        uneven=0.20,
        endorectal=0.30,
        blur=0.8,
        noise=(0.045, 0.020),
        gamma=(0.98, 0.15),
        ceiling=2.2,
        gain=(700.0, 220.0),
    ),
    # one scanner, sharp, clean and bright
    "prostatex": ProstateLook(
        source="ProstateX",
        sizes=(50, 25, 24),
        field=(160.0, 4.0),
        thickness=(3.3, 0.0),
        echo=(101.0, 5.0),
        repetition=(4500.0, 400.0),
        strength=3.0,
        surface=(0.30, 0.12),
        uneven=0.10,
        endorectal=0.0,
        blur=0.45,
        noise=(0.025, 0.005),
        gamma=(0.86, 0.05),
        ceiling=2.0,
        gain=(1150.0, 130.0),
    ),
}
