"""Bounds of everything that arrives: the types that messages, HTTP bodies and shared files are declared with.

A number that the journal cannot hold, a duration that no timer can wait for or a name of a megabyte harms only if it is
believed. So no field on the wire is a plain `int`, `float` or `str`: each has one of the types below, and a decoder
refuses what is outside with the name of the field. A new field takes one of them too; `tests/property/test_limits.py`
walks over every type that arrives and fails otherwise. What arrives inside values of `shoal.core` (addresses, seats,
machines) is checked by these values themselves (`core.validation`).

`Measurement` is the exception. A user's loss or metric may be NaN or infinite, and refusing it would end a member for
an honest report. The code that stores one asks `math.isfinite` first: JSON, and so the journal, has no such numbers.

An honest sender must never be refused. Its texts may be long (the cause of a failure, with a traceback) and its figures
odd (the rate of a step that took no time), so `fit` cuts and clamps a message to its bounds before it is encoded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

# Every integer up to here is exact in a double, and so in every reader of JSON.
MAX_COUNT = 1 << 53
# The journal and SQLite hold signed 64 bits; what is added up must stay below.
MAX_BYTES = 1 << 62
MAX_REAL = 1e300
# Thirty years: no timer or sum of them overflows.
MAX_SECONDS = 1e9
MAX_NAME = 256
MAX_TEXT = 1 << 16
MAX_ITEMS = 1 << 16
MAX_METRICS = 1 << 13
MAX_FILES = 1 << 22

Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Integer = Annotated[int, Meta(ge=-MAX_COUNT, le=MAX_COUNT)]
Bytes = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
Amount = Annotated[float, Meta(ge=0.0, le=MAX_REAL)]
Real = Annotated[float, Meta(ge=-MAX_REAL, le=MAX_REAL)]
Seconds = Annotated[float, Meta(ge=0.0, le=MAX_SECONDS)]
EpochSeconds = Annotated[float, Meta(ge=-MAX_SECONDS, le=100 * MAX_SECONDS)]
Measurement = float
Name = Annotated[str, Meta(max_length=MAX_NAME)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Names = Annotated[tuple[Name, ...], Meta(max_length=MAX_ITEMS)]
Texts = Annotated[tuple[Text, ...], Meta(max_length=MAX_ITEMS)]
Labels = Annotated[dict[Name, Text], Meta(max_length=MAX_ITEMS)]
# The name of a blob, "" for none. Such a name becomes part of a path, so it must not be anything else.
Digest = Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z", max_length=64)]
Metrics = Annotated[dict[Name, Measurement], Meta(max_length=MAX_METRICS)]
SettingValue = Text | Integer | Real | bool
SettingValues = Annotated[dict[Name, SettingValue], Meta(max_length=MAX_NAME)]

S = TypeVar("S", bound=msgspec.Struct)
Fitter = Callable[[Any], Any]


def fit(message: S) -> S:
    """Return the message with long texts cut and odd numbers clamped to the bounds of their fields."""
    changes = {}
    for field, fitter in _fitters(type(message)):
        value = getattr(message, field)
        fitted = fitter(value)
        if fitted is not value:
            changes[field] = fitted
    return msgspec.structs.replace(message, **changes) if changes else message


@cache
def _fitters(kind: type[msgspec.Struct]) -> tuple[tuple[str, Fitter], ...]:
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    pairs = ((field.name, _fitter(field.type)) for field in info.fields)
    return tuple((name, fitter) for name, fitter in pairs if fitter is not None)


def _fitter(info: msgspec.inspect.Type) -> Fitter | None:
    """Return what fits a value to a type, None if values of this type are left as they are."""
    match info:
        case msgspec.inspect.StrType(max_length=int(longest), pattern=None):
            return lambda text: _cut(text, longest)
        case msgspec.inspect.FloatType(ge=least, le=most) if least is not None and most is not None:
            return lambda number: number if least <= number <= most else _clamp(number, least, most)
        case msgspec.inspect.VarTupleType(item_type=item, max_length=int(longest)):
            return _items_fitter(_fitter(item), longest)
        case msgspec.inspect.DictType(key_type=key, value_type=value, max_length=int(longest)):
            return _entries_fitter(_fitter(key), _fitter(value), longest)
        case msgspec.inspect.TupleType(item_types=items):
            fitters = [_fitter(item) or _keep for item in items]
            return lambda values: tuple(fitter(value) for fitter, value in zip(fitters, values, strict=True))
        case msgspec.inspect.UnionType(types=(kind, msgspec.inspect.NoneType())):
            inner = _fitter(kind)
            return None if inner is None else lambda value: None if value is None else inner(value)
        case msgspec.inspect.StructType():
            return fit
    return None


def _keep(value: Any) -> Any:
    return value


def _items_fitter(fitter: Fitter | None, longest: int) -> Fitter:
    each = fitter or _keep
    return lambda items: tuple(map(each, items[:longest])) if items else items


def _entries_fitter(key: Fitter | None, value: Fitter | None, longest: int) -> Fitter:
    of_key, of_value = key or _keep, value or _keep
    return lambda entries: (
        {of_key(name): of_value(entries[name]) for name in list(entries)[:longest]} if entries else entries
    )


def _cut(text: str, longest: int) -> str:
    """Return the beginning and the end of a text, at most so many characters, without what UTF-8 cannot encode."""
    if not text.isascii():
        text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= longest else f"{text[: longest // 2]}…{text[len(text) - longest // 2 + 1 :]}"


def _clamp(number: float, least: float, most: float) -> float:
    return least if math.isnan(number) else min(max(number, least), most)
