"""Commands that follow runs: watch, runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from consilium.cli import completing
from consilium.cli.train import Json

if TYPE_CHECKING:
    from consilium.watching.sources import StatusSource

Host = Annotated[str, typer.Option(help="The address to listen on; another than this machine's own needs --token.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")]
Token = Annotated[
    str, typer.Option(help="What a reader must know: ?token=… or an Authorization header.", envvar="CONSILIUM_TOKEN")
]


def watch(
    run: Annotated[Path, typer.Argument(help="A run folder.", metavar="RUN", autocompletion=completing.runs)],
    host: Host = "127.0.0.1",
    port: Port = 0,
    token: Token = "",
) -> None:
    """Serve one page about a run while it is under way: rounds, curves, sites, who was rejected and why.

    The page only reads. The same figures are at /status.json and, for Prometheus, at /metrics. Ctrl-C ends it.
    Example: consilium watch runs/retina-fedsm-s0-1a2b3c4d
    """
    from consilium.watching.sources import RunSource

    serve(RunSource(run), host, port, token)


def serve(source: StatusSource, host: str, port: int, token: str) -> None:
    """Serve a page until Ctrl-C."""
    from consilium.watching.server import WatchServer

    with WatchServer(source, host, port, token) as server:
        typer.echo(server.url)
        server.serve_forever()


@contextmanager
def beside(run: Path) -> Iterator[str]:
    """Serve the page of a run that this process makes; gives its address."""
    import threading

    from consilium.watching.server import WatchServer
    from consilium.watching.sources import RunSource

    with WatchServer(RunSource(run), "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, name="page", daemon=True).start()
        try:
            yield server.url
        finally:
            server.shutdown()


def runs(
    place: Annotated[Path, typer.Argument(help="The folder that holds run folders.", metavar="DIR")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """List the run folders, also one folder further down: state, round, validation score, age.

    Example: consilium runs runs
    """
    from consilium.watching.listing import as_table, list_runs

    found = list_runs(place)
    if as_json:
        typer.echo(json.dumps({"runs": [line.to_json() for line in found]}, allow_nan=False))
        return
    for text in as_table(found):
        typer.echo(text)


def add_to(app: typer.Typer) -> None:
    for command in (watch, runs):
        app.command(rich_help_panel="Look")(command)
