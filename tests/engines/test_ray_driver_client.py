"""Ray engine with drivers that are silent, die, or are no drivers at all; needs no Ray."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import pytest

from shoal.engines.engine import AllocationRequest
from shoal.engines.ray import engine as ray_engine
from shoal.engines.ray.engine import Ray, RayOptions
from shoal.errors import AllocationRefused, EngineUnreachable
from shoal.wire.credentials import Credentials

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

TALK = """\
import json, sys, time
def reply(**message): print(json.dumps(message), flush=True)
reply(id=0, ok="started")
reply(id=1, ok={})
for line in sys.stdin:
    request = json.loads(line)
"""
EMPTY = 'reply(id=request["id"], ok={"actors": [], "nodes": []})'


def engine(path: Path, *answers: str, talk: str = TALK) -> Ray:
    """Return an engine whose interpreter runs this script instead of the driver."""
    script = path / "driver.py"
    script.write_text(talk + "".join(f"    {line}\n" for line in answers))
    client = path / "client"
    client.write_text(f"#!/bin/sh\nexec {sys.executable} {script}\n")
    client.chmod(0o755)
    return Ray("rays", RayOptions(client=str(client)))


def test_requests_of_several_threads_get_their_own_replies(tmp_path: Path) -> None:
    slow_then_quick = (
        'late = request if request["prefix"] == "shoal-a-" else None',
        "if late is not None: kept = late; continue",
        f"{EMPTY}; request = kept",
        'actor = {"name": "shoal-a-1", "state": "ALIVE", "why": "", "ends_at": None}',
        'reply(id=request["id"], ok={"actors": [actor], "nodes": []})',
    )
    pool = engine(tmp_path, *slow_then_quick)
    names: list[str] = []
    first = threading.Thread(target=lambda: names.extend(status.allocation for status in pool.watch("a")))
    first.start()
    while pool._driver is None or 2 not in pool._driver._waiting:
        time.sleep(0.01)
    assert pool.watch("b") == []
    first.join(120)
    assert names == ["1"]
    pool.close()


def test_late_driver_is_not_awaited_again_and_then_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engine, "REPLY_S", 0.4)
    monkeypatch.setattr(ray_engine, "LATE_S", 0.1)
    pool = engine(tmp_path, "pass")
    whys = []
    for give_up_s in (60.0, 60.0, 0.0):
        monkeypatch.setattr(ray_engine, "GIVE_UP_S", give_up_s)
        with pytest.raises(EngineUnreachable) as error:
            pool.watch("a")
        whys.append(error.value.why)
    assert whys == [f"no reply within {limit} s" for limit in ("0.4", "0.1", "0.1")]
    monkeypatch.setattr(ray_engine, "REPLY_S", 10.0)
    engine(tmp_path, EMPTY)
    assert pool.watch("a") == []
    pool.close()


def test_driver_that_answers_late_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engine, "REPLY_S", 0.2)
    go = tmp_path / "go"
    pool = engine(
        tmp_path, f"while not os.path.exists({str(go)!r}): time.sleep(0.01)", EMPTY, talk=f"import os\n{TALK}"
    )
    with pytest.raises(EngineUnreachable):
        pool.watch("a")
    driver = pool._driver
    assert driver is not None
    assert driver.late_since is not None
    go.touch()
    while driver.late_since is not None:
        time.sleep(0.01)
    monkeypatch.setattr(ray_engine, "REPLY_S", 10.0)
    assert pool.watch("a") == []
    assert pool._driver is driver
    pool.close()


def test_driver_that_reaches_no_cluster_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engine, "CONNECT_S", 0.5)
    monkeypatch.setattr(ray_engine, "GIVE_UP_S", -1.0)
    pool = engine(tmp_path, talk="import time; time.sleep(60)\nif True:\n    pass\n")
    with pytest.raises(EngineUnreachable, match="cannot reach the Ray cluster") as error:
        pool.watch("a")
    assert error.value.why == "no reply within 0.5 s"
    assert pool._driver is None


def test_dead_driver_fails_its_own_request_only(tmp_path: Path) -> None:
    mark = str(tmp_path / "once")
    once = f'if not os.path.exists({mark!r}): open({mark!r}, "w"); sys.exit("GCS is gone")'
    pool = engine(tmp_path, once, EMPTY, talk=f"import os\n{TALK}")
    with pytest.raises(EngineUnreachable) as error:
        pool.watch("a")
    assert error.value.why == "GCS is gone"
    assert pool.watch("a") == []
    pool.close()


def test_program_that_is_no_driver_is_refused_with_its_output(tmp_path: Path) -> None:
    pool = engine(tmp_path, talk="import sys; sys.exit('unknown option -P')\nif True:\n    pass\n")
    with pytest.raises(AllocationRefused, match="cannot use the interpreter") as error:
        pool.watch("a")
    assert error.value.why == "unknown option -P"


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("no ray", AllocationRefused),
        ("version", AllocationRefused),
        ("not a node", AllocationRefused),
        ("lost", EngineUnreachable),
    ],
)
def test_cause_of_a_failed_connection_decides_about_a_retry(kind: str, error: type[Exception], tmp_path: Path) -> None:
    pool = engine(tmp_path, talk=TALK.replace("ok={})", f'failed="{kind}", why="so it is")') + "    pass\n")
    with pytest.raises(error) as raised:
        pool.watch("a")
    assert "so it is" in str(raised.value)
    assert pool._driver is None


def test_submitted_request_is_the_rendered_one_plus_the_token(tmp_path: Path) -> None:
    kept = tmp_path / "request"
    pool = engine(tmp_path, f'open({str(kept)!r}, "w").write(line); reply(id=request["id"], ok=request["name"])')
    allocation = AllocationRequest("a-1", "tag", "http://127.0.0.1:9", Credentials("secret", "PEM"), 1)
    assert pool.submit(allocation) == "shoal-tag-a-1"
    request = json.loads(kept.read_text())
    assert request.pop("id") == 2
    assert request.pop("credentials") == "secret\nPEM"
    assert request == json.loads(pool.render(allocation).text)
    pool.close()
