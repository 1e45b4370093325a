"""Checks for whatever a script trains or updates without having attached it.

A run keeps its members equal by summing the gradients of the attached model, by stepping the attached optimizers and
schedulers in committed steps only, and by sending the state of all attached objects to joiners. Anything beside that is
trained by each member on its own: on its share only, again after every repeated step, and from the start in a joiner.
Such a run ends well and its result is wrong, so it is refused, as early as the mistake can be seen:

- `check_attached`, before the loop: no model, parameters or optimizer, lazy layers, an optimizer of another
  module's parameters.
- `check_companions`, before the loop and once more when a learning rate changes by itself: schedulers of an attached
  optimizer and weight averages (`AveragedModel`) of the attached model, searched for among all live objects.
- `check_loss`, in the steps 0, 1, 2, 4, 8 …: parameters in the graph of the loss that the model does not own.
- `OptimizerWatch`, whenever any optimizer steps in the loop: one that owns parameters of the model is refused at once,
  any other in the second step in which it appears (an optimizer of an inner loop is made and dropped in one step).
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

from shoal.core.nouns import counted
from shoal.errors import NotAttached

# Folders of Shoal and of torch, whose frames are not the script's; not resolved, as frames name them.
_PACKAGES = (f"{Path(__file__).parents[2]}/", f"{Path(str(torch.__file__)).parent}/", "<")


def user_line() -> str:
    """Return the file and line of the script that called into Shoal; empty if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_PACKAGES):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def instances(kinds: Collection[type[Any]]) -> list[Any]:
    """Return the live instances of these classes, not of their subclasses.

    An instance refers to its class, so the garbage collector finds it by that. Listing all objects instead would also
    hold the tuples that other threads are just building, and Python cannot complete a tuple with a second reference.
    """
    return [referrer for referrer in gc.get_referrers(*kinds) if type(referrer) in kinds]


def check_attached(model: torch.nn.Module | None, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise NotAttached unless a model and an optimizer of its parameters are attached."""
    if model is None:
        raise NotAttached("run.attach was not called", do="call run.attach(model, optimizer) before the loop")
    if not optimizers:
        raise NotAttached("run.attach got no optimizer", do="run.attach(model, optimizer)")
    if any(map(torch.nn.parameter.is_lazy, [*model.parameters(), *model.buffers()])):
        raise NotAttached(
            "the model has lazy layers without parameters yet",
            why="every member would initialise them on its own",
            do="call the model with a sample before run.attach, on every member",
        )
    attached = set(map(id, model.parameters()))
    if not attached:
        raise NotAttached(
            f"the attached {type(model).__name__} has no parameters",
            why="there is nothing to train in it; its buffers are not trained",
            do="attach the module that holds the parameters of the optimizer",
        )
    for optimizer in optimizers:
        foreign = [tuple(p.shape) for p in _trained_by(optimizer) if p.requires_grad and id(p) not in attached]
        if foreign:
            raise NotAttached(
                f"{type(optimizer).__name__} trains {counted(len(foreign), 'parameter')} outside the attached model",
                why=f"each member would train its own copy; the first one has shape {foreign[0]}",
                do="put everything that is trained into one torch.nn.Module, and attach that",
            )


# --- schedulers and weight averages


def check_companions(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], parts: Iterable[Any]) -> None:
    """Raise NotAttached if a live scheduler or weight average of what is attached is not attached itself.

    A scheduler would also step after optimizer steps that do not commit, an average would be updated by them, and both
    would be lost by joiners and checkpoints.
    """
    parts = list(parts)
    suspects = _suspects(model, optimizers, parts)
    if suspects:
        # Objects that the script has dropped may live on in reference cycles.
        del suspects
        gc.collect()
        suspects = _suspects(model, optimizers, parts)
    for suspect in suspects:
        raise _not_attached(suspect, optimizers)


def _suspects(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], parts: list[Any]) -> list[Any]:
    kinds = {LRScheduler, AveragedModel} | set(subclasses(LRScheduler)) | set(subclasses(AveragedModel))
    live = instances(kinds)
    inner = {id(value) for part in parts for value in _schedulers_in(part)} | set(map(id, parts))
    return [
        candidate
        for candidate in live
        if id(candidate) not in inner
        and (
            _averages(candidate, model)
            if isinstance(candidate, AveragedModel)
            else any(getattr(candidate, "optimizer", None) is optimizer for optimizer in optimizers)
        )
    ]


def _not_attached(suspect: Any, optimizers: Sequence[torch.optim.Optimizer]) -> NotAttached:
    kind = type(suspect).__name__
    if isinstance(suspect, AveragedModel):
        return NotAttached(
            f"{kind} averages the attached model but is not attached",
            why="it would be updated again by repeated steps, and joiners would not receive its state",
            do="run.attach(model, optimizer, averaged)",
        )
    number = next(n for n, optimizer in enumerate(optimizers) if suspect.optimizer is optimizer)
    which = "optimizer" if len(optimizers) == 1 else f"optimizer{number + 1}"
    return NotAttached(
        f"{kind} changes the learning rate of {type(optimizers[number]).__name__} but is not attached",
        why="it would step even if a step does not commit, and joiners would not receive its state",
        do=f"run.attach(model, {which}, scheduler)",
    )


def _averages(averaged: AveragedModel, model: torch.nn.Module) -> bool:
    # Not one that is the model or a part of it, nor one that is attached to another run: its update is guarded.
    if any(module is averaged for module in model.modules()) or "update_parameters" in vars(averaged):
        return False
    return averaged.module.state_dict().keys() == model.state_dict().keys()


def subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    """Yield every class that derives from this one, directly or not."""
    for subclass in kind.__subclasses__():
        yield subclass
        yield from subclasses(subclass)


def _schedulers_in(value: Any, depth: int = 4) -> Iterator[LRScheduler]:
    """Yield the schedulers that an attached object holds: itself, in its attributes, or in containers there."""
    if isinstance(value, LRScheduler):
        yield value
    if depth == 0 or isinstance(value, torch.nn.Module | torch.optim.Optimizer | torch.Tensor | type):
        return
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    for inner in (*values, *vars(value).values()) if hasattr(value, "__dict__") else values:
        yield from _schedulers_in(inner, depth - 1)


# --- parameters in the loss


def is_checked_step(number: int) -> bool:
    """Return whether the graph of this step's loss is walked: steps 0, 1, 2, 4, 8 …, since a loss may change later."""
    return number & (number - 1) == 0 if number else True


def check_loss(loss: torch.Tensor, modules: Iterable[torch.nn.Module]) -> None:
    """Raise NotAttached if the loss trains parameters that belong to none of the attached modules."""
    owned = {id(parameter) for module in modules for parameter in module.parameters()}
    foreign = [
        leaf
        for node in nodes_of(loss)
        if node.name().endswith("AccumulateGrad")
        and isinstance(leaf := node.variable, torch.nn.Parameter)
        and id(leaf) not in owned
    ]
    if foreign:
        names = ", ".join(_name_of(leaf) for leaf in foreign[:4])
        raise NotAttached(
            f"the loss trains {counted(len(foreign), 'parameter')} outside the attached model: {names}",
            where=user_line(),
            why="their gradients are not summed: each member would train its own",
            do="put them into the model: run.attach(torch.nn.ModuleList([model, other]), optimizer); "
            "or, if they are not trained, other.requires_grad_(False)",
        )


def nodes_of(loss: torch.Tensor) -> Iterator[Any]:
    """Yield every node of the graph that a loss was computed with, each once."""
    pending = [loss.grad_fn] if loss.grad_fn is not None else []
    seen: set[Any] = set(pending)
    while pending:
        node = pending.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)


def _name_of(leaf: torch.nn.Parameter) -> str:
    """Return the name of a parameter by the module that holds it, and its shape."""
    for parameters in gc.get_referrers(leaf):
        attributes = gc.get_referrers(parameters) if type(parameters) is dict else []
        for module in gc.get_referrers(*(holder for holder in attributes if type(holder) is dict)):
            if isinstance(module, torch.nn.Module) and module._parameters is parameters:
                name = next(name for name, parameter in parameters.items() if parameter is leaf)
                return f"{type(module).__name__}.{name} {tuple(leaf.shape)}"
    return f"a Parameter {tuple(leaf.shape)}"


# --- optimizers


def _trained_by(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class OptimizerWatch:
    """Raises NotAttached when an optimizer steps in the loop without being attached.

    `step_number` returns the number of the step in progress, None outside of one. Only the loop's own thread is
    watched, and not what an attached optimizer does inside its step: it may wrap another one.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        step_number: Callable[[], int | None],
    ) -> None:
        self._model, self._optimizers, self._step_number = model, optimizers, step_number
        self._thread = threading.get_ident()
        self._depth = 0
        self._first_seen: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def close(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()

    def _is_attached(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(optimizer is attached for attached in self._optimizers)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if self._is_attached(optimizer):
            self._depth += 1
            return
        number = self._step_number()
        if self._depth or number is None:
            return
        trained = _trained_by(optimizer)
        owned = set(map(id, self._model.parameters()))
        kind = type(optimizer).__name__
        if any(id(parameter) in owned for parameter in trained):
            raise NotAttached(
                f"{kind} steps parameters of the attached model but is not attached",
                where=user_line(),
                why="it would step even if a step does not commit, and joiners would not receive its state",
                do="pass every optimizer: run.attach(model, optimizer, other_optimizer)",
            )
        if self._first_seen.setdefault(optimizer, number) != number:
            raise NotAttached(
                f"{kind} trains {counted(len(trained), 'parameter')} in the loop but is not attached",
                where=user_line(),
                why="each member would train its own; the first one has shape "
                f"{tuple(trained[0].shape) if trained else ()}",
                do="put the parameters into the model and attach all: run.attach(model, optimizer, other_optimizer)",
            )

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if threading.get_ident() == self._thread and self._is_attached(optimizer):
            self._depth -= 1
