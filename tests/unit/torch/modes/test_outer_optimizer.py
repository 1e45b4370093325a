"""The outer optimizer averages the changes of a round; a round that does not commit is undone."""

from __future__ import annotations

import torch

from shoal.torch.modes.outer_optimizer import OuterOptimizer, ParameterDeltas, RoundStart
from shoal.worker.session.standalone import StandaloneSession


def after_a_round(outer: OuterOptimizer, parameter: torch.nn.Parameter, change: float, fraction: float = 1.0) -> float:
    start = {parameter: parameter.detach().clone()}
    with torch.no_grad():
        parameter.add_(change)
    deltas = ParameterDeltas([parameter], statistics=0, counts=1)
    exchange = StandaloneSession().exchange
    assert exchange is not None
    deltas.average(exchange, start, fraction)
    outer.step(deltas, start)
    return parameter.item()


def test_rate_one_without_momentum_is_the_weighted_mean_of_the_changes() -> None:
    parameter = torch.nn.Parameter(torch.tensor(1.0))
    assert after_a_round(OuterOptimizer(1.0, 0.0), parameter, change=2.0, fraction=0.5) == 2.0


def test_momentum_is_nesterov() -> None:
    parameter, outer = torch.nn.Parameter(torch.tensor(0.0)), OuterOptimizer(0.5, 0.5)
    assert after_a_round(outer, parameter, change=1.0) == 0.5 * (1.0 + 0.5 * 1.0)
    assert outer.velocities[0].item() == 1.0


def test_restore_undoes_a_round() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    start = RoundStart()
    start.save(list(model.parameters()), [optimizer], [scheduler])
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler.step()
    start.restore()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert scheduler.last_epoch == 0
