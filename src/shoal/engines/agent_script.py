"""Shell script that becomes an agent on a machine; pure.

Every engine but `local` sends this script. It makes the allocation's directory, runs the pool's `setup` lines and
replaces itself by the agent, so that the agent's process is the one that the engine started. Where the pool has an
`environment`, any Python from 3.7 on fetches Shoal first (`pack.remote.bootstrap`), which builds the environment and
becomes the agent inside it.
"""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Sequence

from shoal.engines.engine import AllocationRequest, EngineOptions
from shoal.pack.environments.recipe import PublishedEnvironment
from shoal.pack.remote import bootstrap

ALLOCATIONS, ENVIRONMENTS = "allocations", "environments"
# How long the directory of an ended allocation is kept: users may want to read its log, or files of its members.
KEEP_S = 24 * 3600.0
OLDEST_BOOTSTRAP_PYTHON = (3, 7)


def script(
    request: AllocationRequest,
    options: EngineOptions,
    *,
    python: str,
    token: str = "$home/token",
    before: Sequence[str] = (),
) -> str:
    """Return a POSIX shell script that replaces itself by the agent; `token` is the file that holds its token.

    In the script, `$home` is the allocation's directory on that machine, which only its owner can read.
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
        arguments = agent_arguments(request, token)
        lines.append(f'exec {quoted(python)} -P -m shoal.agent {arguments} >>"$home/agent.log" 2>&1')
    else:
        lines += _with_environment(request, request.environment, python, token)
    return "\n".join(lines) + "\n"


def home(tag: str, allocation: str, options: EngineOptions) -> str:
    """Return the directory of an allocation, as a shell word."""
    parent = quoted(options.directory) if options.directory else '"${SHOAL_HOME:-$HOME/.shoal}"'
    return f"{parent}/{ALLOCATIONS}/{tag}/{allocation}"


def agent_arguments(request: AllocationRequest, token: str) -> str:
    """Return the agent's command-line arguments as shell words; they name the token's file, never the token."""
    options = [*(("--slots", str(request.slots)) if request.slots is not None else ()), *request.options]
    name = shlex.quote(request.allocation)
    common = f'--url {shlex.quote(request.url)} --token-file "{token}" --name {name} --dir "$home"'
    return " ".join([common, *map(shlex.quote, options)])


def _with_environment(
    request: AllocationRequest, environment: PublishedEnvironment, python: str, token: str
) -> list[str]:
    """Return the lines that fetch Shoal with the machine's Python, build the environment and become the agent."""
    major, minor = OLDEST_BOOTSTRAP_PYTHON
    too_old = f"error[S442] Python on this machine is too old: need {major}.{minor} or newer, found "
    check = f"import sys; sys.version_info < ({major}, {minor}) and sys.exit('{too_old}' + sys.version.split()[0])"
    names = " ".join(map(shlex.quote, (environment.shoal, environment.recipe, request.allocation)))
    arguments = f'"${{home%/*/*/*}}/{ENVIRONMENTS}" {shlex.quote(request.url)} "{token}" {names}'
    return [
        'exec >>"$home/agent.log" 2>&1',
        f"{quoted(python)} -c {shlex.quote(check)}",
        """cat >"$home/first.py" <<'SHOAL'""",
        inspect.getsource(bootstrap).rstrip("\n"),
        "SHOAL",
        f'exec {quoted(python)} "$home/first.py" {arguments} {agent_arguments(request, token)}',
    ]


def quoted(path: str) -> str:
    """Return a path as a shell word; a leading ~ stays the home directory of the user who runs the script."""
    if path == "~" or path.startswith("~/"):
        return '"$HOME"' + (shlex.quote(path[1:]) if path != "~" else "")
    return shlex.quote(path)
