"""Any tree of supported values comes back as it was, whatever it is made of."""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ModelMismatch, StateMalformed
from shoal.torch.state import capture as state

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float16]


class ScriptState:
    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = value


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    value = torch.randint(0, 2, shape).to(draw(st.sampled_from(DTYPES)))
    if value.dim() and draw(st.booleans()):
        value = value.transpose(0, -1)
    if value.dim() and value.shape[0] > 1 and draw(st.booleans()):
        value = value[:: draw(st.integers(1, 2))]
    return value


keys = st.one_of(st.integers(), st.text(max_size=5), st.none(), st.tuples(st.integers(), st.text(max_size=2)))
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=10),
    st.binary(max_size=10),
    st.complex_numbers(),
    tensors(),
    st.sampled_from(DTYPES),
    st.integers(0, 5).map(lambda n: np.arange(n, dtype=np.float32)),
    st.floats(width=32).map(np.float32),
    st.sets(st.integers(), max_size=4),
    st.frozensets(st.text(max_size=3), max_size=4),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
        st.dictionaries(keys, st.integers(), max_size=4).map(Counter),
        st.lists(inner, max_size=3).map(lambda items: deque(items, maxlen=5)),
    ),
    max_leaves=20,
)


def same(value: Any, other: Any) -> bool:
    if type(value) is not type(other):
        return False
    if isinstance(value, torch.Tensor):
        return value.dtype == other.dtype and value.shape == other.shape and torch.equal(value, other)
    if isinstance(value, np.ndarray):
        return value.dtype == other.dtype and np.array_equal(value, other)
    if isinstance(value, dict):
        return list(value) == list(other) and all(same(value[key], other[key]) for key in value)
    if isinstance(value, (list, tuple, deque)):
        return len(value) == len(other) and all(same(a, b) for a, b in zip(value, other, strict=True))
    return bool(value == other) or repr(value) == repr(other)


@given(trees)
def test_tree_is_restored_unchanged(tree):
    header, buffers = state.capture({"own": ScriptState(tree)})
    receiver = ScriptState()
    state.restore({"own": receiver}, header, [buffer.copy() for buffer in state.as_bytes(buffers)])
    assert same(receiver.value, tree)
    assert state.checksum({"own": receiver}) == state.checksum({"own": ScriptState(tree)})


@given(trees, st.data())
def test_changed_header_is_valid_or_refused_with_a_code(tree, data):
    header, buffers = state.capture({"own": ScriptState(tree)})
    changed = bytearray(header)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(StateMalformed, ModelMismatch):
        state.restore({"own": ScriptState()}, bytes(changed), [buffer.copy() for buffer in state.as_bytes(buffers)])


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data):
    with pytest.raises(StateMalformed):
        state.read(data, [])
