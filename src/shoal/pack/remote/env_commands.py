"""The commands that make an environment: each can be ended at any time, with all that it started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import time

from shoal.errors import EnvironmentNotBuilt, EnvironmentUnusable
from shoal.pack.remote.env_cache import BUILD_S, LOOK_S, node

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

TOUCH_S = 30.0
TAIL_BYTES = 20_000
DIE_WITH_PARENT = 1
PASSWORD = re.compile(r"(?<=://)[^/@\s]+(?=@)")
# They would let what is built find, or be put, where something else is.
LEFT_OUT = ("PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_REQUIRE_VIRTUALENV")


class BuildCommands:
    """Runs commands in a folder, whose `log` takes what they say; `meanwhile` is called all the time."""

    def __init__(self, meanwhile: Callable[[], None], label: str) -> None:
        self._meanwhile, self._label = meanwhile, label

    def said(self, folder: str, argv: list[str], own: dict[str, str] | None = None) -> str:
        """What a command prints that has to work."""
        path = os.path.join(folder, "said")
        with open(path, "wb") as out:
            code = self.run(folder, argv, env={**plain(folder), **(own or {})}, out=out.fileno())
        with open(path, errors="replace") as said:
            text = said.read().strip()
        os.unlink(path)
        if code != 0:
            raise self._unfit((tail(folder) or [f"{argv[0]}: exit code {code}"])[-1])
        return text

    def run(
        self,
        folder: str,
        argv: list[str],
        *,
        where: str = "",
        env: dict[str, str] | None = None,
        out: int | None = None,
    ) -> int:
        """The exit code of a command; it and its group end with us."""
        os.makedirs(os.path.join(folder, "tmp"), exist_ok=True)
        prctl = ctypes.CDLL(None).prctl

        def begin() -> None:
            os.setpgid(0, 0)
            prctl(DIE_WITH_PARENT, signal.SIGKILL)

        with open(os.path.join(folder, "log"), "ab") as log:
            try:
                child = subprocess.Popen(
                    argv,
                    cwd=where or folder,
                    env=env or plain(folder),
                    stdin=subprocess.DEVNULL,
                    stdout=log if out is None else out,
                    stderr=log,
                    preexec_fn=begin,
                )
            except OSError as error:
                raise self._unfit(f"{argv[0]}: {error.strerror}") from error
        try:
            self._wait(child, folder)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            raise
        return child.returncode

    def _wait(self, child: subprocess.Popen[bytes], folder: str) -> None:
        deadline, touch_at = time.monotonic() + BUILD_S, 0.0
        while child.poll() is None:
            self._meanwhile()
            now = time.monotonic()
            if now >= touch_at:
                # So that nobody takes it for something that was left half made.
                os.utime(folder)
                touch_at = now + TOUCH_S
            if now > deadline:
                why, do = f"process {child.pid} has run for {BUILD_S:g} s", "see there what it waits for"
                raise EnvironmentNotBuilt(f"{self._label} does not come to an end on {node()}", why=why, do=do)
            time.sleep(LOOK_S)

    def _unfit(self, why: str) -> EnvironmentUnusable:
        do = "pack it on a machine of the same system and processor"
        return EnvironmentUnusable(f"{self._label} does not work on {node()}", why=why, do=do)


def plain(folder: str) -> dict[str, str]:
    """Our variables, for commands that build something in a folder."""
    kept = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
    return {**kept, "TMPDIR": os.path.join(folder, "tmp"), "PIP_USER": "0"}


def environ(env: dict[str, str], python: str, beside: str) -> dict[str, str]:
    """The variables of an agent in an environment; `beside` is where Shoal is, if that is not in it."""
    scripts = os.path.dirname(python)
    own = {"PATH": os.pathsep.join((scripts, env.get("PATH", os.defpath))), "VIRTUAL_ENV": os.path.dirname(scripts)}
    if beside:
        own["PYTHONPATH"] = os.pathsep.join(filter(None, (beside, env.get("PYTHONPATH", ""))))
    return {**env, **own}


def tail(folder: str) -> list[str]:
    """The last lines of what was said in a folder, without passwords in URLs: others may read what becomes of them."""
    try:
        with open(os.path.join(folder, "log"), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    return [PASSWORD.sub("****", line.strip()) for line in lines if line.strip()]
