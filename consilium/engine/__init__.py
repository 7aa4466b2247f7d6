"""Trains a study to its end, from the current state of its run folder."""

from consilium.engine.active import Wire
from consilium.engine.loop import run

__all__ = ["Wire", "run"]
