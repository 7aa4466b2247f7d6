"""The `consilium` command: parse, call, print. Nothing here imports torch before a command needs it."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from pathlib import Path

import typer

from consilium import __version__
from consilium.cli import data, look, train, use
from consilium.errors import UserError, WorkError

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


for module in (train, look, data, use):
    module.add_to(app)


def main(arguments: list[str] | None = None) -> None:
    """Run a command; exit status 0 on success, 2 on a user's mistake, 1 on a failure in the work."""
    try:
        app(arguments)  # ends the process itself, with status 2 for a wrong option
        status = 0
    except KeyboardInterrupt:
        _say("stopped. What was committed is saved; `consilium resume RUN` goes on.")
        status = 130
    except UserError as error:
        _say(str(error))
        status = 2
    except WorkError as error:
        _say(str(error))
        status = 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        status = 1
    except Exception as error:
        if os.environ.get("CONSILIUM_DEBUG"):
            raise
        _say(f"consilium failed: {type(error).__name__}: {error} (details in {_details()}; please report it)")
        status = 1
    sys.exit(status)


def _say(sentence: str) -> None:
    typer.echo(f"consilium: {sentence}", err=True)


def _details() -> Path:
    with tempfile.NamedTemporaryFile("w", prefix="consilium-", suffix=".log", delete=False) as file:
        traceback.print_exc(file=file)
    return Path(file.name)


if __name__ == "__main__":
    main()
