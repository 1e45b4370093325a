"""Run specs and the strict struct through which the API accepts them."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from shoal.core.runs.spec import RoleSpec, RunSpec
from shoal.wire.api import SubmitRequest, SubmitRole

SPEC = RunSpec("t", ("t.py",), "/", (1, 2), roles={"evaluator": RoleSpec(on=("lab",))}, settings={"lease_s": 9.0})


def test_spec_survives_the_way_through_the_api() -> None:
    assert msgspec.json.decode(msgspec.json.encode(SPEC), type=SubmitRequest).spec() == SPEC


@pytest.mark.parametrize(("struct", "spec"), [(SubmitRequest, RunSpec), (SubmitRole, RoleSpec)])
def test_request_has_the_fields_of_the_spec(struct: type[msgspec.Struct], spec: type) -> None:
    assert list(struct.__struct_fields__) == [field.name for field in dataclasses.fields(spec)]


@pytest.mark.parametrize("extra", [{"memebers": 2}, {"roles": {"evaluator": {"cpu": 2}}}])
def test_unknown_field_is_refused(extra: dict[str, object]) -> None:
    body = msgspec.json.encode({**msgspec.to_builtins(SPEC), **extra})
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.json.decode(body, type=SubmitRequest)
