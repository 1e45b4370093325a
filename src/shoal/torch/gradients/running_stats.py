"""Buffers that a forward pass changes, above all BatchNorm's running statistics.

Their changes count only if the step commits. The running statistics of all members are averaged by weight along with
the gradients, so that all members hold the same; after a step that did not commit, every buffer is rolled back.
"""

from __future__ import annotations

import torch

from shoal.torch.gradients.buckets import Buckets


class RunningStats:
    """Buffers of a model, with copies of their values at the last commit.

    `count` numbers of type `dtype` are averaged over members: in double precision if the model has such statistics.
    """

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
        # BatchNorm's kernels change these without incrementing `_version`.
        self._silent = {(id(module), name) for module, name in averaged}
        self.count = sum(_buffer(place).numel() for place in averaged)
        is_double = any(_buffer(place).dtype == torch.float64 for place in averaged)
        self.dtype = torch.float64 if is_double else torch.float32
        self._saved: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor, int]] = {}
        self.save()

    def save(self) -> None:
        """Copy the buffers' values; those that were not written to since the last call are skipped."""
        for module, name in self._places:
            buffer = module._buffers.get(name)
            if buffer is None:
                continue
            key = (id(module), name)
            saved = self._saved.get(key)
            if saved is None:
                self._saved[key] = (buffer, buffer.detach().clone(), buffer._version)
            elif saved[0] is not buffer or saved[2] != buffer._version or key in self._silent:
                copy = saved[1] if saved[1].shape == buffer.shape else buffer.detach().clone()
                copy.copy_(buffer.detach())
                self._saved[key] = (buffer, copy, buffer._version)

    def roll_back(self) -> None:
        """Reset the buffers to their values at the last `save`."""
        with torch.no_grad():
            for module, name in self._places:
                key = (id(module), name)
                buffer, copy, version = self._saved[key]
                if module._buffers.get(name) is not buffer:
                    module._buffers[name] = buffer
                if buffer._version != version or key in self._silent:
                    buffer.copy_(copy)
                    self._saved[key] = (buffer, copy, buffer._version)

    def write_to(self, buckets: Buckets, fraction: float) -> None:
        """Write this member's statistics, times its fraction of the total weight, into the tail of the buckets."""
        if self.count:
            flat = torch.cat([_buffer(place).detach().reshape(-1).to(self.dtype) for place in self._averaged])
            torch.mul(flat, fraction, out=buckets.statistics)

    def read_from(self, buckets: Buckets) -> None:
        """Set the statistics to the average over all members."""
        offset = 0
        with torch.no_grad():
            for place in self._averaged:
                buffer = _buffer(place)
                average = buckets.statistics[offset : offset + buffer.numel()]
                buffer.copy_(average.view(buffer.shape))
                offset += buffer.numel()


def _buffer(place: tuple[torch.nn.Module, str]) -> torch.Tensor:
    buffer = place[0]._buffers[place[1]]
    assert buffer is not None
    return buffer
