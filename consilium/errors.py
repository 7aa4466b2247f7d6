"""The two ways a command can end badly."""

from __future__ import annotations

from pathlib import Path


class UserError(Exception):
    """A user's mistake: one sentence saying what is wrong, where, and what to do. Exit status 2."""


class StudyError(UserError):
    """A study asks for something that does not exist or cannot work."""


class DataError(UserError):
    """A federation on disk is not as it must be."""


class RunError(UserError):
    """A run folder cannot be used as asked."""


def not_a_run(path: Path) -> RunError:
    """A folder was given that no run made; perhaps it holds some."""
    inside = sorted(path.glob("*/study.toml"))
    hint = f"it holds {len(inside)} of them: name one, such as {inside[0].parent}" if inside else "it has no study.toml"
    return RunError(f"{path} is not a run: {hint}. Runs are the folders that `consilium run` makes.")


class NotForOutsiders(UserError):
    """This method has no model for a hospital outside the federation."""


class WorkError(Exception):
    """The work itself failed: a full disk, too few answers. State is saved. Exit status 1."""


class WireError(WorkError):
    """A site's answer that the run cannot do without did not come."""
