"""A state_dict as plain msgpack values: every kind of value that is not msgpack's own has a tag.

Tensors and arrays are numbered; where their bytes lie is decided once all are known, because several may share memory.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, ClassVar, NoReturn, TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from shoal.errors import StateMalformed, StateUnsupported

Bytes: TypeAlias = NDArray[np.uint8]

MAX_DEPTH = 64
SMALL_BYTES = 16 << 10
ALIGNMENT_BYTES = 64
_FACTORIES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind for kind in (int, float, bool, str, list, dict, set, tuple)
}
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
Memory: TypeAlias = tuple[str, int]
_INT64 = range(-(1 << 63), 1 << 63)


class TensorInfo(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Where one tensor lies: in which buffer, from which byte on, with which shape and strides (in elements)."""

    buffer: int
    offset_bytes: int
    dtype: str
    shape: list[int]
    strides: list[int]


def memory_of(tensor: torch.Tensor) -> Memory:
    """Return what two tensors have in common if they share memory: the device and the address of the storage."""
    return str(tensor.device), tensor.untyped_storage().data_ptr()


class Walker:
    """Turns a value into msgpack values; what becomes of a tensor or an array is the subclass's affair."""

    def __init__(self, name: str = "") -> None:
        self._path = [name]
        self._open: set[int] = set()

    def tensor(self, value: torch.Tensor) -> list[Any]:
        raise NotImplementedError

    def array(self, value: NDArray[Any]) -> list[Any]:
        raise NotImplementedError

    def pairs(self, value: dict[Any, Any]) -> list[Any]:
        return [[self.visit(key), self._inside(key, item)] for key, item in value.items()]

    def visit(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, float, str, bytes):
            return value
        if kind is int:
            return value if value in _INT64 else ["int", hex(value)]
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if kind is np.ndarray:
            return self._array(value)
        if isinstance(value, np.generic):
            return self._scalar(value)
        if kind is complex:
            return ["complex", value.real, value.imag]
        if kind is torch.dtype:
            return ["dtype", str(value).removeprefix("torch.")]
        if kind is torch.device:
            return ["device", str(value)]
        if kind is torch.Size:
            return ["size", list(value)]
        if kind is bytearray:
            return ["bytearray", bytes(value)]
        return self._container(value)

    def _container(self, value: Any) -> list[Any]:
        if id(value) in self._open or len(self._open) > MAX_DEPTH:
            self.refuse(value, f"it contains itself, or is nested more than {MAX_DEPTH} deep")
        self._open.add(id(value))
        try:
            return self._tagged(value)
        finally:
            self._open.discard(id(value))

    def _tagged(self, value: Any) -> list[Any]:
        kind = type(value)
        if kind is dict:
            return ["dict", self.pairs(value)]
        if kind is OrderedDict:
            return ["odict", self.pairs(value), self.visit(getattr(value, "_metadata", None))]
        if kind is Counter:
            return ["counter", self.pairs(value)]
        if kind is defaultdict:
            return ["ddict", self._factory(value), self.pairs(value)]
        if kind in (list, tuple):
            return [kind.__name__, [self._inside(index, item) for index, item in enumerate(value)]]
        if kind in (set, frozenset):
            return [kind.__name__, sorted((self.visit(item) for item in value), key=msgspec.msgpack.encode)]
        if kind is deque:
            return ["deque", value.maxlen, [self._inside(index, item) for index, item in enumerate(value)]]
        self.refuse(value, "")

    def _inside(self, key: Any, item: Any) -> Any:
        self._path.append(f"[{key!r}]")
        encoded = self.visit(item)
        self._path.pop()
        return encoded

    def _factory(self, value: defaultdict[Any, Any]) -> str | None:
        factory = value.default_factory
        if factory is None:
            return None
        name = getattr(factory, "__name__", "")
        if _FACTORIES.get(name) is not factory:
            self.refuse(value, f"its default {name or factory!r} is not one of {', '.join(_FACTORIES)}")
        return name

    def _tensor(self, value: torch.Tensor) -> list[Any]:
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            self.refuse(value, "only plain tensors can be handed over")
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            self.refuse(value, "it is sparse, quantized or without memory")
        return self.tensor(value.detach().resolve_conj().resolve_neg())

    def _array(self, value: NDArray[Any]) -> list[Any]:
        if value.dtype.kind not in "biufcSUMm":
            self.refuse(value, f"arrays of {value.dtype} cannot be handed over")
        return self.array(value)

    def _scalar(self, value: np.generic) -> list[Any]:
        if value.dtype.kind not in "biufcSUMm":
            self.refuse(value, f"scalars of {value.dtype} cannot be handed over")
        return ["scalar", value.dtype.str, value.tobytes()]

    def refuse(self, value: Any, why: str) -> NoReturn:
        kind = type(value)
        raise StateUnsupported(
            f"{''.join(self._path)} is a {kind.__module__}.{kind.__qualname__}, which cannot be handed over",
            why=why or "state travels without pickle, as numbers, text, tensors, arrays and containers of these",
            do='save it as plain values: run.state("name", save, load)',
        )


class Encoder(Walker):
    """Encodes the trees of several parts, and lays out the memory of all their tensors together."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._tensors: list[torch.Tensor] = []
        self._live: set[Memory] = set()
        self._is_live: Container[Memory] = ()

    def encode(self, value: Any, name: str, live: Container[Memory]) -> Any:
        """Encode one part's state; memory that is in `live` need not be copied."""
        self._path, self._is_live = [name], live
        return self.visit(value)

    def tensor(self, value: torch.Tensor) -> list[Any]:
        memory = memory_of(value)
        if memory in self._is_live:
            self._live.add(memory)
        return ["tensor", self._number(value, memory)]

    def array(self, value: NDArray[Any]) -> list[Any]:
        flat = torch.from_numpy(np.ascontiguousarray(value).reshape(-1).view(np.uint8).copy())
        memory = memory_of(flat)
        self._live.add(memory)  # nobody else has this copy
        return ["array", value.dtype.str, list(value.shape), self._number(flat, memory)]

    def layout(self) -> tuple[list[TensorInfo], list[torch.Tensor]]:
        """Return where each tensor lies, and the buffers.

        Tensors that fill one piece of memory, or overlap in it, share a buffer; otherwise each has its own.
        """
        together: dict[Memory, list[int]] = {}
        for number, tensor in enumerate(self._tensors):
            together.setdefault(memory_of(tensor), []).append(number)
        infos: dict[int, TensorInfo] = {}
        buffers: list[torch.Tensor] = []

        def add(members: dict[int, torch.Tensor], start: int, stop: int, live: bool) -> None:
            for number, tensor in members.items():
                infos[number] = _info(tensor, len(buffers), _start(tensor) - start)
            raw = _raw(next(iter(members.values())), start, stop)
            buffers.append(raw if live else raw.clone())

        for memory, numbers in together.items():
            members = {number: self._tensors[number] for number in numbers}
            start, stop = _extent(members.values())
            if stop - start <= sum(tensor.nbytes for tensor in members.values()):
                add(members, start, stop, memory in self._live)
                continue
            for number, tensor in members.items():
                packed = tensor.contiguous()
                live = memory in self._live or memory_of(packed) != memory
                add({number: packed}, _start(packed), _start(packed) + packed.nbytes, live)
        return _pooled([infos[number] for number in range(len(self._tensors))], buffers)

    def _number(self, tensor: torch.Tensor, memory: Memory) -> int:
        """Return the number of a tensor, the same one for the same memory."""
        key = (memory, _start(tensor), tensor.dtype, tensor.shape, tensor.stride())
        if key not in self._numbers:
            self._numbers[key] = len(self._tensors)
            self._tensors.append(tensor)
        return self._numbers[key]


class Canonical(Walker):
    """Encodes values only: how they lie in memory, and the order of keys, make no difference."""

    def tensor(self, value: torch.Tensor) -> list[Any]:
        flat = value.contiguous().reshape(-1)
        data = flat.view(torch.uint8).cpu().numpy().tobytes() if flat.numel() else b""
        return ["tensor", str(value.dtype), list(value.shape), hashlib.sha256(data).digest()]

    def array(self, value: NDArray[Any]) -> list[Any]:
        return ["array", value.dtype.str, list(value.shape), hashlib.sha256(value.tobytes()).digest()]

    def pairs(self, value: dict[Any, Any]) -> list[Any]:
        return sorted(super().pairs(value), key=lambda pair: msgspec.msgpack.encode(pair[0]))


def canonical(value: Any, name: str) -> Any:
    """Return the value as msgpack values in which a tensor is its type, shape and hash."""
    return Canonical(name).visit(value)


class Decoder:
    """Builds values from an encoded tree, with tensors over the buffers; strict, because the tree may be garbage."""

    def __init__(self, tensors: Sequence[TensorInfo], buffers: Sequence[Bytes]) -> None:
        self._buffers = [torch.from_numpy(_writable(buffer)) for buffer in buffers]
        self._tensors = [self._build(info) for info in tensors]

    def decode(self, tree: Any) -> Any:
        """Return the value that a tree describes."""
        try:
            return self._value(tree)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
            raise StateMalformed("the header of a state describes no valid value", why=str(error)) from error

    def _build(self, info: TensorInfo) -> torch.Tensor:
        dtype = _DTYPES.get(info.dtype)
        if dtype is None:
            raise StateMalformed(
                f"a state has a tensor of type {info.dtype}, which this version of torch does not know",
                do="install the same version of torch everywhere",
            )
        if 0 in info.shape:
            return torch.empty(info.shape, dtype=dtype)
        sound = len(info.shape) == len(info.strides) and min([0, info.buffer, info.offset_bytes, *info.strides]) == 0
        if not sound or min([1, *info.shape]) < 1 or info.buffer >= len(self._buffers):
            raise StateMalformed("the header of a state describes an impossible tensor", why=repr(info))
        raw = self._buffers[info.buffer]
        stop = info.offset_bytes + _span(info.shape, info.strides) * dtype.itemsize
        if stop > raw.numel():
            raise StateMalformed("the header of a state describes a tensor outside its buffer", why=repr(info))
        data = raw[info.offset_bytes : stop]
        if data.data_ptr() % dtype.itemsize or data.storage_offset() % dtype.itemsize:
            data = data.clone()
        return data.view(dtype).as_strided(info.shape, info.strides)

    def _value(self, tree: Any) -> Any:
        if not isinstance(tree, list):
            return tree
        tag, *rest = tree
        return self._READERS[tag](self, *rest)

    def _items(self, pairs: list[Any]) -> dict[Any, Any]:
        return {self._value(key): self._value(item) for key, item in pairs}

    def _list(self, items: list[Any]) -> list[Any]:
        return [self._value(item) for item in items]

    def _odict(self, pairs: list[Any], metadata: Any) -> OrderedDict[Any, Any]:
        value = OrderedDict(self._items(pairs))
        if metadata is not None:
            # torch keeps the versions of modules in an attribute of the state_dict
            value._metadata = self._value(metadata)  # type: ignore[attr-defined]
        return value

    def _ddict(self, factory: str | None, pairs: list[Any]) -> defaultdict[Any, Any]:
        return defaultdict(None if factory is None else _FACTORIES[factory], self._items(pairs))

    def _array(self, dtype: str, shape: list[int], number: int) -> NDArray[Any]:
        return self._tensors[number].numpy().view(_plain(dtype)).reshape(shape)

    def _scalar(self, dtype: str, data: bytes) -> Any:
        plain = _plain(dtype)
        return np.frombuffer(data, plain, 1)[0] if plain.itemsize else plain.type()

    _READERS: ClassVar[dict[str, Callable[..., Any]]] = {
        "int": lambda _, text: int(text, 16),
        "complex": lambda _, real, imaginary: complex(real, imaginary),
        "dtype": lambda _, name: _DTYPES[name],
        "device": lambda _, name: torch.device(name),
        "size": lambda _, shape: torch.Size(shape),
        "bytearray": lambda _, data: bytearray(data),
        "dict": _items,
        "odict": _odict,
        "counter": lambda self, pairs: Counter(self._items(pairs)),
        "ddict": _ddict,
        "list": _list,
        "tuple": lambda self, items: tuple(self._list(items)),
        "set": lambda self, items: set(self._list(items)),
        "frozenset": lambda self, items: frozenset(self._list(items)),
        "deque": lambda self, limit, items: deque(self._list(items), limit),
        "tensor": lambda self, number: self._tensors[number],
        "array": _array,
        "scalar": _scalar,
    }


def _plain(dtype: str) -> np.dtype[Any]:
    plain = np.dtype(dtype)
    if plain.kind not in "biufcSUMm":
        raise ValueError(f"arrays of {dtype} are not handed over")
    return plain


def _writable(buffer: Bytes) -> Bytes:
    flat = buffer.reshape(-1)
    return flat if flat.flags.writeable else flat.copy()


def _start(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


def _extent(tensors: Iterable[torch.Tensor]) -> tuple[int, int]:
    """Return the first byte and the end of the memory that the tensors use in their storage."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    ends = [_start(each) + each.element_size() * _span(each.shape, each.stride()) for each in filled]
    return min(map(_start, filled), default=0), max(ends, default=0)


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _info(tensor: torch.Tensor, buffer: int, offset_bytes: int) -> TensorInfo:
    name = str(tensor.dtype).removeprefix("torch.")
    return TensorInfo(buffer, offset_bytes, name, list(tensor.shape), list(tensor.stride()))


def _pooled(infos: list[TensorInfo], buffers: list[torch.Tensor]) -> tuple[list[TensorInfo], list[torch.Tensor]]:
    """Copy the small buffers of each device into one, because each buffer costs its readers a message."""
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
        for index, each in zip(indices, padded, strict=True):
            places[index] = (len(large), offset)
            offset += each.numel()
        large.append(torch.cat(padded))
    for info in infos:
        info.buffer, shift = places[info.buffer]
        info.offset_bytes += shift
    return infos, large


def _padded(buffer: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(buffer, (0, -buffer.numel() % ALIGNMENT_BYTES))


def _raw(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return bytes start..stop of a tensor's storage, as a tensor over the same memory."""
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return raw.set_(tensor.untyped_storage(), start, (stop - start,), (1,))
