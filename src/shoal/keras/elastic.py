"""Elastic callback: makes `model.fit` a member of a run.

`fit` offers callbacks a fixed set of hooks, and no way to say "another process did this step". The callback therefore
changes three things for the duration of one `fit`, and restores them in `_release_model`:

- `model.make_train_function` installs a function that does one step of the run (see `fit.train_function`).
- The data, `shoal.batches`, ends its iteration where the run ends an epoch, long before the length that Keras is told.
- `model._should_eval` skips the validation of epochs that other members ended before this one joined.

Around `fit` the callback does this:

1. `set_params` and `set_model`, before anything else: find the batches that were passed to `fit`.
2. `on_train_begin`: let the script's callbacks reset themselves, then join the run. Joining may load the state of the
   run, including that of the callbacks, so the order matters. Keras is then sent to the epoch that the run is in.
3. `on_epoch_begin` and `on_epoch_end`: forward to the script's callbacks, each epoch once for the whole run. A member
   that joins later gets the results with the state. If it ran them again, a learning rate lowered every epoch would be
   lowered twice.
4. `on_train_end`, or any exception: leave the run and restore the model.

*State of callbacks.* What callbacks learn during training (how long EarlyStopping has waited, the best loss so far)
must be the same on all members and survive in checkpoints. Keras has no interface for it, so every attribute that is a
plain value or an array is considered, and those that changed since training began are saved. Unchanged ones are not:
they are the script's, which may have been edited before `shoal resume`. The state also holds how many epochs were begun
and ended, and the logs of recent epochs, for a member that was suspended while others ended them.

*Writers.* Callbacks that write files (CSVLogger, TensorBoard) must run on one member only: `session.is_writer`. That
role moves when the writer leaves; the next one appends. ModelCheckpoint runs everywhere, since the next writer must
know the best score so far, but only the writer's model is saved.

A member can enter at the very end of an epoch. Keras then ends the epoch without a single step of its own and knows no
metrics; `_entry_logs` holds those that came with the state.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from shoal.errors import NotAttached, UnusableModel
from shoal.keras.data.batches import UNLIMITED, Batches, clear_passed_to_fit, passed_to_fit
from shoal.keras.evaluation import scalars_of
from shoal.keras.modes.served import AnyTrainer
from shoal.keras.run import Run, join

# Callbacks that write files, and so run on one member only.
FILE_WRITERS = (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard)
# Larger attributes that exist when training begins are not transferred: every member has them from the script.
TRANSFER_LIMIT_BYTES = 1 << 20
# A member that was suspended can miss the ends of this many epochs and still get their logs.
KEPT_EPOCHS = 64


def _forwarded(name: str) -> Callable[..., None]:
    def hook(self: Any, *args: Any, **kwargs: Any) -> None:
        self.forward(name, *args, **kwargs)

    return hook


class _CallbackList(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that forwards every hook to other callbacks."""

    def __init__(self, receivers: Sequence[Any]) -> None:
        super().__init__()
        self.receivers = list(receivers)

    def forward(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Call one hook of all receivers."""
        for receiver in self.receivers:
            getattr(receiver, name)(*args, **kwargs)

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
    """Forwards hooks only while this member is the writer; it begins the callback when it first is."""

    def __init__(self, callback: Any, run: Callable[[], Run]) -> None:
        super().__init__([callback])
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
            if self._run().step and hasattr(self.receivers[0], "append"):
                self.receivers[0].append = True  # to the file of the previous writer
            super().forward("on_train_begin")


class _WriterCheckpoint(_CallbackList):
    """Forwards all hooks to ModelCheckpoint, so that the next writer knows the best score; only the writer saves."""

    def __init__(self, callback: Any, run: Callable[[], Run]) -> None:
        super().__init__([callback])
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

    Pass your other callbacks to it: it forwards every hook to them. Their state (such as how long EarlyStopping has
    waited) is copied to joining members and kept in checkpoints, while their settings are the script's; callbacks that
    write files do so on one member only. `jit_compile` compiles steps with XLA, once for each size of a share; it is
    never taken from `model.compile`, because Keras turns it on wherever it can. `evaluate` is the data (x, y) or the
    function that an evaluator scores the model with; `best`, `patience` and `export` are as in `Run.evaluate`.
    """

    # `shoal.batches` checks this attribute, to refuse a `fit` without an Elastic callback.
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
            raise UnusableModel(
                f"invalid jit_compile {jit_compile!r}", do="pass True or False: Shoal does not choose for you"
            )
        self._callbacks = list(callbacks)
        for callback in callbacks:
            if isinstance(callback, keras.callbacks.BackupAndRestore):
                raise UnusableModel(
                    "BackupAndRestore cannot be used with shoal.Elastic",
                    why="both would restore the state of the run",
                    do="leave it out: the run keeps its own checkpoints, and shoal resume continues from them",
                )
        super().__init__([self._wrap(callback) for callback in callbacks])
        self._run, self._jit = run, jit_compile
        self._evaluate = evaluate
        self._evaluation_options = {"best": best, "patience": patience, "export": export}
        # Attributes of the callbacks as the script set them, in the order of the callbacks.
        self._initial_attributes: list[dict[str, Any]] = []
        self._trainer: AnyTrainer | None = None
        # With steps_per_epoch, Keras ends an epoch after this many calls of the train function.
        self._calls_per_epoch: int | None = None
        self._calls_in_epoch = 0
        self._entry_logs: dict[str, Any] | None = None
        # Epochs that the run has begun and ended, and the logs of the last ones: part of the state.
        self._epochs_begun = self._epochs_ended = 0
        self._epoch_logs: dict[int, dict[str, Any]] = {}

    def _wrap(self, callback: Any) -> Any:
        if isinstance(callback, keras.callbacks.ModelCheckpoint):
            return _WriterCheckpoint(callback, self._joined_run)
        return _WriterOnly(callback, self._joined_run) if isinstance(callback, FILE_WRITERS) else callback

    # --- hooks of Keras

    def set_params(self, params: dict[str, Any]) -> None:
        batches = self._batches()
        if params["steps"] != UNLIMITED:
            self._calls_per_epoch = batches.steps_per_epoch = params["steps"]
        # The progress bar reads the same dictionary; in local mode it would count rounds against steps.
        params["steps"] = None if self._joined_run().in_rounds else batches.steps_per_epoch
        super().set_params(params)

    def set_model(self, model: Any) -> None:
        self._batches()
        super().set_model(model)
        model.make_train_function = lambda force=False: self._make_train_function(model)  # noqa: ARG005
        # The results of epochs that this member missed came with the state; its model is newer than they are.
        should_eval = model._should_eval
        model._should_eval = lambda epoch, freq: self._epochs_ended <= epoch and should_eval(epoch, freq)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        try:
            self._begin(logs)
        except BaseException:
            self._release_model()
            raise

    def _begin(self, logs: dict[str, Any] | None) -> None:
        self._initial_attributes = [_plain_attributes(callback) for callback in self._callbacks]
        # Callbacks reset themselves here, so this comes before the state of the run is loaded into them.
        self.forward("on_train_begin", logs)
        for callback, initial in zip(self._callbacks, self._initial_attributes, strict=True):
            attributes = _plain_attributes(callback)
            initial |= {name: value for name, value in attributes.items() if _is_large(value)}
        warnings.filterwarnings("ignore", message="Your input ran out of data", category=UserWarning)
        batches, model, run = self._batches(), self.model, self._joined_run()
        run.state("callbacks", self._save, self._load)
        if self._evaluate is not None or any(option is not None for option in self._evaluation_options.values()):
            run.evaluate(self._evaluate, **self._evaluation_options)  # type: ignore[arg-type]
        self._trainer = run.begin(model, batches, self.params["epochs"], self._jit)
        self._trainer.next_micro_batch()
        # A member that enters between two epochs ends the first of them, unless other members have ended it.
        model._initial_epoch = max(batches.epoch_before(self._trainer.entry_step), self._epochs_ended)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        batches, step = self._batches(), self._joined_run().step
        batches.current_epoch, self._calls_in_epoch = epoch, 0
        if self._trainer is not None:
            partly_done = bool(step) and batches.epoch_before(step) == epoch
            self._entry_logs = self._trainer.enter_epoch(partly_done)
        # Once per run, not once per member: a callback that lowers the learning rate every epoch must not do so again
        # on a member that joins within the epoch.
        if self._epochs_begun <= epoch:
            self.forward("on_epoch_begin", epoch, logs)
            self._epochs_begun = epoch + 1

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        logs = {} if logs is None else logs
        if self._epochs_ended > epoch:
            logs |= self._epoch_logs.get(epoch, {})
            return
        # Keras has no metrics of an epoch of which this member did no step.
        logs |= {name: _as_keras_log(value) for name, value in (self._entry_logs or {}).items()}
        self._entry_logs = None
        self.forward("on_epoch_end", epoch, logs)
        self._epochs_ended = epoch + 1
        self._epoch_logs[epoch] = {name: _packed(value) for name, value in logs.items() if _is_plain(value)}
        self._epoch_logs.pop(epoch - KEPT_EPOCHS, None)
        self._joined_run().log(**{name: value for name, value in scalars_of(logs).items() if not math.isnan(value)})

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._trainer is not None:
            self._trainer.end()
        self._release_model()
        self.forward("on_train_end", logs)

    def _release_model(self) -> None:
        """Undo every change to the model, so that another `fit` trains it as plain Keras does."""
        if self._trainer is not None:
            self._trainer.release()
        clear_passed_to_fit()
        del self.model.make_train_function, self.model._should_eval
        self.model.train_function = None

    # --- the train function

    def _make_train_function(self, model: Any) -> None:
        backend = keras.backend.backend()

        def train(iterator: Any) -> dict[str, Any]:
            if backend == "tensorflow":
                next(iterator)  # raises at the end of the epoch; on PyTorch, Keras itself iterates
            try:
                return self._run_step()
            except BaseException:
                self._release_model()
                raise

        model.train_function = train

    def _run_step(self) -> dict[str, Any]:
        assert self._trainer is not None
        self._entry_logs = None
        self._calls_in_epoch += 1
        logs = self._trainer.run_step()
        # With servers an epoch may have more tickets than steps_per_epoch: the last call does all that remain.
        while self._calls_in_epoch == self._calls_per_epoch and self._has_more_in_epoch():
            logs = self._trainer.run_step()
        return logs

    def _has_more_in_epoch(self) -> bool:
        coming = self._trainer.next_micro_batch() if self._trainer is not None else None
        return coming is not None and self._batches().in_current_epoch(coming[0])

    def _batches(self) -> Batches:
        batches = passed_to_fit()
        if batches is None:
            raise NotAttached(
                "shoal.keras.Elastic has no data", do="call model.fit(shoal.batches(x, y, size=…), …) with it"
            )
        return batches

    def _joined_run(self) -> Run:
        return self._run or join()

    # --- the state of the callbacks

    def _save(self) -> dict[str, Any]:
        changed = [_changed(*pair) for pair in zip(self._callbacks, self._initial_attributes, strict=True)]
        return {
            "begun": self._epochs_begun,
            "ended": self._epochs_ended,
            "logs": list(self._epoch_logs.items()),
            "callbacks": changed,
        }

    def _load(self, saved: dict[str, Any]) -> None:
        self._epochs_begun, self._epochs_ended = saved["begun"], saved["ended"]
        self._epoch_logs = dict(saved["logs"])
        for callback, initial, changed in zip(
            self._callbacks, self._initial_attributes, saved["callbacks"], strict=True
        ):
            # Attributes that changed here but not in the saved state go back to the script's values.
            undone = {name: _copied(initial[name]) for name in _changed(callback, initial) if name in initial}
            for name, value in (undone | changed).items():
                setattr(callback, name, value)


def _as_keras_log(value: Any) -> Any:
    array = keras.ops.convert_to_numpy(value)
    return array if array.ndim else array.item()


def _plain_attributes(callback: Any) -> dict[str, Any]:
    """Return the attributes of a callback that are plain values or arrays, or lists of them; small ones are copied."""
    # Keras gives min_delta the sign of monitor_op when it creates that, which every member does for itself.
    excluded = {"params", "_model"} | ({"min_delta"} if hasattr(callback, "monitor_op") else set())
    return {
        name: value if _is_large(value) else _copied(value)
        for name, value in vars(callback).items()
        if name not in excluded and _is_plain(value)
    }


def _changed(callback: Any, initial: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain attributes that differ from `initial`; the rest is the script's, which may have been edited."""
    return {
        name: _packed(value)
        for name, value in _plain_attributes(callback).items()
        if name not in initial or not _are_same(value, initial[name])
    }


def _are_same(first: Any, second: Any) -> bool:
    if first is second:
        return True
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_are_same, first, second))
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return first.dtype == second.dtype and np.array_equal(first, second)
    return type(first) is type(second) and bool(first == second)


def _copied(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return value.copy() if isinstance(value, np.ndarray) else value


def _is_large(value: Any) -> bool:
    parts = value if isinstance(value, list | tuple) else [value]
    return sum(part.nbytes for part in parts if isinstance(part, np.ndarray)) > TRANSFER_LIMIT_BYTES


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biuf" or "float" in str(value.dtype)
    return value is None or isinstance(value, bool | int | float | str | np.generic)


def _packed(value: Any) -> Any:
    """Return a value with NumPy scalars and tuples replaced by types that msgpack encodes."""
    if isinstance(value, list | tuple):
        return [_packed(part) for part in value]
    return value.item() if isinstance(value, np.generic) else value
