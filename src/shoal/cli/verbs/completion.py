"""`shoal completion`: what a shell must source to complete verbs and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from shoal.cli.options import OutputOptions, with_frame
from shoal.errors import UsageError

LINES = {
    "bash": 'eval "$(shoal completion bash)"   # in ~/.bashrc',
    "zsh": 'eval "$(shoal completion zsh)"   # in ~/.zshrc',
    "fish": "shoal completion fish | source   # in ~/.config/fish/config.fish",
}


@click.command()
@click.argument("shell", type=click.Choice(list(LINES)), required=False)
@with_frame
def command(frame: OutputOptions, shell: str | None) -> None:
    """Print shell completion for bash, zsh or fish."""
    if shell is None:
        frame.answer(LINES, lambda: "\n".join(LINES.values()))
        return
    found = get_completion_class(shell)
    if found is None:
        raise UsageError(f"there is no completion for {shell}", do="use bash, zsh or fish")
    root = click.get_current_context().find_root()
    click.echo(found(root.command, {}, "shoal", "_SHOAL_COMPLETE").source())
