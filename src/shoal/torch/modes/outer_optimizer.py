"""Outer optimizer of local SGD: averages the changes that members made in a round and applies them.

With a learning rate of 1 and no momentum the result is the mean of the members' parameters (local SGD, FedAvg). With
Nesterov momentum it is DiLoCo, which treats the mean change as a gradient. Members' parameters differ within a round
and are equal after it, because all start from the same values and add the same sum.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shoal.torch.gradients.buckets import Buckets, reduce
from shoal.worker.collectives.exchange import Exchange

Values = dict[torch.nn.Parameter, torch.Tensor]


class ParameterDeltas(Buckets):
    """Changes of the parameters in a round, averaged over members; `counts` are further numbers summed with them."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        statistics: int,
        counts: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(parameters, statistics + counts, dtype)
        self.close()
        self.statistics, self.counts = torch.split(self.statistics, [statistics, counts])

    def refuse_foreign_gradients(self) -> None:
        """Accept any gradients: they are not exchanged in this mode."""

    def average(self, exchange: Exchange, start: Values, fraction: float) -> None:
        """Sum the changes since `start` over members, this one's times `fraction`; `items` then yields the sums."""
        works = []
        for bucket in self._buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if fraction:
                    torch.sub(parameter.detach(), start[parameter], out=view).mul_(fraction)
                else:
                    view.zero_()
            works.append(reduce(exchange, bucket.flat))
        for work in works:
            work.wait()

    def items(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Yield each parameter with its change."""
        for bucket in self._buckets:
            yield from zip(bucket.parameters, bucket.views, strict=True)


class OuterOptimizer:
    """SGD with Nesterov momentum on the changes of a round; all members hold the same velocities."""

    def __init__(self, lr: float, momentum: float) -> None:
        self._lr, self._momentum = lr, momentum
        self.velocities: list[torch.Tensor] = []

    @torch.no_grad()
    def step(self, deltas: ParameterDeltas, start: Values) -> None:
        """Set every parameter to its value at the start of the round plus the outer step."""
        if self._momentum and [v.shape for v in self.velocities] != [p.shape for p in deltas.parameters]:
            # The first round, or the first one after the script froze or unfroze layers.
            self.velocities = [torch.zeros_like(start[p]) for p in deltas.parameters]
        velocities = dict(zip(deltas.parameters, self.velocities, strict=True)) if self._momentum else {}
        for parameter, change in deltas.items():
            if self._momentum:
                velocity = velocities[parameter].mul_(self._momentum).add_(change)
                change.add_(velocity, alpha=self._momentum)
            parameter.copy_(start[parameter].add(change, alpha=self._lr))


class RoundStart:
    """Copies of the state at the start of a round, to restore it if the round does not commit."""

    def __init__(self) -> None:
        self.values: Values = {}
        self._states: list[tuple[torch.optim.Optimizer, dict[Any, dict[str, Any]], list[dict[str, Any]]]] = []
        self._others: list[tuple[Any, Any]] = []

    def save(
        self,
        parameters: Sequence[torch.nn.Parameter],
        optimizers: Sequence[torch.optim.Optimizer],
        others: Sequence[Any],
    ) -> None:
        """Copy everything; the memory of the previous round's copies is reused."""
        self.values = {p: _copied(p.detach(), self.values.get(p)) for p in parameters}
        previous = {id(optimizer): state for optimizer, state, _ in self._states}
        self._states = [(o, _state_of(o, previous.get(id(o), {})), _groups_of(o)) for o in optimizers]
        self._others = [(part, copy.deepcopy(part.state_dict())) for part in others]

    @torch.no_grad()
    def restore(self) -> None:
        """Reset everything to the copies."""
        for parameter, value in self.values.items():
            parameter.copy_(value)
        for optimizer, state, groups in self._states:
            _restore(optimizer, state)
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                group.update(settings)
        for part, state in self._others:
            part.load_state_dict(state)


def _copied(value: torch.Tensor, into: Any) -> torch.Tensor:
    fits = isinstance(into, torch.Tensor) and into.shape == value.shape and into.dtype == value.dtype
    return into.copy_(value) if fits else value.clone()


def _state_of(optimizer: torch.optim.Optimizer, previous: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    return {
        parameter: {
            key: _copied(value, previous.get(parameter, {}).get(key))
            if isinstance(value, torch.Tensor)
            else copy.deepcopy(value)
            for key, value in values.items()
        }
        for parameter, values in optimizer.state.items()
    }


def _groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        copy.deepcopy({key: value for key, value in group.items() if key != "params"})
        for group in optimizer.param_groups
    ]


def _restore(optimizer: torch.optim.Optimizer, state: dict[Any, dict[str, Any]]) -> None:
    for parameter in [p for p in optimizer.state if p not in state]:
        del optimizer.state[parameter]
    for parameter, saved in state.items():
        live = optimizer.state[parameter]
        for key in [k for k in live if k not in saved]:
            del live[key]
        for key, value in saved.items():
            live[key] = _copied(value, live.get(key)) if isinstance(value, torch.Tensor) else copy.deepcopy(value)
