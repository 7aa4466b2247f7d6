"""What the tissues of a pelvis are to a magnetic resonance scanner."""

from __future__ import annotations

import math

# Proton density, T1 and T2 in ms at 3 tesla; fat's T2 is the long one it shows in turbo spin echo.
TISSUES: dict[str, tuple[float, float, float]] = {
    "air": (0.0, 1000, 50),
    "fat": (0.95, 400, 125),
    "muscle": (0.85, 1400, 40),
    "cortex": (0.15, 1000, 20),
    "marrow": (0.70, 500, 95),
    "cartilage": (0.70, 1100, 45),
    "wall": (0.85, 1400, 60),
    "urine": (1.0, 4000, 900),
    "vein": (0.92, 1800, 140),
    "seminal fluid": (0.95, 2300, 220),
    "bulb": (0.92, 1900, 150),
    "stool": (0.65, 900, 75),
    "gel": (0.95, 3000, 400),
    "peripheral zone": (0.92, 1900, 150),
    "transition zone": (0.88, 1600, 88),
    "stroma": (0.82, 1400, 52),
    "glandular nodule": (0.92, 1800, 150),
    "stromal nodule": (0.84, 1400, 58),
    "lesion": (0.86, 1500, 70),
}


def signals(echo: float, repetition: float, strength: float) -> dict[str, float]:
    """The spin echo signal of every tissue, fat being 1; times in ms, field strength in tesla."""
    slowing = (strength / 3) ** 0.35  # T1 grows with the field
    made = {
        name: density * (1 - math.exp(-repetition / (t1 * slowing))) * math.exp(-echo / t2)
        for name, (density, t1, t2) in TISSUES.items()
    }
    return {name: value / made["fat"] for name, value in made.items()}
