"""The six sites of the retina phantom: what their patients, cameras and graders do to a photograph.

Each spread is (mean, standard deviation) over cases. Lengths are shares of the image's side.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

Spread = tuple[float, float]
Colour = tuple[float, float, float]


@dataclass(frozen=True)
class RetinaLook:
    """One site's patients, camera and graders."""

    source: str  # the published dataset it stands for
    sizes: tuple[int, int, int]  # train, valid, test cases in the paper's table 1
    # where the eye is
    disc: Spread  # vertical disc diameter
    cup: Spread  # vertical cup-to-disc ratio
    nasal: Spread  # disc centre from the image centre, towards the nose
    lower: Spread  # disc centre below the image centre
    squeeze: float  # width over height of a circle: wide photographs were resized to squares
    # the field of view; a radius above 0.75 leaves no black
    field: Spread
    cut: float  # half height at which the field is cut off above and below
    notch: bool  # the small tab on the field's edge by which some cameras mark a side
    border: Colour  # what the camera records outside the field
    # the patients
    melanin: Spread  # 0 pale, 1 dark
    choroid: float  # how much the choroid's texture shows
    atrophy: float  # share of discs with a pale crescent on the temporal side
    rim: Colour  # light returned by the disc's rim
    pit: Colour  # light returned by the cup
    edge: float  # softness of the disc's edge, in disc radii; the cup's is 1.5 times this
    # the camera
    mixing: tuple[Colour, Colour, Colour]  # rows: the recorded red, green, blue from the true ones
    gamma: Colour  # below 1 lifts the shadows
    exposure: Spread
    vignette: float  # light lost at the field's edge
    vessels: float  # contrast of the vessels
    haze: Spread  # veil of stray light
    blur: float  # standard deviation, share of the image side
    noise: float  # standard deviation at full brightness, of 1; grows with the square root of the light
    # the graders
    generous: float  # drawn cup over visible cup


LOOKS: dict[str, RetinaLook] = {
    # a 30 degree field centred on the disc, dark eyes, large cups, deep orange
    "drishti": RetinaLook(
        source="Drishti-GS1",
        sizes=(50, 25, 26),
        disc=(0.350, 0.025),
        cup=(0.68, 0.07),
        nasal=(0.00, 0.035),
        lower=(0.00, 0.035),
        squeeze=1.0,
        field=(0.515, 0.010),
        cut=0.6,
        notch=False,
        border=(0.0, 0.0, 0.0),
        melanin=(0.70, 0.12),
        choroid=0.8,
        atrophy=0.35,
        rim=(0.95, 0.52, 0.20),
        pit=(1.05, 0.95, 0.66),
        edge=0.05,
        mixing=((1.04, 0.04, 0.0), (0.02, 0.94, 0.0), (0.0, 0.14, 0.55)),
        gamma=(0.90, 1.10, 1.25),
        exposure=(0.95, 0.07),
        vignette=0.35,
        vessels=0.85,
        haze=(0.02, 0.01),
        blur=0.003,
        noise=0.012,
        generous=1.0,
    ),
    # a wide photograph squeezed into a square, overexposed and yellow, the disc towards the nose
    "binrushed": RetinaLook(
        source="RIGA BinRushed",
        sizes=(98, 49, 48),
        disc=(0.310, 0.022),
        cup=(0.52, 0.08),
        nasal=(0.13, 0.035),
        lower=(0.01, 0.03),
        squeeze=0.76,
        field=(0.520, 0.012),
        cut=0.47,
        notch=False,
        border=(0.01, 0.01, 0.01),
        melanin=(0.25, 0.12),
        choroid=0.8,
        atrophy=0.15,
        rim=(1.05, 0.66, 0.30),
        pit=(1.10, 1.10, 0.95),
        edge=0.09,
        mixing=((0.92, 0.22, 0.0), (0.16, 1.02, 0.0), (0.02, 0.30, 0.62)),
        gamma=(0.70, 0.82, 1.10),
        exposure=(1.05, 0.06),
        vignette=0.20,
        vessels=0.65,
        haze=(0.06, 0.02),
        blur=0.006,
        noise=0.020,
        generous=1.05,
    ),
    # a small dark field, crimson
    "magrabia": RetinaLook(
        source="RIGA Magrabia",
        sizes=(47, 24, 23),
        disc=(0.270, 0.020),
        cup=(0.50, 0.08),
        nasal=(-0.02, 0.05),
        lower=(0.03, 0.04),
        squeeze=0.95,
        field=(0.400, 0.012),
        cut=0.5,
        notch=False,
        border=(0.03, 0.015, 0.02),
        melanin=(0.50, 0.15),
        choroid=1.2,
        atrophy=0.20,
        rim=(0.95, 0.54, 0.32),
        pit=(1.05, 1.00, 0.85),
        edge=0.07,
        mixing=((0.95, 0.0, 0.0), (-0.10, 0.80, 0.06), (0.10, 0.26, 0.62)),
        gamma=(1.05, 1.20, 1.0),
        exposure=(0.82, 0.06),
        vignette=0.45,
        vessels=0.9,
        haze=(0.03, 0.015),
        blur=0.004,
        noise=0.030,
        generous=0.97,
    ),
    # centred on the macula, squeezed, saturated orange, sharp
    "messidor": RetinaLook(
        source="RIGA MESSIDOR",
        sizes=(230, 115, 115),
        disc=(0.275, 0.018),
        cup=(0.54, 0.08),
        nasal=(0.235, 0.020),
        lower=(-0.01, 0.025),
        squeeze=0.80,
        field=(0.500, 0.008),
        cut=0.6,
        notch=False,
        border=(0.0, 0.0, 0.0),
        melanin=(0.40, 0.15),
        choroid=0.9,
        atrophy=0.20,
        rim=(1.00, 0.62, 0.22),
        pit=(1.05, 1.05, 0.80),
        edge=0.05,
        mixing=((1.10, 0.10, 0.0), (0.05, 1.00, 0.0), (-0.04, 0.10, 0.38)),
        gamma=(0.80, 0.98, 1.30),
        exposure=(0.92, 0.06),
        vignette=0.30,
        vessels=0.8,
        haze=(0.02, 0.01),
        blur=0.002,
        noise=0.012,
        generous=1.0,
    ),
    # a close crop around the disc under a green filter: the rim is darker than the retina around it, no black anywhere
    "rimone": RetinaLook(
        source="RIM-ONE",
        sizes=(80, 40, 39),
        disc=(0.600, 0.045),
        cup=(0.52, 0.08),
        nasal=(0.00, 0.03),
        lower=(0.00, 0.03),
        squeeze=1.0,
        field=(0.900, 0.020),
        cut=2.0,
        notch=False,
        border=(0.0, 0.0, 0.0),
        melanin=(0.30, 0.12),
        choroid=1.1,
        atrophy=0.25,
        rim=(0.52, 0.22, 0.14),
        pit=(0.85, 0.62, 0.40),
        edge=0.07,
        mixing=((0.22, 0.72, 0.10), (0.14, 1.32, 0.10), (0.05, 0.70, 0.40)),
        gamma=(1.0, 0.78, 0.95),
        exposure=(0.92, 0.07),
        vignette=0.55,
        vessels=0.75,
        haze=(0.05, 0.02),
        blur=0.006,
        noise=0.022,
        generous=1.0,
    ),
    # centred between macula and disc, a dim brownish pink, a notch on the field's edge
    "refuge": RetinaLook(
        source="REFUGE",
        sizes=(400, 200, 200),
        disc=(0.260, 0.018),
        cup=(0.56, 0.08),
        nasal=(0.19, 0.035),
        lower=(-0.02, 0.03),
        squeeze=1.0,
        field=(0.465, 0.008),
        cut=0.6,
        notch=True,
        border=(0.0, 0.0, 0.0),
        melanin=(0.60, 0.14),
        choroid=0.7,
        atrophy=0.25,
        rim=(0.92, 0.56, 0.34),
        pit=(1.05, 1.00, 0.85),
        edge=0.06,
        mixing=((0.82, 0.10, 0.06), (0.14, 0.82, 0.06), (0.16, 0.22, 0.72)),
        gamma=(0.90, 0.90, 0.86),
        exposure=(0.86, 0.07),
        vignette=0.30,
        vessels=0.7,
        haze=(0.04, 0.02),
        blur=0.003,
        noise=0.018,
        generous=1.02,
    ),
}

# with `alike`: a share of a site's patients is photographed with a camera like its partner's, in both directions
PARTNERS = {
    "drishti": "magrabia",
    "magrabia": "drishti",
    "binrushed": "messidor",
    "messidor": "binrushed",
    "rimone": "refuge",
    "refuge": "rimone",
}
# patients and graders stay the site's own; magnification, aim, field, light and sensor come with the camera
_OWN = ("source", "sizes", "cup", "melanin", "choroid", "atrophy", "edge", "generous")


def with_camera_of(partner: RetinaLook, look: RetinaLook) -> RetinaLook:
    """A site's patients and graders behind another site's camera."""
    return replace(partner, **{name: getattr(look, name) for name in _OWN})
