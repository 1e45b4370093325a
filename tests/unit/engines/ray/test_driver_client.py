"""The conversation with a Ray driver process, which a shell script stands for."""

from __future__ import annotations

import pytest

from shoal.engines.ray.driver_client import DriverError, RayDriverClient

STARTED = """echo '{"id": 0, "ok": "started"}'; echo '{"id": 1, "ok": {}}';"""


def driver(script: str) -> RayDriverClient:
    return RayDriverClient(["sh", "-c", script])


def test_replies_are_matched_by_number_not_by_order() -> None:
    client = driver(STARTED + """read a; read b; echo '{"id": 3, "ok": "second"}'; echo '{"id": 2, "ok": "first"}'""")
    assert client.ready.result(30.0) == {}
    first, second = client.call({"do": "list"}), client.call({"do": "list"})
    assert (first.result(30.0), second.result(30.0)) == ("first", "second")
    client.end()


def test_failure_reported_by_the_driver_keeps_its_kind() -> None:
    client = driver(STARTED + """read a; echo '{"id": 2, "failed": "full", "why": "no CPU is free"}'; cat""")
    with pytest.raises(DriverError, match="no CPU is free") as error:
        client.call({"do": "start"}).result(30.0)
    assert error.value.kind == "full"
    client.end()


def test_every_open_request_ends_with_the_driver_and_gets_its_last_words() -> None:
    client = driver(STARTED + "read a; echo 'GCS is gone' >&2; exit 1")
    reply = client.call({"do": "list"})
    with pytest.raises(DriverError, match="GCS is gone") as error:
        reply.result(30.0)
    assert error.value.kind == "lost"
    with pytest.raises(DriverError, match="GCS is gone"):
        client.call({"do": "list"}).result(30.0)
    assert client.ended


def test_program_that_is_no_driver_never_started() -> None:
    client = driver("exit 7")
    with pytest.raises(DriverError, match="exit code 7") as error:
        client.ready.result(30.0)
    assert error.value.kind == "never started"


def test_late_driver_counts_from_the_first_missed_reply() -> None:
    client = driver(STARTED + "cat")
    client.ready.result(30.0)
    first_s = client.late_for_s()
    assert client.late_for_s() >= first_s
    assert client.late_since is not None
    client.end()
