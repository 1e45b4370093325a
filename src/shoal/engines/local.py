"""This machine: an agent is a process of its own session, found again by a file that names it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

import psutil

from shoal.engines import agent_script, exit_message, grace_period, stale_dirs
from shoal.engines.agent_script import ALLOCATIONS
from shoal.engines.engine import AllocationRequest, AllocationStatus, Capacity, Engine, RenderedRequest
from shoal.engines.ssh.remote_helper import ALLOCATION_MARK
from shoal.errors import AllocationRefused
from shoal.wire import credentials

END_S = 5.0
BORN_WITHIN_S = 0.01


class Local(Engine):
    """Agents on this machine."""

    shared_by_default = True

    def render(self, request: AllocationRequest) -> RenderedRequest:
        if request.environment is not None:
            return RenderedRequest(("/bin/sh", "-c", agent_script.script(request, self.options, python=self._python)))
        where = self._home(request.tag, request.allocation)
        slots = ("--slots", str(request.slots)) if request.slots is not None else ()
        given = (
            "--url",
            request.url,
            "--token-file",
            str(where / "token"),
            "--name",
            request.allocation,
            "--dir",
            str(where),
        )
        return RenderedRequest((self._python, "-P", "-m", "shoal.agent", *given, *slots, *request.options))

    def submit(self, request: AllocationRequest) -> str:
        where = self._home(request.tag, request.allocation)
        if _is_here(where):
            return str(where)
        try:
            where.mkdir(parents=True, exist_ok=True, mode=0o700)
            credentials.write(where / "token", request.credentials)
            with (where / "agent.log").open("ab") as log:
                process = subprocess.Popen(
                    self.render(request).argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env={**os.environ, ALLOCATION_MARK: str(where)},
                )
        except OSError as error:
            raise AllocationRefused("an agent could not be started here", where=str(where), why=str(error)) from error
        _note(where, process.pid, grace_period.of(request))
        return str(where)

    def watch(self, tag: str) -> list[AllocationStatus]:
        found = []
        for where in sorted((self._above / ALLOCATIONS / tag).glob("*/")):
            here = _is_here(where)
            if not here and not (where / "process.json").exists():
                continue
            found.append(
                AllocationStatus(
                    where.name, str(where), "running" if here else "gone", "" if here else _last_words(where)
                )
            )
        return found

    def cancel(self, handle: str) -> None:
        where = Path(handle)
        process = _running(where)
        below = _end(process, _grace_s(where) + END_S) if process is not None else []
        _kill([*below, *_left_by(where)])
        (where / "process.json").unlink(missing_ok=True)
        (where / "token").unlink(missing_ok=True)

    def clean_up(self, tag: str, known: Collection[str]) -> None:
        hires = self._above / ALLOCATIONS
        for _, _, where in stale_dirs.homes(hires):
            if _is_ours(where) and _running(where) is None and stale_dirs.is_old(where, time.time()):
                (where / "token").unlink(missing_ok=True)
        stale_dirs.remove(hires, tag, known, time.time())

    def capacity(self) -> list[Capacity]:
        return [Capacity("this machine", None, os.cpu_count() or 1, memory_bytes=psutil.virtual_memory().total)]

    @property
    def _python(self) -> str:
        return self.options.python or sys.executable

    @property
    def _above(self) -> Path:
        given = self.options.directory or os.environ.get("SHOAL_HOME") or "~/.shoal"
        return Path(given).expanduser()

    def _home(self, tag: str, hire: str) -> Path:
        return self._above / ALLOCATIONS / tag / hire


def _note(where: Path, pid: int, grace_s: float) -> None:
    """Write down which process it is; the time of its birth tells it from another that gets its number later."""
    born = psutil.Process(pid).create_time()
    part = where / "process.json.part"
    part.write_text(json.dumps({"pid": pid, "born": born, "grace_s": grace_s}))
    part.replace(where / "process.json")


def _is_ours(where: Path) -> bool:
    """Whether we started it: other engines may keep theirs in the same place, and write down more."""
    try:
        return "node" not in json.loads((where / "process.json").read_text())
    except (FileNotFoundError, ValueError, TypeError):
        return False


def _is_here(where: Path) -> bool:
    """Whether its agent runs; whoever started it may have died before it could write that down."""
    if (where / "process.json").exists():
        return _running(where) is not None
    return (where / "token").exists() and bool(_left_by(where))


def _running(where: Path) -> psutil.Process | None:
    try:
        known = json.loads((where / "process.json").read_text())
        process = psutil.Process(known["pid"])
        born, status = process.create_time(), process.status()
    except (FileNotFoundError, ValueError, psutil.NoSuchProcess):
        return None
    same = abs(born - known["born"]) < BORN_WITHIN_S
    if same and status == psutil.STATUS_ZOMBIE:
        _reap(process.pid)
    return process if same and status != psutil.STATUS_ZOMBIE else None


def _grace_s(where: Path) -> float:
    """How long an agent gives its members to hand over."""
    try:
        return float(json.loads((where / "process.json").read_text()).get("grace_s", 0.0))
    except (OSError, ValueError):
        return 0.0


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return


def _end(process: psutil.Process, within_s: float) -> list[psutil.Process]:
    """As an agent is told to go: it hands over and ends its members. Who ought to be gone now."""
    try:
        told = [process, *process.children(recursive=True)]
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + within_s
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
            time.sleep(0.02)
        _reap(process.pid)
    except psutil.NoSuchProcess:
        return []
    return told


def _left_by(where: Path) -> list[psutil.Process]:
    """Who was started by an agent, in whatever session it is: it has the agent's environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(ALLOCATION_MARK) == str(where):
                found.append(process)
    return found


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _last_words(where: Path) -> str:
    """The last error that the agent wrote, if it ended by one."""
    try:
        lines = (where / "agent.log").read_text(errors="replace").strip().splitlines()
    except FileNotFoundError:
        lines = []
    return exit_message.of_log("\n".join(lines[-20:])) if lines else "its process is gone"
