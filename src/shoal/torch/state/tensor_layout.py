"""Layout of tensors in byte buffers: which bytes of which buffer belong to each tensor, and tensors over buffers.

Tensors that overlap in memory (views, tied weights) share a buffer, so that their bytes are sent once and they overlap
again when they are rebuilt. Small buffers are pooled, because each buffer costs a message.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from shoal.errors import StateMalformed

Bytes: TypeAlias = NDArray[np.uint8]
Memory: TypeAlias = tuple[str, int]

SMALL_BYTES = 16 << 10
ALIGNMENT_BYTES = 64
DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class TensorInfo(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Position of one tensor: buffer, offset in it, dtype, shape and strides (in elements)."""

    buffer: int
    offset_bytes: int
    dtype: str
    shape: list[int]
    strides: list[int]


def memory_of(tensor: torch.Tensor) -> Memory:
    """Return the device and the address of a tensor's storage; equal for tensors that share it."""
    return str(tensor.device), tensor.untyped_storage().data_ptr()


def lay_out(tensors: Sequence[torch.Tensor], live: Container[Memory]) -> tuple[list[TensorInfo], list[torch.Tensor]]:
    """Return the position of each tensor, and flat byte buffers; memory that is not in `live` is copied.

    Tensors of one storage share a buffer if they cover it or overlap in it; otherwise each has its own.
    """
    together: dict[Memory, list[int]] = {}
    for number, tensor in enumerate(tensors):
        together.setdefault(memory_of(tensor), []).append(number)
    infos: dict[int, TensorInfo] = {}
    buffers: list[torch.Tensor] = []

    def add(members: dict[int, torch.Tensor], start: int, stop: int, as_is: bool) -> None:
        for number, tensor in members.items():
            infos[number] = _info(tensor, len(buffers), _start(tensor) - start)
        raw = _raw(next(iter(members.values())), start, stop)
        buffers.append(raw if as_is else raw.clone())

    for memory, numbers in together.items():
        members = {number: tensors[number] for number in numbers}
        start, stop = _extent(members.values())
        if stop - start <= sum(tensor.nbytes for tensor in members.values()):
            add(members, start, stop, memory in live)
            continue
        for number, tensor in members.items():
            packed = tensor.contiguous()
            as_is = memory in live or memory_of(packed) != memory
            add({number: packed}, _start(packed), _start(packed) + packed.nbytes, as_is)
    return _pooled([infos[number] for number in range(len(tensors))], buffers)


def rebuild(infos: Sequence[TensorInfo], buffers: Sequence[Bytes]) -> list[torch.Tensor]:
    """Return tensors over the buffers; raise StateMalformed if an info is invalid.

    Tensors that overlap share a storage, as they did before. Any other has its own storage that begins with it, because
    some functions of torch (such as set_rng_state) are wrong for a tensor in the middle of a storage.
    """
    writable = [(buffer if buffer.flags.writeable else buffer.copy()).reshape(-1) for buffer in buffers]
    spans = [_checked_span(info, writable) for info in infos]
    built: dict[int, torch.Tensor] = {}
    for numbers, start, stop in _overlapping(infos, spans):
        raw = writable[infos[numbers[0]].buffer][start:stop]
        shared = torch.from_numpy(raw)
        for number in numbers:
            built[number] = _tensor(infos[number], shared[spans[number][0] - start : spans[number][1] - start])
    return [
        built[number] if number in built else torch.empty(info.shape, dtype=DTYPES[info.dtype])
        for number, info in enumerate(infos)
    ]


def _checked_span(info: TensorInfo, buffers: Sequence[Bytes]) -> tuple[int, int]:
    """Return the first byte and the end of a tensor in its buffer; both are 0 if it is empty."""
    dtype = DTYPES.get(info.dtype)
    if dtype is None:
        raise StateMalformed(
            f"a state has a tensor of unknown type {info.dtype}",
            why=f"torch {torch.__version__} does not have this type",
            do="install the same version of torch everywhere",
        )
    if len(info.shape) != len(info.strides) or min([0, *info.shape, *info.strides]) < 0:
        raise StateMalformed("the header of a state describes an invalid tensor", why=repr(info))
    if 0 in info.shape:
        return 0, 0
    stop = info.offset_bytes + _span(info.shape, info.strides) * dtype.itemsize
    if not (0 <= info.buffer < len(buffers) and info.offset_bytes >= 0 and stop <= buffers[info.buffer].nbytes):
        raise StateMalformed("the header of a state describes a tensor outside its buffers", why=repr(info))
    return info.offset_bytes, stop


def _overlapping(infos: Sequence[TensorInfo], spans: Sequence[tuple[int, int]]) -> Iterator[tuple[list[int], int, int]]:
    """Yield the numbers of tensors that overlap, directly or through others, with the bytes that they cover."""
    filled = [number for number, (start, stop) in enumerate(spans) if start < stop]
    numbers: list[int] = []
    first = end = 0
    for number in sorted(filled, key=lambda index: (infos[index].buffer, *spans[index])):
        start, stop = spans[number]
        if numbers and (infos[number].buffer != infos[numbers[0]].buffer or start >= end):
            yield numbers, first, end
            numbers = []
        if not numbers:
            first = end = start
        numbers.append(number)
        end = max(end, stop)
    if numbers:
        yield numbers, first, end


def _tensor(info: TensorInfo, data: torch.Tensor) -> torch.Tensor:
    dtype = DTYPES[info.dtype]
    if data.data_ptr() % dtype.itemsize or data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).as_strided(info.shape, info.strides)


def _pooled(infos: list[TensorInfo], buffers: list[torch.Tensor]) -> tuple[list[TensorInfo], list[torch.Tensor]]:
    """Copy the small buffers of each device into one, because each buffer costs a message."""
    places: dict[int, tuple[int, int]] = {}
    large: list[torch.Tensor] = []
    small: dict[str, list[int]] = {}
    for index, buffer in enumerate(buffers):
        if buffer.numel() <= SMALL_BYTES:
            small.setdefault(str(buffer.device), []).append(index)
        else:
            places[index] = (len(large), 0)
            large.append(buffer)
    for indices in small.values():
        padded = [_padded(buffers[index]) for index in indices]
        offset = 0
        for index, buffer in zip(indices, padded, strict=True):
            places[index] = (len(large), offset)
            offset += buffer.numel()
        large.append(torch.cat(padded))
    for info in infos:
        info.buffer, shift = places[info.buffer]
        info.offset_bytes += shift
    return infos, large


def _padded(buffer: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(buffer, (0, -buffer.numel() % ALIGNMENT_BYTES))


def _start(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


def _extent(tensors: Iterable[torch.Tensor]) -> tuple[int, int]:
    """Return the first byte and the end of the memory that the tensors use in their storage."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    ends = [_start(t) + t.element_size() * _span(t.shape, t.stride()) for t in filled]
    return min(map(_start, filled), default=0), max(ends, default=0)


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _info(tensor: torch.Tensor, buffer: int, offset_bytes: int) -> TensorInfo:
    name = str(tensor.dtype).removeprefix("torch.")
    return TensorInfo(buffer, offset_bytes, name, list(tensor.shape), list(tensor.stride()))


def _raw(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return bytes start..stop of a tensor's storage, as a tensor over the same memory."""
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return raw.set_(tensor.untyped_storage(), start, (stop - start,), (1,))
