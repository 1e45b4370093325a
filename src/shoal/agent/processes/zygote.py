"""Zygote: the warm process that has imported the framework already, and forks members from that state.

Why a warm process. A member that starts cold spends seconds on `import torch`, and during recovery all other members
wait for it. A process that has done the imports once can fork a member in milliseconds, and the pages of the imported
modules stay shared between all members of the machine. The price is that `fork` copies exactly the state there is, so
this process must stay in a state that is safe to copy:

- It is single-threaded. A lock that another thread holds during a fork would stay locked in the child forever. The
  number of threads after the imports is reported to the agent, which warns if it is more than one.
- It touches no device: a CUDA context does not survive a fork.
- It does nothing but wait for its agent, so a fork is never in the middle of anything.

The protocol, over a socket pair whose other end is held by `warm_process` in the agent (`zygote_messages`)::

    zygote → agent    ZygoteReady      the imports are done; those that failed, and why
    agent → zygote    ForkRequest      key, script, environment, log file
    zygote → agent    ForkStarted      key and pid, before anything else about this key; or ForkFailed
    zygote → agent    ChildExited      key and wait status

The zygote is the parent of all members, so it alone can wait for them; SIGCHLD wakes its loop through a pipe.

What a child resets. The fork leaves the loop by returning from `serve` with its request, closes the sockets of the
zygote and unblocks the signals. The zygote blocks SIGTERM, SIGINT and SIGHUP rather than ignoring them: a SIGTERM that
arrives before the member has installed its handlers stays pending and is not lost. `child_main` then starts a session,
renames the process, redirects its output to the log, replaces environment, search path and arguments, reseeds the
random generators, sets the number of threads, and runs the script as `__main__`. Where a setting is read only at the
start of an interpreter (`PYTHONHASHSEED`, `LD_PRELOAD`, …) the request is `cold`, and the fork executes a new one.

Orphans. Members start processes of their own, for example data loaders, and a member that crashes leaves them behind.
The zygote is a *child subreaper*: processes whose parent dies become its children instead of init's. After each exit
it kills every child that no living member can have started. The evidence is the session, the process name (a mark that
forks inherit), the log file as standard output, or the incarnation in the environment; a process that shows none of
these belongs to no living member.

The end. Members die with the zygote: the kernel sends them SIGKILL when their parent dies (PR_SET_PDEATHSIG). When the
agent closes the socket or dies, the zygote kills all descendants until none is left, and exits. If zygote and agent are
killed together, the next agent in the same directory finishes the job (`orphan_cleanup`).
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
from shoal.agent.processes.child_main import process_name, run_member

# torch._dynamo: the first optimizer of a process imports it, which takes longer than all the rest.
PRELOAD = ("numpy", "torch", "torch._dynamo", "torch.utils.data", "websockets.sync.client", "psutil", "shoal.torch")
_BLOCKED_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def main() -> None:
    """Serve the agent at the other end of the given descriptor; in a fork, become the member."""
    parser = argparse.ArgumentParser(prog="shoal.agent.processes.zygote")
    parser.add_argument("channel", type=int)
    parser.add_argument("preload", nargs="*")
    arguments = parser.parse_args()
    channel = socket.socket(fileno=arguments.channel)
    channel.set_inheritable(False)
    # Blocked, not ignored: a SIGTERM that reaches a member before it has its handlers must not be lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)
    process_tree.adopt_orphans()
    search_path = sys.path[0 if sys.flags.safe_path else 1 :]
    ready = preload(arguments.preload)
    with contextlib.suppress(ConnectionError):
        channel.sendall(zygote_messages.pack(ready))
    zygote = os.getpid()
    request = ForkServer(channel).serve()
    if request is None:
        process_tree.kill_descendants()
        return
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED_SIGNALS)
    try:
        run_member(request, zygote, search_path)
    except SystemExit as leaving:
        if leaving.code is not None and not isinstance(leaving.code, int):
            raise
        _exit_fast(leaving.code or 0)
    _exit_fast(0)


def _exit_fast(exit_code: int) -> NoReturn:
    """Exit as Python does, but without freeing memory: destroying torch's objects one by one can take a second."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code & 0xFF)


def preload(modules: list[str]) -> zygote_messages.ZygoteReady:
    """Import the modules; report those that fail, which members import again if they need them.

    Imports are a fifth faster without the garbage collector. Frozen objects are not touched by the members' collectors,
    so their memory stays shared.
    """
    began = time.monotonic()
    gc.disable()
    failed = {}
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - a module may raise anything, and members may not need it
            failed[name] = f"{type(error).__name__}: {error}"
    gc.freeze()
    gc.enable()
    return zygote_messages.ZygoteReady(
        seconds=time.monotonic() - began, tasks=len(os.listdir("/proc/self/task")), failed=failed
    )


class ForkServer:
    """Loop of the zygote: forks members on request and reports their exits."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._alive: dict[int, zygote_messages.ForkRequest] = {}
        self._wakeup, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> zygote_messages.ForkRequest | None:
        """Serve until the agent is gone, then return None; in a forked member, return its request."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        selector = selectors.DefaultSelector()
        selector.register(self._channel, selectors.EVENT_READ)
        selector.register(self._wakeup, selectors.EVENT_READ)
        with contextlib.suppress(BrokenPipeError, ConnectionError):
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if self._wakeup in ready:
                    self._reap()
                if self._channel not in ready:
                    continue
                request = zygote_messages.receive_request(self._channel)
                if request is None:
                    return None
                if self._fork(request):
                    selector.close()
                    self._close()
                    return request
        return None

    def _fork(self, request: zygote_messages.ForkRequest) -> bool:
        """Fork a member; return True in the child, False in the zygote."""
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = os.fork()
        except OSError as error:
            self._channel.sendall(zygote_messages.pack(zygote_messages.ForkFailed(request.key, f"fork: {error}")))
            return False
        if pid == 0:
            return True
        self._alive[pid] = request
        self._channel.sendall(zygote_messages.pack(zygote_messages.ForkStarted(request.key, pid)))
        return False

    def _close(self) -> None:
        """Close everything that belongs to the zygote; called in the fork."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._channel.close()
        os.close(self._wakeup)
        os.close(self._waker)

    def _reap(self) -> None:
        """Collect ended children, kill what they left behind, and report the exits of members."""
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
        """Return children, with their descendants, that belong to no living member."""
        orphans = []
        for child in psutil.Process().children():
            if child.pid not in self._alive and not self._has_living_owner(child):
                orphans += [child, *process_tree.descendants(child.pid)]
        return orphans

    def _has_living_owner(self, process: psutil.Process) -> bool:
        """Return whether a process shows by any of four properties that a living member started it."""
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(process.pid) in self._alive or _name_of(process.pid) in map(process_name, self._alive):
                return True
            logs = {request.log_path for request in self._alive.values()}
            if any(_descriptor_target(process.pid, number) in logs for number in (1, 2)):
                return True
            incarnation = process.environ().get("SHOAL_INCARNATION", "")
            living = {request.env.get("SHOAL_INCARNATION") for request in self._alive.values()}
            return bool(incarnation) and incarnation in living
        return False


def _name_of(pid: int) -> str:
    with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
        return file.read().strip()


def _descriptor_target(pid: int, descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/{descriptor}")
    except OSError:
        return ""


if __name__ == "__main__":
    main()
