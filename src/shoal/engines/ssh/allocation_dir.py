"""Directory of an allocation on a host: `ROOT/TAG/ALLOCATION`, with its token, its log and the record of its process.

=================  ==================================================================================================
`process.json`     which process the agent is (`ProcessRecord`); written by that process before it becomes the agent
`token`            the coordinator's credentials; removed once the agent has ended
`agent.log`        output of the agent
`stopping`         created by the first request to stop the agent, so that it gets SIGTERM only once
=================  ==================================================================================================

`ROOT` may be on a disk that several nodes share, so records name their node, and each node has a lock file of its own.
Sent to hosts as source: Python 3.7 and the standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time

from shoal.engines import process_tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TypedDict

    class ProcessRecord(TypedDict):
        """The agent's process, and how long its members may take to hand over."""

        pid: int
        started: int
        boot: str
        node: str
        grace_s: float


RECORD, TOKEN, LOG, STOPPING = "process.json", "token", "agent.log", "stopping"


def root(directory: str) -> str:
    """Return the directory of all allocations; `directory` is the pool's, "" for the default."""
    parent = directory or os.environ.get("SHOAL_HOME") or "~/.shoal"
    if parent == "~" or parent.startswith("~/"):
        parent = os.environ.get("HOME", "") + parent[1:]
    return os.path.join(os.path.abspath(parent), "allocations")


def homes(root: str) -> Iterator[tuple[str, str, str]]:
    """Yield tag, name and path of every allocation's directory."""
    for tag in _folders(root):
        for allocation in _folders(os.path.join(root, tag)):
            yield tag, allocation, os.path.join(root, tag, allocation)


def _folders(path: str) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(path) if entry.is_dir())
    except FileNotFoundError:
        return []


def make(*paths: str) -> None:
    """Create directories that only their owner can read."""
    os.makedirs(os.path.dirname(paths[0]), exist_ok=True)
    for path in paths:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        os.chmod(path, 0o700)


@contextlib.contextmanager
def locked(root: str) -> Iterator[None]:
    """Hold the lock under which agents are started on this node."""
    path = os.path.join(root, "lock-" + process_tree.node_name())
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        # A disk that has become read-only must not prevent agents from being stopped.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            raise OSError(errno.ENOLCK, error.strerror, path) from error
        yield
    finally:
        os.close(descriptor)


def write(path: str, text: str) -> None:
    """Write a file atomically, readable by its owner only."""
    part = path + ".part"
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "w") as file:
            file.write(text)
        os.replace(part, path)
    except OSError as error:
        os.unlink(part)
        raise OSError(error.errno, error.strerror, path) from error


def remove(home: str, *names: str) -> None:
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(home, name))


def remove_unused_token(home: str) -> None:
    """Remove the token of an agent that has ended, unless it is being started again right now."""
    if os.path.exists(os.path.join(home, TOKEN)):
        with contextlib.suppress(OSError), locked(os.path.dirname(os.path.dirname(home))):
            if not is_running(home):
                remove(home, TOKEN)


def record(home: str) -> ProcessRecord | None:
    """Return the process that was started for an allocation; None if the ssh engine did not start it."""
    try:
        with open(os.path.join(home, RECORD)) as file:
            process: ProcessRecord = json.load(file)
    except (FileNotFoundError, ValueError):
        return None
    # The local engine may use the same directory; its records name no node.
    return process if "node" in process else None


def is_running(home: str) -> bool:
    process = record(home)
    return process is not None and is_alive(process)


def is_alive(process: ProcessRecord) -> bool:
    """Return whether this process runs on this node."""
    if process["node"] != process_tree.node_name() or process["boot"] != process_tree.boot_id():
        return False
    return process_tree.is_alive((process["pid"], process["started"]))


def report_age_s(home: str) -> float:
    """Return how long ago the record or the log was written."""
    paths = [os.path.join(home, name) for name in (RECORD, LOG)]
    return time.time() - max(os.stat(path).st_mtime for path in paths if os.path.exists(path))


def untouched_s(home: str) -> float:
    """Return how long ago any file in the directory was written; removed files do not count."""
    times = []
    for entry in os.scandir(home):
        with contextlib.suppress(FileNotFoundError):
            times.append(entry.stat(follow_symlinks=False).st_mtime)
    return time.time() - max(times or [os.stat(home).st_mtime])
