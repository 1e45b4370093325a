"""A Keras process's handle on its run, and the two ways into it: `model.fit` and a script's own loop."""

from __future__ import annotations

import atexit
import hashlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import keras

from shoal.core import sync_mode
from shoal.errors import NotAttached, SecondTrainingLoop, UnusableExchange
from shoal.keras.backends.base import KerasBackend, build_model, make_backend
from shoal.keras.backends.optimizer_guard import OptimizerGuard
from shoal.keras.data.batches import Batches, set_loop
from shoal.keras.evaluation import evaluation_request
from shoal.keras.modes.every_step import KerasLoopTrainer, KerasTrainer
from shoal.keras.modes.local_sgd import KerasLocalLoop, KerasLocalTrainer
from shoal.keras.modes.served import AnyTrainer, KerasServedLoop, KerasServedTrainer
from shoal.keras.modes.sharded_checkpoint import load
from shoal.keras.modes.state import capture, restore
from shoal.worker import join as worker_join
from shoal.worker.base_run import BaseRun
from shoal.worker.evaluation import evaluate as evaluation_evaluate
from shoal.worker.evaluation.evaluator_session import EvaluatorSession
from shoal.worker.parameter_server import sharded_checkpoint as parameter_server_sharded_checkpoint
from shoal.worker.parameter_server.served_session import ServedSession
from shoal.worker.session.session import Session
from shoal.worker.session.standalone import StandaloneSession
from shoal.worker.training.metrics import check_metrics
from shoal.worker.training.training_state import StateCodec


class Run(BaseRun):
    """The run of this process; a run of one, if the process was not started by `shoal run`."""

    def __init__(self, session: Session | ServedSession | StandaloneSession, name: str, directory: str) -> None:
        if isinstance(session, Session) and session.settings.exchange in ("gloo", "nccl"):
            why = "members with Keras sum their gradients over Shoal's own ring"
            raise UnusableExchange(f"no exchange={session.settings.exchange} with Keras", why=why, do="remove it")
        super().__init__(
            session,
            name,
            directory,
            parameter_server_sharded_checkpoint.checkpoint_codec(session, StateCodec(capture, restore), self._load),
        )
        # Whether a step of the run is a round of several global batches.
        self.in_rounds = bool(sync_mode.parse(session.settings.sync).local)
        self._trainer: AnyTrainer | None = None
        self._backend: KerasBackend | None = None
        self._evaluation: tuple[Any, dict[str, Any]] = (None, {})

    @property
    def share(self) -> int:
        """This member's samples of the global batch, or of the round, in the current step."""
        current = self._trainer.current if self._trainer is not None else None
        return current.samples if current is not None else 0

    @property
    def is_writer(self) -> bool:
        """Whether this member is the one that writes files; the role may move to another member."""
        return self._session.is_writer

    def evaluate(
        self,
        evaluate: Any,
        *,
        best: str | None = None,
        patience: int | None = None,
        export: str | os.PathLike[str] | None = None,
    ) -> None:
        """Let an evaluator score checkpoints during training, by a function or by data for `model.evaluate`.

        `best`, `patience` and `export` are as in `shoal.torch.Run.evaluate`.
        """
        self._evaluation = (evaluate, {"best": best, "patience": patience, "export": export})

    def log(self, **metrics: Any) -> None:
        """Record numbers to show in `shoal status`."""
        numbers = check_metrics(metrics)
        if self._trainer is not None:
            self._trainer.metrics.update(numbers)

    def save(self, path: str | os.PathLike[str], model: Any = None) -> None:
        """Write the model once, atomically; one member is chosen to do it.

        From a machine that does not share your disk the file is sent to the run's coordinator: use `shoal fetch`.
        """
        path, trainer = os.fspath(path), self._trainer
        saved = model or (trainer.model if trainer is not None else None)
        if saved is None:
            raise NotAttached("there is no model to save", do="pass one, or call model.fit first")

        def write() -> None:
            stem, suffix = os.path.splitext(path)
            part = f"{stem}.{os.getpid()}.part{suffix or '.keras'}"
            saved.save(part)
            os.replace(part, path)

        self._save_once(path, write, trainer is not None and trainer.looping)

    # --- training loops

    def begin(self, model: Any, batches: Batches, epochs: int, jit: bool = False) -> AnyTrainer:
        """Join the run with the model of `fit`; return when this member's first step can be done."""
        self._check_first_loop("call model.fit once, with all its epochs")
        guard = OptimizerGuard(model.optimizer)
        try:
            build_model(model, guard, batches.example())
            if not model.optimizer.built:
                model.optimizer.build(model.trainable_variables)
            return self._begin_guarded(model, guard, batches, epochs, jit)
        except BaseException:
            guard.release()
            raise

    def _begin_guarded(self, model: Any, guard: OptimizerGuard, batches: Batches, epochs: int, jit: bool) -> AnyTrainer:
        backend, session = make_backend(model, guard, jit), self._session
        self._backend = backend
        trainer_class = self._class_for_mode(KerasTrainer, KerasLocalTrainer, KerasServedTrainer)
        trainer: AnyTrainer = trainer_class(session, self._training_state, backend)
        feed, description = batches.make_feed(trainer, self._training_state, self._session.settings, epochs)
        self._trainer = trainer
        self._evaluate_if_evaluator(model)
        if isinstance(trainer, KerasTrainer):
            # Before joining: after it, all other members would wait.
            trainer.warm_up(batches.example())
        description |= self._data_signatures(feed, batches)
        trainer.begin(feed, self._identity(model, model.optimizer, description), batches.seed)
        batches.attach(trainer.next_micro_batch, feed)
        trainer.epoch_of = batches.epoch_of
        return trainer

    def loop(self, model: Any, guard: OptimizerGuard, batches: Batches) -> Iterator[Any]:
        """Return the micro-batches of a script's own loop, whose optimizer is guarded."""
        self._check_first_loop("make one loop over all epochs")
        if not model.built:
            x, _, _ = keras.utils.unpack_x_y_sample_weight(batches.example())
            model(keras.tree.map_structure(keras.ops.convert_to_tensor, x))
        if not guard.optimizer.built:
            guard.optimizer.build(model.trainable_variables)
        backend, session = make_backend(model, guard), self._session
        self._backend = backend
        trainer_class = self._class_for_mode(KerasLoopTrainer, KerasLocalLoop, KerasServedLoop)
        trainer: KerasLoopTrainer | KerasServedLoop = trainer_class(session, self._training_state, backend)
        feed, description = batches.make_feed(trainer, self._training_state, self._session.settings, batches.epochs)
        trainer.feed, guard.on_apply, self._trainer = feed, trainer.on_apply, trainer
        set_loop(None)  # batches created from now on belong to another loop
        self._evaluate_if_evaluator(model)
        description |= self._data_signatures(feed, batches)
        return trainer.train(feed, self._identity(model, guard.optimizer, description), batches.seed)

    def _data_signatures(self, feed: Any, batches: Batches) -> dict[str, str]:
        """Return signatures of the data, if there are other members to compare them with."""
        if isinstance(self._session, StandaloneSession):
            return {}
        return {
            name: text
            for name, text in (("data", batches.signatures(feed)), ("validation", batches.validation_signatures()))
            if text
        }

    def _check_first_loop(self, do: str) -> None:
        """Raise SecondTrainingLoop if the run has a loop: a joining member could not know which one to enter."""
        if self._trainer is not None and self._trainer.feed is not None:
            raise SecondTrainingLoop("this run already has a training loop", do=do)

    def _class_for_mode(self, every_step: Any, local_sgd: Any, served: Any) -> Any:
        """Return the class for the run's sync mode."""
        if isinstance(self._session, ServedSession):
            return served
        return local_sgd if self.in_rounds else every_step

    def _evaluate_if_evaluator(self, model: Any) -> None:
        """Check the evaluation request; an evaluator then scores checkpoints and never returns."""
        evaluate, options = self._evaluation
        request = evaluation_request(evaluate, model, **options)
        if isinstance(self._session, EvaluatorSession):
            raise evaluation_evaluate.evaluate_checkpoints(self._session, self._training_state, request, model.save)

    def _load(self, _parts: Mapping[str, Any], shards: parameter_server_sharded_checkpoint.Parts) -> None:
        assert self._backend is not None
        load(self._backend, shards)

    def _identity(self, model: Any, optimizer: Any, description: dict[str, Any]) -> str:
        """Return a text that must be the same on all members of a run."""
        variables = [f"{v.dtype!s}{list(v.shape)}" for v in model.variables]
        optimizer_name = type(getattr(optimizer, "inner_optimizer", optimizer)).__name__
        parts = {
            "variables": _hash(variables),
            "optimizer": optimizer_name,
            "keras": keras.backend.backend(),
        } | description
        return ";".join(f"{key}={value}" for key, value in parts.items())


_joined: Run | None = None


def join() -> Run:
    """Return this process's run, joining it on the first call; a run of one, if the process was started by hand."""
    global _joined
    if _joined is None:
        _joined = Run(*worker_join.join())
        atexit.register(_joined.close)
    return _joined


def elastic(optimizer: Any, model: Any, run: Run | None = None) -> Any:
    """Make a loop of your own elastic: the returned optimizer applies gradients summed over all members.

    Iterate over `shoal.batches(…, epochs=…)`, and apply the optimizer once for each batch.
    """
    guard = OptimizerGuard(optimizer)
    set_loop(lambda batches: (run or join()).loop(model, guard, batches))
    return optimizer


def _hash(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
