"""Prometheus metrics of runs."""

from __future__ import annotations

import msgspec
from tests.unit.coordinator.test_api_views import trained_by

from shoal.coordinator import api_views
from shoal.coordinator.http import prometheus
from shoal.coordinator.live_state import LiveRun
from shoal.wire.api import ForecastView
from shoal.wire.member_messages import HeartbeatMsg, StepTimes


def test_metrics_include_shares_idle_time_and_noise() -> None:
    state, live = trained_by(2), LiveRun()
    told = {"batch": 64, "noise": 310.0, "idle": (0.38, 0.02)}
    live.heartbeats = {
        "m/0": HeartbeatMsg(1, 7, "compute", 0.0, share=51, spent=StepTimes(0.001, 0.05, 0.002, 0.003), **told),
        "m/1": HeartbeatMsg(1, 7, "compute", 0.0, share=13, **told),
    }
    text = prometheus.render([api_views.run_view(state.runs["r"], state, live, "d", 6.0)], []).decode()
    for line in (
        'shoal_run_batch{name="t",run="r"} 64.0',
        'shoal_run_noise_scale{name="t",run="r"} 310.0',
        'shoal_run_idle_ratio{name="t",run="r",shares="equal"} 0.38',
        'shoal_run_idle_ratio{name="t",run="r",shares="now"} 0.02',
        'shoal_member_share{member="m/1",name="t",run="r"} 13.0',
        'shoal_member_step_seconds{member="m/0",name="t",part="wait",run="r"} 0.002',
        'shoal_member_step_seconds{member="m/0",name="t",part="exchange",run="r"} 0.003',
    ):
        assert line in text


def test_unknown_values_have_no_metric() -> None:
    state = trained_by(1)
    text = prometheus.render([api_views.run_view(state.runs["r"], state, LiveRun(), "d", 6.0)], []).decode()
    assert "shoal_run_noise_scale{" not in text
    assert "shoal_run_idle_ratio{" not in text


def test_time_left_is_a_metric_while_it_is_known() -> None:
    state = trained_by(1)
    run = api_views.run_view(state.runs["r"], state, LiveRun(), "d", 6.0)
    known = msgspec.structs.replace(run, forecast=ForecastView(600.0, 500.0, 700.0, 0.9))
    assert 'shoal_run_seconds_left{name="t",run="r"} 600.0' in prometheus.render([known], []).decode()
    assert "shoal_run_seconds_left{" not in prometheus.render([run], []).decode()
