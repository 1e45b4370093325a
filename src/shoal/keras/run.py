"""This process's part in a run, as Keras sees it."""

from __future__ import annotations

import atexit
import hashlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import keras

from shoal.core import sync_mode
from shoal.errors import NotAttached, SecondTrainingLoop
from shoal.keras.backends.base import KerasBackend, backend_of
from shoal.keras.backends.optimizer_guard import OptimizerGuard
from shoal.keras.data.batches import Batches, iterate_with
from shoal.keras.evaluation import wish
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
    """One run a process; alone, if it was not started by `shoal run`."""

    def __init__(self, session: Session | ServedSession | StandaloneSession, name: str, directory: str) -> None:
        super().__init__(
            session,
            name,
            directory,
            parameter_server_sharded_checkpoint.checkpoint_codec(session, StateCodec(capture, restore), self._load),
        )
        # Whether what is a step to the run is a round of several global batches.
        self.in_rounds = bool(sync_mode.parse(session.settings.sync).local)
        self._trainer: AnyTrainer | None = None
        self._backend: KerasBackend | None = None
        self._evaluation: tuple[Any, dict[str, Any]] = (None, {})

    @property
    def share(self) -> int:
        """How many samples of the global batch, or of the round, this member has in this step."""
        current = self._trainer.current if self._trainer is not None else None
        return current.samples if current is not None else 0

    @property
    def is_writer(self) -> bool:
        """Whether this member is the one that writes files; another one may be, later."""
        return self._session.is_writer

    def evaluate(
        self,
        evaluate: Any,
        *,
        best: str | None = None,
        patience: int | None = None,
        export: str | os.PathLike[str] | None = None,
    ) -> None:
        """Let an evaluator score checkpoints beside the training: a function, or what `model.evaluate` is given.

        `best`, `patience` and `export` are as in `shoal.torch.Run.evaluate`.
        """
        self._evaluation = (evaluate, {"best": best, "patience": patience, "export": export})

    def log(self, **metrics: Any) -> None:
        """Show these numbers with the run."""
        numbers = check_metrics(metrics)
        if self._trainer is not None:
            self._trainer.metrics.update(numbers)

    def save(self, path: str | os.PathLike[str], model: Any = None) -> None:
        """Write the model once, atomically, whichever member gets to do it.

        From a machine that does not share your disk it comes back to the run's coordinator: `shoal fetch`.
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

    # --- what callbacks and loops ask

    def begin(self, model: Any, batches: Batches, epochs: int, jit: bool = False) -> AnyTrainer:
        """Join the run with this model; returns when the first step of this member can be done."""
        self._check_first("call model.fit once, with all its epochs")
        model._symbolic_build(data_batch=batches.few())
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        guard = OptimizerGuard(model.optimizer)
        try:
            return self._begun(model, guard, batches, epochs, jit)
        except BaseException:
            guard.release()
            raise

    def _begun(self, model: Any, guard: OptimizerGuard, batches: Batches, epochs: int, jit: bool) -> AnyTrainer:
        backend, session = backend_of(model, guard, jit), self._session
        self._backend = backend
        kind = self._kind(KerasTrainer, KerasLocalTrainer, KerasServedTrainer)
        trainer: AnyTrainer = kind(session, self._training_state, backend)
        feed, described = batches.feed(trainer, self._training_state, self._session.settings, epochs)
        self._trainer = trainer
        self._follow_if_evaluator(model)
        if isinstance(trainer, KerasTrainer):
            # Now, because others would wait for it later.
            trainer.rehearse(batches.few())
        trainer.begin(feed, self._identity(model, model.optimizer, described), batches.seed)
        batches.begin(trainer.coming, feed)
        trainer.epoch_of = batches.epoch_of
        return trainer

    def loop(self, model: Any, guard: OptimizerGuard, batches: Batches) -> Iterator[Any]:
        """The batches of a loop of the script's own, whose optimizer is guarded."""
        self._check_first("make one loop over all epochs")
        if not model.built:
            model(keras.tree.map_structure(keras.ops.convert_to_tensor, batches.few()[0]))
        if not guard.optimizer.built:
            guard.optimizer.build(model.trainable_variables)
        backend, session = backend_of(model, guard), self._session
        self._backend = backend
        kind = self._kind(KerasLoopTrainer, KerasLocalLoop, KerasServedLoop)
        trainer: KerasLoopTrainer | KerasServedLoop = kind(session, self._training_state, backend)
        feed, described = batches.feed(trainer, self._training_state, self._session.settings, batches.epochs)
        trainer.feed, guard.take, self._trainer = feed, trainer.take, trainer
        iterate_with(None)  # batches that are made from now on are for somebody else
        self._follow_if_evaluator(model)
        return trainer.train(feed, self._identity(model, guard.optimizer, described), batches.seed)

    def _check_first(self, do: str) -> None:
        """A member that joins later must know which loop the run is in."""
        if self._trainer is not None and self._trainer.feed is not None:
            raise SecondTrainingLoop("this run already has a training loop", do=do)

    def _kind(self, of_steps: Any, of_rounds: Any, of_tickets: Any) -> Any:
        """The loop for how closely members keep together."""
        if isinstance(self._session, ServedSession):
            return of_tickets
        return of_rounds if self.in_rounds else of_steps

    def _follow_if_evaluator(self, model: Any) -> None:
        """An evaluator does not train, and ends here."""
        evaluate, asked = self._evaluation
        wished = wish(evaluate, model, **asked)
        if isinstance(self._session, EvaluatorSession):
            raise evaluation_evaluate.evaluate_checkpoints(self._session, self._training_state, wished, model.save)

    def _load(self, _parts: Mapping[str, Any], shards: parameter_server_sharded_checkpoint.Parts) -> None:
        assert self._backend is not None
        load(self._backend, shards)

    def _identity(self, model: Any, optimizer: Any, described: dict[str, Any]) -> str:
        variables = [f"{v.dtype!s}{list(v.shape)}" for v in model.variables]
        kind = type(getattr(optimizer, "inner_optimizer", optimizer)).__name__
        parts = {"variables": _hashed(variables), "optimizer": kind, "keras": keras.backend.backend()} | described
        return ";".join(f"{key}={value}" for key, value in parts.items())


_joined: Run | None = None


def join() -> Run:
    """This process's run: taken part in when it is first asked for; alone, if the process was started by hand."""
    global _joined
    if _joined is None:
        _joined = Run(*worker_join.join())
        atexit.register(_joined.close)
    return _joined


def elastic(optimizer: Any, model: Any, run: Run | None = None) -> Any:
    """Make a loop of your own elastic: the optimizer applies what it is given once all members' gradients are in it.

    Iterate over `shoal.batches(…, epochs=…)`, and apply the optimizer once for each batch.
    """
    guard = OptimizerGuard(optimizer)
    iterate_with(lambda batches: (run or join()).loop(model, guard, batches))
    return optimizer


def _hashed(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
