"""External commands of a build (venv, pip, conda-unpack), and the variables they run with.

A build can be cancelled at any time. So every command runs in a process group of its own, which is killed if an
exception passes through, and the kernel kills the command itself if this process dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import time

from shoal.errors import EnvironmentNotBuilt, EnvironmentUnusable
from shoal.pack.remote.env_cache import BUILD_TIMEOUT_S, POLL_S, hostname

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

TOUCH_S = 30.0
TAIL_BYTES = 20_000
PR_SET_PDEATHSIG = 1
PASSWORD = re.compile(r"(?<=://)[^/@\s]+(?=@)")
# With these, a build would import from, or install into, a place outside its folder.
REMOVED_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_REQUIRE_VIRTUALENV")


class BuildCommands:
    """Runs commands in a folder and appends their output to its `log`.

    `on_wait` is called several times a second while a command runs, and may raise to cancel it.
    """

    def __init__(self, on_wait: Callable[[], None], label: str) -> None:
        self._on_wait, self._label = on_wait, label

    def output(self, folder: str, argv: list[str], variables: dict[str, str] | None = None) -> str:
        """Return the standard output of a command; raise EnvironmentUnusable if it fails."""
        path = os.path.join(folder, "output")
        with open(path, "wb") as out:
            code = self.run(folder, argv, env={**build_env(folder), **(variables or {})}, out=out.fileno())
        with open(path, errors="replace") as file:
            text = file.read().strip()
        os.unlink(path)
        if code != 0:
            raise self._unusable((log_tail(folder) or [f"{argv[0]}: exit code {code}"])[-1])
        return text

    def run(
        self,
        folder: str,
        argv: list[str],
        *,
        cwd: str = "",
        env: dict[str, str] | None = None,
        out: int | None = None,
    ) -> int:
        """Run a command and return its exit code; kill its process group if an exception cancels it."""
        os.makedirs(os.path.join(folder, "tmp"), exist_ok=True)
        prctl = ctypes.CDLL(None).prctl

        def in_child() -> None:
            os.setpgid(0, 0)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

        with open(os.path.join(folder, "log"), "ab") as log:
            try:
                child = subprocess.Popen(
                    argv,
                    cwd=cwd or folder,
                    env=env or build_env(folder),
                    stdin=subprocess.DEVNULL,
                    stdout=log if out is None else out,
                    stderr=log,
                    preexec_fn=in_child,
                )
            except OSError as error:
                raise self._unusable(f"{argv[0]}: {error.strerror}") from error
        try:
            self._wait(child, folder)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            raise
        return child.returncode

    def _wait(self, child: subprocess.Popen[bytes], folder: str) -> None:
        deadline, touch_at = time.monotonic() + BUILD_TIMEOUT_S, 0.0
        while child.poll() is None:
            self._on_wait()
            now = time.monotonic()
            if now >= touch_at:
                # Where files cannot be locked, a recent time is all that keeps the folder from being removed.
                os.utime(folder)
                touch_at = now + TOUCH_S
            if now > deadline:
                why, do = f"process {child.pid} has run for {BUILD_TIMEOUT_S:g} s", "check there what it waits for"
                raise EnvironmentNotBuilt(f"building {self._label} timed out on {hostname()}", why=why, do=do)
            time.sleep(POLL_S)

    def _unusable(self, why: str) -> EnvironmentUnusable:
        do = "pack it on a machine with the same operating system and processor"
        return EnvironmentUnusable(f"{self._label} does not work on {hostname()}", why=why, do=do)


def build_env(folder: str) -> dict[str, str]:
    """Return the environment variables for commands that build in a folder."""
    kept = {name: value for name, value in os.environ.items() if name not in REMOVED_VARIABLES}
    return {**kept, "TMPDIR": os.path.join(folder, "tmp"), "PIP_USER": "0"}


def agent_env(env: dict[str, str], python: str, shoal_dir: str) -> dict[str, str]:
    """Return the environment variables of an agent; `shoal_dir` holds Shoal if it is not installed, else ""."""
    scripts = os.path.dirname(python)
    changes = {"PATH": os.pathsep.join((scripts, env.get("PATH", os.defpath))), "VIRTUAL_ENV": os.path.dirname(scripts)}
    if shoal_dir:
        changes["PYTHONPATH"] = os.pathsep.join(filter(None, (shoal_dir, env.get("PYTHONPATH", ""))))
    return {**env, **changes}


def log_tail(folder: str) -> list[str]:
    """Return the last lines of a build's log, without the passwords in URLs: they become part of error messages."""
    try:
        with open(os.path.join(folder, "log"), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    return [PASSWORD.sub("****", line.strip()) for line in lines if line.strip()]
