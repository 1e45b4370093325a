"""Everything that arrives is bounded: each number, text and list of each type on the wire, and each setting."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from shoal.coordinator import dispatch
from shoal.core.runs.events import KINDS
from shoal.errors import ShoalError
from shoal.settings import LaunchSettings, RunSettings, parse_value
from shoal.store.journal import JournalEntry, decode_event
from shoal.wire import api, limits, pool_files
from shoal.wire.agent_messages import FromAgent, ToAgent
from shoal.wire.machine_check import CheckRequest
from shoal.wire.member_messages import FromMember, HeartbeatMsg, ToMember

MESSAGES = tuple({kind: None for union in (FromMember, ToMember, FromAgent, ToAgent) for kind in get_args(union)})
BODIES = (
    api.SubmitRequest,
    api.StopRequest,
    api.ScaleRequest,
    api.SetupReport,
    api.RunView,
    api.AgentView,
    api.PoolView,
    api.LogPage,
    api.FilePage,
    api.ErrorView,
    api.Health,
    CheckRequest,
    pool_files.ReleaseProgress,
)
SETTINGS = (RunSettings, LaunchSettings)
# A user's own figures may be NaN or infinite; the code that stores them checks.
MEASUREMENTS = {"loss", "metrics"}
TOO_LARGE_INTS = (1 << 63, (1 << 64) - 1, -(1 << 63))
NOT_FINITE = (math.nan, math.inf, -math.inf)
LONG = "x" * (limits.MAX_TEXT + 1)

Put = Callable[[Any], Any]


def example(info: inspect.Type) -> Any:
    """Return a valid value of a type, as it is encoded."""
    match info:
        case inspect.StructType(fields=fields) | inspect.DataclassType(fields=fields):
            tag = {info.tag_field: info.tag} if isinstance(info, inspect.StructType) and info.tag_field else {}
            return {**tag, **{field.encode_name: example(field.type) for field in fields}}
        case inspect.Metadata(type=kind):
            return example(kind)
        case inspect.UnionType(types=types):
            return example(next(kind for kind in types if not isinstance(kind, inspect.NoneType)))
        case inspect.TupleType(item_types=items):
            return [example(item) for item in items]
        case inspect.VarTupleType(item_type=item):
            return [example(item)]
        case inspect.DictType(key_type=key, value_type=value):
            return {example(key): example(value)}
        case inspect.LiteralType(values=values):
            return values[0]
        case inspect.IntType(ge=least) | inspect.FloatType(ge=least):
            # 0 is also the rank of the only seat of an example of a world.
            return max(0, least or 0) if isinstance(info, inspect.IntType) else 0.5
        case inspect.BoolType():
            return True
    return ""


def leaves(info: inspect.Type, put: Put, path: str) -> Iterator[tuple[str, inspect.Type, Put]]:
    """Yield path and type of everything inside a value that has a size, and a function that puts another there."""
    match info:
        case inspect.StructType(fields=fields) | inspect.DataclassType(fields=fields):
            whole = example(info)
            for field in fields:
                name = field.encode_name
                yield from leaves(field.type, lambda v, name=name: put({**whole, name: v}), f"{path}.{name}")
        case inspect.Metadata(type=kind):
            yield from leaves(kind, put, path)
        case inspect.UnionType(types=types):
            for kind in types:
                yield from leaves(kind, put, path)
        case inspect.TupleType(item_types=items):
            whole = example(info)
            for at, item in enumerate(items):
                yield from leaves(item, lambda v, at=at: put([*whole[:at], v, *whole[at + 1 :]]), f"{path}[{at}]")
        case inspect.VarTupleType(item_type=item):
            yield path, info, put
            yield from leaves(item, lambda v: put([v]), f"{path}[]")
        case inspect.DictType(key_type=key, value_type=value):
            yield path, info, put
            yield from leaves(key, lambda v: put({v: example(value)}), f"{path}{{key}}")
            yield from leaves(value, lambda v: put({example(key): v}), f"{path}{{}}")
        case inspect.IntType() | inspect.FloatType() | inspect.StrType():
            yield path, info, put


def all_leaves(kinds: tuple[Any, ...]) -> list[tuple[Any, str, inspect.Type, Put]]:
    return [
        (kind, path, info, put)
        for kind in kinds
        for path, info, put in leaves(inspect.type_info(kind), lambda value: value, kind.__name__)
    ]


def too_much(info: inspect.Type) -> list[Any]:
    """Return values that no field of this type may accept."""
    match info:
        case inspect.IntType():
            return list(TOO_LARGE_INTS)
        case inspect.FloatType():
            return list(NOT_FINITE)
        case inspect.StrType():
            return [LONG]
        case inspect.VarTupleType(item_type=item):
            longest = info.max_length or limits.MAX_ITEMS
            return [[example(item)] * (longest + 1)] if longest <= limits.MAX_ITEMS else []
        case inspect.DictType(key_type=key, value_type=value):
            longest, one_key = info.max_length or limits.MAX_ITEMS, example(key)
            keys = range(longest + 1) if isinstance(one_key, int) else map(str, range(longest + 1))
            return [dict.fromkeys(keys, example(value))]
    return []


def is_refused(decode: Callable[[], object]) -> bool:
    try:
        decode()
    except msgspec.ValidationError:
        return True
    return False


def is_measurement(path: str) -> bool:
    return path.partition("{}")[0].rpartition(".")[2] in MEASUREMENTS and not path.endswith("key}")


@pytest.mark.parametrize("kind", [*MESSAGES, *BODIES], ids=lambda kind: kind.__name__)
def test_example_of_each_type_is_accepted(kind: Any) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(example(inspect.type_info(kind))), type=kind)


@pytest.mark.parametrize("kind", [*MESSAGES, *BODIES], ids=lambda kind: kind.__name__)
def test_each_number_text_and_list_on_the_wire_is_bounded(kind: Any) -> None:
    for _, path, info, put in all_leaves((kind,)):
        if is_measurement(path) and isinstance(info, inspect.FloatType):
            continue
        assert too_much(info) or path == "FilePage.files", path
        for value in too_much(info):
            assert is_refused(partial(msgspec.msgpack.decode, msgspec.msgpack.encode(put(value)), type=kind)), path


@pytest.mark.parametrize("kind", SETTINGS, ids=lambda kind: kind.__name__)
def test_each_setting_is_bounded(kind: Any) -> None:
    for _, path, info, _put in all_leaves((kind,)):
        name = path.partition(".")[2]
        for value in too_much(info):
            assert is_refused(partial(msgspec.convert, {name: value}, kind, strict=False)), path
            if name != "members":  # text too
                assert is_refused(partial(msgspec.convert, {name: str(value)}, kind, strict=False)), path


TEXT_SETTINGS = [name for _, name, info, _ in all_leaves(SETTINGS) if isinstance(info, inspect.StrType)]
GRAMMARS = st.text(max_size=40) | st.from_regex(
    r"(auto|stale|local|fixed|ratio|model|async|step)?:?[0-9²٣.,:@=e-]{0,30}", fullmatch=True
)


@given(st.sampled_from(TEXT_SETTINGS), GRAMMARS)
def test_any_text_for_a_setting_is_accepted_or_a_clear_error(path: str, text: str) -> None:
    with contextlib.suppress(ShoalError):
        parse_value(path.partition(".")[2], text)


NUMBERS = [
    leaf
    for leaf in all_leaves(get_args(FromMember))
    if isinstance(leaf[2], inspect.IntType | inspect.FloatType) and not is_measurement(leaf[1])
]


@given(st.sampled_from(NUMBERS), st.integers(-(1 << 63), (1 << 64) - 1) | st.floats())
def test_whatever_number_a_member_sends_the_journal_can_hold_its_event(leaf: Any, number: float) -> None:
    kind, _path, _info, put = leaf
    try:
        message = msgspec.msgpack.decode(msgspec.msgpack.encode(put(number)), type=kind)
    except msgspec.ValidationError:
        return
    event = dispatch.event_of("m/0", message)
    if event is not None:
        fields = msgspec.to_builtins(event)
        line = msgspec.json.encode(JournalEntry(1, 1.0, "r", type(event).__name__, fields))
        assert decode_event(msgspec.json.decode(line, type=JournalEntry), KINDS) == event


@given(
    st.builds(
        HeartbeatMsg,
        st.none(),
        st.none(),
        st.text(st.characters(), max_size=600),
        st.floats(),
        samples_per_s=st.floats(),
        noise=st.floats() | st.none(),
        idle=st.tuples(st.floats() | st.none(), st.floats()) | st.none(),
        waits_for=st.tuples(st.text(max_size=600)),
        metrics=st.dictionaries(st.text(max_size=600), st.floats(), max_size=3),
    )
)
def test_what_an_honest_member_sends_is_fitted_and_then_accepted(heartbeat: HeartbeatMsg) -> None:
    data = msgspec.msgpack.encode(limits.fit(heartbeat))
    received = msgspec.msgpack.decode(data, type=HeartbeatMsg)
    if 0 <= heartbeat.samples_per_s <= limits.MAX_REAL:
        assert received.samples_per_s == heartbeat.samples_per_s
