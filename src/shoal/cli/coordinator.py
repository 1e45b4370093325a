"""`shoal coordinator`: a coordinator that stands alone, for runs and machines to come."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from shoal.cli import launch as launching
from shoal.cli.frame import Frame, home, with_frame


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; TLS off loopback.")
@click.option("--port", default=29300, show_default=True, type=click.IntRange(0, 65535), help="0 for any.")
@click.option("--dir", "directory", type=click.Path(path_type=Path), help="Where it keeps everything.")
@with_frame
def command(frame: Frame, host: str, port: int, directory: Path | None) -> None:
    """Run a standing coordinator.

    Stays in the foreground, and prints its URL and token file. Submit to it with shoal run --url, add machines with
    shoal join. Started again on the same --dir it goes on where it was.
    """
    where = directory or launching.new_directory(home())
    fresh = not where.exists()
    if fresh:
        launching.make(where)
    argv = [sys.executable, "-P", "-m", "shoal.coordinator", "--dir", str(where), "--host", host, "--port", str(port)]
    os.execv(sys.executable, argv)
