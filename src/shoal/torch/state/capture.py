"""The training state of a member as a header and raw buffers, and back, without pickle.

A part is anything with `state_dict` and `load_state_dict`. Its tree becomes the header (msgpack); the bytes of its
tensors and arrays become the buffers. Parameters and optimizer state are not copied: the buffers are their memory,
which changes only in `optimizer.step()`. Everything else could change at any time, and is copied.
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
from shoal.torch.state.fingerprint import describe as describe
from shoal.torch.state.fingerprint import describe_difference as describe_difference
from shoal.torch.state.fingerprint import fingerprint as fingerprint
from shoal.torch.state.tensor_layout import Memory, TensorInfo, memory_of

Bytes: TypeAlias = NDArray[np.uint8]

FORMAT = 1


class Stateful(Protocol):
    """Something whose state is handed over: a model, an optimizer, a scheduler, a scaler, the user's own."""

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
        trees[name] = encoder.encode(part.state_dict(), name, _live_memory(part))
    tensors, buffers = encoder.layout()
    header = _TorchStateHeader(FORMAT, trees, tensors, [buffer.numel() for buffer in buffers])
    return msgspec.msgpack.encode(header), buffers


def as_bytes(tensors: Sequence[torch.Tensor]) -> list[Bytes]:
    """Return the bytes of each tensor: a view of its memory if that is contiguous and on the CPU, else a copy."""
    return [_bytes_of(tensor) for tensor in tensors]


def capture_bytes(parts: Mapping[str, Stateful]) -> tuple[bytes, list[Bytes]]:
    """Return the state of all parts as a header and bytes, for whoever sends or stores it."""
    header, tensors = capture(parts)
    return header, as_bytes(tensors)


def restore(parts: Mapping[str, Stateful], header: bytes, buffers: Sequence[Bytes]) -> None:
    """Load a captured state into the parts, after checking that all of it fits them.

    The buffers are given away: an optimizer may keep using their memory as its state.
    """
    states = read(header, buffers)
    _check_names(parts, states)
    for name, part in parts.items():
        _check_fits(name, part, states[name])
    for name, part in parts.items():
        try:
            part.load_state_dict(states[name])
        except Exception as error:
            error.add_note(f"while loading the state of {name!r} that another member or a checkpoint gave")
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
            "the buffers of a state are not those that its header describes",
            why=f"{len(sizes)} buffers of {sum(sizes)} bytes, not {len(decoded.sizes)} of {sum(decoded.sizes)}",
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


def _live_memory(part: Stateful) -> Container[Memory]:
    """Return the memory of a part that only an optimizer step changes."""
    if hasattr(part, "param_groups"):
        return _AllMemory()
    if isinstance(part, torch.nn.Module):
        return {memory_of(each) for each in part.parameters() if not torch.nn.parameter.is_lazy(each)}
    return ()


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    whole = tensor.detach().contiguous()
    if whole.numel() == 0:
        return np.empty(0, np.uint8)
    # A tensor of one element is contiguous whatever its stride, which a view as bytes is not.
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8).cpu().numpy()


def _check_names(parts: Mapping[str, Stateful], states: Mapping[str, Any]) -> None:
    missing, unexpected = sorted(parts.keys() - states.keys()), sorted(states.keys() - parts.keys())
    if missing or unexpected:
        raise ModelMismatch(
            "the state of the run does not have the parts that this member has",
            why="; ".join(
                f"{text}: {', '.join(names)}"
                for text, names in (("only here", missing), ("only there", unexpected))
                if names
            ),
            do="attach the same model, optimizer, scheduler and states on every member",
        )


def _check_fits(name: str, part: Stateful, state: Any) -> None:
    if isinstance(part, torch.nn.Module):
        why = _module_difference(part.state_dict(), state)
    elif hasattr(part, "param_groups"):
        why = _groups_difference(part.param_groups, state)
    else:
        return
    if why:
        raise ModelMismatch(
            f"the state of {name!r} does not fit the one that this member has built",
            why=why,
            do="build the same model and optimizer on every member",
        )


def _module_difference(mine: Mapping[str, Any], theirs: Any) -> str:
    if not isinstance(theirs, dict):
        return "it is not the state of a model"
    for text, names in (("only here", mine.keys() - theirs.keys()), ("only there", theirs.keys() - mine.keys())):
        if names:
            return f"{text}: {', '.join(sorted(names)[:5])}"
    for key, here in mine.items():
        there = theirs[key]
        if not isinstance(here, torch.Tensor) or torch.nn.parameter.is_lazy(here):
            continue
        if not isinstance(there, torch.Tensor):
            return f"{key} is a tensor here, but {type(there).__name__} there"
        if here.shape != there.shape or here.dtype != there.dtype:
            return f"{key} is {_type_of(here)} here, but {_type_of(there)} there"
    return ""


def _groups_difference(mine: Sequence[Mapping[str, Any]], state: Any) -> str:
    theirs = state.get("param_groups") if isinstance(state, dict) else None
    if not isinstance(theirs, list) or not all(isinstance(g, dict) and "params" in g for g in theirs):
        return "it is not the state of an optimizer"
    here, there = [len(group["params"]) for group in mine], [len(group["params"]) for group in theirs]
    return "" if here == there else f"its groups have {here} parameters here, but {there} there"


def _type_of(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _undo_casts(part: Stateful, state: Any) -> None:
    """Give an optimizer its state in the type that it was sent in.

    torch's Optimizer.load_state_dict turns every tensor into the parameter's type; an optimizer that keeps float32
    moments of bfloat16 parameters would go on with other numbers than the member that sent them.
    """
    held = getattr(part, "state", None)
    if not isinstance(part, torch.optim.Optimizer) or held is None:
        return
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in part.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, sent in state["state"].get(number, {}).items():
            kept = held[parameter].get(key)
            if isinstance(kept, torch.Tensor) and isinstance(sent, torch.Tensor) and kept.dtype != sent.dtype:
                held[parameter][key] = sent.to(kept.device)
