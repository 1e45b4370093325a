"""`shoal nodes`: the machines whose agents have joined."""

from __future__ import annotations

import click

from shoal.cli.options import OutputOptions, with_frame, with_place
from shoal.cli.output import table
from shoal.launch import run_lookup
from shoal.launch.coordinator_target import CoordinatorTarget
from shoal.wire.api import AgentView


@click.command()
@with_place
@with_frame
def command(frame: OutputOptions, place: CoordinatorTarget) -> None:
    """List the machines of the coordinators."""
    pairs = [
        (one.id, agent)
        for one in run_lookup.coordinators(place)
        if one.client is not None
        for agent in one.client.agents()
    ]
    frame.answer([{"coordinator": id, "agent": agent} for id, agent in pairs], lambda: _text(pairs))


def _text(pairs: list[tuple[str, AgentView]]) -> str:
    if not pairs:
        return "no machines: no coordinator is running here, or nobody has joined it"
    rows = [
        (
            agent.agent,
            agent.machine,
            "up" if agent.connected else f"silent for {table.span(agent.beat_age_s)}",
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
