"""Values of a state_dict survive encoding with their types; what cannot be sent is refused with its path."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from shoal.errors import StateMalformed, StateUnsupported
from shoal.torch.state.encode import MAX_DEPTH, StateDecoder, StateEncoder, canonical


def through_the_wire(value: Any) -> Any:
    encoder = StateEncoder()
    tree = msgspec.msgpack.decode(msgspec.msgpack.encode(encoder.encode(value, "part", ())))
    infos, buffers = encoder.layout()
    return StateDecoder(infos, [buffer.numpy() for buffer in buffers]).decode(tree)


@pytest.mark.parametrize(
    "value",
    [
        (1, [2.5, None, True], {"a": b"x", 3: "y", (1, 2): {4, 5}}),
        1 << 80,
        3 + 4j,
        OrderedDict(b=1, a=2),
        Counter("aab"),
        deque([1, 2], maxlen=3),
        frozenset([1]),
        bytearray(b"ab"),
        torch.Size([2, 3]),
        torch.bfloat16,
        torch.device("cpu"),
        np.float32(1.5),
    ],
    ids=repr,
)
def test_value_keeps_its_type(value: Any) -> None:
    decoded = through_the_wire(value)
    assert decoded == value
    assert type(decoded) is type(value)


def test_defaultdict_keeps_its_factory() -> None:
    decoded = through_the_wire(defaultdict(list, a=[1]))
    assert decoded["new"] == []
    assert decoded["a"] == [1]


def test_tensors_that_share_memory_share_it_again() -> None:
    weight = torch.arange(6.0)
    decoded = through_the_wire({"weight": weight, "tied": weight, "tail": weight[3:]})
    decoded["weight"][3] = 9.0
    assert decoded["tied"][3] == 9.0
    assert decoded["tail"][0] == 9.0


def test_arrays_keep_dtype_and_shape() -> None:
    array = np.arange(6, dtype=">i2").reshape(2, 3)
    decoded = through_the_wire(array)
    assert decoded.dtype == array.dtype
    assert decoded.tolist() == array.tolist()


@pytest.mark.parametrize(
    "value", [object(), lambda: None, torch.ones(2).to_sparse(), np.array([object()]), defaultdict(lambda: 1)]
)
def test_value_without_a_plain_form_is_refused_with_its_path(value: Any) -> None:
    with pytest.raises(StateUnsupported, match=r"part\['groups'\]\[1\] is a "):
        through_the_wire({"groups": [0, value]})


def test_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(StateUnsupported, match=f"nested more than {MAX_DEPTH} deep|contains itself"):
        through_the_wire(loop)


@pytest.mark.parametrize("tree", [["unknown", 1], ["tensor", 7], ["int", "zz"], [], ["array", "O", [1], 0]])
def test_invalid_tree_is_refused(tree: Any) -> None:
    with pytest.raises(StateMalformed):
        StateDecoder([], []).decode(tree)


def test_canonical_form_ignores_the_order_of_keys_and_the_layout_but_no_value() -> None:
    square = torch.arange(4.0).reshape(2, 2)
    first = canonical({"a": 1, "b": square.T.contiguous()}, "part")
    assert first == canonical({"b": square.T, "a": 1}, "part")
    assert first != canonical({"a": 1, "b": square}, "part")
