"""Options that verbs share (`--json`, `-q`, `-v`, `--url`, `--token-file`), and how results and errors are shown."""

from __future__ import annotations

import functools
import os
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import click
import msgspec

from shoal.cli.output import table
from shoal.errors import ShoalError, UsageError
from shoal.launch.coordinator_target import CoordinatorTarget, home

F = TypeVar("F", bound=Callable[..., Any])
DURATION_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """The output format of a command."""

    json: bool = False
    quiet: bool = False
    verbose: int = 0

    def note(self, text: str) -> None:
        """Print a line about progress; nothing with -q or --json."""
        if not (self.quiet or self.json):
            click.echo(table.printable(text))

    def result(self, value: object, text: Callable[[], str]) -> None:
        """Print the result of a verb: `value` with --json, otherwise `text()`."""
        click.echo(as_json(value) if self.json else table.printable(text()))


def as_json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def show_error(error: ShoalError, json: bool = False) -> None:
    """Print an error to standard error, as text or as JSON."""
    if json:
        fields = ("code", "what", "where", "why", "do")
        click.echo(as_json({name: getattr(error, name) for name in fields}), err=True)
    else:
        click.echo(table.printable(str(error)), err=True)


def with_output_options(function: F) -> F:
    """Add --json, -q and -v to a verb or the group; the verb's own win over those given before it.

    A ShoalError is shown and becomes the exit code.
    """

    @click.option("--json", "as_json_", is_flag=True, help="Print JSON.")
    @click.option("-q", "--quiet", is_flag=True, help="Print only the result.")
    @click.option("-v", "--verbose", count=True, help="Print Python tracebacks of errors.")
    @click.pass_context
    @functools.wraps(function)
    def wrapped(ctx: click.Context, /, as_json_: bool, quiet: bool, verbose: int, **rest: Any) -> Any:
        outer = ctx.find_object(OutputOptions) or OutputOptions()
        output = replace(
            outer, json=outer.json or as_json_, quiet=outer.quiet or quiet, verbose=max(outer.verbose, verbose)
        )
        ctx.obj = output
        try:
            return function(output, **rest)
        except ShoalError as error:
            show_error(error, output.json)
            if output.verbose:
                traceback.print_exception(error)
            ctx.exit(error.exit_code)

    return wrapped  # type: ignore[return-value]


def with_target_options(function: F) -> F:
    """Add --url and --token-file to a verb that talks to coordinators."""

    @click.option("--url", envvar="SHOAL_URL", default="", help="URL of a standing coordinator.")
    @click.option("--token-file", envvar="SHOAL_TOKEN_FILE", default="", help="File with that coordinator's token.")
    @functools.wraps(function)
    def wrapped(*args: Any, url: str, token_file: str, **rest: Any) -> Any:
        return function(*args, target=CoordinatorTarget(home(), url, token_file), **rest)

    return wrapped  # type: ignore[return-value]


def parse_duration(text: str, option: str) -> float:
    """Return a time span such as 45s, 10m, 12h or 7d in seconds; `option` is where it was given."""
    number, unit = text[:-1], text[-1:]
    if unit not in DURATION_UNITS or not re.fullmatch(r"\d+(\.\d+)?", number):
        raise UsageError(
            f"{option} {text} is not a time span", do="write a number with s, m, h or d, such as 10m or 7d"
        )
    return float(number) * DURATION_UNITS[unit]


def interactive() -> bool:
    """Return whether standard output is a terminal that can show a live panel."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
