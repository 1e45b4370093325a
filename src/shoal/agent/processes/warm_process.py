"""Agent's side of the zygote: keeps one running, sends it requests, and receives exits.

If the zygote dies, its members die with it, and their exits are not reported. So this side remembers the pid of every
member that has not exited, kills what is left of them, and reports those exits itself; then a new zygote is started,
after a pause that grows if it keeps dying. Requests that arrive meanwhile wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from shoal.agent.processes import process_tree, zygote_messages
from shoal.errors import WarmProcessFailed

log = logging.getLogger("shoal.agent")

_RESTART_MAX_S = 5.0
_KILL_S = 10.0


class WarmProcess:
    """Warm process that is restarted when it dies.

    `on_start(key, pid)` and, after it, `on_exit(key, status)` are called once for every member, also when the warm
    process itself dies and its members with it.
    """

    def __init__(
        self,
        preload: Sequence[str],
        environment: Mapping[str, str],
        on_start: Callable[[str, int], None],
        on_exit: Callable[[str, int], None],
    ) -> None:
        self._preload = tuple(preload)
        self._environment = dict(environment)
        self._on_start = on_start
        self._on_exit = on_exit
        self._pids: dict[str, int] = {}
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._up = asyncio.Event()
        self._closing = False
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def open(self) -> None:
        """Start the warm process, and restart it whenever it dies, until `close`."""
        process_tree.adopt_orphans()
        self._supervisor = asyncio.create_task(self._supervise())

    async def start(self, request: zygote_messages.ForkRequest, timeout_s: float) -> None:
        """Fork a member and return when it runs; raise `WarmProcessFailed`."""
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[request.key] = started
        try:
            async with asyncio.timeout(timeout_s):
                await self._up.wait()
                assert self._writer is not None
                self._writer.write(zygote_messages.pack(request))
                await self._writer.drain()
                await started
        except TimeoutError as error:
            raise WarmProcessFailed(f"the member did not start within {timeout_s:.0f} s") from error
        except ConnectionError as error:
            raise WarmProcessFailed("the warm process died while it started a member") from error
        finally:
            self._waiting.pop(request.key, None)

    async def close(self) -> None:
        """Kill the warm process and all its descendants; it may be amid an import, so it cannot be asked."""
        self._closing = True
        deadline = time.monotonic() + _KILL_S
        while (remaining := process_tree.descendants()) and time.monotonic() < deadline:
            await process_tree.kill(remaining, 1.0)
        if self._supervisor is not None:
            await asyncio.wait({self._supervisor}, timeout=_KILL_S)
            self._supervisor.cancel()
        process_tree.reap_all()

    async def _supervise(self) -> None:
        pause_s = 0.05
        while not self._closing:
            began = time.monotonic()
            reader = await self._launch()
            await self._read(reader)
            self._up.clear()
            await self._on_death()
            if self._closing:
                return
            pause_s = 0.05 if time.monotonic() - began > 10.0 else min(pause_s * 2, _RESTART_MAX_S)
            log.warning("the warm process has died; restarting it in %.2f s", pause_s)
            await asyncio.sleep(pause_s)

    async def _launch(self) -> asyncio.StreamReader:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "shoal.agent.processes.zygote", str(theirs.fileno()), *self._preload],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=self._environment,
                start_new_session=True,
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._up.set()
        return reader

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                header = await reader.readexactly(4)
                self._receive(
                    zygote_messages.unpack_from_zygote(await reader.readexactly(zygote_messages.length_of(header)))
                )

    def _receive(self, report: zygote_messages.FromZygote) -> None:
        match report:
            case zygote_messages.ZygoteReady():
                log.info("the warm process is ready after %.2f s", report.seconds)
                for module, why in report.failed.items():
                    log.warning("the warm process could not import %s: %s", module, why)
                if report.tasks > 1:
                    log.warning("the warm process has %d threads; forking from it may hang", report.tasks)
            case zygote_messages.ForkStarted():
                self._pids[report.key] = report.pid
                self._on_start(report.key, report.pid)
                if (started := self._waiting.get(report.key)) and not started.done():
                    started.set_result(None)
            case zygote_messages.ForkFailed():
                if (started := self._waiting.get(report.key)) and not started.done():
                    started.set_exception(WarmProcessFailed("cannot start a member", why=report.why))
            case zygote_messages.ChildExited():
                if self._pids.pop(report.key, None) is not None:
                    self._on_exit(report.key, report.status)

    async def _on_death(self) -> None:
        """Kill what is left of its members, and report the exit of each. The kernel has killed most of them already."""
        if self._writer is not None:
            self._writer.close()
        process = self._process
        assert process is not None
        deadline = time.monotonic() + _KILL_S
        while process.poll() is None:
            if time.monotonic() > deadline:
                process.kill()
            await asyncio.sleep(0.01)
        await process_tree.kill(process_tree.descendants(), 30.0)
        for started in self._waiting.values():
            if not started.done():
                started.set_exception(WarmProcessFailed("the warm process died while it started a member"))
        for key, pid in list(self._pids.items()):
            del self._pids[key]
            self._on_exit(key, _status_of(pid))
        process_tree.reap_all()


def _status_of(pid: int) -> int:
    """Return the wait status of an adopted member; SIGKILL if unknown, since its parent's death sends that."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return 9
    return status if ended else 9
