"""Encoding of the training state of a Keras run as a header and raw buffers, without pickle.

A part of the state is either a `VariableGroup`, whose variables become one buffer each, or any object with `state_dict`
and `load_state_dict` of plain values, which go into the header. Arrays among the plain values become buffers too, and
come before those of the variables; the header holds an extension code in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoal.core.nouns import counted
from shoal.core.state_check import PROBES, Kind, TensorDigest, digest
from shoal.errors import ModelMismatch, StateMalformed

Bytes: TypeAlias = NDArray[np.uint8]

FORMAT = 1
# Code of the msgpack extension that stands for an array: the number of its buffer, its type and its shape.
ARRAY = 1
# Path, type and shape.
VariableDescription: TypeAlias = tuple[str, str, list[int]]


class VariableGroup:
    """Variables that are transferred together: `variables` lists them, `read` returns the value of one."""

    def __init__(self, variables: Callable[[], Sequence[Any]], read: Callable[[Any], NDArray[Any]]) -> None:
        self._variables, self._read = variables, read

    def describe(self) -> list[VariableDescription]:
        """Return the path, type and shape of each variable."""
        return [(variable.path, str(variable.dtype), list(variable.shape)) for variable in self._variables()]

    def buffers(self) -> list[Bytes]:
        """Return the values as bytes."""
        return [_as_bytes(self._read(variable)) for variable in self._variables()]

    def load(self, buffers: Sequence[Bytes]) -> None:
        """Assign the values that `buffers` returned elsewhere."""
        for variable, raw in zip(self._variables(), buffers, strict=True):
            like = self._read(variable)
            variable.assign(raw.view(like.dtype).reshape(like.shape))


def tensor_digests(kind: Kind, variables: Sequence[Any], read: Callable[[Any], NDArray[Any]]) -> Iterator[TensorDigest]:
    """Yield the digests of these variables; names of layers may differ between members, positions may not."""
    for number, variable in enumerate(variables):
        value = read(variable)
        flat = value.reshape(-1)
        probes = flat[:: max(1, flat.size // PROBES)][:PROBES].astype(np.float64)
        yield TensorDigest(f"{kind} {number}, {variable.path}", kind, digest(_as_bytes(value)), tuple(probes.tolist()))


class _KerasStateHeader(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    format: int
    variables: dict[str, list[VariableDescription]]
    plain: dict[str, Any]


def capture(parts: Mapping[str, Any]) -> tuple[bytes, list[Bytes]]:
    """Return the state of all parts; the buffers of variables may share the variables' memory."""
    arrays: list[Bytes] = []

    def encode_array(value: Any) -> Any:
        if not isinstance(value, np.ndarray) or value.dtype.hasobject:
            raise TypeError(f"values of type {type(value).__name__} are not supported")
        # A copy: the script may change the array while other members still read.
        arrays.append(_as_bytes(value).copy())
        return msgspec.msgpack.Ext(ARRAY, msgspec.msgpack.encode((len(arrays) - 1, str(value.dtype), value.shape)))

    groups = _groups(parts)
    plain = {name: part.state_dict() for name, part in parts.items() if name not in groups}
    header = _KerasStateHeader(FORMAT, {name: group.describe() for name, group in groups.items()}, plain)
    try:
        packed = msgspec.msgpack.encode(header, enc_hook=encode_array)
    except (TypeError, OverflowError) as error:
        raise StateMalformed(
            "a part of the training state cannot be encoded",
            why=str(error),
            do="let run.state save numbers, strings, arrays, lists and dictionaries only",
        ) from error
    return packed, arrays + [raw for group in groups.values() for raw in group.buffers()]


def restore(parts: Mapping[str, Any], header: bytes, buffers: Sequence[Bytes]) -> None:
    """Load a captured state into the parts, after checking that all of it fits them."""
    arrays = 0

    def decode_array(_code: int, encoded: memoryview) -> NDArray[Any]:
        nonlocal arrays
        arrays += 1
        number, dtype, shape = msgspec.msgpack.decode(encoded, type=tuple[int, str, list[int]])
        return buffers[number].view(dtype).reshape(shape).copy()

    try:
        saved = msgspec.msgpack.decode(header, type=_KerasStateHeader, ext_hook=decode_array)
    except (msgspec.DecodeError, ValueError, TypeError, IndexError, RecursionError) as error:
        raise StateMalformed("the header of a state cannot be read", why=str(error)) from error
    if saved.format != FORMAT:
        raise StateMalformed(
            f"the state has format {saved.format}, but this version of Shoal reads {FORMAT}",
            do="install the same version of Shoal everywhere",
        )
    groups = _groups(parts)
    _check(saved, parts, groups, len(buffers) - arrays)
    start = arrays
    for name, group in groups.items():
        count = len(saved.variables[name])
        group.load(buffers[start : start + count])
        start += count
    for name, state in saved.plain.items():
        parts[name].load_state_dict(state)


def _groups(parts: Mapping[str, Any]) -> dict[str, VariableGroup]:
    return {name: part for name, part in parts.items() if isinstance(part, VariableGroup)}


def _check(
    saved: _KerasStateHeader, parts: Mapping[str, Any], groups: Mapping[str, VariableGroup], buffers: int
) -> None:
    saved_names, own_names = saved.variables.keys() | saved.plain.keys(), parts.keys()
    if saved_names != own_names:
        raise ModelMismatch(
            "the state of the run has other parts than this member",
            why=f"only one of them has {', '.join(sorted(saved_names ^ own_names))}",
            do="run the same script everywhere",
        )
    for name, group in groups.items():
        # Paths are only for the message and need not agree: Keras numbers layers per process.
        saved_variables, own_variables = saved.variables.get(name, []), group.describe()
        if [variable[1:] for variable in saved_variables] != [variable[1:] for variable in own_variables]:
            raise ModelMismatch(
                f"the {name} of the run has other variables than the {name} of this member",
                why=_difference(saved_variables, own_variables),
                do="run the same script everywhere",
            )
    if buffers != sum(map(len, saved.variables.values())):
        raise StateMalformed("the buffers of a state do not match its header")


def _difference(saved: Sequence[VariableDescription], own: Sequence[VariableDescription]) -> str:
    if len(saved) != len(own):
        return f"the run has {counted(len(saved), 'variable')}, this member has {len(own)}"
    pairs = zip(saved, own, strict=True)
    (saved_path, *saved_type), (own_path, *own_type) = next(pair for pair in pairs if pair[0][1:] != pair[1][1:])
    return (
        f"{own_path} is {own_type[0]}{own_type[1]} on this member, "
        f"but {saved_path} is {saved_type[0]}{saved_type[1]} in the run"
    )


def _as_bytes(array: NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
