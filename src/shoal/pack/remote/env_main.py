"""What makes the environment of an agent on its machine, and then becomes the agent.

It comes in Shoal's wheel and runs before anything is installed: it and what it imports need Linux, Python 3.7 and the
standard library.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import select
import signal
import sys
import tempfile
import time

from shoal.errors import (
    ArchiveDamaged,
    EnvironmentNotBuilt,
    EnvironmentNotFetched,
    EnvironmentUnusable,
    RemoteCacheUnwritable,
    RemoteDiskFull,
    ShoalError,
)
from shoal.pack.remote.env_builders import EnvironmentBuilder
from shoal.pack.remote.env_cache import EnvironmentCache, node

TYPE_CHECKING = False
if TYPE_CHECKING:
    from shoal.pack.remote.bootstrap import BootstrapClient

SAY_S = 30.0
TELL_S = 5.0
FAILED, STOPPED = 4, 128 + signal.SIGTERM
# What is wrong with the environment itself, wherever it is made.
FINAL = (ArchiveDamaged, EnvironmentNotBuilt, EnvironmentUnusable)


class SetupCancelled(BaseException):
    """The hire was cancelled; whatever is half made goes."""


def main(coordinator: BootstrapClient, argv: list[str]) -> int:
    """Make the environment or find it, and become the agent; an exit code if there is none."""
    root, _, _, _, recipe, hire, *agent = argv
    line = SetupReporter(coordinator, hire, _lifeline(agent))
    signal.signal(signal.SIGTERM, _stop)
    try:
        python, env = _ready(coordinator, line, os.path.abspath(root), recipe)
        os.execve(python, [python, "-P", "-m", "shoal.agent", *agent], env)
    except SetupCancelled:
        return STOPPED
    except ShoalError as error:
        return line.refuse(error)
    except coordinator.lost as lost:
        do = "see that this machine reaches the coordinator"
        what = f"what the environment is made of could not be fetched by {node()}"
        return line.refuse(EnvironmentNotFetched(what, why=str(lost), do=do))
    except OSError as error:
        return line.refuse(of_disk(error))


def _ready(coordinator: BootstrapClient, line: SetupReporter, root: str, digest: str) -> tuple[str, dict[str, str]]:
    cache = EnvironmentCache(root, line.doing)
    with tempfile.TemporaryDirectory(dir=root) as folder:
        path = os.path.join(folder, "recipe")
        coordinator.get(digest, path)
        with open(path) as file:
            recipe = json.load(file)
    return EnvironmentBuilder(coordinator, cache, recipe).ready()


def of_disk(error: OSError) -> ShoalError:
    """What a disk that cannot be written means."""
    why = f"{error.strerror or error}: {error.filename or 'the cache of environments'}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        do = "make room there, or give the pool a directory on a larger disk"
        return RemoteDiskFull(f"no space is left on {node()} for the environment", why=why, do=do)
    do = "give the pool a directory that can be written"
    return RemoteCacheUnwritable(f"environments cannot be kept on {node()}", why=why, do=do)


class SetupReporter:
    """What the coordinator hears of it: what is being done, now and then, and why it failed."""

    def __init__(self, coordinator: BootstrapClient, hire: str, lifeline: int | None) -> None:
        self._coordinator, self._hire, self._lifeline = coordinator, hire, lifeline
        self._next, self._said = 0.0, ""

    def doing(self, what: str) -> None:
        """To be called all the time: says what is done if it is news, or was not said for long; ends what is over."""
        if self._lifeline is not None and select.select([self._lifeline], [], [], 0)[0]:
            raise SetupCancelled
        now = time.monotonic()
        if what != self._said or now >= self._next:
            if what != self._said:
                _print(what)
            self._said, self._next = what, now + SAY_S
            self._tell(why=what)

    def refuse(self, error: ShoalError) -> int:
        _print(str(error))
        self._tell(
            why=f"{error.what}: {error.why}",
            failed=True,
            where=error.where,
            do=f"{error.do} (shoal explain {error.code})",
            final=isinstance(error, FINAL),
        )
        return FAILED

    def _tell(self, **word: object) -> None:
        # If nobody hears it, it is in the log, and the engine sees how this ends.
        with contextlib.suppress(OSError, http.client.HTTPException):
            self._coordinator.tell(f"/v1/allocations/{self._hire}", json.dumps(word).encode(), TELL_S)


def _stop(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SetupCancelled


def _lifeline(agent: list[str]) -> int | None:
    """The pipe whose end ends the agent, and us before it."""
    return int(agent[agent.index("--lifeline") + 1]) if "--lifeline" in agent else None


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
