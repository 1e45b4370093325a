"""`shoal coordinator`: a coordinator that stands alone, for runs and machines to come."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import click

from shoal.cli.options import OutputOptions, with_frame
from shoal.launch import launch_plan as launching
from shoal.launch import settings_layers
from shoal.launch.address import LOOPBACK
from shoal.launch.coordinator_target import home
from shoal.launch.run_lookup import read_text
from shoal.wire.pool_files import hiring_of, urls_of
from shoal.wire.pool_files import write as write_hires

READY_S = 60.0


@click.command()
@click.option("--host", help="Address to listen on, :: for all; TLS off loopback.  [default: 127.0.0.1]")
@click.option("--port", type=click.IntRange(0, 65535), help="0 for the one before, or any.  [default: 0]")
@click.option("--address", help="Addresses that machines elsewhere try first, with commas.")
@click.option("--dir", "directory", type=click.Path(path_type=Path), help="Where it keeps everything.")
@with_frame
def command(
    frame: OutputOptions, host: str | None, port: int | None, address: str | None, directory: Path | None
) -> None:
    """Run a standing coordinator.

    Stays in the foreground, and prints its URL and token file. Submit to it with shoal submit --url, add machines with
    shoal join, let it hire from the pools of shoal.toml with shoal run --on. Started again on the same --dir it goes
    on where it was, and whoever trained meanwhile finds it again.
    """
    given = {"host": ("--host", host), "port": ("--port", port), "address": ("--address", address)}
    options = {name: (option, value) for name, (option, value) in given.items() if value is not None}
    choices = settings_layers.choose(Path.cwd(), os.environ, (), options)
    where = directory.absolute() if directory is not None else launching.new_directory(home())
    hires = launching.hires_of(choices, before=hiring_of(where))
    fresh = not where.exists()
    launching.make(where, exist_ok=True)
    if hires.pools:
        write_hires(where, hires)
    from shoal.coordinator.__main__ import main

    threading.Thread(target=_announce, args=(frame, where), daemon=True).start()
    listening = ("--host", choices.text("host") or LOOPBACK, "--port", choices.text("port"))
    code = main(["--dir", str(where), *listening, "--address", choices.text("address")])
    if code and fresh and not (where / "url").exists():
        launching.unmake(where)
    click.get_current_context().exit(code)


def _announce(frame: OutputOptions, directory: Path) -> None:
    """Say where it is, once it is there."""
    deadline = time.monotonic() + READY_S
    while read_text(directory / "pid") != str(os.getpid()) or not read_text(directory / "url"):
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)
    url, token_file = ",".join(urls_of(directory)), str(directory / "token")
    facts = {"coordinator": directory.name, "url": url, "token_file": token_file, "directory": str(directory)}
    lines = [f"coordinator {directory.name} at {url}", f"token file  {token_file}"]
    more = f"--url {url} --token-file {token_file}"
    lines += [f"submit      shoal submit {more} SCRIPT", f"join        shoal join {url} --token-file {token_file}"]
    frame.answer(facts, lambda: "\n".join(lines))
