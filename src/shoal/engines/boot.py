"""The shell script that becomes an agent on a machine; pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from shoal.engines.engine import Ask, Options

HIRES = "hires"
# How long what a hire left is kept, for whoever wants to read its log or what members wrote beside it.
KEEP_S = 24 * 3600.0


def script(ask: Ask, options: Options, *, python: str, token: str = "$home/token", before: Sequence[str] = ()) -> str:
    """POSIX shell that replaces itself by the agent. The token is to be in the file that `token` names.

    `$home` is the directory of the hire on that machine, which only its owner can read.
    """
    lines = [
        "set -e",
        "umask 077",
        f"home={home(ask.tag, ask.hire, options)}",
        'mkdir -p "$home"',
        *before,
        *options.setup,
        f'exec {command(ask, python, token)} >>"$home/agent.log" 2>&1',
    ]
    return "\n".join(lines) + "\n"


def home(tag: str, hire: str, options: Options) -> str:
    """Where a hire keeps its things, as the shell there is to be told."""
    above = quoted(options.directory) if options.directory else '"${SHOAL_HOME:-$HOME/.shoal}"'
    return f"{above}/{HIRES}/{tag}/{hire}"


def command(ask: Ask, python: str, token: str) -> str:
    """The agent's command line; it names the file of the token and never the token itself."""
    options = [*(("--slots", str(ask.slots)) if ask.slots is not None else ()), *ask.options]
    given = f'--url {shlex.quote(ask.url)} --token-file "{token}" --name {shlex.quote(ask.hire)} --dir "$home"'
    return " ".join([quoted(python), "-P", "-m", "shoal.agent", given, *map(shlex.quote, options)])


def quoted(path: str) -> str:
    """A path for the shell; a leading ~ stays the home directory of whoever runs it."""
    if path == "~" or path.startswith("~/"):
        return '"$HOME"' + (shlex.quote(path[1:]) if path != "~" else "")
    return shlex.quote(path)
