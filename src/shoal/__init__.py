"""Shoal trains one model on many cheap, unequal, short-lived machines as if they were one dependable machine.

Example::

    run = shoal.run(experiment_fn, roles={"trainer": shoal.Role(count="1:8", cpus=4)}, files=["data.csv"])
    run.wait()
    print(run.metrics())

Training scripts use ``shoal.torch`` or ``shoal.keras`` instead.

May import: the public modules below, when they are first used; `settings` imports core and errors.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.experiment.roles import Role
    from shoal.experiment.run import run
    from shoal.worker.experiment import Experiment

__version__ = "0.1.0"
__all__ = ["Experiment", "Role", "run"]

_HOMES = {"Experiment": "shoal.worker.experiment", "Role": "shoal.experiment.roles", "run": "shoal.experiment.run"}


def __getattr__(name: str) -> Any:
    if name == "join":
        raise AttributeError("shoal has no attribute 'join' — use: import shoal.torch as shoal (or shoal.keras)")
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
