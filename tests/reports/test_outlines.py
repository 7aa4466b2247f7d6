"""Example cases as SVG: the image untouched, and outlines where the masks end."""

from __future__ import annotations

import io
from base64 import b64decode
from xml.etree import ElementTree

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from consilium.reports.outlines import overlay
from consilium.reports.style import label_colour

SVG = "{http://www.w3.org/2000/svg}"


def image_in(svg: ElementTree.Element) -> NDArray[np.uint8]:
    found = svg.find(f"{SVG}image")
    assert found is not None
    return np.asarray(Image.open(io.BytesIO(b64decode(found.attrib["href"].partition(",")[2]))))


@pytest.mark.parametrize("shape", [(16, 24), (16, 24, 3)])
@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_any_image(shape: tuple[int, ...], kind: type) -> None:
    image = (100 * np.random.default_rng(0).random(shape)).astype(kind)
    mask = np.zeros((16, 24), bool)
    mask[4:8, 4:9] = True
    truth = {"disc": mask, "cup": mask & False, "all": mask | True}
    svg = ElementTree.fromstring(overlay(image, truth, {"disc": mask, "cup": mask}))
    assert svg.attrib["viewBox"] == "0 0 24 16"
    assert image_in(svg).shape == shape
    if kind is np.uint8:
        assert (image_in(svg) == image).all()
    lines = [path.attrib for path in svg.iter(f"{SVG}path") if path.attrib["stroke"] != "#000"]
    disc, cup, every = map(label_colour, range(3))
    assert [line["stroke"] for line in lines] == [disc, disc, cup, every]  # the empty truth of the cup has no outline
    assert ["stroke-dasharray" in line for line in lines] == [False, True, True, False]


def test_an_outline_runs_between_the_pixels_by_hand() -> None:
    mask = np.zeros((4, 5), bool)
    mask[1, 2] = True  # its pixel covers x 2..3, y 1..2
    svg = ElementTree.fromstring(overlay(np.zeros((4, 5)), {"disc": mask}, {}))
    path = next(iter(svg.iter(f"{SVG}path"))).attrib["d"]
    assert path.startswith("M") and path.endswith("Z")
    points = {tuple(map(float, point.split())) for point in path[1:-1].split("L")}
    assert points == {(2.5, 1), (2, 1.5), (3, 1.5), (2.5, 2)}


def test_a_constant_image_can_be_shown() -> None:
    assert not image_in(ElementTree.fromstring(overlay(np.ones((8, 8)), {}, {}))).any()
