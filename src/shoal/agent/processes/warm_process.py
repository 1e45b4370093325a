"""The agent's side of the warm process: keeps one up, gives it orders, and hears of exits."""

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

_REVIVE_MAX_S = 5.0
_LAST_CHANCE_S = 10.0


class WarmProcess:
    """One warm process, started anew when it dies.

    `on_start(key, pid)` and, after it, `on_exit(key, status)` are called once for every member.
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
        self._keeper: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def open(self) -> None:
        """Start the warm process and keep one up until `close`."""
        process_tree.adopt_orphans()
        self._keeper = asyncio.create_task(self._keep_one_up())

    async def start(self, order: zygote_messages.ForkRequest, timeout_s: float) -> None:
        """Start a member; returns when it is there."""
        born: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[order.key] = born
        try:
            async with asyncio.timeout(timeout_s):
                await self._up.wait()
                assert self._writer is not None
                self._writer.write(zygote_messages.pack(order))
                await self._writer.drain()
                await born
        except TimeoutError as error:
            raise WarmProcessFailed(f"no member was started within {timeout_s:.0f} s") from error
        except ConnectionError as error:
            raise WarmProcessFailed("the warm process died while a member was to be started") from error
        finally:
            self._waiting.pop(order.key, None)

    async def close(self) -> None:
        """Kill the warm process and whatever is left below it; it may be amid an import, so it is not asked."""
        self._closing = True
        deadline = time.monotonic() + _LAST_CHANCE_S
        while (left := process_tree.descendants()) and time.monotonic() < deadline:
            await process_tree.kill(left, 1.0)
        if self._keeper is not None:
            await asyncio.wait({self._keeper}, timeout=_LAST_CHANCE_S)
            self._keeper.cancel()
        process_tree.reap_all()

    async def _keep_one_up(self) -> None:
        pause_s = 0.05
        while not self._closing:
            began = time.monotonic()
            reader = await self._launch()
            await self._listen(reader)
            self._up.clear()
            await self._after_its_death()
            if self._closing:
                return
            pause_s = 0.05 if time.monotonic() - began > 10.0 else min(pause_s * 2, _REVIVE_MAX_S)
            log.warning("the warm process is gone; another one starts in %.2f s", pause_s)
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

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                header = await reader.readexactly(4)
                self._hear(
                    zygote_messages.unpack_from_zygote(await reader.readexactly(zygote_messages.length_of(header)))
                )

    def _hear(self, report: zygote_messages.FromZygote) -> None:
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
                if (born := self._waiting.get(report.key)) and not born.done():
                    born.set_result(None)
            case zygote_messages.ForkFailed():
                if (born := self._waiting.get(report.key)) and not born.done():
                    born.set_exception(WarmProcessFailed("a member could not be started", why=report.why))
            case zygote_messages.ChildExited():
                if self._pids.pop(report.key, None) is not None:
                    self._on_exit(report.key, report.status)

    async def _after_its_death(self) -> None:
        """Everything that it had started dies by the kernel's hand or ours; tell of each member."""
        if self._writer is not None:
            self._writer.close()
        process = self._process
        assert process is not None
        deadline = time.monotonic() + _LAST_CHANCE_S
        while process.poll() is None:
            if time.monotonic() > deadline:
                process.kill()
            await asyncio.sleep(0.01)
        await process_tree.kill(process_tree.descendants(), 30.0)
        for born in self._waiting.values():
            if not born.done():
                born.set_exception(WarmProcessFailed("the warm process died while a member was to be started"))
        for key, pid in list(self._pids.items()):
            del self._pids[key]
            self._on_exit(key, _status_of(pid))
        process_tree.reap_all()


def _status_of(pid: int) -> int:
    """How an adopted member ended; SIGKILL if it cannot be known, since that is what its parent's death sends."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return 9
    return status if ended else 9
