"""The state of a Keras training as a header and raw buffers, and back, without pickle.

A part is a list of variables, whose bytes become buffers, or anything with `state_dict` and `load_state_dict` of plain
values, which become part of the header; arrays among them become buffers, too, and come before the variables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoal.errors import ModelMismatch, StateMalformed

Bytes: TypeAlias = NDArray[np.uint8]

FORMAT = 1
# What stands in the header for an array: which buffer it is, its type and its shape.
ARRAY = 1


class VariableGroup:
    """Variables that are handed over together; `read` gives the value of one, `list_` those that there are now."""

    def __init__(self, list_: Callable[[], Sequence[Any]], read: Callable[[Any], NDArray[Any]]) -> None:
        self._list, self._read = list_, read

    def described(self) -> list[tuple[str, str, list[int]]]:
        return [(one.path, str(one.dtype), list(one.shape)) for one in self._list()]

    def buffers(self) -> list[Bytes]:
        return [_as_bytes(self._read(one)) for one in self._list()]

    def load(self, buffers: Sequence[Bytes]) -> None:
        for one, raw in zip(self._list(), buffers, strict=True):
            like = self._read(one)
            one.assign(raw.view(like.dtype).reshape(like.shape))


class _KerasStateHeader(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    format: int
    variables: dict[str, list[tuple[str, str, list[int]]]]
    plain: dict[str, Any]


def capture(parts: Mapping[str, Any]) -> tuple[bytes, list[Bytes]]:
    """The state of all parts; the buffers of variables are their memory, if that can be had."""
    arrays: list[Bytes] = []

    def put(value: Any) -> Any:
        if not isinstance(value, np.ndarray) or value.dtype.hasobject:
            raise TypeError(f"a {type(value).__name__} is none of the values that can be")
        # A copy: the script may change it while others still read.
        arrays.append(_as_bytes(value).copy())
        return msgspec.msgpack.Ext(ARRAY, msgspec.msgpack.encode((len(arrays) - 1, str(value.dtype), value.shape)))

    held = {name: part for name, part in parts.items() if isinstance(part, VariableGroup)}
    plain = {name: part.state_dict() for name, part in parts.items() if name not in held}
    header = _KerasStateHeader(FORMAT, {name: part.described() for name, part in held.items()}, plain)
    try:
        packed = msgspec.msgpack.encode(header, enc_hook=put)
    except (TypeError, OverflowError) as error:
        raise StateMalformed(
            "a part of the state cannot be handed over",
            why=str(error),
            do="let run.state save numbers, strings, arrays, lists and dictionaries only",
        ) from error
    return packed, arrays + [raw for part in held.values() for raw in part.buffers()]


def restore(parts: Mapping[str, Any], header: bytes, buffers: Sequence[Bytes]) -> None:
    """Load a captured state into the parts, after checking that all of it fits them."""
    arrays = 0

    def get(_code: int, told: memoryview) -> NDArray[Any]:
        nonlocal arrays
        arrays += 1
        number, kind, shape = msgspec.msgpack.decode(told, type=tuple[int, str, list[int]])
        return buffers[number].view(kind).reshape(shape).copy()

    try:
        found = msgspec.msgpack.decode(header, type=_KerasStateHeader, ext_hook=get)
    except (msgspec.DecodeError, ValueError, TypeError, IndexError, RecursionError) as error:
        raise StateMalformed("the header of a state cannot be read", why=str(error)) from error
    if found.format != FORMAT:
        raise StateMalformed(
            f"a state has format {found.format}, but this version of Shoal reads {FORMAT}",
            do="install the same version of Shoal everywhere",
        )
    held = {name: part for name, part in parts.items() if isinstance(part, VariableGroup)}
    _check(found, parts, held, len(buffers) - arrays)
    start = arrays
    for name, part in held.items():
        count = len(found.variables[name])
        part.load(buffers[start : start + count])
        start += count
    for name, state in found.plain.items():
        parts[name].load_state_dict(state)


def _check(found: _KerasStateHeader, parts: Mapping[str, Any], held: Mapping[str, VariableGroup], buffers: int) -> None:
    there, here = found.variables.keys() | found.plain.keys(), parts.keys()
    if there != here:
        differ = ", ".join(sorted(there ^ here))
        raise ModelMismatch(
            "the state of the run does not have the parts that this member has",
            why=f"only one of them has: {differ}",
            do="run the same script everywhere",
        )
    for name, part in held.items():
        # Paths tell which one differs, but are no part of what must agree: Keras numbers layers through.
        theirs, ours = found.variables.get(name, []), part.described()
        if [one[1:] for one in theirs] != [one[1:] for one in ours]:
            raise ModelMismatch(
                f"the {name} of the run has other variables than that of this member",
                why=_difference(theirs, ours),
                do="run the same script everywhere",
            )
    if buffers != sum(map(len, found.variables.values())):
        raise StateMalformed("the buffers of a state are not those that its header describes")


def _difference(theirs: Sequence[Any], ours: Sequence[Any]) -> str:
    if len(theirs) != len(ours):
        return f"it has {len(theirs)} variables there, and {len(ours)} here"
    there, here = next((a, b) for a, b in zip(theirs, ours, strict=True) if a[1:] != b[1:])
    return f"{here[0]} is {here[1]}{here[2]} here, but {there[0]} is {there[1]}{there[2]} there"


def _as_bytes(array: NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
