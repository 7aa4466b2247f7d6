"""Figures and tables as parts of a page: everything inside the one file."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from consilium.reports.style import to_bytes
from consilium.reports.table_texts import csv_table, latex_table
from consilium.reports.tables import TextCell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEDIA = {"svg": "image/svg+xml", "png": "image/png"}


@dataclass(frozen=True)
class EmbeddedImage:
    """An image inside the page."""

    uri: str
    alt: str
    width: int  # pixels
    caption: str = ""
    photograph: bool = False

    @property
    def drawn(self) -> bool:
        """Whether it is lines on white, which a dark page may turn around; photographs stay as they are."""
        return not self.photograph and self.uri.startswith(f"data:{MEDIA['svg']}")


@dataclass(frozen=True)
class Download:
    """A file that a reader can save from the page."""

    name: str
    said: str
    uri: str


def embedded(
    figure: Figure, alt: str, kind: Literal["svg", "png"] = "svg", caption: str = "", dpi: int = 144
) -> EmbeddedImage:
    width = round(96 * float(figure.get_size_inches()[0]))
    return EmbeddedImage(data_uri(to_bytes(figure, kind, dpi), MEDIA[kind]), alt, width, caption)


def data_uri(data: bytes, media: str) -> str:
    return f"data:{media};base64,{b64encode(data).decode()}"


def downloads(grid: Sequence[Sequence[TextCell]], name: str) -> list[Download]:
    """A table for a spreadsheet and for a paper."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower()
    return [
        Download(f"{name}.csv", "CSV", data_uri(csv_table(grid).encode(), "text/csv")),
        Download(f"{name}.tex", "LaTeX", data_uri(latex_table(grid).encode(), "text/x-tex")),
    ]
