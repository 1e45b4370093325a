"""`shoal coordinator`: a standing coordinator, to which runs are submitted and machines join."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import click

from shoal.cli.options import OutputOptions, with_output_options
from shoal.launch import launch_plan, settings_layers
from shoal.launch.coordinator_target import home
from shoal.launch.run_lookup import read_text
from shoal.wire import pool_files

READY_TIMEOUT_S = 60.0


@click.command()
@click.option("--host", help="Address to listen on, :: for all; TLS unless loopback.  [default: 127.0.0.1]")
@click.option("--port", type=click.IntRange(0, 65535), help="Port, 0 for the previous one or any.  [default: 0]")
@click.option("--address", help="Addresses that other machines try first, separated by commas.")
@click.option("--dir", "directory", type=click.Path(path_type=Path), help="Directory for everything that it keeps.")
@with_output_options
def command(
    output: OutputOptions, host: str | None, port: int | None, address: str | None, directory: Path | None
) -> None:
    """Start a standing coordinator.

    Stays in the foreground and prints its URL and token file. Submit runs with shoal submit --url, add machines with
    shoal join; runs submitted with --on take machines from the pools of shoal.toml. Restarted with the same --dir, it
    continues where it was, and members that trained meanwhile reconnect.
    """
    given = {"host": ("--host", host), "port": ("--port", port), "address": ("--address", address)}
    options = {name: (option, value) for name, (option, value) in given.items() if value is not None}
    settings = settings_layers.resolve(Path.cwd(), os.environ, (), options)
    where = directory.absolute() if directory is not None else launch_plan.new_coordinator_directory(home())
    pools = launch_plan.coordinator_pools(settings, former=pool_files.read_pools(where))
    is_new = not where.exists()
    launch_plan.create_directory(where, exist_ok=True)
    if pools.pools:
        pool_files.write_pools(where, pools)
    from shoal.coordinator.__main__ import main

    threading.Thread(target=_announce, args=(output, where), daemon=True).start()
    listening = ("--host", settings.text("host") or launch_plan.LOOPBACK, "--port", settings.text("port"))
    code = main(["--dir", str(where), *listening, "--address", settings.text("address")])
    if code and is_new and not (where / "url").exists():
        launch_plan.remove_directory(where)
    click.get_current_context().exit(code)


def _announce(output: OutputOptions, directory: Path) -> None:
    """Print the URL and the token file as soon as the coordinator listens."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while read_text(directory / "pid") != str(os.getpid()) or not read_text(directory / "url"):
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)
    url, token_file = ",".join(pool_files.read_urls(directory)), str(directory / "token")
    facts = {"coordinator": directory.name, "url": url, "token_file": token_file, "directory": str(directory)}
    lines = [f"coordinator {directory.name} at {url}", f"token file  {token_file}"]
    options = f"--url {url} --token-file {token_file}"
    lines += [f"submit      shoal submit {options} SCRIPT", f"join        shoal join {url} --token-file {token_file}"]
    output.result(facts, lambda: "\n".join(lines))
