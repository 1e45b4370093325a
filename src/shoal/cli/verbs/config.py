"""`shoal config`: all settings with their values and sources, or the settings of a run."""

from __future__ import annotations

import os
from pathlib import Path

import click

from shoal import settings as shoal_settings
from shoal.cli import completions
from shoal.cli.options import OutputOptions, with_output_options, with_target_options
from shoal.cli.output import table
from shoal.errors import UsageError
from shoal.launch import run_lookup, settings_layers
from shoal.launch.coordinator_target import CoordinatorTarget
from shoal.wire.api import RunView


@click.command()
@click.argument("run", shell_complete=completions.runs, required=False)
@click.option(
    "--set", "assignments", multiple=True, shell_complete=completions.settings, metavar="KEY=VALUE", help="Try a value."
)
@with_target_options
@with_output_options
def command(output: OutputOptions, target: CoordinatorTarget, run: str | None, assignments: tuple[str, ...]) -> None:
    """Print the settings: those in force here, or those of a run.

    Without RUN, each setting is shown with its source. Later sources win: defaults, shoal.toml (or [tool.shoal] of
    pyproject.toml, in this directory or above), environment variables (SHOAL_LEASE_S, SHOAL_CHECKPOINT_KEEP, …), --set,
    options. With RUN, active or ended, each setting is shown with the value that the run was started with, and its
    default.
    """
    if run is None:
        settings = settings_layers.resolve(Path.cwd(), os.environ, assignments)
        output.result(_facts(settings), lambda: _text(settings))
        return
    if assignments:
        raise UsageError("--set cannot change the settings of a run", do="leave out RUN to try a value")
    view = run_lookup.find_run(target, run)[1]
    output.result(view.settings, lambda: run_text(view))


def _facts(settings: settings_layers.ResolvedSettings) -> dict[str, dict[str, object]]:
    return {
        name: {"value": setting.value, "source": setting.source, "type": setting.info.kind, "help": setting.info.help}
        for name, setting in settings.values.items()
    }


def _text(settings: settings_layers.ResolvedSettings) -> str:
    rows = [
        (name, _shown(setting.value), setting.source, setting.info.help) for name, setting in settings.values.items()
    ]
    return table.columns(("setting", "value", "source", "meaning"), rows)


def run_text(view: RunView) -> str:
    """Return the settings that a run was started with, as a table."""
    infos = {info.name: info for info in shoal_settings.declared()}
    rows = []
    for name, value in sorted(view.settings.items()):
        info = infos.get(name)
        if info is None:
            rows.append((name, _shown(value), "-", "unknown to this version of Shoal"))
        else:
            rows.append((name, _shown(value), "same" if value == info.default else _shown(info.default), info.help))
    return table.columns(("setting", "value", "default", "meaning"), rows)


def _shown(value: object) -> str:
    return "true" if value is True else "false" if value is False else str(value) if value != "" else '""'
