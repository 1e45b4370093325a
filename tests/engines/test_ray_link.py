"""The engine of Ray against drivers that are silent, dying, or no drivers at all; needs no Ray."""

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

pytestmark = [pytest.mark.process, pytest.mark.timeout(60)]

TALK = """\
import json, sys, time
def say(**message): print(json.dumps(message), flush=True)
say(id=0, ok="started")
say(id=1, ok={})
for line in sys.stdin:
    asked = json.loads(line)
"""
EMPTY = 'say(id=asked["id"], ok={"hires": [], "nodes": []})'


def engine(path: Path, *answers: str, talk: str = TALK) -> Ray:
    """An engine whose interpreter, whatever it is told to run, is this conversation."""
    said = path / "driver.py"
    said.write_text(talk + "".join(f"    {line}\n" for line in answers))
    client = path / "client"
    client.write_text(f"#!/bin/sh\nexec {sys.executable} {said}\n")
    client.chmod(0o755)
    return Ray("rays", RayOptions(client=str(client)))


def test_questions_of_several_threads_get_their_own_answers(tmp_path: Path) -> None:
    slow_then_quick = (
        'late = asked if asked["prefix"] == "shoal-a-" else None',
        "if late is not None: kept = late; continue",
        f"{EMPTY}; asked = kept",
        'found = {"name": "shoal-a-1", "state": "ALIVE", "why": "", "until": None}',
        'say(id=asked["id"], ok={"hires": [found], "nodes": []})',
    )
    made = engine(tmp_path, *slow_then_quick)
    found: list[str] = []
    first = threading.Thread(target=lambda: found.extend(one.allocation for one in made.watch("a")))
    first.start()
    while made._link is None or 2 not in made._link._waiting:
        time.sleep(0.01)
    assert made.watch("b") == []
    first.join(10.0)
    assert found == ["1"]
    made.close()


def test_a_driver_that_is_late_is_not_waited_for_again_and_then_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_engine, "ANSWER_S", 0.4)
    monkeypatch.setattr(ray_engine, "LATE_S", 0.1)
    made = engine(tmp_path, "pass")
    whys = []
    for give_up_s in (60.0, 60.0, 0.0):
        monkeypatch.setattr(ray_engine, "GIVE_UP_S", give_up_s)
        with pytest.raises(EngineUnreachable) as error:
            made.watch("a")
        whys.append(error.value.why)
    assert whys == [f"it did not answer within {patience} s" for patience in ("0.4", "0.1", "0.1")]
    monkeypatch.setattr(ray_engine, "ANSWER_S", 10.0)
    engine(tmp_path, EMPTY)
    assert made.watch("a") == []
    made.close()


def test_a_driver_that_answers_late_is_trusted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engine, "ANSWER_S", 0.2)
    go = tmp_path / "go"
    made = engine(
        tmp_path, f"while not os.path.exists({str(go)!r}): time.sleep(0.01)", EMPTY, talk=f"import os\n{TALK}"
    )
    with pytest.raises(EngineUnreachable):
        made.watch("a")
    link = made._link
    assert link is not None
    assert link.late_since is not None
    go.touch()
    while link.late_since is not None:
        time.sleep(0.01)
    monkeypatch.setattr(ray_engine, "ANSWER_S", 10.0)
    assert made.watch("a") == []
    assert made._link is link
    made.close()


def test_a_driver_that_reaches_nothing_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engine, "CONNECT_S", 0.5)
    monkeypatch.setattr(ray_engine, "GIVE_UP_S", -1.0)
    made = engine(tmp_path, talk="import time; time.sleep(60)\nif True:\n    pass\n")
    with pytest.raises(EngineUnreachable, match="cannot be reached") as error:
        made.watch("a")
    assert error.value.why == "it did not answer within 0.5 s"
    assert made._link is None


def test_a_driver_that_dies_takes_its_question_with_it_and_no_other(tmp_path: Path) -> None:
    mark = str(tmp_path / "once")
    once = f'if not os.path.exists({mark!r}): open({mark!r}, "w"); sys.exit("GCS is gone")'
    made = engine(tmp_path, once, EMPTY, talk=f"import os\n{TALK}")
    with pytest.raises(EngineUnreachable) as error:
        made.watch("a")
    assert error.value.why == "GCS is gone"
    assert made.watch("a") == []
    made.close()


def test_what_is_no_driver_is_refused_with_what_it_said(tmp_path: Path) -> None:
    made = engine(tmp_path, talk="import sys; sys.exit('unknown option -P')\nif True:\n    pass\n")
    with pytest.raises(AllocationRefused, match="cannot be used") as error:
        made.watch("a")
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
def test_why_there_is_no_connection_decides_whether_it_is_tried_again(
    kind: str, error: type[Exception], tmp_path: Path
) -> None:
    made = engine(tmp_path, talk=TALK.replace("ok={})", f'failed="{kind}", why="so it is")') + "    pass\n")
    with pytest.raises(error) as raised:
        made.watch("a")
    assert "so it is" in str(raised.value)
    assert made._link is None


def test_what_is_submitted_is_what_was_shown_and_the_token(tmp_path: Path) -> None:
    kept = tmp_path / "asked"
    made = engine(tmp_path, f'open({str(kept)!r}, "w").write(line); say(id=asked["id"], ok=asked["name"])')
    ask = AllocationRequest("a-1", "tag", "http://127.0.0.1:9", Credentials("secret", "PEM"), 1)
    assert made.submit(ask) == "shoal-tag-a-1"
    asked = json.loads(kept.read_text())
    assert asked.pop("id") == 2
    assert asked.pop("credentials") == "secret\nPEM"
    assert asked == json.loads(made.render(ask).text)
    made.close()
