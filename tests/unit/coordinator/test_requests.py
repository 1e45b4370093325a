"""What the coordinator makes of the roles that a run asks for."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shoal.coordinator.http.commands import _with_evaluator
from shoal.errors import BadRole
from shoal.settings import parse_settings
from shoal.wire.api import RoleSpec, RunSpec


def settings_of(compat: str = "", evaluators: int = 1, **settings: Any) -> dict[str, Any]:
    roles = {"evaluator": RoleSpec(evaluators, 0, 0)}
    spec = RunSpec("r", ("train.py",), "/", (1, 1), settings=settings, compat=compat, roles=roles)
    found: dict[str, Any] = _with_evaluator(spec, msgspec.to_builtins(parse_settings(spec.settings)))
    return found


@pytest.mark.parametrize("sync", ["step", "stale:2", "async", "local:4"])
def test_an_evaluator_goes_with_every_way_to_keep_together(sync: str) -> None:
    found = settings_of(sync=sync)
    assert found["evaluator"] is True
    assert found["checkpoint.every_s"] == found["evaluate.every_s"]


def test_a_run_has_one_evaluator_at_most() -> None:
    with pytest.raises(BadRole, match="cannot have 2 evaluators"):
        settings_of(evaluators=2)


@pytest.mark.parametrize("kind", ["torchrun", "tf", "ps"])
def test_an_unmodified_script_has_no_evaluator_and_is_told_what_to_do(kind: str) -> None:
    with pytest.raises(BadRole, match=f"--compat {kind}") as raised:
        settings_of(kind)
    assert "checkpoints of its own" in raised.value.why
    assert "leave --evaluator out and evaluate in the script" in raised.value.do


def test_an_unmodified_script_that_asks_for_no_evaluator_is_fine() -> None:
    assert settings_of("torchrun", evaluators=0)["evaluator"] is False
