"""A case with its outlines, as one SVG file: the image inside it as it is, and a path around every label."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from contourpy import contour_generator
from numpy.typing import NDArray
from PIL import Image

from consilium.reports.embedding import data_uri
from consilium.reports.style import as_picture, label_colour

WIDTH = 230  # CSS pixels
SMALL = 240  # pixels: images narrower than this are shown as squares, not blurred
SOLID, DASHED = "", ' stroke-dasharray="6 3"'


def overlay(
    image: NDArray[Any], truth: Mapping[str, NDArray[np.bool_]], prediction: Mapping[str, NDArray[np.bool_]]
) -> bytes:
    """An image (H, W) or (H, W, 3), nothing around it; a colour per label, the truth solid, the prediction dashed."""
    height, width = image.shape[:2]
    stream = io.BytesIO()
    Image.fromarray(np.rint(255 * as_picture(image)).astype(np.uint8)).save(stream, "png")
    squares = ' image-rendering="pixelated"' if width < SMALL else ""
    outlines = [
        _outline(masks[label], label_colour(i), dash)
        for i, label in enumerate(truth)
        for masks, dash in ((truth, SOLID), (prediction, DASHED))
        if label in masks
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{WIDTH}" height="{WIDTH * height / width:g}">'
        f'<image width="{width}" height="{height}" preserveAspectRatio="none"{squares} '
        f'href="{data_uri(stream.getvalue(), "image/png")}"/>'
        f'<g fill="none" stroke-linejoin="round">{"".join(outlines)}</g></svg>'
    ).encode()


def _outline(mask: NDArray[np.bool_], colour: str, dash: str) -> str:
    """A line on a darker, wider one; as wide in a large picture as in a small one."""
    path = "".join(_path(mask)) if mask.any() else ""
    strokes = (("#000", 'stroke-width="3.2" stroke-opacity="0.53"'), (colour, 'stroke-width="1.9"')) if path else ()
    return "".join(
        f'<path d="{path}" stroke="{stroke}" {width}{dash} vector-effect="non-scaling-stroke"/>'
        for stroke, width in strokes
    )


def _path(mask: NDArray[np.bool_]) -> Iterator[str]:
    """Halfway between the pixels of a mask (H, W) and the others; closed at the border of the image too."""
    padded = np.pad(mask.astype(float), 1)
    rows, columns = np.arange(-0.5, mask.shape[0] + 1), np.arange(-0.5, mask.shape[1] + 1)
    for line in contour_generator(columns, rows, padded).lines(0.5):
        yield "M" + "L".join(f"{x:g} {y:g}" for x, y in np.asarray(line)[:-1]) + "Z"
