"""`shoal`: finds the verb, loads only its file, and turns errors into messages and exit codes."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from shoal import __version__, exit_codes
from shoal.cli.options import OutputOptions, show_error, with_frame
from shoal.errors import UsageError

VERBS = {
    "run": "Train a script, and keep it training whoever dies.",
    "submit": "Hand a run to a standing coordinator, and leave it there.",
    "resume": "Go on with a run that was stopped or lost all its members.",
    "ps": "List runs.",
    "status": "Show a run and its members.",
    "fetch": "Bring what a run has saved.",
    "logs": "Print what the members of a run print.",
    "why": "Tell what happened to a run or a member, and why.",
    "stop": "Stop a run after a checkpoint.",
    "scale": "Change how many members a run may have.",
    "join": "Lend this machine to a coordinator's runs.",
    "coordinator": "Run a standing coordinator.",
    "token": "Make or revoke the token of a user of a standing coordinator.",
    "nodes": "List the machines of the coordinators.",
    "pools": "List pools of machines.",
    "cost": "Show what the machines of runs have cost.",
    "doctor": "Look for what could go wrong, on this machine or on those of pools.",
    "config": "Print every setting with its value and source.",
    "explain": "Explain an error code.",
    "completion": "Print shell completion for bash, zsh or fish.",
}


class Verbs(click.Group):
    """A group that knows its verbs' summaries, and imports a verb only when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in VERBS:
            return None
        command: click.Command = importlib.import_module(f"shoal.cli.verbs.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[Any, Any, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], VERBS, n=1)
            hint = f"did you mean {near[0]}?" if near else "shoal --help lists them"
            raise click.UsageError(f"there is no verb {args[0]!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="shoal")
@with_frame
def shoal(frame: OutputOptions) -> None:
    """Train one model on many cheap, unequal, short-lived machines as if they were one dependable machine."""
    del frame


def main() -> None:
    """Run the command line and exit with the design's codes."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """The exit code of one command line."""
    try:
        code = shoal.main(arguments, prog_name="shoal", standalone_mode=False)
    except click.exceptions.Abort:
        return exit_codes.INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return exit_codes.BAD_USAGE
    except click.ClickException as error:
        show_error(_from_click(error), "--json" in arguments)
        return error.exit_code
    except BrokenPipeError:
        # The reader of our output went away (`shoal logs | head`); the interpreter must not flush into it again.
        sys.stdout = None
        return exit_codes.BROKEN_PIPE
    return code if isinstance(code, int) else exit_codes.OK


def _from_click(error: click.ClickException) -> UsageError:
    context = getattr(error, "ctx", None)
    do = f"{context.command_path} --help" if context is not None else "shoal --help"
    return UsageError(error.format_message(), do=do)


if __name__ == "__main__":
    main()
