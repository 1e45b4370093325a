"""Engine for this machine: an agent is a process in a session of its own, found again by a file that names it.

The file is `process.json` in the allocation's directory: pid, start time and boot id, which together identify the
process (`process_tree`). The coordinator may die between starting an agent and writing that file; then the agent is
found by its environment, which names the directory.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import psutil

from shoal.engines import agent_script, exit_message, grace_period, process_tree, stale_dirs
from shoal.engines.agent_script import ALLOCATIONS
from shoal.engines.engine import AllocationRequest, AllocationStatus, Capacity, Engine, RenderedRequest
from shoal.engines.process_tree import ALLOCATION_MARK
from shoal.errors import AllocationRefused
from shoal.wire import credentials

END_S = 5.0
RECORD = "process.json"


class Local(Engine):
    """Agents on this machine."""

    shared_by_default = True

    def render(self, request: AllocationRequest) -> RenderedRequest:
        if request.environment is not None:
            return RenderedRequest(("/bin/sh", "-c", agent_script.script(request, self.options, python=self._python)))
        home = self._home(request.tag, request.allocation)
        slots = ("--slots", str(request.slots)) if request.slots is not None else ()
        files = ("--token-file", str(home / "token"), "--name", request.allocation, "--dir", str(home))
        argv = (self._python, "-P", "-m", "shoal.agent", "--url", request.url, *files, *slots, *request.options)
        return RenderedRequest(argv)

    def submit(self, request: AllocationRequest) -> str:
        home = self._home(request.tag, request.allocation)
        if _is_running(home):
            return str(home)
        try:
            home.mkdir(parents=True, exist_ok=True, mode=0o700)
            credentials.write(home / "token", request.credentials)
            with (home / "agent.log").open("ab") as log:
                process = subprocess.Popen(
                    self.render(request).argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env={**os.environ, ALLOCATION_MARK: str(home)},
                )
        except OSError as error:
            raise AllocationRefused("cannot start an agent on this machine", where=str(home), why=str(error)) from error
        _write_record(home, process.pid, grace_period.of(request))
        return str(home)

    def watch(self, tag: str) -> list[AllocationStatus]:
        statuses = []
        for home in sorted((self._root / tag).glob("*/")):
            running = _is_running(home)
            if not running and not (home / RECORD).exists():
                continue
            why = "" if running else _exit_message(home)
            statuses.append(AllocationStatus(home.name, str(home), "running" if running else "gone", why))
        return statuses

    def cancel(self, handle: str) -> None:
        home = Path(handle)
        process = _recorded_process(home)
        members = _terminate(process, _grace_s(home) + END_S) if process is not None else set()
        process_tree.kill(members | process_tree.marked(str(home)))
        (home / RECORD).unlink(missing_ok=True)
        (home / "token").unlink(missing_ok=True)

    def clean_up(self, tag: str, active: Collection[str]) -> None:
        for _, _, home in stale_dirs.homes(self._root):
            ended = _is_own(home) and _recorded_process(home) is None
            if ended and stale_dirs.is_old(home, time.time()):
                (home / "token").unlink(missing_ok=True)
        stale_dirs.remove(self._root, tag, active, time.time())

    def capacity(self) -> list[Capacity]:
        return [Capacity("this machine", None, os.cpu_count() or 1, memory_bytes=psutil.virtual_memory().total)]

    @property
    def _python(self) -> str:
        return self.options.python or sys.executable

    @property
    def _root(self) -> Path:
        parent = self.options.directory or os.environ.get("SHOAL_HOME") or "~/.shoal"
        return Path(parent).expanduser() / ALLOCATIONS

    def _home(self, tag: str, allocation: str) -> Path:
        return self._root / tag / allocation


def _write_record(home: Path, pid: int, grace_s: float) -> None:
    pid, started = process_tree.identify(pid)
    record = {"pid": pid, "started": started, "boot": process_tree.boot_id(), "grace_s": grace_s}
    part = home / f"{RECORD}.part"
    part.write_text(json.dumps(record))
    part.replace(home / RECORD)


def _record(home: Path) -> dict[str, Any]:
    """Return what `_write_record` wrote; empty if there is none."""
    try:
        record = json.loads((home / RECORD).read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _is_own(home: Path) -> bool:
    """Return whether this engine started the allocation; the ssh engine's records name a node as well."""
    record = _record(home)
    return bool(record) and "node" not in record


def _is_running(home: Path) -> bool:
    """Return whether the agent runs; the coordinator that started it may have died before it wrote the record."""
    if (home / RECORD).exists():
        return _recorded_process(home) is not None
    return (home / "token").exists() and bool(process_tree.marked(str(home)))


def _recorded_process(home: Path) -> process_tree.ProcessId | None:
    """Return the agent's process if it is alive."""
    record = _record(home)
    if not record or record.get("boot") != process_tree.boot_id():
        return None
    process = (record["pid"], record["started"])
    if process_tree.is_alive(process):
        return process
    _reap(record["pid"])
    return None


def _grace_s(home: Path) -> float:
    """Return how long the agent gives its members to hand over."""
    return float(_record(home).get("grace_s", 0.0))


def _reap(pid: int) -> None:
    """Collect the exit status if this process was our child, so that no zombie stays."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return


def _terminate(agent: process_tree.ProcessId, within_s: float) -> set[process_tree.ProcessId]:
    """Send SIGTERM and wait for the agent to end; return the processes that should have ended with it."""
    members = process_tree.tree({agent})
    process_tree.send({agent}, signal.SIGTERM)
    deadline = time.monotonic() + within_s
    while process_tree.is_alive(agent) and time.monotonic() < deadline:
        time.sleep(process_tree.POLL_S)
    _reap(agent[0])
    return members


def _exit_message(home: Path) -> str:
    """Return the last error that the agent logged."""
    try:
        lines = (home / "agent.log").read_text(errors="replace").strip().splitlines()
    except FileNotFoundError:
        lines = []
    return exit_message.of_log("\n".join(lines[-20:])) if lines else "its process has ended"
