"""Encoding of a state_dict as plain msgpack values; types that msgpack does not have become tagged lists.

A tuple (1, 2) becomes ["tuple", [1, 2]], a dict ["dict", [[key, value], …]]: msgpack would turn the first into a list,
and cannot have keys of any type. A list is tagged too, so that an untagged list cannot occur. Tensors and arrays become
["tensor", number]: they are numbered, and where their bytes lie is decided once all are known, because several may
share memory.
"""

from __future__ import annotations

import contextlib
import hashlib
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, ClassVar, NoReturn, TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from shoal.errors import StateMalformed, StateUnsupported
from shoal.torch.state.tensor_layout import DTYPES, Memory, TensorInfo, lay_out, memory_of, rebuild

Bytes: TypeAlias = NDArray[np.uint8]

MAX_DEPTH = 64
_FACTORIES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind for kind in (int, float, bool, str, list, dict, set, tuple)
}
_INT64 = range(-(1 << 63), 1 << 63)


class StateWalker(ABC):
    """Walk over a value that yields msgpack values; subclasses decide what a tensor or an array becomes.

    Values that cannot be encoded raise StateUnsupported with their path.
    """

    def __init__(self, name: str = "") -> None:
        self._path = [name]
        self._open: set[int] = set()

    @abstractmethod
    def tensor(self, value: torch.Tensor) -> list[Any]:
        """Return what a tensor becomes."""

    @abstractmethod
    def array(self, value: NDArray[Any]) -> list[Any]:
        """Return what an array becomes."""

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
            self.refuse(value, "only plain tensors can be transferred")
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            self.refuse(value, "it is sparse, quantized or without memory")
        return self.tensor(value.detach().resolve_conj().resolve_neg())

    def _array(self, value: NDArray[Any]) -> list[Any]:
        if value.dtype.kind not in "biufcSUMm":
            self.refuse(value, f"arrays of {value.dtype} cannot be transferred")
        return self.array(value)

    def _scalar(self, value: np.generic) -> list[Any]:
        if value.dtype.kind not in "biufcSUMm":
            self.refuse(value, f"scalars of {value.dtype} cannot be transferred")
        return ["scalar", value.dtype.str, value.tobytes()]

    def refuse(self, value: Any, why: str) -> NoReturn:
        kind = type(value)
        raise StateUnsupported(
            f"{''.join(self._path)} is a {kind.__module__}.{kind.__qualname__}, which cannot be transferred",
            why=why or "state is sent without pickle, as numbers, text, tensors, arrays and containers of these",
            do='save it as plain values: run.state("name", save, load)',
        )


class StateEncoder(StateWalker):
    """Encoder of the state of several parts, whose tensors share one layout."""

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
        self._live.add(memory)  # a fresh copy that nothing changes
        return ["array", value.dtype.str, list(value.shape), self._number(flat, memory)]

    def layout(self) -> tuple[list[TensorInfo], list[torch.Tensor]]:
        """Return where each tensor lies, and the buffers."""
        return lay_out(self._tensors, self._live)

    def _number(self, tensor: torch.Tensor, memory: Memory) -> int:
        """Return the number of a tensor, the same one for the same memory."""
        key = (memory, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in self._numbers:
            self._numbers[key] = len(self._tensors)
            self._tensors.append(tensor)
        return self._numbers[key]


class CanonicalEncoder(StateWalker):
    """Encoder for checksums: depends on values only, not on memory layout or the order of keys."""

    def tensor(self, value: torch.Tensor) -> list[Any]:
        whole = value.contiguous()
        flat = whole.as_strided((whole.numel(),), (1,))
        data = flat.view(torch.uint8).cpu().numpy().tobytes() if flat.numel() else b""
        return ["tensor", str(value.dtype), list(value.shape), hashlib.sha256(data).digest()]

    def array(self, value: NDArray[Any]) -> list[Any]:
        return ["array", value.dtype.str, list(value.shape), hashlib.sha256(value.tobytes()).digest()]

    def pairs(self, value: dict[Any, Any]) -> list[Any]:
        return sorted(super().pairs(value), key=lambda pair: msgspec.msgpack.encode(pair[0]))


def canonical(value: Any, name: str) -> Any:
    """Return the value as msgpack values in which a tensor is its type, shape and hash."""
    return CanonicalEncoder(name).visit(value)


class StateDecoder:
    """Decoder of encoded values, with tensors over the buffers; raises StateMalformed for anything invalid."""

    def __init__(self, tensors: Sequence[TensorInfo], buffers: Sequence[Bytes]) -> None:
        with _malformed():
            self._tensors = rebuild(tensors, buffers)

    def decode(self, tree: Any) -> Any:
        """Return the value that a tree describes."""
        with _malformed():
            return self._value(tree)

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
            # torch keeps the versions of modules in this attribute of a state_dict.
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
        "dtype": lambda _, name: DTYPES[name],
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


@contextlib.contextmanager
def _malformed() -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise StateMalformed("the header of a state is invalid", why=str(error)) from error


def _plain(dtype: str) -> np.dtype[Any]:
    plain = np.dtype(dtype)
    if plain.kind not in "biufcSUMm":
        raise ValueError(f"arrays of {dtype} cannot be transferred")
    return plain
