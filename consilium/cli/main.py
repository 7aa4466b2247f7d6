"""The `consilium` command: parse, call, print. Nothing here imports torch before a command needs it."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import traceback
from pathlib import Path

import typer

from consilium import __version__
from consilium.cli import analysis, data, exports, federation, look, suites, train, use
from consilium.errors import UserError, WorkError


class Stopped(BaseException):
    """Ctrl-C; not a KeyboardInterrupt, which typer would answer without a word."""


app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Train and use models together with hospitals whose data differ, without moving the data.\n\n"
    "New here? [bold]consilium demo[/bold] trains six synthetic hospitals in a few minutes and writes a report.",
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"consilium {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Say the version."),
) -> None:
    pass


for module in (train, suites, federation, look, analysis, data, use, exports):
    module.add_to(app)


def main(arguments: list[str] | None = None) -> None:
    """Run a command; exit status 0 on success, 2 on a user's mistake, 1 on a failure in the work."""
    interrupt = _Interrupt()
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        app(arguments, prog_name="consilium")  # ends the process itself, with status 2 for a wrong option
        status = 0
    except (Stopped, Exception) as error:
        status = _ending(error, interrupt.seen)
    finally:
        signal.signal(signal.SIGINT, before)
    sys.exit(status)


class _Interrupt:
    """Ends the command at Ctrl-C, and remembers it: a library may turn the exception into one of its own."""

    seen = False

    def __call__(self, *_: object) -> None:
        self.seen = True
        raise Stopped


def _ending(error: BaseException, stopped: bool) -> int:
    """Say why the command ends, and with which status."""
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
    _say(f"consilium failed: {type(error).__name__}: {error} (details in {_details(error)}; please report it)")
    return 1


def _say(sentence: str) -> None:
    typer.echo(f"consilium: {sentence}", err=True)


def _details(error: BaseException) -> Path:
    with tempfile.NamedTemporaryFile("w", prefix="consilium-", suffix=".log", delete=False) as file:
        traceback.print_exception(error, file=file)
    return Path(file.name)


if __name__ == "__main__":
    main()
