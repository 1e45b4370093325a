"""Settings of a submitted run, completed for its roles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit.coordinator.stage import open_service

from shoal.coordinator.http.commands import RunCommands, _complete_settings
from shoal.core.runs.events import RunCreated
from shoal.errors import BadRole, PermissionDenied
from shoal.settings import parse_settings
from shoal.wire.api import RoleSpec, RunSpec


def settings_of(compat: str = "", evaluators: int = 1, **settings: Any) -> dict[str, Any]:
    roles = {"evaluator": RoleSpec(evaluators, 0, 0)}
    spec = RunSpec("r", ("train.py",), "/", (1, 1), settings=settings, compat=compat, roles=roles)
    completed: dict[str, Any] = _complete_settings(spec, msgspec.to_builtins(parse_settings(spec.settings)))
    return completed


@pytest.mark.parametrize("sync", ["step", "stale:2", "async", "local:4"])
def test_evaluator_works_with_every_sync_mode(sync: str) -> None:
    completed = settings_of(sync=sync)
    assert completed["evaluator"] is True
    assert completed["checkpoint.every_s"] == completed["evaluate.every_s"]


def test_run_has_one_evaluator_at_most() -> None:
    with pytest.raises(BadRole, match="invalid number of evaluators 2"):
        settings_of(evaluators=2)


@pytest.mark.parametrize("kind", ["torchrun", "tf", "ps"])
def test_unmodified_script_cannot_have_an_evaluator(kind: str) -> None:
    with pytest.raises(BadRole, match=f"--compat {kind}") as raised:
        settings_of(kind)
    assert "checkpoints of its own" in raised.value.why
    assert "leave --evaluator out and evaluate in the script" in raised.value.do


def test_unmodified_script_without_an_evaluator_is_accepted() -> None:
    assert settings_of("torchrun", evaluators=0)["evaluator"] is False


def test_what_a_run_prints_is_for_its_user_unless_it_is_shared(tmp_path: Path) -> None:
    service = open_service(tmp_path)
    for name, visibility in (("own-1", "private"), ("all-1", "shared")):
        spec = RunSpec(name, ("train.py",), "/", (1, 1))
        service.handle(name, RunCreated(spec, {"tensorboard": False, "visibility": visibility}, "ada"))
    commands = RunCommands(service)
    assert commands.find_readable("ada", "own-1").name == "own-1"
    assert commands.find_readable("bob", "all-1").name == "all-1"
    with pytest.raises(PermissionDenied, match="belongs to ada"):
        commands.find_readable("bob", "own-1")
    service.close()
