"""The shell script that becomes an agent on a machine; pure."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Sequence

from shoal.engines.engine import AllocationRequest, EngineOptions
from shoal.pack.environments.recipe import PublishedEnvironment
from shoal.pack.remote import bootstrap

ALLOCATIONS, ENVIRONMENTS = "allocations", "environments"
# How long what a hire left is kept, for whoever wants to read its log or what members wrote beside it.
KEEP_S = 24 * 3600.0
OLDEST_FIRST = (3, 7)


def script(
    request: AllocationRequest,
    options: EngineOptions,
    *,
    python: str,
    token: str = "$home/token",
    before: Sequence[str] = (),
) -> str:
    """POSIX shell that replaces itself by the agent. The token is to be in the file that `token` names.

    `$home` is the directory of the hire on that machine, which only its owner can read.
    """
    lines = [
        "set -e",
        "umask 077",
        f"home={home(request.tag, request.allocation, options)}",
        'mkdir -p "$home"',
        *before,
        *options.setup,
    ]
    if request.environment is None:
        lines.append(f'exec {quoted(python)} -P -m shoal.agent {given(request, token)} >>"$home/agent.log" 2>&1')
    else:
        lines += _with_environment(request, request.environment, python, token)
    return "\n".join(lines) + "\n"


def home(tag: str, hire: str, options: EngineOptions) -> str:
    """Where a hire keeps its things, as the shell there is to be told."""
    above = quoted(options.directory) if options.directory else '"${SHOAL_HOME:-$HOME/.shoal}"'
    return f"{above}/{ALLOCATIONS}/{tag}/{hire}"


def given(request: AllocationRequest, token: str) -> str:
    """The agent's options; they name the file of the token and never the token itself."""
    options = [*(("--slots", str(request.slots)) if request.slots is not None else ()), *request.options]
    name = shlex.quote(request.allocation)
    told = f'--url {shlex.quote(request.url)} --token-file "{token}" --name {name} --dir "$home"'
    return " ".join([told, *map(shlex.quote, options)])


def _with_environment(
    request: AllocationRequest, environment: PublishedEnvironment, python: str, token: str
) -> list[str]:
    """Any Python there fetches Shoal, which makes the environment and becomes the agent in it."""
    major, minor = OLDEST_FIRST
    too_old = f"error[S442] the Python of this machine is too old: needed is {major}.{minor}, it is "
    look = f"import sys; sys.version_info < ({major}, {minor}) and sys.exit('{too_old}' + sys.version.split()[0])"
    words = map(shlex.quote, (environment.shoal, environment.recipe, request.allocation))
    made = f'"${{home%/*/*/*}}/{ENVIRONMENTS}" {shlex.quote(request.url)} "{token}" {" ".join(words)}'
    return [
        'exec >>"$home/agent.log" 2>&1',
        f"{quoted(python)} -c {shlex.quote(look)}",
        """cat >"$home/first.py" <<'SHOAL'""",
        inspect.getsource(bootstrap).rstrip("\n"),
        "SHOAL",
        f'exec {quoted(python)} "$home/first.py" {made} {given(request, token)}',
    ]


def quoted(path: str) -> str:
    """A path for the shell; a leading ~ stays the home directory of whoever runs it."""
    if path == "~" or path.startswith("~/"):
        return '"$HOME"' + (shlex.quote(path[1:]) if path != "~" else "")
    return shlex.quote(path)
