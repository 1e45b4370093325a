"""The callback that makes `model.fit` a member of a run, and those that it takes along."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from shoal.errors import NotAttached, UnusableModel
from shoal.keras.data.batches import UNLIMITED, Batches, forget_passed, passed_to_fit
from shoal.keras.evaluation import scalars_of
from shoal.keras.modes.served import AnyTrainer
from shoal.keras.run import Run, join

# They write files, which only one member is to do.
WRITING = (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard)
# What is larger than this, and was there from the start, every member has from the script.
KEPT_BYTES = 1 << 20
# A member that hung learns what the metrics said of so many epochs that it missed.
KEPT_EPOCHS = 64


def _forwarded(name: str) -> Callable[..., None]:
    def hook(self: Any, *args: Any, **kwargs: Any) -> None:
        self.forward(name, *args, **kwargs)

    return hook


class _CallbackList(keras.callbacks.Callback):  # type: ignore[misc]
    """Tells other callbacks what it is told."""

    def __init__(self, others: Sequence[Any]) -> None:
        super().__init__()
        self.others = list(others)

    def forward(self, name: str, *args: Any, **kwargs: Any) -> None:
        for one in self.others:
            getattr(one, name)(*args, **kwargs)

    def set_params(self, params: dict[str, Any]) -> None:
        super().set_params(params)
        self.forward("set_params", params)

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self.forward("set_model", model)

    on_train_begin = _forwarded("on_train_begin")
    on_train_end = _forwarded("on_train_end")
    on_epoch_begin = _forwarded("on_epoch_begin")
    on_epoch_end = _forwarded("on_epoch_end")
    on_train_batch_begin = _forwarded("on_train_batch_begin")
    on_train_batch_end = _forwarded("on_train_batch_end")
    on_test_begin = _forwarded("on_test_begin")
    on_test_end = _forwarded("on_test_end")
    on_test_batch_begin = _forwarded("on_test_batch_begin")
    on_test_batch_end = _forwarded("on_test_batch_end")
    on_predict_begin = _forwarded("on_predict_begin")
    on_predict_end = _forwarded("on_predict_end")
    on_predict_batch_begin = _forwarded("on_predict_batch_begin")
    on_predict_batch_end = _forwarded("on_predict_batch_end")


class _WriterOnly(_CallbackList):
    """Tells a callback only what happens while this member is the one that writes; another one may be, later."""

    def __init__(self, other: Any, run: Callable[[], Run]) -> None:
        super().__init__([other])
        self._run = run
        self._began = False

    def forward(self, name: str, *args: Any, **kwargs: Any) -> None:
        if name.startswith("set_"):
            super().forward(name, *args, **kwargs)
        elif name != "on_train_begin" and (self._run().is_writer or (self._began and name == "on_train_end")):
            self._begin()
            super().forward(name, *args, **kwargs)

    def _begin(self) -> None:
        if not self._began:
            self._began = True
            if self._run().step and hasattr(self.others[0], "append"):
                self.others[0].append = True  # to what the writer before us wrote
            super().forward("on_train_begin")


class _WriterCheckpoint(_CallbackList):
    """Tells ModelCheckpoint everything: who writes next must know what was best. Only the writer's model is saved."""

    def __init__(self, other: Any, run: Callable[[], Run]) -> None:
        super().__init__([other])
        self._run = run

    def forward(self, name: str, *args: Any, **kwargs: Any) -> None:
        if name.startswith("set_") or name == "on_train_begin" or self._run().is_writer:
            super().forward(name, *args, **kwargs)
            return
        model = self.model
        model.save = model.save_weights = lambda *_args, **_kwargs: None
        try:
            super().forward(name, *args, **kwargs)
        finally:
            del model.save, model.save_weights


class Elastic(_CallbackList):
    """Makes `model.fit` a member of the run: pass it as a callback, with `shoal.batches` as data.

    The callbacks that it is given are told everything that Keras tells it. Besides, what they have found (such as how
    long EarlyStopping has waited) is handed to members that join and kept in checkpoints, while what they were made
    with is the script's; and those that write files do so in one member only. `jit_compile` compiles steps with XLA,
    anew for every size of a share; what the model was compiled with cannot tell that you want it, because Keras does
    so wherever it can. `evaluate` is what an evaluator scores the model on: (x, y), or a function; `best`, `patience`
    and `export` are as in `Run.evaluate`.
    """

    # By which data that is passed to `model.fit` sees that somebody trains with it.
    makes_elastic = True

    def __init__(
        self,
        *callbacks: Any,
        jit_compile: bool = False,
        run: Run | None = None,
        evaluate: Any = None,
        best: str | None = None,
        patience: int | None = None,
        export: str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(jit_compile, bool):
            raise UnusableModel(f"jit_compile cannot be {jit_compile!r}", do="pass True or False: it is never guessed")
        self._callbacks = list(callbacks)
        for one in callbacks:
            if isinstance(one, keras.callbacks.BackupAndRestore):
                raise UnusableModel(
                    "BackupAndRestore cannot be used beside shoal.Elastic",
                    why="both would restore the state of the run",
                    do="leave it out: the run keeps its own checkpoints, and shoal resume goes on from them",
                )
        super().__init__([self._around(one) for one in callbacks])
        self._run, self._jit = run, jit_compile
        self._evaluate, self._asked = evaluate, {"best": best, "patience": patience, "export": export}
        self._first: list[dict[str, Any]] = []
        self._trainer: AnyTrainer | None = None
        # Keras ends an epoch after so many calls of the train function, if it was told how many.
        self._limit: int | None = None
        self._calls = 0
        self._came_at_the_end: dict[str, Any] | None = None
        # How many epochs were begun and ended by whoever has the state, and what the metrics said of the last ones.
        self._begun = self._ended = 0
        self._told: dict[int, dict[str, Any]] = {}

    def _around(self, callback: Any) -> Any:
        if isinstance(callback, keras.callbacks.ModelCheckpoint):
            return _WriterCheckpoint(callback, self._joined)
        return _WriterOnly(callback, self._joined) if isinstance(callback, WRITING) else callback

    def set_params(self, params: dict[str, Any]) -> None:
        batches = self._batches()
        if params["steps"] != UNLIMITED:
            self._limit = batches.length = params["steps"]
        # The same dictionary is shown to the progress bar; it counts rounds, if there are any.
        params["steps"] = None if self._joined().in_rounds else batches.length
        super().set_params(params)

    def set_model(self, model: Any) -> None:
        self._batches()
        super().set_model(model)
        model.make_train_function = lambda force=False: self._make_train_function(model)  # noqa: ARG005
        # What others made of an epoch that this member missed is handed over; the model is not that of then any more.
        should = model._should_eval
        model._should_eval = lambda epoch, freq: self._ended <= epoch and should(epoch, freq)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        try:
            self._begin(logs)
        except BaseException:
            self._let_go()
            raise

    def _begin(self, logs: dict[str, Any] | None) -> None:
        self._first = [_plain(one) for one in self._callbacks]
        # First, because they reset themselves: what the others hand over comes after it.
        self.forward("on_train_begin", logs)
        for one, first in zip(self._callbacks, self._first, strict=True):
            first |= {name: value for name, value in _plain(one).items() if _bytes(value) > KEPT_BYTES}
        warnings.filterwarnings("ignore", message="Your input ran out of data", category=UserWarning)
        batches, model, run = self._batches(), self.model, self._joined()
        run.state("callbacks", self._save, self._load)
        if self._evaluate is not None or any(one is not None for one in self._asked.values()):
            run.evaluate(self._evaluate, **self._asked)  # type: ignore[arg-type]
        self._trainer = run.begin(model, batches, self.params["epochs"], self._jit)
        self._trainer.coming()
        # Whoever comes in between two epochs ends the first of them, if the others have not yet done so.
        model._initial_epoch = max(batches.epoch_before(self._trainer.entered), self._ended)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        batches, done = self._batches(), self._joined().step
        batches.now, self._calls = epoch, 0
        if self._trainer is not None:
            inside = bool(done) and batches.epoch_before(done) == epoch
            self._came_at_the_end = self._trainer.missed(inside)
        # What callbacks do when an epoch begins or ends is done once, and handed over: a learning rate that each
        # epoch lowers must not be lowered again by who comes in.
        if self._begun <= epoch:
            self.forward("on_epoch_begin", epoch, logs)
            self._begun = epoch + 1

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        logs = {} if logs is None else logs
        if self._ended > epoch:
            logs |= self._told.get(epoch, {})
            return
        # Keras knows of no metrics if it has seen no step of this epoch here.
        logs |= {name: _as_keras_tells(value) for name, value in (self._came_at_the_end or {}).items()}
        self._came_at_the_end = None
        self.forward("on_epoch_end", epoch, logs)
        self._ended = epoch + 1
        self._told[epoch] = {name: _packed(value) for name, value in logs.items() if _is_plain(value)}
        self._told.pop(epoch - KEPT_EPOCHS, None)
        self._joined().log(**{name: value for name, value in scalars_of(logs).items() if not math.isnan(value)})

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._trainer is not None:
            self._trainer.end()
        self._let_go()
        self.forward("on_train_end", logs)

    def _let_go(self) -> None:
        """What is fitted next has data of its own, and the model is trained as Keras does it again."""
        if self._trainer is not None:
            self._trainer.release()
        forget_passed()
        del self.model.make_train_function, self.model._should_eval
        self.model.train_function = None

    def _make_train_function(self, model: Any) -> None:
        backend = keras.backend.backend()

        def train(source: Any) -> dict[str, Any]:
            if backend == "tensorflow":
                next(source)  # whether the epoch is over
            try:
                return self._step()
            except BaseException:
                self._let_go()
                raise

        model.train_function = train

    def _step(self) -> dict[str, Any]:
        assert self._trainer is not None
        self._came_at_the_end = None
        self._calls += 1
        logs = self._trainer.step()
        # With servers an epoch may have more tickets than Keras was told steps: all others are done in the last.
        while self._calls == self._limit and self._goes_on():
            logs = self._trainer.step()
        return logs

    def _goes_on(self) -> bool:
        """Whether there is more to do in Keras' epoch."""
        found = self._trainer.coming() if self._trainer is not None else None
        return found is not None and self._batches().in_epoch(found[0])

    def _batches(self) -> Batches:
        found = passed_to_fit()
        if found is None:
            raise NotAttached(
                "shoal.keras.Elastic has no data", do="call model.fit(shoal.batches(x, y, size=…), …) with it"
            )
        return found

    def _joined(self) -> Run:
        return self._run or join()

    # --- the state of the callbacks

    def _save(self) -> dict[str, Any]:
        own = {"begun": self._begun, "ended": self._ended, "told": list(self._told.items())}
        return own | {"callbacks": [_found(*one) for one in zip(self._callbacks, self._first, strict=True)]}

    def _load(self, saved: dict[str, Any]) -> None:
        self._begun, self._ended, self._told = saved["begun"], saved["ended"], dict(saved["told"])
        for one, first, found in zip(self._callbacks, self._first, saved["callbacks"], strict=True):
            # What the others have not found is as the script here has it, whatever this member had found by itself.
            own = {name: _copied(first[name]) for name in _found(one, first) if name in first}
            for name, value in (own | found).items():
                setattr(one, name, value)


def _as_keras_tells(value: Any) -> Any:
    found = keras.ops.convert_to_numpy(value)
    return found if found.ndim else found.item()


def _plain(callback: Any) -> dict[str, Any]:
    """The attributes of a callback that are plain values or arrays, or lists of them, as they are now."""
    # Keras gives min_delta the sign of monitor_op when it makes that, which everybody does for himself.
    without = {"params", "_model"} | ({"min_delta"} if hasattr(callback, "monitor_op") else set())
    return {
        name: value if _bytes(value) > KEPT_BYTES else _copied(value)
        for name, value in vars(callback).items()
        if name not in without and _is_plain(value)
    }


def _found(callback: Any, first: Mapping[str, Any]) -> dict[str, Any]:
    """Of these, what is no longer as it was at `first`: the rest is the script's, which may say otherwise by now."""
    return {
        name: _packed(value)
        for name, value in _plain(callback).items()
        if name not in first or not _are_same(value, first[name])
    }


def _are_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_are_same, one, other))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _copied(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return value.copy() if isinstance(value, np.ndarray) else value


def _bytes(value: Any) -> int:
    parts = value if isinstance(value, list | tuple) else [value]
    return sum(one.nbytes for one in parts if isinstance(one, np.ndarray))


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biuf" or "float" in str(value.dtype)
    return value is None or isinstance(value, bool | int | float | str | np.generic)


def _packed(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_packed(one) for one in value]
    return value.item() if isinstance(value, np.generic) else value
