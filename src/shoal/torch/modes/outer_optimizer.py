"""The outer step of local training: what members have learned for themselves is averaged, and gone after.

With a learning rate of 1 and no momentum it is the mean of the members' parameters (local SGD); with Nesterov momentum
it is that of DiLoCo.
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
    """By how much a round changed each parameter, summed over members; `told` are further numbers, summed along."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], statistics: int, told: int) -> None:
        super().__init__(parameters, statistics + told)
        self.close()
        self.statistics, self.told = torch.split(self.statistics, [statistics, told])

    def refuse_others(self) -> None:
        """A member's gradients are its own here."""

    def sum_up(self, exchange: Exchange, start: Values, part: float) -> None:
        """Let ours count for `part`; on return `each` gives the sum of all members' parts."""
        tickets = []
        for bucket in self._buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if part:
                    torch.sub(parameter.detach(), start[parameter], out=view).mul_(part)
                else:
                    view.zero_()
            tickets.append(reduce(exchange, bucket.flat))
        for ticket in tickets:
            ticket.wait()

    def each(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        for bucket in self._buckets:
            yield from zip(bucket.parameters, bucket.views, strict=True)


class OuterOptimizer:
    """The outer optimizer; all members hold the same momentum."""

    def __init__(self, lr: float, momentum: float) -> None:
        self._lr, self._momentum = lr, momentum
        self.velocities: list[torch.Tensor] = []

    @torch.no_grad()
    def step(self, changes: ParameterDeltas, start: Values) -> None:
        """Set every parameter to where it started, plus the step."""
        if self._momentum and [v.shape for v in self.velocities] != [p.shape for p in changes.parameters]:
            # The first round, or the first one in which other layers are trained.
            self.velocities = [torch.zeros_like(start[p]) for p in changes.parameters]
        velocities = dict(zip(changes.parameters, self.velocities, strict=True)) if self._momentum else {}
        for parameter, change in changes.each():
            if self._momentum:
                velocity = velocities[parameter].mul_(self._momentum).add_(change)
                change.add_(velocity, alpha=self._momentum)
            parameter.copy_(start[parameter].add(change, alpha=self._lr))


class RoundStart:
    """The state that a round began with: copies, so that a round that does not commit leaves no trace."""

    def __init__(self) -> None:
        self.values: Values = {}
        self._states: list[tuple[torch.optim.Optimizer, dict[Any, dict[str, Any]], list[dict[str, Any]]]] = []
        self._others: list[tuple[Any, Any]] = []

    def keep(
        self,
        parameters: Sequence[torch.nn.Parameter],
        optimizers: Sequence[torch.optim.Optimizer],
        others: Sequence[Any],
    ) -> None:
        """Remember all of it as it is now; memory of the round before is used again."""
        self.values = {p: _copied(p.detach(), self.values.get(p)) for p in parameters}
        before = {id(optimizer): state for optimizer, state, _ in self._states}
        self._states = [(o, _state_of(o, before.get(id(o), {})), _groups_of(o)) for o in optimizers]
        self._others = [(part, copy.deepcopy(part.state_dict())) for part in others]

    @torch.no_grad()
    def put_back(self) -> None:
        """Make everything what it was."""
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


def _state_of(optimizer: torch.optim.Optimizer, before: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    return {
        parameter: {
            key: _copied(value, before.get(parameter, {}).get(key))
            if isinstance(value, torch.Tensor)
            else copy.deepcopy(value)
            for key, value in held.items()
        }
        for parameter, held in optimizer.state.items()
    }


def _groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        copy.deepcopy({key: value for key, value in group.items() if key != "params"})
        for group in optimizer.param_groups
    ]


def _restore(optimizer: torch.optim.Optimizer, state: dict[Any, dict[str, Any]]) -> None:
    for parameter in [p for p in optimizer.state if p not in state]:
        del optimizer.state[parameter]
    for parameter, kept in state.items():
        held = optimizer.state[parameter]
        for key in [k for k in held if k not in kept]:
            del held[key]
        for key, value in kept.items():
            held[key] = _copied(value, held.get(key)) if isinstance(value, torch.Tensor) else copy.deepcopy(value)
