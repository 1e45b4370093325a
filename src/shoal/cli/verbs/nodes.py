"""`shoal nodes`: the machines whose agents have joined."""

from __future__ import annotations

import click

from shoal.cli.options import OutputOptions, with_output_options, with_target_options
from shoal.cli.output import table
from shoal.launch import run_lookup
from shoal.launch.coordinator_target import CoordinatorTarget
from shoal.wire.api import AgentView


@click.command()
@with_target_options
@with_output_options
def command(output: OutputOptions, target: CoordinatorTarget) -> None:
    """List the machines of the coordinators."""
    pairs = [
        (coordinator.id, agent)
        for coordinator in run_lookup.coordinators(target)
        if coordinator.client is not None
        for agent in coordinator.client.agents()
    ]
    output.result([{"coordinator": id, "agent": agent} for id, agent in pairs], lambda: _text(pairs))


def _text(pairs: list[tuple[str, AgentView]]) -> str:
    if not pairs:
        return "no machines: no coordinator is running, or no agent has joined it"
    rows = [
        (
            agent.agent,
            agent.machine,
            "up" if agent.connected else f"silent for {table.span(agent.heartbeat_age_s)}",
            str(agent.cores),
            table.size(agent.memory_bytes),
            ", ".join(agent.devices) or "-",
            f"{len(agent.members)}/{agent.slots if agent.slots is not None else '∞'}",
            f"{agent.load:.2f}",
            agent.notice or "-",
            agent.via.partition("://")[2] or "-",
            id,
        )
        for id, agent in pairs
    ]
    head = ("agent", "machine", "state", "cores", "memory", "devices", "members", "load", "notice", "via")
    return table.columns((*head, "coordinator"), rows)
