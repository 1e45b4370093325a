"""What clouds and scripts write, as notices."""

from __future__ import annotations

import json

import msgspec
import pytest

from shoal.agent.notices.source import aws_action, azure_events, file_notice, gcp_preempted, source
from shoal.errors import BadNoticeSource

NOON = 1_505_736_000.0  # 2017-09-18T12:00:00Z


def test_a_spot_interruption_says_when():
    notice = aws_action('{"action": "terminate", "time": "2017-09-18T12:02:00Z"}', NOON)
    assert (notice.within_s, notice.source) == (120.0, "aws")
    assert "terminate" in notice.detail


def test_an_interruption_in_the_past_is_now():
    assert aws_action('{"action": "stop", "time": "2017-09-18T11:00:00Z"}', NOON).within_s == 0.0


@pytest.mark.parametrize("body", ["", "<html>", "{}", '{"action": 3}', '{"action": "stop", "time": "soon"}'])
def test_garbage_is_no_interruption(body):
    with pytest.raises(msgspec.DecodeError):
        aws_action(body, NOON)


def test_preempted_is_true_or_false():
    assert gcp_preempted("FALSE\n") is None
    assert gcp_preempted("TRUE").within_s == 30.0
    with pytest.raises(ValueError, match="neither"):
        gcp_preempted("<html>")


def events(*found):
    return json.dumps({"DocumentIncarnation": 1, "Events": list(found)})


def event(kind="Preempt", machine="vm1", at="Mon, 18 Sep 2017 12:00:30 GMT", number="A1"):
    return {"EventId": number, "EventType": kind, "ResourceType": "VirtualMachine", "Resources": [machine],
            "EventStatus": "Scheduled", "NotBefore": at}  # fmt: skip


def test_a_scheduled_preemption_says_when():
    notice = azure_events(events(event()), "vm1", NOON)
    assert (notice.within_s, notice.source, notice.detail, notice.key) == (30.0, "azure", "Preempt", "A1")


def test_events_of_other_machines_and_freezes_do_not_concern_us():
    assert azure_events(events(), "vm1", NOON) is None
    assert azure_events(events(event(machine="vm2"), event(kind="Freeze")), "vm1", NOON) is None
    assert azure_events(events(event(machine="vm2"), event(kind="Terminate")), "vm1", NOON).detail == "Terminate"


def test_an_event_that_has_started_is_now():
    assert azure_events(events(event(at="")), "vm1", NOON).within_s == 0.0


@pytest.mark.parametrize(
    ("body", "within_s", "detail"),
    [("", 30.0, "the file appeared"), ("90", 90.0, "the file appeared"), ("90 time limit", 90.0, "time limit"),
     ("time limit", 30.0, "time limit"), ("-5 late", 0.0, "late")],
)  # fmt: skip
def test_a_file_may_say_how_soon_and_why(body, within_s, detail):
    notice = file_notice(body, "1")
    assert (notice.within_s, notice.detail) == (within_s, detail)


def test_an_unknown_source_is_refused():
    with pytest.raises(BadNoticeSource):
        source("oracle")
