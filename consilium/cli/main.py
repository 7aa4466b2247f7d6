"""The `consilium` command: parse, call, print. Nothing here imports torch before a command needs it."""

from __future__ import annotations

import atexit
import errno
import functools
import gc
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from consilium import __version__
from consilium.cli import (
    analysis,
    audit,
    checking,
    data,
    exports,
    federation,
    importing,
    look,
    privacy,
    suites,
    train,
    use,
    watch,
)
from consilium.errors import UserError, WorkError


class Stopped(BaseException):
    """Ctrl-C; not a KeyboardInterrupt, for which typer prints nothing."""


class _Plain:
    """A command or group whose help says nothing of types beside its flags: "--json <bool>" reads like a value."""

    def get_params(self, ctx: Any) -> list[Any]:
        found = list(super().get_params(ctx))  # type: ignore[misc]
        for flag in (param for param in found if getattr(param, "is_flag", False) and param.metavar is None):
            flag.metavar = ""
        return found


class _PlainCommand(_Plain, TyperCommand):
    pass


app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Federated medical imaging: hospitals train models together without moving their data.\n\n"
    "Start with [bold]consilium demo[/bold]: it trains six synthetic hospitals in a few minutes and writes a report.",
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"consilium {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


COMMANDS = (train, suites, federation, look, watch, privacy, analysis, audit, data, checking, importing, use, exports)
for module in COMMANDS:
    module.add_to(app)


def _speak_plainly(group: typer.Typer) -> None:
    own = group.info.cls if isinstance(group.info.cls, type) else TyperGroup  # `kits` has a class of its own
    group.info.cls = type(own.__name__, (_Plain, own), {})
    for told in group.registered_commands:
        told.cls = _PlainCommand
    for inner in group.registered_groups:
        if inner.typer_instance:
            _speak_plainly(inner.typer_instance)


_speak_plainly(app)


@functools.cache
def command() -> Callable[..., object]:
    """The parser of all commands, built when first needed: that takes longer than to parse."""
    return typer.main.get_command(app)


def main(arguments: list[str] | None = None) -> None:
    """Run a command; exit status 0 on success, 2 on a user's mistake, 1 on a failure in the work."""
    atexit.register(gc.freeze)  # else the end of the process looks through all modules once more, for half a second
    interrupt = _Interrupt()
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        command()(arguments, prog_name="consilium")  # ends the process itself, with status 2 for a wrong option
        status = 0
    except (Stopped, Exception) as error:
        status = _ending(error, interrupt.seen)
    finally:
        signal.signal(signal.SIGINT, before)
    sys.exit(status)


class _Interrupt:
    """Ends the command at Ctrl-C and records it, because a library may replace the exception."""

    seen = False

    def __call__(self, *_: object) -> None:
        self.seen = True
        raise Stopped


def _ending(error: BaseException, stopped: bool) -> int:
    """Print why the command ends; returns its exit status."""
    if stopped:
        _say(" ".join(["stopped.", *getattr(error, "__notes__", [])]))  # the command's own, see `kept`
        return 130
    if isinstance(error, (UserError, WorkError)):
        _say(str(error))
        return 2 if isinstance(error, UserError) else 1
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    if os.environ.get("CONSILIUM_DEBUG"):
        raise error
    if isinstance(error, OSError) and error.errno in _REMEDIES:
        where = f" ({_meant(error.filename)})" if error.filename else ""
        _say(f"{error.strerror}{where}: {_REMEDIES[error.errno]}, then call the command again.")
        return 1
    if isinstance(error, MemoryError):
        _say(f"there is not enough memory ({error}): make images, batches or the network smaller.")
        return 1
    if isinstance(error, FileExistsError | NotADirectoryError | IsADirectoryError):
        _say(f"{error.strerror} ({error.filename2 or error.filename}): name another file or folder.")
        return 2
    _say(f"consilium failed: {type(error).__name__}: {error} (details in {_details(error)}; please report it)")
    return 1


_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room where it writes"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "allow reading and writing there, or name another place"),
}


def _meant(path: str) -> str:
    """The file or folder that was to appear under its own name when it was whole."""
    place = Path(path)
    return str(place.with_name(_UNFINISHED.sub(r"\1", place.name)))


_UNFINISHED = re.compile(r"^\.(.+?)\.\d+((-\d+)?\.partial)?$")  # as `write_text` and `new_folder` name it


def _say(sentence: str) -> None:
    typer.echo(f"consilium: {sentence}", err=True)


def _details(error: BaseException) -> Path:
    with tempfile.NamedTemporaryFile("w", prefix="consilium-", suffix=".log", delete=False) as file:
        traceback.print_exception(error, file=file)
    return Path(file.name)


if __name__ == "__main__":
    main()
