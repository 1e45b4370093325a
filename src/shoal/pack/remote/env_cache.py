"""Cache of environments on a machine, or on all machines that share a home directory.

NAME contains the hash of everything an environment depends on::

    NAME.ready        name of the folder that holds the finished environment; created atomically
    NAME-RANDOM/      one environment, finished or not; it counts only if a .ready file names it
    NAME-RANDOM/used  locked (shared) by every agent that runs in the environment and by its builder
    NAME.lock         locked (exclusive) by the builder, and holds its process id and host
    NAME.log          output of the last failed build
    NAME.failed       error of the last failed build, for agents that waited for it
    shoal-HASH.whl    wheel of Shoal, from which this module is imported

Invariants. A .ready file names a complete environment. A folder is removed only when no process locks its `used`: an
environment after a month without use, an unfinished folder after an hour. Locks belong to open files, so the kernel
releases them with their process, however it ends. Some network file systems have no locks; there several processes may
build at once, the first to create the .ready file wins, and ages alone decide what is removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import tempfile
import time

from shoal import errors
from shoal.errors import EnvironmentNotBuilt, RemoteCacheUnwritable, ShoalError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BUILD_TIMEOUT_S = 3600.0
POLL_S = 0.1
STALE_S = 3600.0
UNUSED_S = 30 * 86400.0


class EnvironmentCache:
    """Environments in one directory.

    `report` is called with the present activity several times a second while a build runs or waits; it may raise.
    """

    def __init__(self, root: str, report: Callable[[str], None]) -> None:
        self._root, self.report = root, report
        os.makedirs(root, mode=0o700, exist_ok=True)

    def get(self, name: str, activity: str, build: Callable[[str], None]) -> str:
        """Return the folder of an environment; if there is none, call `build` with an empty folder and publish it.

        This process, and the agent that it becomes, lock the folder against removal until they exit.
        """
        folder = self._find(name)
        if folder is None:
            started = time.time()
            with self._lock(name, activity):
                folder = self._find(name) or self._build(name, activity, build, started)
        return folder

    def _find(self, name: str) -> str | None:
        """Return the folder of a finished environment and lock it, or None if it is missing or unusable."""
        ready = self._path(f"{name}.ready")
        try:
            with open(ready) as file:
                folder = self._path(file.read())
            used = os.open(os.path.join(folder, "used"), os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:
            return None
        os.utime(used)
        with contextlib.suppress(OSError):
            fcntl.flock(used, fcntl.LOCK_SH | fcntl.LOCK_NB)
        # `_folder_to_keep` removes the .ready file and then checks `used` again, so one of us notices the other.
        if os.path.exists(ready) and _is_usable(folder):
            os.set_inheritable(used, True)
            return folder
        os.close(used)
        return None

    @contextlib.contextmanager
    def _lock(self, name: str, activity: str) -> Iterator[None]:
        """Wait for the build lock of an environment, if files can be locked here, and hold it."""
        lock = os.open(self._path(f"{name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + BUILD_TIMEOUT_S
        try:
            while not _try_lock(lock):
                owner = os.pread(lock, 200, 0).decode(errors="replace") or "another process"
                self.report(f"waits for {owner}, which {activity}")
                if time.monotonic() > deadline:
                    why = f"{owner} has been building it for {BUILD_TIMEOUT_S:g} s"
                    raise EnvironmentNotBuilt("timed out waiting for the environment", why=why, do=f"end {owner}")
                time.sleep(POLL_S)
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"process {os.getpid()} on {hostname()}".encode(), 0)
            yield
        finally:
            os.close(lock)

    def _build(self, name: str, activity: str, build: Callable[[str], None], started: float) -> str:
        """Build an environment in a new folder and return the published one, which may be another process's."""
        self._raise_shared_failure(name, started)
        self._remove_unused()
        self.report(activity)
        folder = tempfile.mkdtemp(prefix=f"{name}-", dir=self._root)
        with _hold(folder):
            try:
                build(folder)
                self._publish(name, folder)
            except BaseException as error:
                if isinstance(error, ShoalError):
                    self._record_failure(name, folder, error)
                shutil.rmtree(folder, ignore_errors=True)
                raise
            published = self._find(name)
        if published is None:
            raise RemoteCacheUnwritable("a new environment disappeared from the cache", where=f"{hostname()}:{folder}")
        if published != folder:
            shutil.rmtree(folder, ignore_errors=True)
        return published

    def _publish(self, name: str, folder: str) -> None:
        """Create the .ready file, unless another process was faster."""
        part, ready = os.path.join(folder, "ready"), self._path(f"{name}.ready")
        with open(part, "w") as file:
            file.write(os.path.basename(folder))
        if self._find(name) is None:
            # There is no .ready file, or it names an unusable environment.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(ready)
        # Where files cannot be locked, another process may have published first.
        with contextlib.suppress(FileExistsError):
            os.link(part, ready)

    # --- failures

    def _record_failure(self, name: str, folder: str, error: ShoalError) -> None:
        log = self._path(f"{name}.log")
        with contextlib.suppress(OSError):
            shutil.copyfile(os.path.join(folder, "log"), log)
            error.where = error.where or f"{hostname()}:{log}"
        with contextlib.suppress(OSError), open(self._path(f"{name}.failed"), "w") as file:
            json.dump([type(error).__name__, error.what, error.where, error.why, error.do], file)

    def _raise_shared_failure(self, name: str, started: float) -> None:
        """Raise the error of a build that failed while we waited for it: it would fail again."""
        path = self._path(f"{name}.failed")
        with contextlib.suppress(OSError, ValueError):
            if os.stat(path).st_mtime >= started:
                with open(path) as file:
                    kind, what, where, why, do = json.load(file)
                raise getattr(errors, kind)(what, where=where, why=why, do=do)
            os.unlink(path)

    # --- removal

    def _remove_unused(self) -> None:
        """Remove unfinished folders and environments that have not been used for long."""
        with contextlib.suppress(OSError):
            kept = {folder for folder in map(self._folder_to_keep, os.listdir(self._root)) if folder}
            for entry in os.scandir(self._root):
                age_s = time.time() - entry.stat().st_mtime
                if entry.is_dir() and entry.name not in kept and age_s > STALE_S:
                    if _is_unused(os.path.join(entry.path, "used"), STALE_S):
                        shutil.rmtree(entry.path, ignore_errors=True)
                elif entry.name.endswith((".log", ".failed", ".whl")) and age_s > UNUSED_S:
                    os.unlink(entry.path)

    def _folder_to_keep(self, name: str) -> str:
        """Return the folder that a .ready file names; remove the file and return "" if it is unused for too long."""
        if not name.endswith(".ready"):
            return ""
        ready = self._path(name)
        with open(ready) as file:
            folder = file.read()
        used = os.path.join(self._path(folder), "used")
        if _is_unused(used, UNUSED_S):
            os.unlink(ready)
            # An agent may have found the environment before the file was removed; then put it back.
            if _is_unused(used, UNUSED_S):
                return ""
            os.link(os.path.join(self._path(folder), "ready"), ready)
        return folder

    def _path(self, name: str) -> str:
        return os.path.join(self._root, name)


@contextlib.contextmanager
def _hold(folder: str) -> Iterator[None]:
    """Lock a folder while it is filled, so that no other process removes it as unfinished."""
    used = os.open(os.path.join(folder, "used"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(used, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(used)


def hostname() -> str:
    """Return the name of this machine, for messages."""
    return socket.gethostname() or "this machine"


def _is_usable(folder: str) -> bool:
    """Return whether the interpreter, which may be one of the machine's, still exists."""
    try:
        with open(os.path.join(folder, "python")) as file:
            return os.access(os.path.join(folder, file.read()), os.X_OK)
    except FileNotFoundError:
        return os.path.isdir(os.path.join(folder, "shoal"))


def _is_unused(used: str, for_s: float) -> bool:
    """Return whether no process locks this file and the last one took it more than `for_s` seconds ago."""
    try:
        descriptor = os.open(used, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        return _try_lock(descriptor) and time.time() - os.fstat(descriptor).st_mtime > for_s
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Return whether the file could be locked; where files cannot be locked at all, the answer is yes."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True
