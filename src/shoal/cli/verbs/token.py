"""`shoal token`: who else may submit runs to a standing coordinator."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

import click

from shoal.cli.options import OutputOptions, with_frame
from shoal.errors import UsageError
from shoal.launch import launch_plan as launching
from shoal.wire import credentials
from shoal.wire.credentials import Credentials

FOLDER = "tokens"
NAME = r"[A-Za-z0-9_.-]{1,64}"


@click.command()
@click.argument("name")
@click.option("--dir", "directory", required=True, type=click.Path(path_type=Path), help="The coordinator's directory.")
@click.option("--revoke", is_flag=True, help="Take the token back.")
@click.option("--renew", is_flag=True, help="Make another in its place; the one before is not accepted any more.")
@with_frame
def command(frame: OutputOptions, name: str, directory: Path, revoke: bool, renew: bool) -> None:
    """Make or revoke the token of a user of a standing coordinator.

    Prints the file to give to NAME. With it NAME submits runs, sees all runs, and stops or scales its own.
    """
    if not re.fullmatch(NAME, name) or name.startswith("."):
        raise UsageError(f"a user cannot be called {name!r}", do="use letters, digits, _, . and -")
    if not (directory / "token").exists():
        raise UsageError(
            f"{directory} is no directory of a coordinator", do="shoal coordinator --dir prints and keeps it"
        )
    path = directory / FOLDER / name
    if revoke and renew:
        raise UsageError("--revoke and --renew cannot be had together", do="use one of them")
    if revoke:
        if not path.exists():
            raise UsageError(f"{name} has no token here", where=str(directory))
        path.unlink()
        frame.answer({"user": name, "revoked": True}, lambda: f"{name} may not submit any more")
        return
    if path.exists() and not renew:
        raise UsageError(
            f"{name} has a token already",
            where=str(path),
            why="another would shut out whoever uses this one",
            do="give that file to them, or add --renew for another in its place",
        )
    launching.make(path.parent, exist_ok=True)
    own = credentials.read(directory / "token")
    credentials.write(path, Credentials(secrets.token_urlsafe(32), own.certificate_pem))
    frame.answer({"user": name, "token_file": str(path)}, lambda: f"token file  {path}")
