"""`shoal completion`: the code that a shell must source to complete verbs, options and values."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from shoal.cli.options import OutputOptions, with_output_options
from shoal.errors import UsageError

LINES = {
    "bash": 'eval "$(shoal completion bash)"   # in ~/.bashrc',
    "zsh": 'eval "$(shoal completion zsh)"   # in ~/.zshrc',
    "fish": "shoal completion fish | source   # in ~/.config/fish/config.fish",
}


@click.command()
@click.argument("shell", type=click.Choice(list(LINES)), required=False)
@with_output_options
def command(output: OutputOptions, shell: str | None) -> None:
    """Print shell completion for bash, zsh or fish.

    Without SHELL, print the line to add to the configuration of each shell.
    """
    if shell is None:
        output.result(LINES, lambda: "\n".join(LINES.values()))
        return
    completion = get_completion_class(shell)
    if completion is None:
        raise UsageError(f"no completion for {shell}", do="use bash, zsh or fish")
    root = click.get_current_context().find_root()
    click.echo(completion(root.command, {}, "shoal", "_SHOAL_COMPLETE").source())
