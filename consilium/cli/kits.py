"""Commands of whoever runs the consortium: kits for all participants, and later for one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from consilium.errors import StudyError
from consilium.federation import require_flare


class KitsGroup(TyperGroup):
    """`kits FILE.toml` is short for `kits make FILE.toml`, and older."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["make", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=KitsGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Make the participants' kits: `kits FILE.toml` all of them, once; then add, renew or revoke one.",
)

ProjectFile = Annotated[Path, typer.Argument(help="The project file.", metavar="FILE.toml")]
Name = Annotated[str, typer.Argument(help="The participant's name.", metavar="NAME")]
Kits = Annotated[Path, typer.Option(help="The folder of the kits and the authority.", metavar="DIR")]
HERE = Path("kits")


@app.command()
def make(
    project: ProjectFile,
    to: Annotated[Path, typer.Option(help="A new folder for the kits.", metavar="DIR")] = HERE,
) -> None:
    """Make one start-up kit per participant, each with its own certificate."""
    from consilium.federation.project import read_project

    require_flare()
    from consilium.federation.kits import make_kits

    for kit in make_kits(read_project(project), to).values():
        typer.echo(str(kit))
    typer.echo(f"send each to its owner over a trusted channel, and keep {to / 'authority'} offline.", err=True)


@app.command()
def add(
    project: ProjectFile,
    name: Name,
    to: Kits = HERE,
    admin: Annotated[str, typer.Option(help="An administrator who may submit or watch.", metavar="ROLE")] = "",
) -> None:
    """Make the kit of a new site, or with --admin of a new administrator; all other kits stay as they are."""
    require_flare()
    from consilium.federation.kits import add_kit
    from consilium.federation.project import ROLES

    if admin and admin not in ROLES:
        raise StudyError(f"--admin {admin}: write {' or '.join(ROLES)}.")
    typer.echo(str(add_kit(project, name, admin or "site", to)))


@app.command()
def renew(project: ProjectFile, name: Name, to: Kits = HERE) -> None:
    """Make a new certificate and key for one participant, in its kit or in a new one.

    The old certificate stays valid to its end, unless it is revoked before.
    """
    require_flare()
    from consilium.federation.kits import renew_kit

    path = renew_kit(project, name, to)
    typer.echo(f"its owner copies the whole folder {path / 'startup'} over the one in its kit.", err=True)
    typer.echo(str(path))


@app.command()
def revoke(project: ProjectFile, name: Name, to: Kits = HERE) -> None:
    """Revoke every certificate that one participant has so far, and print the path of the authority's new list.

    The server reads the list from its kit, without a restart.
    """
    require_flare()
    from consilium.federation.kits import revoke_kit

    path = revoke_kit(project, name, to)
    typer.echo(f"copy {path} into the server's kit; for an administrator also into every site's.", err=True)
    typer.echo(str(path))


@app.command("list")
def list_(project: ProjectFile, to: Kits = HERE) -> None:
    """Print every participant, what it is, and until when its certificate is valid."""
    require_flare()
    from consilium.federation.kits import describe_kits

    for line in describe_kits(project, to):
        typer.echo(line)
