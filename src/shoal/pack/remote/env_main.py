"""Main function on the machine, after the bootstrap: build or find the environment, then become the agent.

It is imported from Shoal's wheel before anything is installed. While it works it reports progress to the coordinator,
so that the allocation is not given up as silent.
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
from shoal.pack.remote.env_cache import EnvironmentCache, hostname

TYPE_CHECKING = False
if TYPE_CHECKING:
    from shoal.pack.remote.bootstrap import BootstrapClient

REPORT_EVERY_S = 30.0
POST_TIMEOUT_S = 5.0
FAILED, STOPPED = 4, 128 + signal.SIGTERM
# Errors of the environment itself, which any other machine would repeat.
FINAL = (ArchiveDamaged, EnvironmentNotBuilt, EnvironmentUnusable)


class SetupCancelled(BaseException):
    """The allocation was cancelled; the build is undone. Not an Exception, so that no handler of errors stops it."""


def main(coordinator: BootstrapClient, argv: list[str]) -> int:
    """Build or find the environment and replace this process by the agent; return an exit code on failure."""
    root, _, _, _, recipe, allocation, *agent = argv
    reporter = SetupReporter(coordinator, allocation, _lifeline(agent))
    signal.signal(signal.SIGTERM, _cancel)
    try:
        python, env = _prepare(coordinator, reporter, os.path.abspath(root), recipe)
        os.execve(python, [python, "-P", "-m", "shoal.agent", *agent], env)
    except SetupCancelled:
        return STOPPED
    except ShoalError as error:
        return reporter.fail(error)
    except coordinator.download_failed as error:
        do = "check that this machine can reach the coordinator"
        what = f"the files of the environment could not be downloaded by {hostname()}"
        return reporter.fail(EnvironmentNotFetched(what, why=str(error), do=do))
    except OSError as error:
        return reporter.fail(disk_error(error))


def _prepare(
    coordinator: BootstrapClient, reporter: SetupReporter, root: str, digest: str
) -> tuple[str, dict[str, str]]:
    """Download the recipe and return the interpreter and the variables of its environment."""
    cache = EnvironmentCache(root, reporter.report)
    with tempfile.TemporaryDirectory(dir=root) as folder:
        path = os.path.join(folder, "recipe")
        coordinator.get(digest, path)
        with open(path) as file:
            recipe = json.load(file)
    return EnvironmentBuilder(coordinator, cache, recipe).prepare()


def disk_error(error: OSError) -> ShoalError:
    """Return the error to report for an OSError of the cache's disk."""
    why = f"{error.strerror or error}: {error.filename or 'the environment cache'}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        do = "free some space there, or set the pool's directory to a larger disk"
        return RemoteDiskFull(f"no space is left on {hostname()} for the environment", why=why, do=do)
    do = "set the pool's directory to one that is writable there"
    return RemoteCacheUnwritable(f"the environment cache on {hostname()} is not writable", why=why, do=do)


class SetupReporter:
    """Reports progress and failure of an allocation's setup to the coordinator, and notices cancellation."""

    def __init__(self, coordinator: BootstrapClient, allocation: str, lifeline: int | None) -> None:
        self._coordinator, self._allocation, self._lifeline = coordinator, allocation, lifeline
        self._next_at, self._reported = 0.0, ""

    def report(self, activity: str) -> None:
        """Report a new activity at once and the same one every 30 s; raise SetupCancelled if the lifeline ended.

        Call this several times a second.
        """
        if self._lifeline is not None and select.select([self._lifeline], [], [], 0)[0]:
            raise SetupCancelled
        now = time.monotonic()
        if activity != self._reported or now >= self._next_at:
            if activity != self._reported:
                _print(activity)
            self._reported, self._next_at = activity, now + REPORT_EVERY_S
            self._post(why=activity)

    def fail(self, error: ShoalError) -> int:
        """Log and report an error; return the exit code."""
        _print(str(error))
        self._post(
            why=f"{error.what}: {error.why}",
            failed=True,
            where=error.where,
            do=f"{error.do} (shoal explain {error.code})",
            final=isinstance(error, FINAL),
        )
        return FAILED

    def _post(self, **body: object) -> None:
        # An unreachable coordinator is no reason to fail: the log has the text, and the engine sees the exit code.
        with contextlib.suppress(OSError, http.client.HTTPException):
            self._coordinator.post(f"/v1/allocations/{self._allocation}", json.dumps(body).encode(), POST_TIMEOUT_S)


def _cancel(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SetupCancelled


def _lifeline(agent: list[str]) -> int | None:
    """Return the descriptor of the pipe whose end means that the agent, and this setup, must stop."""
    return int(agent[agent.index("--lifeline") + 1]) if "--lifeline" in agent else None


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
