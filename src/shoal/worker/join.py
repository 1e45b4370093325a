"""Entry of a process into the run that it was started for, in any framework."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Any, NamedTuple

from shoal.core import sync_mode
from shoal.core.membership.state import EVALUATOR
from shoal.errors import AlreadyJoined
from shoal.store.blob_store import SCHEME
from shoal.worker.evaluation.evaluator_session import EvaluatorSession
from shoal.worker.parameter_server.served_session import ServedSession
from shoal.worker.session import environment
from shoal.worker.session.session import Session
from shoal.worker.session.standalone import Progress, StandaloneSession

NOTICE_S = 30.0
# Slurm and systemd signal every process of a job, and the agent then passes its own signal on: both are one notice.
REPEATED_NOTICE_S = 2.0
_joined_pid = 0
_opened: Session | ServedSession | EvaluatorSession | None = None


class Joined(NamedTuple):
    """Session of this process, the name of its run, and the directory of its checkpoints."""

    session: Session | ServedSession | StandaloneSession
    run: str
    checkpoints: str


def join(*, show_progress: bool = False) -> Joined:
    """Join the run that this process was started for; return a standalone session if it was started by hand.

    With `show_progress` a standalone session prints its steps and losses.
    """
    member = environment.read(os.environ)
    if member is None:
        session = StandaloneSession(Progress() if show_progress else None)
        return Joined(session, "alone", os.path.join(os.getcwd(), ".shoal", "checkpoints"))
    global _opened
    _raise_if_joined(member.member)
    opened = _opened = _open_session(member)
    _handle_sigterm(opened, member.grace_s or NOTICE_S)
    _report_uncaught_errors(opened)
    return Joined(opened, member.run, checkpoint_directory(member))


def _raise_if_joined(member: str) -> None:
    """Raise AlreadyJoined if this process, or the one it was forked from, has joined already."""
    global _joined_pid
    if _joined_pid:
        own = _joined_pid == os.getpid()
        raise AlreadyJoined(
            "join() was called twice" if own else "a fork of a member's process called join()",
            where=member,
            why="this process takes part in the run already" if own else f"process {_joined_pid} has joined before it",
            do="call join() once, in one process of each member",
        )
    _joined_pid = os.getpid()


def has_trained() -> bool:
    """Return whether this process has joined its run and holds the state of a step, as after a training loop."""
    return _opened is not None and bool(_opened.step)


def checkpoint_directory(member: environment.MemberEnvironment) -> str:
    """Return where the run's checkpoints are: the setting checkpoint.to, else the run's directory or its store."""
    configured = member.values.checkpoint_to
    if configured and configured != SCHEME:
        return f"{configured.rstrip('/')}/{member.run}"
    parent = f"{SCHEME}{member.run}" if configured == SCHEME else member.checkpoint_store or member.run_dir
    return os.path.join(parent, "checkpoints")


def _open_session(member: environment.MemberEnvironment) -> Session | ServedSession | EvaluatorSession:
    if member.role == EVALUATOR:
        return EvaluatorSession(member)
    return ServedSession(member) if sync_mode.parse(member.values.sync).served else Session(member)


def _handle_sigterm(session: Session | ServedSession | EvaluatorSession, grace_s: float = NOTICE_S) -> None:
    """Treat SIGTERM as a notice: hand off the state and leave. A later SIGTERM ends the process at once."""
    if threading.current_thread() is not threading.main_thread():
        return
    noticed = False

    def leave(_signal: int, _frame: Any) -> None:
        nonlocal noticed
        if noticed:
            return
        noticed = True
        # In threads of their own: the main thread may hold the lock that leaving needs, or be busy in a library.
        threading.Thread(target=session.leave, args=(grace_s, "SIGTERM"), daemon=True).start()
        threading.Thread(target=_restore_default_sigterm, daemon=True).start()

    signal.signal(signal.SIGTERM, leave)


def _restore_default_sigterm() -> None:
    """Let the next SIGTERM end the process, once repetitions of the first have passed."""
    time.sleep(REPEATED_NOTICE_S)
    # Through libc, because `signal.signal` works in the main thread only.
    ctypes.CDLL(None).signal(int(signal.SIGTERM), None)


def _report_uncaught_errors(session: Session | ServedSession | EvaluatorSession) -> None:
    """Report uncaught exceptions to the coordinator before the process ends, so that the cause is known."""
    previous_hook = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(session, EvaluatorSession):
            session.on_uncaught(error)
        session.report_exception(error, "".join(traceback.format_exception(kind, error, trace)))
        previous_hook(kind, error, trace)

    sys.excepthook = report
