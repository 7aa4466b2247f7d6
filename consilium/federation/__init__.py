"""A real federation on NVIDIA FLARE: kits, the server, the sites, and the administrator that submits studies."""

from __future__ import annotations

from importlib.util import find_spec

from consilium.errors import StudyError


def require_flare() -> None:
    """Say what to install where NVIDIA FLARE is missing."""
    if find_spec("nvflare") is None:
        raise StudyError("a real federation needs NVIDIA FLARE: pip install 'consilium[federation]'.")
