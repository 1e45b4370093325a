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

May import: core, errors, worker, and all of shoal.torch.
"""

from __future__ import annotations

import atexit

from shoal.worker import join as worker_join
from shoal.worker.framework import missing_framework_error

try:
    from shoal.torch.run import Run
except ModuleNotFoundError as error:
    raise missing_framework_error(error) from None

__all__ = ["Run", "join"]


def join() -> Run:
    """Return the run that this process was started for; a standalone one if it was started by hand."""
    run = Run(*worker_join.join(show_progress=True))
    atexit.register(run.close)
    return run
