"""Documents of clouds as notices."""

from __future__ import annotations

import json

import msgspec
import pytest

from shoal.agent.notices.cloud import aws_action, azure_events, gcp_preempted

NOON = 1_505_736_000.0  # 2017-09-18T12:00:00Z


def test_spot_interruption_has_its_deadline():
    notice = aws_action('{"action": "terminate", "time": "2017-09-18T12:02:00Z"}', NOON)
    assert (notice.within_s, notice.source) == (120.0, "aws")
    assert "terminate" in notice.detail


def test_interruption_in_the_past_is_now():
    assert aws_action('{"action": "stop", "time": "2017-09-18T11:00:00Z"}', NOON).within_s == 0.0


@pytest.mark.parametrize("body", ["", "<html>", "{}", '{"action": 3}', '{"action": "stop", "time": "soon"}'])
def test_malformed_document_is_refused(body):
    with pytest.raises(msgspec.DecodeError):
        aws_action(body, NOON)


def test_preempted_must_be_true_or_false():
    assert gcp_preempted("FALSE\n") is None
    assert gcp_preempted("TRUE").within_s == 30.0
    with pytest.raises(ValueError, match="neither"):
        gcp_preempted("<html>")


def events(*scheduled):
    return json.dumps({"DocumentIncarnation": 1, "Events": list(scheduled)})


def event(kind="Preempt", machine="vm1", at="Mon, 18 Sep 2017 12:00:30 GMT", number="A1"):
    return {"EventId": number, "EventType": kind, "ResourceType": "VirtualMachine", "Resources": [machine],
            "EventStatus": "Scheduled", "NotBefore": at}  # fmt: skip


def test_scheduled_preemption_has_its_deadline():
    notice = azure_events(events(event()), "vm1", NOON)
    assert (notice.within_s, notice.source, notice.detail, notice.key) == (30.0, "azure", "Preempt", "A1")


def test_events_of_other_machines_and_freezes_are_ignored():
    assert azure_events(events(), "vm1", NOON) is None
    assert azure_events(events(event(machine="vm2"), event(kind="Freeze")), "vm1", NOON) is None
    assert azure_events(events(event(machine="vm2"), event(kind="Terminate")), "vm1", NOON).detail == "Terminate"


def test_event_that_has_started_is_now():
    assert azure_events(events(event(at="")), "vm1", NOON).within_s == 0.0
