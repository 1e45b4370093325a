"""What every verb shares: `--json`, `-q`, `-v`, where the coordinators are, and how an error is shown."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import click
import msgspec

from shoal.errors import ShoalError
from shoal.launch.coordinator_target import CoordinatorTarget, home

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """How this command speaks."""

    json: bool = False
    quiet: bool = False
    verbose: int = 0

    def say(self, text: str) -> None:
        """A line for people; silent with -q and --json."""
        if not (self.quiet or self.json):
            click.echo(text)

    def answer(self, value: object, text: Callable[[], str]) -> None:
        """The answer of a verb: the value itself with --json, else its text."""
        click.echo(as_json(value) if self.json else text())


def as_json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def show_error(error: ShoalError, json: bool = False) -> None:
    """Say what went wrong, on standard error."""
    if json:
        fields = ("code", "what", "where", "why", "do")
        click.echo(as_json({name: getattr(error, name) for name in fields}), err=True)
    else:
        click.echo(str(error), err=True)


def with_frame(function: F) -> F:
    """Add --json, -q and -v to a verb or the group; the verb's own win over those given before it."""

    @click.option("--json", "as_json_", is_flag=True, help="Answer in JSON.")
    @click.option("-q", "--quiet", is_flag=True, help="Say only what was asked for.")
    @click.option("-v", "--verbose", count=True, help="Say more; errors with their Python traceback.")
    @click.pass_context
    @functools.wraps(function)
    def framed(ctx: click.Context, /, as_json_: bool, quiet: bool, verbose: int, **rest: Any) -> Any:
        outer = ctx.find_object(OutputOptions) or OutputOptions()
        frame = replace(
            outer, json=outer.json or as_json_, quiet=outer.quiet or quiet, verbose=max(outer.verbose, verbose)
        )
        ctx.obj = frame
        try:
            return function(frame, **rest)
        except ShoalError as error:
            show_error(error, frame.json)
            if frame.verbose:
                traceback.print_exception(error)
            ctx.exit(error.exit_code)

    return framed  # type: ignore[return-value]


def with_place(function: F) -> F:
    """Add --url and --token-file to a verb that talks to coordinators."""

    @click.option("--url", envvar="SHOAL_URL", default="", help="A coordinator's URL, instead of this machine's own.")
    @click.option("--token-file", envvar="SHOAL_TOKEN_FILE", default="", help="The file with that coordinator's token.")
    @functools.wraps(function)
    def placed(*args: Any, url: str, token_file: str, **rest: Any) -> Any:
        return function(*args, place=CoordinatorTarget(home(), url, token_file), **rest)

    return placed  # type: ignore[return-value]


def interactive() -> bool:
    """Whether a live panel makes sense here."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
