"""Captured state is restored with every type of value; unsupported values are named."""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from shoal.errors import ModelMismatch, StateMalformed, StateUnsupported
from shoal.torch.state import capture as state


class ScriptState:
    """State of the script's own, as `run.state` wraps it."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = value


def copied(tensors) -> list[np.ndarray]:
    return [buffer.copy() for buffer in state.as_bytes(tensors)]


def round_trip(value: Any) -> Any:
    header, buffers = state.capture({"own": ScriptState(value)})
    receiver = ScriptState()
    state.restore({"own": receiver}, header, copied(buffers))
    assert state.checksum({"own": ScriptState(value)}) == state.checksum({"own": receiver})
    return receiver.value


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(200, 100), torch.nn.BatchNorm1d(100), torch.nn.Linear(100, 2))


@pytest.mark.parametrize(
    "value",
    [
        None, True, False, 0, -1, 1 << 63, -(1 << 70), 1 << 200, 0.1, math.inf, -math.inf, "", "ü\0", b"\0\xff",
        bytearray(b"ab"), 1 - 2j, [], (), {}, set(), [1, [2, [3]]], (1, (2,)), {"a": {1: "b", None: 2, (1, "x"): 3}},
        {1, "a", (2, 3)}, frozenset({1}), OrderedDict([("b", 1), ("a", 2)]), Counter({30: 2, 80: 1}),
        defaultdict(list, {1: [2]}), defaultdict(None, {1: 2}), deque([1, 2], maxlen=5), deque(),
        torch.float16, torch.device("cpu"), torch.device("cuda:1"), torch.Size([1, 2]), torch.Size([]),
        {True: 1, 2: "int", "2": "str"},
    ],
)  # fmt: skip
def test_plain_value_keeps_its_type(value):
    restored = round_trip(value)
    assert restored == value
    assert type(restored) is type(value)
    assert isinstance(value, set) or repr(restored) == repr(value)


def test_nan_is_restored():
    assert math.isnan(round_trip({"x": math.nan})["x"])


def test_order_of_keys_is_kept():
    assert list(round_trip({"z": 1, "a": 2, 3: 3})) == ["z", "a", 3]


DTYPES = [
    value
    for value in {id(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}.values()
    if not any(word in str(value) for word in ("qint", "quint", "bits", "bit", "torch.int1", "torch.uint1"))
    and not any(str(value).endswith(f"int{width}") for width in range(1, 8))
] + [torch.int16, torch.uint16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensor_of_every_dtype_is_restored_bit_for_bit(dtype):
    raw = torch.arange(64, dtype=torch.uint8)
    value = (raw % 2).view(torch.bool) if dtype == torch.bool else raw.view(dtype)
    restored = round_trip({"t": value})["t"]
    assert restored.dtype == dtype
    assert restored.shape == value.shape
    assert torch.equal(restored.view(torch.uint8), value.view(torch.uint8))


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(3.5),
        torch.empty(0, 3),
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(100.0)[::7],
        torch.ones(1).expand(5),
        torch.ones(1, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.ones(3, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
        torch.arange(40_000.0),
        torch.arange(40_000.0).reshape(200, 200).t(),
        torch.arange(40_000.0)[1:],
    ],
    ids=range(12),
)
def test_tensor_of_every_layout_is_restored(value):
    restored = round_trip([value])[0]
    assert type(restored) is torch.Tensor
    assert not restored.requires_grad
    assert restored.shape == value.shape
    assert torch.equal(restored, value.detach())


@pytest.mark.parametrize(
    "value",
    [
        np.arange(5), np.arange(10)[::2], np.zeros((0, 2)), np.array(3.5), np.array(["a", "bcd"]), np.array([b"x"]),
        np.array([True]), np.array([1j]), np.array(["2020-01-01"], "datetime64[D]"), np.arange(3, dtype=">i4"),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.float16(1), np.longdouble(1) / 3,
    ],
    ids=range(13),
)  # fmt: skip
def test_numpy_array_is_restored(value):
    restored = round_trip({"n": value})["n"]
    assert type(restored) is type(value)
    assert restored.dtype == value.dtype
    assert restored.shape == value.shape
    np.testing.assert_array_equal(restored, value)


@pytest.mark.parametrize(
    "value",
    [np.float32(1.5), np.int64(-3), np.bool_(True), np.complex64(1j), np.str_("ü"), np.str_(""), np.float64("nan")],
)
def test_numpy_scalar_is_restored(value):
    restored = round_trip(value)
    assert type(restored) is type(value)
    assert restored.tobytes() == value.tobytes()


def test_random_states_are_restored():
    value = {
        "python": random.Random(1).getstate(),
        "numpy": np.random.RandomState(1).get_state(),
        "generator": np.random.default_rng(1).bit_generator.state,
        "torch": torch.Generator().manual_seed(1).get_state(),
    }
    restored = round_trip(value)
    again = random.Random()
    again.setstate(restored["python"])
    assert again.random() == random.Random(1).random()
    assert restored["generator"] == value["generator"]
    generator = torch.Generator()
    generator.set_state(restored["torch"])
    assert torch.rand(1, generator=generator) == torch.rand(1, generator=torch.Generator().manual_seed(1))


def test_tensor_under_two_keys_is_sent_once_and_stays_shared():
    shared = torch.arange(50_000.0)
    header, buffers = state.capture({"a": ScriptState({"x": shared, "y": shared}), "b": ScriptState(shared)})
    assert sum(buffer.numel() for buffer in buffers) == shared.nbytes
    first, second = ScriptState(), ScriptState()
    state.restore({"a": first, "b": second}, header, copied(buffers))
    first.value["x"][0] = -1
    assert first.value["y"][0] == second.value[0] == -1


def test_overlapping_views_are_sent_once_and_stay_views():
    whole = torch.arange(50_000.0)
    header, buffers = state.capture(
        {"a": ScriptState({"whole": whole, "part": whole[10:20], "square": whole.view(100, 500).t()})}
    )
    assert sum(buffer.numel() for buffer in buffers) == whole.nbytes
    restored = ScriptState()
    state.restore({"a": restored}, header, copied(buffers))
    restored.value["whole"][10] = -1
    assert restored.value["part"][0] == -1
    assert restored.value["square"][10, 0] == -1


def test_parameters_and_optimizer_state_are_not_copied():
    net = torch.nn.Linear(200, 100)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 200)).sum().backward()
    optimizer.step()
    _, buffers = state.capture({"model": net, "optimizer": optimizer})
    addresses = {buffer.ctypes.data for buffer in state.as_bytes(buffers)}
    assert net.weight.data_ptr() in addresses
    assert optimizer.state[net.weight]["exp_avg"].data_ptr() in addresses


def test_buffers_of_a_module_are_copied():
    net = torch.nn.BatchNorm1d(20_000)
    _, buffers = state.capture({"model": net, "own": ScriptState(torch.ones(20_000))})
    before = [buffer.copy() for buffer in state.as_bytes(buffers)]
    net(torch.randn(4, 20_000))
    for old, new in zip(before, state.as_bytes(buffers), strict=True):
        np.testing.assert_array_equal(old, new)


def test_small_tensors_share_a_buffer():
    _, buffers = state.capture({"own": ScriptState([torch.tensor(float(number)) for number in range(100)])})
    assert len(buffers) == 1


def test_restore_keeps_the_parameter_objects():
    source, target = model(), model()
    kept = list(target.parameters())
    header, buffers = state.capture({"model": source})
    state.restore({"model": target}, header, copied(buffers))
    assert all(new is old for new, old in zip(target.parameters(), kept, strict=True))
    assert state.checksum({"model": source}) == state.checksum({"model": target})


def test_restored_state_is_independent_of_read_only_memory():
    source, target = torch.nn.Linear(200, 100), torch.nn.Linear(200, 100)
    optimizers = [torch.optim.Adam(net.parameters()) for net in (source, target)]
    source(torch.ones(1, 200)).sum().backward()
    optimizers[0].step()
    header, buffers = state.capture({"optimizer": optimizers[0]})
    read_only = copied(buffers)
    for buffer in read_only:
        buffer.flags.writeable = False
    before = [buffer.copy() for buffer in read_only]
    state.restore({"optimizer": optimizers[1]}, header, read_only)
    target(torch.ones(1, 200)).sum().backward()
    optimizers[1].step()
    assert all(np.array_equal(old, new) for old, new in zip(before, read_only, strict=True))


def test_checksum_changes_with_one_bit():
    value = torch.zeros(1000)
    before = state.checksum({"own": ScriptState(value)})
    value[500] = -0.0
    assert state.checksum({"own": ScriptState(value)}) != before


def test_checksum_ignores_memory_layout():
    value = torch.arange(12.0).reshape(3, 4)
    assert state.checksum({"o": ScriptState(value.t())}) == state.checksum({"o": ScriptState(value.t().contiguous())})


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value",
    [
        object(), lambda: 1, Point(1, 2), torch.nn.Linear(1, 1), np.array([object()]), np.zeros(1, [("a", "i4")]),
        defaultdict(lambda: 1), torch.eye(2).to_sparse(), torch.empty(1, device="meta"), type, torch.Generator(),
        np.void(b"x"),
    ],
    ids=range(12),
)  # fmt: skip
def test_unsupported_value_is_named_with_its_path_and_a_remedy(value):
    with pytest.raises(StateUnsupported) as caught:
        state.capture({"own": ScriptState({"layers": [{"x": 1}, {3: value}]})})
    assert "own['layers'][1][3]" in caught.value.what
    assert "run.state(" in caught.value.do
    assert caught.value.code == "S310"


def test_container_that_contains_itself_is_refused():
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(StateUnsupported, match="own"):
        state.capture({"own": ScriptState(loop)})


def test_missing_part_is_named_before_anything_is_loaded():
    header, buffers = state.capture({"model": model(), "old": ScriptState(1)})
    target, new = model(), ScriptState("untouched")
    before = state.checksum({"model": target})
    with pytest.raises(ModelMismatch) as caught:
        state.restore({"model": target, "new": new}, header, copied(buffers))
    assert "only on this member: new" in caught.value.why
    assert "only in the run: old" in caught.value.why
    assert (state.checksum({"model": target}), new.value) == (before, "untouched")


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (torch.nn.Linear(3, 5), "weight is float32[5, 3] on this member but float32[4, 3] in the run"),
        (torch.nn.Linear(3, 4, bias=False), "only in the run: bias"),
        (torch.nn.Linear(3, 4).double(), "weight is float64[4, 3] on this member"),
    ],
)
def test_different_model_is_refused_before_anything_is_loaded(other, why):
    header, buffers = state.capture({"own": ScriptState("sent"), "model": torch.nn.Linear(3, 4)})
    own = ScriptState("untouched")
    with pytest.raises(ModelMismatch) as caught:
        state.restore({"own": own, "model": other}, header, copied(buffers))
    assert why in caught.value.why
    assert own.value == "untouched"


def test_optimizer_with_other_groups_is_refused():
    source, target = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
    header, buffers = state.capture({"optimizer": torch.optim.SGD(source.parameters())})
    other = torch.optim.SGD([{"params": [target.weight]}, {"params": [target.bias]}])
    with pytest.raises(ModelMismatch, match="does not fit"):
        state.restore({"optimizer": other}, header, copied(buffers))


def test_buffers_of_the_wrong_size_are_refused():
    header, buffers = state.capture({"own": ScriptState(torch.ones(9))})
    with pytest.raises(StateMalformed):
        state.restore({"own": ScriptState()}, header, [copied(buffers)[0][:-1]])
    with pytest.raises(StateMalformed):
        state.restore({"own": ScriptState()}, header, [])


@pytest.mark.parametrize(
    "header",
    [
        b"", b"\x00", b"garbage", b"\x91" * 2000, msgspec.msgpack.encode([2, {}, [], []]),
        msgspec.msgpack.encode([1, {"own": ["tensor", 5]}, [], []]),
        msgspec.msgpack.encode([1, {"own": ["eval", "1"]}, [], []]),
        msgspec.msgpack.encode([1, {"own": ["ddict", "eval", []]}, [], []]),
        msgspec.msgpack.encode([1, {"own": ["array", "O", [1], 0]}, [[0, 0, "uint8", [1], [1]]], []]),
        msgspec.msgpack.encode([1, {"own": ["tensor", 0]}, [[0, 0, "float32", [1 << 40], [1]]], []]),
        msgspec.msgpack.encode([1, {"own": ["tensor", 0]}, [[0, 0, "float32", [1], [-1]]], []]),
        msgspec.msgpack.encode([1, {"own": ["tensor", 0]}, [[0, 0, "nosuch", [1], [1]]], []]),
        msgspec.msgpack.encode([1, {"own": ["dict", 5]}, [], []]),
        msgspec.msgpack.encode([1, {"own": []}, [], []]),
        msgspec.msgpack.encode([1, {"own": ["tensor", 0]}, [[0, 0, "float32", [0, 1 << 62, 64], [1, 1, 1]]], []]),
    ],
    ids=range(15),
)  # fmt: skip
def test_invalid_header_is_refused(header):
    own = ScriptState("untouched")
    with pytest.raises(StateMalformed):
        state.restore({"own": own}, header, [])
    assert own.value == "untouched"


def test_tensor_outside_its_buffer_is_refused():
    header = msgspec.msgpack.encode([1, {"own": ["tensor", 0]}, [[0, 4, "float32", [2], [1]]], [8]])
    with pytest.raises(StateMalformed, match="outside"):
        state.restore({"own": ScriptState()}, header, [np.zeros(8, np.uint8)])


def test_failing_load_state_dict_is_named():
    class Picky(ScriptState):
        def load_state_dict(self, value: Any) -> None:
            raise KeyError("epoch")

    header, buffers = state.capture({"picky": Picky({})})
    with pytest.raises(KeyError) as caught:
        state.restore({"picky": Picky()}, header, copied(buffers))
    assert any("'picky'" in note for note in caught.value.__notes__)


def test_module_versions_are_restored():
    restored = round_trip(torch.nn.BatchNorm1d(3).state_dict())
    assert restored._metadata[""]["version"] == 2


def test_single_element_with_any_stride_has_its_own_bytes():
    strange = torch.arange(4.0)[1::2][:1]
    assert strange.stride() == (2,)
    assert state.as_bytes([strange])[0].view(np.float32).tolist() == [1.0]
