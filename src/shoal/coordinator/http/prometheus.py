"""Prometheus metrics of the runs and agents of a coordinator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from shoal.wire.api import AgentView, RunView


def _evaluation(run: RunView, what: str) -> float | None:
    value: float | None = getattr(run.evaluation, what, None)
    return value


_GAUGES: tuple[tuple[str, str, Callable[[RunView], float | None]], ...] = (
    ("shoal_run_step", "Committed steps", lambda run: run.step),
    ("shoal_run_world", "Number of the live world", lambda run: run.world),
    ("shoal_run_world_size", "Members of the live world", lambda run: run.world_size),
    ("shoal_run_loss", "Latest loss", lambda run: run.loss),
    ("shoal_run_samples_per_second", "Samples per second", lambda run: run.samples_per_s),
    ("shoal_run_batch", "Samples in a global batch", lambda run: run.batch or None),
    ("shoal_run_noise_scale", "Gradient noise scale in samples", lambda run: run.noise),
    (
        "shoal_run_seconds_left",
        "Seconds until the last step, as foretold",
        lambda run: run.forecast.seconds if run.forecast else None,
    ),
    ("shoal_run_checkpoint_step", "Step of the newest checkpoint", lambda run: run.checkpoint_step),
    ("shoal_run_evaluated_step", "Step of the latest evaluation", lambda run: _evaluation(run, "step")),
    ("shoal_run_best_step", "Step of the best evaluation", lambda run: _evaluation(run, "best_step")),
    ("shoal_run_best_value", "Metric of the best evaluation", lambda run: _evaluation(run, "best_value")),
)


def render(runs: Iterable[RunView], agents: Iterable[AgentView]) -> bytes:
    """Return all metrics in the text format."""
    registry = CollectorRegistry()
    registry.register(_Collector(list(runs), list(agents)))
    return generate_latest(registry)


class _Collector:
    def __init__(self, runs: list[RunView], agents: list[AgentView]) -> None:
        self._runs, self._agents = runs, agents

    def collect(self) -> Iterator[Metric]:
        for name, text, value in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=["run", "name"])
            for run in self._runs:
                measured = value(run)
                if measured is not None:
                    gauge.add_metric([run.run, run.name], measured)
            yield gauge
        losses = CounterMetricFamily("shoal_run_losses", "Members lost", labels=["run", "name"])
        joins = CounterMetricFamily("shoal_run_joins", "Members that joined", labels=["run", "name"])
        members = GaugeMetricFamily("shoal_run_members", "Members by status", labels=["run", "name", "status"])
        for run in self._runs:
            losses.add_metric([run.run, run.name], run.losses)
            joins.add_metric([run.run, run.name], run.joins)
            for status in sorted({member.status for member in run.members}):
                count = sum(member.status == status for member in run.members)
                members.add_metric([run.run, run.name, status], count)
        yield from (losses, joins, members)
        yield from self._steps()
        yield self._evaluations()
        agents = GaugeMetricFamily("shoal_agent_connected", "Whether the agent is connected", labels=["agent"])
        for agent in self._agents:
            agents.add_metric([agent.agent], float(agent.connected))
        yield agents

    def _evaluations(self) -> Metric:
        gauge = GaugeMetricFamily("shoal_run_evaluation", "Latest evaluation", labels=["run", "name", "metric"])
        for run in self._runs:
            for metric, value in (run.evaluation.metrics if run.evaluation is not None else {}).items():
                gauge.add_metric([run.run, run.name, metric], value)
        return gauge

    def _steps(self) -> Iterator[Metric]:
        """Yield the shares of members, the parts of their steps, and the time they spend waiting."""
        labels = ["run", "name"]
        idle = GaugeMetricFamily(
            "shoal_run_idle_ratio", "Part of the members' time spent waiting", labels=[*labels, "shares"]
        )
        share = GaugeMetricFamily("shoal_member_share", "Samples of the member in a step", labels=[*labels, "member"])
        parts = GaugeMetricFamily(
            "shoal_member_step_seconds", "Seconds of a usual step", labels=[*labels, "member", "part"]
        )
        for run in self._runs:
            for shares, value in (("equal", run.idle_before), ("now", run.idle_now)):
                if value is not None:
                    idle.add_metric([run.run, run.name, shares], value)
            for member in run.members:
                if member.rank is not None:
                    share.add_metric([run.run, run.name, member.member], member.share)
                    spent = {"data": member.data_s, "compute": member.compute_s, "wait": member.wait_s}
                    for part, seconds in (spent | {"exchange": member.exchange_s}).items():
                        parts.add_metric([run.run, run.name, member.member, part], seconds)
        yield from (idle, share, parts)
