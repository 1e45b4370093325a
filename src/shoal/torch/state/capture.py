"""Capture and restore of a member's training state, as a header and raw buffers, without pickle.

Theory of operation. A joiner gets the state of a peer, and a checkpoint stores the state of the run. Both need all of
it: model, optimizers, schedulers, scaler, position in the data, and whatever the script registered with `run.state`. A
*part* is any of these, an object with `state_dict` and `load_state_dict`.

*Header and buffers.* `capture` walks the state_dict of every part (`encode`). Containers, numbers and text become the
header, one msgpack message of some kilobytes. Tensors and arrays become entries of the header that say where their
bytes lie: which buffer, which offset, dtype, shape and strides (`tensor_layout`). The buffers are the bulk. They are
sent, hashed and written as they are, with no serialisation in between, and `restore` puts tensors over the received
bytes without another copy. Tensors that share memory (tied weights) share a buffer and are tied again.

*Live memory.* Copying a large model takes long, and the state is captured between two steps while all members wait. So
the buffers of parameters and optimizer state are not copies: they are the tensors' own memory, which nothing but
`optimizer.step()` changes. A peer may read them while the next forward and backward passes run; the loop copies what is
still pending before it lets the optimizer step (`TrainingState.before_change`). Everything else (BatchNorm statistics,
counters, random states) may change at any time, is small, and is copied at once.

*Why no pickle.* State comes over the network and from disk, and unpickling runs code of the sender's choice. It also
ties both ends to the same classes, and copies every tensor. The format here can express values only; a header
that is corrupt or hostile is refused with StateMalformed, and an object that is not plain data is refused by name, with
its path, when it is captured (StateUnsupported), instead of failing on another machine.

*Checks first.* `restore` changes nothing until the names of all parts and the shapes and dtypes of model and optimizer
groups are known to fit. A mismatch raises ModelMismatch and leaves the member as it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from shoal.errors import ModelMismatch, StateMalformed
from shoal.torch.state.encode import StateDecoder, StateEncoder, canonical
from shoal.torch.state.tensor_layout import Memory, TensorInfo, memory_of

Bytes: TypeAlias = NDArray[np.uint8]

FORMAT = 1


class Stateful(Protocol):
    """Object whose state is transferred: a model, optimizer, scheduler, scaler, or one of the script's own."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


class _TorchStateHeader(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    format: int
    parts: dict[str, Any]
    tensors: list[TensorInfo]
    sizes: list[int]


def capture(parts: Mapping[str, Stateful]) -> tuple[bytes, list[torch.Tensor]]:
    """Return the state of all parts as a header and flat byte tensors; those of parameters are live memory."""
    encoder = StateEncoder()
    trees: dict[str, Any] = {}
    for name, part in parts.items():
        trees[name] = encoder.encode(part.state_dict(), name, _live_memory(name, part))
    tensors, buffers = encoder.layout()
    header = _TorchStateHeader(FORMAT, trees, tensors, [buffer.numel() for buffer in buffers])
    return msgspec.msgpack.encode(header), buffers


def as_bytes(tensors: Sequence[torch.Tensor]) -> list[Bytes]:
    """Return the bytes of each tensor: a view of its memory if that is contiguous and on the CPU, else a copy."""
    return [_bytes_of(tensor) for tensor in tensors]


def capture_bytes(parts: Mapping[str, Stateful]) -> tuple[bytes, list[Bytes]]:
    """Return the state of all parts as a header and bytes, ready to be sent or stored."""
    header, tensors = capture(parts)
    return header, as_bytes(tensors)


def restore(parts: Mapping[str, Stateful], header: bytes, buffers: Sequence[Bytes]) -> None:
    """Load a captured state into the parts; raise ModelMismatch, before any change, if it does not fit them.

    The caller must not use the buffers any more: an optimizer may keep their memory as its state.
    """
    states = read(header, buffers)
    _check_names(parts, states)
    for name, part in parts.items():
        _check_fits(name, part, states[name])
    for name, part in parts.items():
        try:
            part.load_state_dict(states[name])
        except Exception as error:
            error.add_note(f"while loading the state of {name!r} from another member or a checkpoint")
            raise
        _undo_casts(part, states[name])


def read(header: bytes, buffers: Sequence[Bytes]) -> dict[str, Any]:
    """Return the state_dict of every part in a captured state; its tensors lie over the buffers."""
    try:
        decoded = msgspec.msgpack.decode(header, type=_TorchStateHeader)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise StateMalformed("the header of a state cannot be read", why=str(error)) from error
    if decoded.format != FORMAT:
        raise StateMalformed(
            f"a state has format {decoded.format}, but this version of Shoal reads {FORMAT}",
            do="install the same version of Shoal everywhere",
        )
    sizes = [buffer.nbytes for buffer in buffers]
    if sizes != decoded.sizes:
        raise StateMalformed(
            "the buffers of a state do not match its header",
            why=f"expected {len(decoded.sizes)} buffers of {sum(decoded.sizes)} bytes in all, got {len(sizes)} of "
            f"{sum(sizes)}",
        )
    decoder = StateDecoder(decoded.tensors, buffers)
    return {name: decoder.decode(tree) for name, tree in decoded.parts.items()}


def checksum(parts: Mapping[str, Stateful]) -> str:
    """Return one hash over every value of the state, equal on members whose state is bitwise equal."""
    digest = hashlib.sha256()
    for name in sorted(parts):
        digest.update(msgspec.msgpack.encode([name, canonical(parts[name].state_dict(), name)]))
    return digest.hexdigest()


class _AllMemory(Container[Memory]):
    def __contains__(self, _memory: object) -> bool:
        return True


def _live_memory(name: str, part: Stateful) -> Container[Memory]:
    """Return the memory of a part that only an optimizer step changes; averages of the model change after it."""
    if hasattr(part, "param_groups"):
        return _AllMemory()
    if isinstance(part, torch.nn.Module) and name == "model":
        return {memory_of(p) for p in part.parameters() if not torch.nn.parameter.is_lazy(p)}
    return ()


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    whole = tensor.detach().contiguous()
    if whole.numel() == 0:
        return np.empty(0, np.uint8)
    # A tensor of one element counts as contiguous with any stride, but cannot be viewed as bytes with any stride.
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8).cpu().numpy()


def _check_names(parts: Mapping[str, Stateful], states: Mapping[str, Any]) -> None:
    missing, unexpected = sorted(parts.keys() - states.keys()), sorted(states.keys() - parts.keys())
    if missing or unexpected:
        raise ModelMismatch(
            "the run's state has other parts than this member",
            why="; ".join(
                f"{text}: {', '.join(names)}"
                for text, names in (("only on this member", missing), ("only in the run", unexpected))
                if names
            ),
            do="attach the same model, optimizer, scheduler and states on every member",
        )


def _check_fits(name: str, part: Stateful, state: Any) -> None:
    if isinstance(part, torch.nn.Module):
        why = _module_difference(part.state_dict(), state)
    elif hasattr(part, "param_groups"):
        why = _groups_difference(part.param_groups, state)
    elif isinstance(part, torch.amp.GradScaler):
        why = _scaler_difference(part, state)
    else:
        return
    if why:
        raise ModelMismatch(
            f"the run's state of {name!r} does not fit the one on this member",
            why=why,
            do="build the same model and optimizer on every member",
        )


def _module_difference(expected: Mapping[str, Any], state: Any) -> str:
    """Return the first difference between a model's state_dict and a received state; empty if it fits."""
    if not isinstance(state, dict):
        return "it is not the state of a model"
    missing, unexpected = sorted(expected.keys() - state.keys()), sorted(state.keys() - expected.keys())
    for text, names in (("only on this member", missing), ("only in the run", unexpected)):
        if names:
            return f"{text}: {', '.join(names[:5])}"
    for key, tensor in expected.items():
        received = state[key]
        if not isinstance(tensor, torch.Tensor) or torch.nn.parameter.is_lazy(tensor):
            continue
        if not isinstance(received, torch.Tensor):
            return f"{key} is a tensor on this member but {type(received).__name__} in the run"
        if tensor.shape != received.shape or tensor.dtype != received.dtype:
            return f"{key} is {_type_of(tensor)} on this member but {_type_of(received)} in the run"
    return ""


def _groups_difference(groups: Sequence[Mapping[str, Any]], state: Any) -> str:
    """Return how the parameter groups of a received state differ; empty if they fit."""
    received = state.get("param_groups") if isinstance(state, dict) else None
    if not isinstance(received, list) or not all(isinstance(g, dict) and "params" in g for g in received):
        return "it is not the state of an optimizer"
    expected, actual = [len(g["params"]) for g in groups], [len(g["params"]) for g in received]
    return "" if expected == actual else f"its groups have {expected} parameters on this member but {actual} in the run"


def _scaler_difference(scaler: torch.amp.GradScaler, state: Any) -> str:
    """Return whether a GradScaler is enabled on one side only; a disabled one has an empty state."""
    own, sent = ("enabled" if enabled else "disabled" for enabled in (scaler.is_enabled(), bool(state)))
    return "" if own == sent else f"it is {own} on this member but {sent} in the run"


def _type_of(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _undo_casts(part: Stateful, state: Any) -> None:
    """Restore the dtypes of an optimizer's state to those that were sent.

    torch's Optimizer.load_state_dict casts every tensor to the dtype of its parameter; an optimizer that keeps float32
    moments of bfloat16 parameters would continue with other numbers than the member that sent them.
    """
    live = getattr(part, "state", None)
    if not isinstance(part, torch.optim.Optimizer) or live is None:
        return
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in part.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, sent in state["state"].get(number, {}).items():
            loaded = live[parameter].get(key)
            if isinstance(loaded, torch.Tensor) and isinstance(sent, torch.Tensor) and loaded.dtype != sent.dtype:
                live[parameter][key] = sent.to(loaded.device)
