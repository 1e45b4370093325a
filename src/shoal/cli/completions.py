"""Completion of values in the shell: runs, settings, error codes and pools.

Each function is called by click while the user presses Tab. It must be quick and silent: no coordinator is asked, only
files are read, and any error means no suggestions. Runs come from the SQLite views of the newest coordinators, which
live coordinators keep up to date within a moment.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

BUDGET_S = 0.5
DIRECTORIES = 50

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def completion(suggest: Callable[[str], Iterable[tuple[str, str]]]) -> Complete:
    """Return a click completion from a function that yields values and their help for what was typed so far."""

    @functools.wraps(suggest)
    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        del ctx, param
        try:
            pairs = dict(suggest(incomplete))
        except Exception:  # noqa: BLE001 - whatever fails, there is nothing to suggest
            # An error message would end up in the middle of the command line that the user types.
            return []
        return [CompletionItem(value, help=help_) for value, help_ in pairs.items() if value.startswith(incomplete)]

    return complete


@completion
def runs(incomplete: str) -> Iterable[tuple[str, str]]:
    """Yield the ids and names of runs, newest first, for as long as the time allows."""
    del incomplete
    from shoal.launch.coordinator_target import home
    from shoal.store import sqlite_views

    deadline = time.monotonic() + BUDGET_S
    directories = sorted((home() / "coordinators").iterdir(), reverse=True)[:DIRECTORIES]
    for directory in directories:
        if time.monotonic() > deadline:
            return
        for view in _views(sqlite_views.runs, directory):
            yield view.run, view.status
            yield view.name, view.status


def _views(read: Callable[[Path], list[Any]], directory: Path) -> list[Any]:
    """Return the runs of one directory, none if it is damaged, so that the others are still suggested."""
    try:
        return read(directory)
    except Exception:  # noqa: BLE001 - any damage means no suggestions
        return []


@completion
def settings(incomplete: str) -> Iterable[tuple[str, str]]:
    """Yield NAME= for each setting, and the values of a setting that has a fixed set of them."""
    from shoal import settings as shoal_settings

    name = incomplete.partition("=")[0] if "=" in incomplete else ""
    for info in shoal_settings.declared():
        if not name:
            yield f"{info.name}=", info.help
        elif info.name == name and info.kind == "bool":
            yield from ((f"{name}={value}", "") for value in ("true", "false"))


@completion
def error_codes(incomplete: str) -> Iterable[tuple[str, str]]:
    """Yield the code and the name of each error."""
    del incomplete
    from shoal import errors

    return ((code, kind.__name__) for code, kind in errors.catalog().items())


@completion
def pools(incomplete: str) -> Iterable[tuple[str, str]]:
    """Yield the pools of shoal.toml, after those that the list already has."""
    from shoal.launch import settings_layers

    before = incomplete.rpartition(",")[0]
    file = settings_layers.find_file(Path.cwd())
    tables = settings_layers.read_pools(file) if file is not None else {}
    prefix = f"{before}," if before else ""
    chosen = before.split(",")
    return ((f"{prefix}{name}", str(pool.get("engine", ""))) for name, pool in tables.items() if name not in chosen)
