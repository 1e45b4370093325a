"""Shoal for PyTorch: ``import shoal.torch as shoal``.

Example::

    run = shoal.join()
    model, optimizer = run.attach(model, optimizer)
    for x, y in run.batches(dataset, size=512, epochs=10, seed=0):
        loss = loss_fn(model(x), y)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    run.save("model.pt")
"""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from types import TracebackType

from shoal.core import sync
from shoal.torch.run import Run, handle_sigterm
from shoal.worker import environment
from shoal.worker.placed import PlacedSession
from shoal.worker.session import Session
from shoal.worker.solo import Solo

__all__ = ["Run", "join"]


def join() -> Run:
    """Take part in the run that this process was started for; alone, if it was started by hand."""
    told = environment.read(os.environ)
    if told is None:
        return Run(Solo(), "alone", os.path.join(os.getcwd(), ".shoal", "checkpoints"))
    served = sync.parse(told.values.sync).served
    session = PlacedSession(told) if served else Session(told)
    handle_sigterm(session)
    elsewhere = told.values.checkpoint_to
    where = f"{elsewhere.rstrip('/')}/{told.run}" if elsewhere else os.path.join(told.run_dir, "checkpoints")
    run = Run(session, told.run, where)
    atexit.register(run.close)
    _tell_of_errors(session)
    return run


def _tell_of_errors(session: Session | PlacedSession) -> None:
    """Let the coordinator know of an uncaught exception before the process is gone and the others see only that."""
    usual = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        session.raised(error, "".join(traceback.format_exception(kind, error, trace)))
        usual(kind, error, trace)

    sys.excepthook = tell
