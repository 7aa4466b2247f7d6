"""The errors that end a command: a mistake in the input, or a failure of the work."""

from __future__ import annotations

from pathlib import Path


class UserError(Exception):
    """A mistake in the input. The message is one sentence: what is wrong, where, and what to do. Exit status 2."""


class StudyError(UserError):
    """A study asks for something that does not exist or cannot work."""


class DataError(UserError):
    """A federation on disk has faults."""


class TableFaults(DataError):
    """The tables of a federation on disk have faults; its images were not opened."""

    def __init__(self, text: str, folder: Path) -> None:
        super().__init__(text)
        self.folder = folder


class RunError(UserError):
    """A run folder cannot be used in the requested way."""


def not_a_run(path: Path) -> RunError:
    """The error for a folder that is not a run folder; it names run folders inside."""
    inside = sorted((*path.glob("*/study.toml"), *path.glob("runs/*/study.toml")))
    hint = "it has no study.toml" if path.exists() else "there is no such folder"
    if inside:
        hint = f"it holds {len(inside)} of them: name one, such as {inside[0].parent}"
    return RunError(f"{path} is not a run: {hint}. Runs are the folders that `consilium run` makes.")


class NotForOutsiders(UserError):
    """This method has no model for a hospital outside the federation."""


class WorkError(Exception):
    """The work itself failed: a full disk, too few answers. State is saved. Exit status 1."""


class RunStopped(WorkError):
    """Someone stopped the run from outside its process."""


class WireError(WorkError):
    """A required answer of a site did not arrive."""
