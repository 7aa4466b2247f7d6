"""Which way a volume's axes run through the patient, and how to bring all volumes to one orientation.

A code such as "RAS" names the direction of each file axis (x, y, z): towards the patient's right, front and head.
Arrays have the same axes backwards, (z, y, x). NIfTI says directions in RAS, ITK and DICOM in LPS.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consilium.data.formats import ItkGeometry, NiftiGeometry

Geometry = NiftiGeometry | ItkGeometry | None
Axes = tuple[int, ...]  # per array axis wanted: the stored array axis, from 1, negative where it runs the other way

_LETTERS = (("L", "R"), ("P", "A"), ("I", "S"))  # per world axis of RAS: towards lower, towards higher
_WORLD = {letter: (axis, sign) for axis, pair in enumerate(_LETTERS) for letter, sign in zip(pair, (-1, 1))}
CODES = tuple(
    "".join(letters) for order in itertools.permutations(_LETTERS) for letters in itertools.product(*order)
)  # all 48
RADIOLOGICAL = "LPS"  # slices as radiologists look at them: the patient's front on top, the right side on the left


def orientation_of(geometry: Geometry) -> str:
    """The code of the orientation a volume is stored in, or "" where its file does not say."""
    affine = affine_of(geometry)
    if affine is None:
        return ""
    from nibabel.orientations import io_orientation

    ways = io_orientation(affine)  # the nearest axes, also of oblique and sheared volumes
    if not np.isfinite(ways).all():
        return ""  # an axis of no length
    return "".join(_LETTERS[int(axis)][int(sign > 0)] for axis, sign in ways)


def affine_of(geometry: Geometry) -> NDArray[np.float64] | None:
    """From file indices (x, y, z) to mm in RAS, a (4, 4) matrix; None of a picture or where the file does not say."""
    if isinstance(geometry, NiftiGeometry):
        known = len(geometry.shape) == 3 and (geometry.header["sform_code"] > 0 or geometry.header["qform_code"] > 0)
        return geometry.affine if known else None
    if isinstance(geometry, ItkGeometry) and len(geometry.direction) == 9:
        affine = np.eye(4)
        affine[:3, :3] = np.reshape(geometry.direction, (3, 3)) * np.asarray(geometry.spacing)
        affine[:3, 3] = geometry.origin
        return np.diag([-1.0, -1.0, 1.0, 1.0]) @ affine
    return None


def axes_between(stored: str, wanted: str) -> Axes:
    """How an array of one orientation becomes one of another; () where nothing is to do or one is not known."""
    if not stored or not wanted or stored == wanted:
        return ()
    found = {_WORLD[letter][0]: (place, _WORLD[letter][1]) for place, letter in enumerate(stored)}
    axes = []
    for letter in reversed(wanted):  # array axes are the file's backwards
        axis, sign = _WORLD[letter]
        place, stored_sign = found[axis]
        axes.append((3 - place) * sign * stored_sign)
    return tuple(axes)


def turned(array: NDArray[Any], axes: Axes) -> NDArray[Any]:
    """An array (..., z, y, x) in the wanted orientation."""
    if not axes:
        return array
    lead = array.ndim - len(axes)
    array = array.transpose(*range(lead), *(lead + abs(axis) - 1 for axis in axes))
    array = np.flip(array, tuple(lead + place for place, axis in enumerate(axes) if axis < 0))
    return np.ascontiguousarray(array)  # so that later sums do not depend on how the file was stored


def reordered(values: tuple[Any, ...], axes: Axes) -> tuple[Any, ...]:
    """A shape or a spacing (z, y, x) in the wanted orientation."""
    return tuple(values[abs(axis) - 1] for axis in axes) if axes else values


def axes_to_same_grid(mask: Geometry, image: Geometry) -> Axes:
    """How a mask stored in another orientation than its image is brought to the image's.

    () where the orientations are the same, unknown, or where the mask so turned does not lie on the image's voxels.
    """
    axes = axes_between(orientation_of(mask), orientation_of(image))
    theirs, ours = affine_of(image), affine_of(mask)
    if not axes or theirs is None or ours is None or mask is None or image is None:
        return ()
    shape = tuple(reversed(mask.shape))
    if tuple(reversed(reordered(shape, axes))) != image.shape[:3]:
        return ()
    step = np.zeros((4, 4))  # from an index in the image's orientation to the mask's own index
    step[3, 3] = 1
    for place, axis in enumerate(axes):
        own = 3 - abs(axis)
        step[own, 2 - place] = np.sign(axis)
        step[own, 3] = mask.shape[own] - 1 if axis < 0 else 0
    return axes if np.allclose(ours @ step, theirs, rtol=0, atol=1e-2) else ()
