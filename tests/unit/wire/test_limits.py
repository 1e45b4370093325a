"""Messages are fitted to their bounds before they are sent."""

from __future__ import annotations

import math

import msgspec
import pytest

from shoal.wire import codec, limits
from shoal.wire import member_messages as ms
from shoal.wire.api import SubmitRequest


def test_long_cause_arrives_with_its_beginning_and_its_end() -> None:
    cause = "begin " + "x" * limits.MAX_TEXT + " end"
    received = codec.from_member.decode(codec.to_member.encode(ms.WorldBrokenMsg(1, 2, (), cause)))
    assert isinstance(received, ms.WorldBrokenMsg)
    assert len(received.cause) <= limits.MAX_TEXT
    assert received.cause.startswith("begin ")
    assert received.cause.endswith(" end")


def test_odd_figures_are_clamped_and_others_are_untouched() -> None:
    message = ms.ReadyMsg("model", 3, speed=math.inf)
    assert limits.fit(message) == ms.ReadyMsg("model", 3, speed=limits.MAX_REAL)
    assert limits.fit(ms.LeavingMsg(math.nan, "c")).within_s == 0.0
    usual = ms.ReadyMsg("model", 3, speed=7.5)
    assert limits.fit(usual) is usual


def test_text_that_utf8_cannot_encode_is_sent_with_a_mark() -> None:
    received = codec.from_member.decode(codec.to_member.encode(ms.ClaimMsg("caf\udce9")))
    assert received == ms.ClaimMsg("caf?")


def test_nan_of_the_users_own_metric_passes() -> None:
    heartbeat = ms.HeartbeatMsg(None, 1, "compute", 0.0, loss=math.nan, metrics={"kl": math.inf})
    received = codec.from_member.decode(codec.to_member.encode(heartbeat))
    assert isinstance(received, ms.HeartbeatMsg)
    assert received.loss is not None
    assert math.isnan(received.loss)
    assert received.metrics == {"kl": math.inf}


@pytest.mark.parametrize("name", ["../../etc/passwd", "\n", "0" * 63, "0" * 64 + "\n", "A" * 64, "\0"])
def test_project_of_a_run_is_named_by_its_hash_and_nothing_else(name: str) -> None:
    fields = {"name": "r", "argv": ["train.py"], "cwd": "/", "members": [1, 1]}
    assert msgspec.convert(fields | {"project": "0" * 64}, SubmitRequest).project == "0" * 64
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(fields | {"project": name}, SubmitRequest)
