"""`shoal join`: lend this machine to a coordinator's runs."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import click

from shoal.cli.options import OutputOptions, with_frame
from shoal.launch import launch_plan as launching
from shoal.launch import settings_layers
from shoal.launch.api_client import open_client
from shoal.launch.coordinator_target import home


@click.command()
@click.argument("url")
@click.option("--token-file", envvar="SHOAL_TOKEN_FILE", required=True, help="The file with the coordinator's token.")
@click.option("--name", help="Name of this machine in runs.  [default: its host name]")
@click.option("--slots", type=click.IntRange(min=0), help="How many members it offers.  [default: as many as asked]")
@click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Set one setting; see shoal config.")
@with_frame
def command(
    frame: OutputOptions, url: str, token_file: str, name: str | None, slots: int | None, assignments: tuple[str, ...]
) -> None:
    """Lend this machine to a coordinator's runs.

    Stays in the foreground. Ctrl-C or SIGTERM is a notice: members hand over and go, and nothing is lost.
    """
    choices = settings_layers.choose(Path.cwd(), os.environ, assignments)
    client = open_client(url, token_file)
    health = client.check()
    client.agents()
    client.close()
    called = name or socket.gethostname().partition(".")[0]
    directory = home() / "agents" / called
    launching.make(directory, exist_ok=True)
    frame.say(f"{called} joins coordinator {health.coordinator} at {url}; logs in {directory}")
    argv = ["--url", url, "--token-file", token_file, "--name", called, "--dir", str(directory)]
    argv += [*launching.agent_options(choices), *(["--slots", str(slots)] if slots is not None else [])]
    # The agent takes the place of this process, so that a signal to it reaches the agent itself.
    os.execv(sys.executable, [sys.executable, "-P", "-m", "shoal.agent", *argv])
