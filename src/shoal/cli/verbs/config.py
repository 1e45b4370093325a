"""`shoal config`: every setting with its value and source."""

from __future__ import annotations

import os
from pathlib import Path

import click

from shoal.cli.options import OutputOptions, with_frame
from shoal.cli.output import table
from shoal.launch import settings_layers


@click.command()
@click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Try a value.")
@with_frame
def command(frame: OutputOptions, assignments: tuple[str, ...]) -> None:
    """Print every setting with its value and source.

    Later sources win: defaults, shoal.toml (or [tool.shoal] of pyproject.toml, from here upwards), environment
    variables (SHOAL_LEASE_S, SHOAL_CHECKPOINT_KEEP, …), --set, options.
    """
    choices = settings_layers.choose(Path.cwd(), os.environ, assignments)
    found = {
        name: {"value": one.value, "source": one.source, "type": one.key.kind, "help": one.key.help}
        for name, one in choices.found.items()
    }

    def text() -> str:
        rows = [(name, _shown(one.value), one.source, one.key.help) for name, one in choices.found.items()]
        return table.columns(("setting", "value", "source", "meaning"), rows)

    frame.answer(found, text)


def _shown(value: object) -> str:
    return "true" if value is True else "false" if value is False else str(value) if value != "" else '""'
