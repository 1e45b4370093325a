"""How a process takes part in the run that it was started for, whatever it trains with."""

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
from shoal.store.blob_store import SCHEME
from shoal.worker.evaluation.evaluator_session import EvaluatorSession
from shoal.worker.parameter_server.served_session import ServedSession
from shoal.worker.session import environment
from shoal.worker.session.session import Session
from shoal.worker.session.standalone import StandaloneSession

NOTICE_S = 30.0
# Whoever ends a whole job, as Slurm and systemd do, signals each process of it; the agent then passes its own on.
SAME_NOTICE_S = 2.0


class Joined(NamedTuple):
    """The session of this process, the name of its run, and where checkpoints of that go."""

    session: Session | ServedSession | StandaloneSession
    run: str
    checkpoints: str


def join() -> Joined:
    """Take part in the run that this process was started for; alone, if it was started by hand."""
    told = environment.read(os.environ)
    if told is None:
        return Joined(StandaloneSession(), "alone", os.path.join(os.getcwd(), ".shoal", "checkpoints"))
    session = _session(told)
    _handle_sigterm(session, told.grace_s or NOTICE_S)
    _tell_of_errors(session)
    return Joined(session, told.run, checkpoints_of(told))


def checkpoints_of(told: environment.MemberEnvironment) -> str:
    """Where the checkpoints of a run are: where it was asked, else in its directory, seen from here or not."""
    elsewhere = told.values.checkpoint_to
    if elsewhere and elsewhere != SCHEME:
        return f"{elsewhere.rstrip('/')}/{told.run}"
    above = f"{SCHEME}{told.run}" if elsewhere == SCHEME else told.store or told.run_dir
    return os.path.join(above, "checkpoints")


def _session(told: environment.MemberEnvironment) -> Session | ServedSession | EvaluatorSession:
    if told.role == EVALUATOR:
        return EvaluatorSession(told)
    return ServedSession(told) if sync_mode.parse(told.values.sync).served else Session(told)


def _handle_sigterm(session: Session | ServedSession | EvaluatorSession, grace_s: float = NOTICE_S) -> None:
    """SIGTERM is a notice: hand over and go. Another one, a little later, ends the process at once."""
    if threading.current_thread() is not threading.main_thread():
        return
    told = False

    def leave(_signal: int, _frame: Any) -> None:
        nonlocal told
        if told:
            return
        told = True
        # In threads of their own: the main thread may hold the very lock that leaving needs, or be busy in a library.
        threading.Thread(target=session.leave, args=(grace_s, "SIGTERM"), daemon=True).start()
        threading.Thread(target=_end_at_the_next, daemon=True).start()

    signal.signal(signal.SIGTERM, leave)


def _end_at_the_next() -> None:
    time.sleep(SAME_NOTICE_S)
    # Python itself would do so in the main thread only.
    ctypes.CDLL(None).signal(int(signal.SIGTERM), None)


def _tell_of_errors(session: Session | ServedSession | EvaluatorSession) -> None:
    """Let the coordinator know of an uncaught exception before the process is gone and the others see only that."""
    usual = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        session.report_exception(error, "".join(traceback.format_exception(kind, error, trace)))
        usual(kind, error, trace)

    sys.excepthook = tell
