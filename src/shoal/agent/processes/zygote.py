"""The warm process: it has the imports done, and forks a member from them in milliseconds.

It is single-threaded, touches no device, and listens to its agent only. When the agent goes, it kills all that it
ever started, wherever that moved to, and goes too.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import threading
import time
from typing import NoReturn

import psutil

from shoal.agent.processes import process_tree, zygote_messages
from shoal.agent.processes.child_main import birth_mark, live

# torch._dynamo, because the first optimizer of a process imports it, which takes longer than all the rest.
PRELOAD = ("numpy", "torch", "torch._dynamo", "torch.utils.data", "websockets.sync.client", "psutil", "shoal.torch")
_HELD = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def main() -> None:
    """Serve the agent behind the given descriptor; in a fork, become the member."""
    parser = argparse.ArgumentParser(prog="shoal.agent.processes.zygote")
    parser.add_argument("channel", type=int)
    parser.add_argument("preload", nargs="*")
    given = parser.parse_args()
    channel = socket.socket(fileno=given.channel)
    channel.set_inheritable(False)
    # Held back, not ignored: a SIGTERM that reaches a member before it has its own handlers must not be lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
    process_tree.adopt_orphans()
    search_path = sys.path[0 if sys.flags.safe_path else 1 :]
    ready = preload(given.preload)
    with contextlib.suppress(ConnectionError):
        channel.sendall(zygote_messages.pack(ready))
    zygote = os.getpid()
    start = ForkServer(channel).serve()
    if start is None:
        process_tree.kill_descendants()
        return
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD)
    try:
        live(start, zygote, search_path)
    except SystemExit as leaving:
        if leaving.code is not None and not isinstance(leaving.code, int):
            raise
        _vanish(leaving.code or 0)
    _vanish(0)


def _vanish(exit_code: int) -> NoReturn:
    """End as Python does, but leave the memory to the system: taking torch down piece by piece can take a second."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code & 0xFF)


def preload(modules: list[str]) -> zygote_messages.ZygoteReady:
    """Import these; one that fails is reported, and imported again by whoever needs it.

    Without the collector imports are a fifth faster; what is frozen then is not touched by the members' collectors,
    so its memory stays shared.
    """
    began = time.monotonic()
    gc.disable()
    failed = {}
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - a module may raise anything, and a member can still live without it
            failed[name] = f"{type(error).__name__}: {error}"
    gc.freeze()
    gc.enable()
    return zygote_messages.ZygoteReady(
        seconds=time.monotonic() - began, tasks=len(os.listdir("/proc/self/task")), failed=failed
    )


class ForkServer:
    """Forks members on order and reports their exits."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._alive: dict[int, zygote_messages.ForkRequest] = {}
        self._wakeup, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> zygote_messages.ForkRequest | None:
        """Runs until the agent is gone (None); in a forked member, returns what it is to do."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        selector = selectors.DefaultSelector()
        selector.register(self._channel, selectors.EVENT_READ)
        selector.register(self._wakeup, selectors.EVENT_READ)
        with contextlib.suppress(BrokenPipeError, ConnectionError):
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if self._wakeup in ready:
                    self._bury()
                if self._channel not in ready:
                    continue
                order = zygote_messages.receive_start(self._channel)
                if order is None:
                    return None
                if self._is_the_fork(order):
                    selector.close()
                    self._forget()
                    return order
        return None

    def _is_the_fork(self, order: zygote_messages.ForkRequest) -> bool:
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = os.fork()
        except OSError as error:
            self._channel.sendall(zygote_messages.pack(zygote_messages.ForkFailed(order.key, f"fork: {error}")))
            return False
        if pid == 0:
            return True
        self._alive[pid] = order
        self._channel.sendall(zygote_messages.pack(zygote_messages.ForkStarted(order.key, pid)))
        return False

    def _forget(self) -> None:
        """In the fork: let go of everything that is the warm process's own."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._channel.close()
        os.close(self._wakeup)
        os.close(self._waker)

    def _bury(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wakeup, 4096):
                pass
        ended = []
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid in self._alive:
                    ended.append(zygote_messages.ChildExited(self._alive.pop(pid).key, pid, status))
        if ended:
            process_tree.signal_to(self._orphans(), signal.SIGKILL)
        for report in ended:
            self._channel.sendall(zygote_messages.pack(report))

    def _orphans(self) -> list[psutil.Process]:
        """What ended members left behind: children of ours that no living member can be shown to have started."""
        left = []
        for child in psutil.Process().children():
            if child.pid not in self._alive and not self._belongs_to_the_living(child):
                left += [child, *process_tree.descendants(child.pid)]
        return left

    def _belongs_to_the_living(self, process: psutil.Process) -> bool:
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(process.pid) in self._alive or _mark(process.pid) in map(birth_mark, self._alive):
                return True
            logs = {order.log_path for order in self._alive.values()}
            if any(_points_to(process.pid, number) in logs for number in (1, 2)):
                return True
            born = process.environ().get("SHOAL_INCARNATION", "")
            return any(born and born == order.env.get("SHOAL_INCARNATION") for order in self._alive.values())
        return False


def _mark(pid: int) -> str:
    with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
        return file.read().strip()


def _points_to(pid: int, descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/{descriptor}")
    except OSError:
        return ""


if __name__ == "__main__":
    main()
