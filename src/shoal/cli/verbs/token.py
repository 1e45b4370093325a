"""`shoal token`: tokens for the users of a standing coordinator."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

import click

from shoal.cli.options import OutputOptions, with_output_options
from shoal.errors import UsageError
from shoal.launch.launch_plan import create_directory
from shoal.wire import credentials
from shoal.wire.credentials import Credentials

FOLDER = "tokens"
NAME = r"[A-Za-z0-9_.-]{1,64}"


@click.command()
@click.argument("name")
@click.option("--dir", "directory", required=True, type=click.Path(path_type=Path), help="The coordinator's directory.")
@click.option("--revoke", is_flag=True, help="Revoke the token.")
@click.option("--renew", is_flag=True, help="Replace the token; the old one is no longer accepted.")
@with_output_options
def command(output: OutputOptions, name: str, directory: Path, revoke: bool, renew: bool) -> None:
    """Create or revoke a user's token for a standing coordinator.

    Prints the file to give to the user NAME, who can then submit runs, see all runs, and stop or scale their own.
    """
    if not re.fullmatch(NAME, name) or name.startswith("."):
        raise UsageError(f"invalid user name {name!r}", do="use letters, digits, _, . and -")
    if not (directory / "token").exists():
        raise UsageError(
            f"{directory} is not a coordinator's directory", do="use the directory given to shoal coordinator --dir"
        )
    path = directory / FOLDER / name
    if revoke and renew:
        raise UsageError("--revoke and --renew exclude each other", do="use one of them")
    if revoke:
        if not path.exists():
            raise UsageError(f"{name} has no token", where=str(directory))
        path.unlink()
        output.result({"user": name, "revoked": True}, lambda: f"revoked the token of {name}")
        return
    if path.exists() and not renew:
        raise UsageError(
            f"{name} already has a token",
            where=str(path),
            why="a new one would lock out everyone who uses the old one",
            do="hand out that file, or add --renew to replace the token",
        )
    create_directory(path.parent, exist_ok=True)
    own = credentials.read(directory / "token")
    credentials.write(path, Credentials(secrets.token_urlsafe(32), own.certificate_pem))
    output.result({"user": name, "token_file": str(path)}, lambda: f"token file  {path}")
