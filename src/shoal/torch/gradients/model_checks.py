"""Refusal of models that a run cannot train (without memory, or distributed by torch itself), and of exchanges."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from shoal.errors import UnusableExchange, UnusableModel
from shoal.torch.gradients.unattached import instances, subclasses, user_line


def refuse_exchange(backend: str) -> None:
    """Raise UnusableExchange if this process has no such backend; it would form one world after another in vain."""
    available = torch.distributed.is_available()
    if backend == "nccl":
        if not available or not torch.distributed.is_nccl_available():
            missing = "this build of PyTorch has no NCCL"
        elif not torch.cuda.is_available():
            missing = "PyTorch sees no GPU on this machine"
        else:
            return
    elif backend == "gloo" and not (available and torch.distributed.is_gloo_available()):
        missing = "this build of PyTorch has no Gloo"
    else:
        return
    raise UnusableExchange(f"exchange={backend} cannot work here", why=missing, do="remove it, or use exchange=ring")


def refuse_meta(model: torch.nn.Module) -> None:
    """Raise UnusableModel if parameters or buffers have shapes but no memory."""
    names = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if names:
        raise UnusableModel(
            "the model is on the meta device",
            why=f"{len(names)} of its tensors have no memory; the first is {names[0]}",
            do='materialise it: model.to_empty(device="cpu") and load weights, before run.attach and the optimizer',
        )


def refuse_distributed(model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
    """Raise UnusableModel if torch.distributed already divides or sums what is attached (DDP, FSDP, DTensor).

    Also finds a wrapper that was put around the model later: wrappers need a process group, so without one nothing is
    searched.
    """
    if not torch.distributed.is_available():
        return
    _refuse_modules(model.modules())
    if torch.distributed.is_initialized():
        inside = {id(module) for module in model.modules()}
        ddp = torch.nn.parallel.DistributedDataParallel
        for wrapper in instances({ddp, *subclasses(ddp)}):
            if id(wrapper.module) in inside:
                raise _wrapped("DistributedDataParallel")
    tensors: list[tuple[str, Any]] = [*model.named_parameters(), *model.named_buffers()]
    tensors += [("a parameter of the optimizer", p) for o in optimizers for g in o.param_groups for p in g["params"]]
    for name, tensor in tensors:
        if type(tensor).__module__.startswith("torch.distributed") or hasattr(tensor, "_local_tensor"):
            raise UnusableModel(
                f"{name} is a {type(tensor).__name__}",
                where=user_line(),
                why="torch.distributed has divided the model among processes, so no member holds all of it",
                do="remove fully_shard and distribute_tensor: run.attach the plain model and its optimizer",
            )


def _refuse_modules(modules: Iterable[torch.nn.Module]) -> None:
    for module in modules:
        for kind in type(module).__mro__:
            if kind.__name__ in WRAPPERS and kind.__module__.startswith("torch."):
                raise _wrapped(kind.__name__)


WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "PipelineStage")


def _wrapped(kind: str) -> UnusableModel:
    line = "fully_shard(model)" if kind == "FSDPModule" else f"model = {kind}(model)"
    return UnusableModel(
        f"the model is wrapped in {kind}",
        where=user_line(),
        why="Shoal sums the gradients itself; a second exchange inside the model would count or skip members",
        do=f"remove `{line}` and init_process_group, then run.attach(model, optimizer)",
    )
