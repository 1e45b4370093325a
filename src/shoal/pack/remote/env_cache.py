"""The environments of a machine, or of all machines that share a home; needs Linux, Python 3.7 and nothing else.

Each is kept under the hash of what it is made of::

    NAME.ready        names the folder of the one that is whole; it appears in one moment, or never
    NAME-RANDOM/      an environment, in the place that it was made for; without a .ready it is nobody's
    NAME.lock         is held by who makes it; where files cannot be locked, several may, and the first one counts
    NAME.log          what was said when it could not be made
    shoal-HASH.whl    what makes all of it

An agent holds a lock on `used` in its environment for as long as it lives. What nobody has used for a month is removed.
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

BUILD_S = 3600.0
LOOK_S = 0.1
STALE_S = 3600.0
UNUSED_S = 30 * 86400.0


class EnvironmentCache:
    """What was made in a directory. `doing` is told what is being done, as often as one likes."""

    def __init__(self, root: str, doing: Callable[[str], None]) -> None:
        self._root, self.doing = root, doing
        os.makedirs(root, mode=0o700, exist_ok=True)

    def get(self, name: str, doing: str, make: Callable[[str], None]) -> str:
        """The folder of what has this name; if there is none, `make` fills one, and nobody sees it before it is whole.

        It is held from now on, for as long as this process lives.
        """
        found = self._find(name)
        if found is None:
            began = time.time()
            with self._alone(name, doing):
                found = self._find(name) or self._make(name, doing, make, began)
        return found

    def _find(self, name: str) -> str | None:
        ready = self._path(f"{name}.ready")
        try:
            with open(ready) as file:
                folder = self._path(file.read())
            held = os.open(os.path.join(folder, "used"), os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:
            return None
        os.utime(held)
        with contextlib.suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
        # Whoever removes what is unused takes the .ready away first, and looks at `used` then.
        if os.path.exists(ready) and _works(folder):
            os.set_inheritable(held, True)
            return folder
        os.close(held)
        return None

    @contextlib.contextmanager
    def _alone(self, name: str, doing: str) -> Iterator[None]:
        """While nobody else makes it, if files can be locked here."""
        lock = os.open(self._path(f"{name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + BUILD_S
        try:
            while not _locked(lock):
                who = os.pread(lock, 200, 0).decode(errors="replace") or "another"
                self.doing(f"waits for {who}, which {doing}")
                if time.monotonic() > deadline:
                    why = f"{who} has been at it for {BUILD_S:g} s"
                    raise EnvironmentNotBuilt("the environment was not ready in time", why=why, do=f"end {who}")
                time.sleep(LOOK_S)
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"process {os.getpid()} on {node()}".encode(), 0)
            yield
        finally:
            os.close(lock)

    def _make(self, name: str, doing: str, make: Callable[[str], None], began: float) -> str:
        self._share_failure(name, began)
        self._sweep()
        self.doing(doing)
        folder = tempfile.mkdtemp(prefix=f"{name}-", dir=self._root)
        with _held(folder):
            try:
                make(folder)
                self._publish(name, folder)
            except BaseException as error:
                if isinstance(error, ShoalError):
                    self._note_failure(name, folder, error)
                shutil.rmtree(folder, ignore_errors=True)
                raise
            found = self._find(name)
        if found is None:
            raise RemoteCacheUnwritable("an environment was gone as soon as it was made", where=f"{node()}:{folder}")
        if found != folder:
            shutil.rmtree(folder, ignore_errors=True)
        return found

    def _publish(self, name: str, folder: str) -> None:
        part, ready = os.path.join(folder, "ready"), self._path(f"{name}.ready")
        with open(part, "w") as file:
            file.write(os.path.basename(folder))
        if self._find(name) is None:
            # There is none, or one that does not work any more.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(ready)
        # Where files cannot be locked, another may have been faster.
        with contextlib.suppress(FileExistsError):
            os.link(part, ready)

    # --- failures

    def _note_failure(self, name: str, folder: str, error: ShoalError) -> None:
        log = self._path(f"{name}.log")
        with contextlib.suppress(OSError):
            shutil.copyfile(os.path.join(folder, "log"), log)
            error.where = error.where or f"{node()}:{log}"
        with contextlib.suppress(OSError), open(self._path(f"{name}.failed"), "w") as file:
            json.dump([type(error).__name__, error.what, error.where, error.why, error.do], file)

    def _share_failure(self, name: str, began: float) -> None:
        """What failed while we waited for it would fail again."""
        path = self._path(f"{name}.failed")
        with contextlib.suppress(OSError, ValueError):
            if os.stat(path).st_mtime >= began:
                with open(path) as file:
                    kind, what, where, why, do = json.load(file)
                raise getattr(errors, kind)(what, where=where, why=why, do=do)
            os.unlink(path)

    # --- what is not needed any more

    def _sweep(self) -> None:
        """Remove what was left half made, and what nobody has used for long."""
        with contextlib.suppress(OSError):
            kept = {folder for folder in map(self._keep, os.listdir(self._root)) if folder}
            for one in os.scandir(self._root):
                age_s = time.time() - one.stat().st_mtime
                if one.is_dir() and one.name not in kept and age_s > STALE_S:
                    if _is_unused(os.path.join(one.path, "used"), STALE_S):
                        shutil.rmtree(one.path, ignore_errors=True)
                elif one.name.endswith((".log", ".failed", ".whl")) and age_s > UNUSED_S:
                    os.unlink(one.path)

    def _keep(self, name: str) -> str:
        """The folder that this .ready names, unless it is too old to be kept."""
        if not name.endswith(".ready"):
            return ""
        ready = self._path(name)
        with open(ready) as file:
            folder = file.read()
        used = os.path.join(self._path(folder), "used")
        if _is_unused(used, UNUSED_S):
            os.unlink(ready)
            if _is_unused(used, UNUSED_S):
                return ""
            os.link(os.path.join(self._path(folder), "ready"), ready)
        return folder

    def _path(self, name: str) -> str:
        return os.path.join(self._root, name)


@contextlib.contextmanager
def _held(folder: str) -> Iterator[None]:
    """While somebody fills it, however long that takes, nobody takes it for something that was left half made."""
    used = os.open(os.path.join(folder, "used"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(used, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(used)


def node() -> str:
    return socket.gethostname() or "this machine"


def _works(folder: str) -> bool:
    """Whether its interpreter, which may be one of the machine's, is still there."""
    try:
        with open(os.path.join(folder, "python")) as file:
            return os.access(os.path.join(folder, file.read()), os.X_OK)
    except FileNotFoundError:
        return os.path.isdir(os.path.join(folder, "shoal"))


def _is_unused(used: str, for_s: float) -> bool:
    try:
        descriptor = os.open(used, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        return _locked(descriptor) and time.time() - os.fstat(descriptor).st_mtime > for_s
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    """Lock it if nobody else has; where that cannot be done at all, it counts as done."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True
