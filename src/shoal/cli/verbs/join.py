"""`shoal join`: this machine as an agent of a standing coordinator."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import click

from shoal.cli.options import OutputOptions, with_output_options
from shoal.core.fleet.state import MAX_MEMBERS
from shoal.launch import launch_plan, settings_layers
from shoal.launch.api_client import open_client
from shoal.launch.coordinator_target import home


@click.command()
@click.argument("url")
@click.option("--token-file", envvar="SHOAL_TOKEN_FILE", required=True, help="File with the coordinator's token.")
@click.option("--name", help="Name of this machine in runs.  [default: its host name]")
@click.option(
    "--slots", type=click.IntRange(min=0, max=MAX_MEMBERS), help="Maximum number of members.  [default: no limit]"
)
@click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Change a setting; see shoal config.")
@with_output_options
def command(
    output: OutputOptions, url: str, token_file: str, name: str | None, slots: int | None, assignments: tuple[str, ...]
) -> None:
    """Offer this machine to a coordinator's runs.

    Stays in the foreground. Ctrl-C or SIGTERM counts as a preemption notice: the members here hand over their work and
    leave, and no step is lost.
    """
    settings = settings_layers.resolve(Path.cwd(), os.environ, assignments)
    client = open_client(url, token_file)
    health = client.check()
    client.agents()
    client.close()
    agent = name or socket.gethostname().partition(".")[0]
    directory = home() / "agents" / agent
    launch_plan.create_directory(directory, exist_ok=True)
    output.note(f"{agent} joins coordinator {health.coordinator} at {url}; logs in {directory}")
    argv = ["--url", url, "--token-file", token_file, "--name", agent, "--dir", str(directory)]
    argv += [*launch_plan.agent_options(settings), *(["--slots", str(slots)] if slots is not None else [])]
    # The agent replaces this process, so signals reach it directly.
    os.execv(sys.executable, [sys.executable, "-P", "-m", "shoal.agent", *argv])
