"""Buffers that a forward pass changes: BatchNorm's running statistics above all.

They count only when a step is committed. The running statistics of all members are averaged by weight along with the
gradients, so that all members hold the same; after a step that did not commit, every buffer goes back to what it was.
"""

from __future__ import annotations

import torch

from shoal.torch.gradients.buckets import Buckets


class RunningStats:
    """The buffers of a model, and what they were at the last commit."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._places = [
            (module, name) for module in model.modules() for name, b in module._buffers.items() if b is not None
        ]
        averaged = [
            (module, name)
            for module, name in self._places
            if isinstance(module, torch.nn.modules.batchnorm._NormBase) and name in ("running_mean", "running_var")
        ]
        self._averaged = averaged
        # BatchNorm's kernels write to these without counting up their version.
        self._silent = {(id(module), name) for module, name in averaged}
        self.count = sum(_buffer(place).numel() for place in averaged)
        self._kept: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor, int]] = {}
        self.keep()

    def keep(self) -> None:
        """Remember the buffers as they are; only those that were written to since are copied."""
        for module, name in self._places:
            buffer = module._buffers.get(name)
            if buffer is None:
                continue
            key = (id(module), name)
            known = self._kept.get(key)
            if known is None:
                self._kept[key] = (buffer, buffer.detach().clone(), buffer._version)
            elif known[0] is not buffer or known[2] != buffer._version or key in self._silent:
                copy = known[1] if known[1].shape == buffer.shape else buffer.detach().clone()
                copy.copy_(buffer.detach())
                self._kept[key] = (buffer, copy, buffer._version)

    def put_back(self) -> None:
        """Undo what a forward pass did to the buffers."""
        with torch.no_grad():
            for module, name in self._places:
                key = (id(module), name)
                buffer, copy, version = self._kept[key]
                if module._buffers.get(name) is not buffer:
                    module._buffers[name] = buffer
                if buffer._version != version or key in self._silent:
                    buffer.copy_(copy)
                    self._kept[key] = (buffer, copy, buffer._version)

    def send(self, buckets: Buckets, part: float) -> None:
        """Write our part of the averaged statistics into the tail of the buckets."""
        if self.count:
            flat = torch.cat([_buffer(place).detach().reshape(-1).float() for place in self._averaged])
            torch.mul(flat, part, out=buckets.statistics)

    def receive(self, buckets: Buckets) -> None:
        """Take over the average of all members."""
        offset = 0
        with torch.no_grad():
            for place in self._averaged:
                buffer = _buffer(place)
                piece = buckets.statistics[offset : offset + buffer.numel()]
                buffer.copy_(piece.view(buffer.shape))
                offset += buffer.numel()


def _buffer(place: tuple[torch.nn.Module, str]) -> torch.Tensor:
    buffer = place[0]._buffers[place[1]]
    assert buffer is not None
    return buffer
