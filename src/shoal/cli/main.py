"""The command `shoal`: loads the module of one verb, and turns errors into messages and exit codes."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import click

from shoal import __version__, exit_codes
from shoal.cli.options import OutputOptions, show_error, with_output_options
from shoal.errors import ShoalError, UsageError

VERBS = {
    "run": "Run a training script; keep it running when members fail.",
    "submit": "Submit a run to a standing coordinator and return.",
    "resume": "Continue a run from its newest checkpoint.",
    "ps": "List runs.",
    "status": "Show a run and its members.",
    "attach": "Follow a run until it ends.",
    "fetch": "Download the files that a run has saved.",
    "logs": "Print the output of a run's members.",
    "why": "Show what happened to a run or a member, and why.",
    "stop": "Stop a run after a checkpoint.",
    "rm": "Remove ended runs with all their files.",
    "prune": "Remove all ended runs of a certain age.",
    "scale": "Change the number of members or the budget of a run.",
    "join": "Offer this machine to a coordinator's runs.",
    "coordinator": "Start a standing coordinator.",
    "token": "Create or revoke a user's token for a standing coordinator.",
    "nodes": "List the machines of the coordinators.",
    "pools": "List pools of machines.",
    "cost": "Show the cost of the machines of runs.",
    "doctor": "Check this machine, or the machines of pools, for problems.",
    "config": "Print the settings: those in force here, or those of a run.",
    "explain": "Explain an error code.",
    "completion": "Print shell completion for bash, zsh or fish.",
}


class Verbs(click.Group):
    """A click group that knows the verbs' summaries and imports a verb only when it is used."""

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
            hint = f"did you mean {near[0]}?" if near else "shoal --help lists the verbs"
            raise click.UsageError(f"unknown verb {args[0]!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="shoal")
@with_output_options
def shoal(output: OutputOptions) -> None:
    """Train one PyTorch or Keras model on many machines that are cheap, differ in speed, and may disappear."""
    del output


def main() -> None:
    """Run the command line and exit with its code."""
    _open_standard_streams()
    sys.exit(run(sys.argv[1:]))


def _open_standard_streams() -> None:
    """Give each standard stream that the caller has closed to /dev/null, so that everything can read and print."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # The lowest free number is taken, which is this one: those below are open by now.
            descriptor = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(descriptor, "w" if number else "r", closefd=False))


def run(arguments: list[str]) -> int:
    """Run one command line; return its exit code."""
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
    except ShoalError as error:  # before the verb itself, such as by its options
        show_error(error, "--json" in arguments)
        return error.exit_code
    except FileNotFoundError:
        if _has_working_directory():
            raise
        why, do = "it was deleted or moved while this shell was in it", "cd to a directory that exists"
        show_error(UsageError("the working directory does not exist", why=why, do=do), "--json" in arguments)
        return exit_codes.BAD_USAGE
    except BrokenPipeError:
        # The reader is gone (`shoal logs | head`), so the interpreter must not flush into the pipe at exit.
        sys.stdout = None
        return exit_codes.BROKEN_PIPE
    return code if isinstance(code, int) else exit_codes.OK


def _has_working_directory() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _from_click(error: click.ClickException) -> UsageError:
    context = getattr(error, "ctx", None)
    do = f"{context.command_path} --help" if context is not None else "shoal --help"
    return UsageError(error.format_message(), do=do)


if __name__ == "__main__":
    main()
