"""The two ways a command can end badly."""

from __future__ import annotations


class UserError(Exception):
    """A user's mistake: one sentence saying what is wrong, where, and what to do. Exit status 2."""


class StudyError(UserError):
    """A study asks for something that does not exist or cannot work."""


class DataError(UserError):
    """A federation on disk is not as it must be."""


class RunError(UserError):
    """A run folder cannot be used as asked."""


class NotForOutsiders(UserError):
    """This method has no model for a hospital outside the federation."""


class WorkError(Exception):
    """The work itself failed: a full disk, too few answers. State is saved. Exit status 1."""
