"""The run as a training script sees it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch

from shoal.core import sync_mode
from shoal.core.data.lanes import LaneLayout
from shoal.core.validation import checked_int
from shoal.errors import NotAttached, SecondTrainingLoop, UnusableBackward, UnusableShard
from shoal.torch.data.fetch import lane_reader
from shoal.torch.feeds import Feeds
from shoal.torch.gradients.guards import guard_optimizer, guard_scaler, guard_scheduler, refuse_strangers
from shoal.torch.gradients.oom_retry import guard_model
from shoal.torch.gradients.sync_batchnorm import synchronise
from shoal.torch.gradients.tree_buckets import make_alike
from shoal.torch.modes.every_step import TorchTrainer
from shoal.torch.modes.local_sgd import TorchLocalTrainer
from shoal.torch.modes.served import TorchServedTrainer
from shoal.torch.modes.sharded_checkpoint import load
from shoal.torch.state.capture import capture_bytes, restore
from shoal.torch.state.fingerprint import fingerprint
from shoal.worker.base_run import BaseRun
from shoal.worker.data.feed import Feed
from shoal.worker.data.read_ahead_threads import depth
from shoal.worker.evaluation import evaluate as evaluation_evaluate
from shoal.worker.evaluation.evaluator_session import EvaluatorSession
from shoal.worker.parameter_server import sharded_checkpoint as parameter_server_sharded_checkpoint
from shoal.worker.parameter_server.served_session import ServedSession
from shoal.worker.parameter_server.ticket_loop import TicketStep
from shoal.worker.session.session import Session
from shoal.worker.session.standalone import StandaloneSession
from shoal.worker.training.metrics import bad_metric, check_metrics
from shoal.worker.training.training_state import StateCodec


class Run(BaseRun):
    """This process's part in a run; alone, if it was not started by `shoal run`."""

    def __init__(self, session: Session | ServedSession | StandaloneSession, name: str, directory: str) -> None:
        super().__init__(
            session,
            name,
            directory,
            parameter_server_sharded_checkpoint.checkpoint_codec(session, StateCodec(capture_bytes, restore), load),
        )
        self._trainer: TorchTrainer | TorchServedTrainer
        if isinstance(session, ServedSession):
            self._trainer = TorchServedTrainer(session, self._training_state)
        else:
            mode = sync_mode.parse(session.settings.sync)
            self._trainer = (
                TorchLocalTrainer(session, self._training_state, mode)
                if mode.local
                else TorchTrainer(session, self._training_state)
            )
            self._training_state.parts["noise"] = self._trainer.noise_sampler.noise
        self._evaluation: evaluation_evaluate.EvaluationRequest | None = None
        self._feeds = Feeds(self._trainer, self._training_state, session.settings)

    # --- where the run is

    @property
    def epoch(self) -> int:
        """The epoch of the batch that was given out last."""
        current = self._trainer.current
        return current.epoch if current is not None else 0

    @property
    def epoch_ended(self) -> bool:
        """Whether the step that was just committed was the last of its epoch."""
        current, feed = self._trainer.current, self._trainer.feed
        if current is None or feed is None or not current.committed:
            return False
        if isinstance(current, TicketStep):
            return current.last_of_epoch
        return feed.ended(self.step) or feed.cursor(self.step).epoch > current.epoch

    @property
    def share(self) -> int:
        """How many samples of the global batch this member has in this step."""
        current = self._trainer.current
        return current.samples if current is not None else 0

    @property
    def committed(self) -> bool:
        """Whether the last optimizer step counted; it is done again if not."""
        return self._trainer.committed

    # --- what the script does

    def attach(self, *parts: Any) -> Any:
        """Take part in the training of a model: pass it with its optimizers, schedulers and scaler; get them back."""
        trainer = self._trainer
        for part in parts:
            if isinstance(part, torch.nn.Module):
                if trainer.model is not None and trainer.model is not part:
                    raise NotAttached("two models were attached", do="put both into one torch.nn.Module")
                if trainer.model is None:
                    guard_model(trainer, part)
                trainer.model = part
                self._training_state.parts["model"] = part
            elif any(part is known for known in self._training_state.parts.values()):
                continue
            elif isinstance(part, torch.optim.Optimizer):
                guard_optimizer(trainer, part)
                trainer.optimizers.append(part)
                self._training_state.parts[f"optimizer{len(trainer.optimizers)}"] = part
            elif isinstance(part, torch.amp.GradScaler):
                trainer.refuse_scaler()
                guard_scaler(trainer, part)
                self._training_state.parts["scaler"] = part
            elif part is not None:
                self._attach_other(part)
        return parts[0] if len(parts) == 1 else parts

    def _attach_other(self, part: Any) -> None:
        """A scheduler, or something else that has a state."""
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise NotAttached(
                f"a {type(part).__name__} cannot be attached",
                why="it has no state_dict and load_state_dict",
                do="pass the model, optimizers and schedulers one by one; run.state is for anything else",
            )
        kind = "scheduler" if hasattr(part, "step") else "state"
        if kind == "scheduler":
            guard_scheduler(self._trainer, part)
            self._trainer.schedulers.append(part)
        count = sum(name.startswith(kind) for name in self._training_state.parts)
        self._training_state.parts[f"{kind}{count + 1}"] = part

    def sync_batchnorm(self, model: torch.nn.Module) -> torch.nn.Module:
        """Make BatchNorm layers normalise over the whole global batch instead of each member's share."""
        self._feeds.refuse_locally(True, "run.sync_batchnorm", "leave BatchNorm as it is: its statistics are averaged")
        if not isinstance(self._trainer, TorchTrainer):
            raise self._trainer.unsupported("BatchNorm over the whole global batch", "leave run.sync_batchnorm out")
        self._trainer.synchronised = True
        return synchronise(model, self._trainer)

    def batches(
        self,
        dataset: Any,
        size: int,
        epochs: int = 1,
        seed: int = 0,
        *,
        shuffle: bool = True,
        last: Literal["keep", "drop"] = "keep",
        shares: str | None = None,
        micro: int | None = None,
        exact: int | None = None,
        workers: int = 0,
        prefetch: int = 2,
        collate: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
    ) -> Iterator[Any]:
        """This member's share of every global batch of `size` samples, each sample once an epoch.

        `shares` says how each batch is shared out: model (by what is learned of the members' speeds), ratio, equal or
        for example fixed:3,1; without it, the setting `shares.policy` does. `micro` cuts a share into batches of at
        most so many samples, which the loop's body sees one by one and which together make one step. `exact` cuts the
        global batch into so many shards instead, which are dealt out whole and seen one by one: no bit of the result
        then depends on who computes them; without it, the setting `exact` does, and 0 is off. `workers` processes read
        ahead.
        """
        order = {
            "size": checked_int("size", size),
            "epochs": checked_int("epochs", epochs),
            "seed": seed,
            "last": last,
            "shuffle": shuffle,
        }
        loading = (workers, prefetch, collate, micro, pin_memory)
        feed, described = self._feeds.of_dataset(dataset, order, loading, shares, exact, ahead=depth(workers, prefetch))
        return self._loop(feed, described, seed)

    def stream(
        self,
        shards: Sequence[Any],
        size: int,
        epochs: int = 1,
        seed: int = 0,
        *,
        lanes: int | None = None,
        shuffle: bool = False,
        shares: str = "equal",
        open: Callable[[Any], Any] | None = None,
        workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Iterator[Any]:
        """This member's part of global batches from shards that can only be read from their start.

        `shares` deals out the lanes; whoever gets a lane has to read its shard up to where it stands, so that it is
        equal unless you ask for more.
        """
        if isinstance(shards, str | bytes) or not hasattr(shards, "__len__"):
            raise UnusableShard(
                f"run.stream was given a {type(shards).__name__}, not a list of shards",
                do="pass a list: sorted(glob(…)), or [dataset] if there is only one",
            )
        layout = LaneLayout.of(len(shards), size, lanes, epochs, seed, shuffle)
        reader = lane_reader(shards, layout, collate, open, workers)
        feed = self._feeds.of_stream(layout, reader, shares)
        described = {"shards": len(shards), "size": size, "epochs": epochs, "lanes": layout.lanes, "seed": seed}
        return self._loop(feed, described | {"shuffle": shuffle}, seed)

    def evaluate(
        self,
        fn: Callable[[], Any],
        *,
        best: str | None = None,
        patience: int | None = None,
        export: str | os.PathLike[str] | None = None,
    ) -> None:
        """Let an evaluator (`shoal run --evaluator`) score checkpoints beside the training; call it before the loop.

        `fn` evaluates the model and returns a dict of numbers. `best` says which of them decides: ``max:accuracy`` or
        ``min:loss``. The best model so far is kept in `export`, and after `patience` evaluations that found no better
        one the run ends early. Trainers only take note of it.
        """
        self._evaluation = evaluation_evaluate.evaluation_request(fn, best, patience, export)

    def backward(self, loss: torch.Tensor, weight: float | None = None) -> None:
        """Compute gradients and sum them over all members; on return they are those of the whole global batch.

        `loss` is the mean over this batch, which counts for `weight` (default: its number of samples).
        """
        counts = None if weight is None else float(weight)
        if counts is not None and not 0.0 <= counts < float("inf"):
            raise UnusableBackward(
                f"run.backward was given weight={counts:g}", do="pass how many samples or tokens the loss is a mean of"
            )
        self._trainer.backward(loss, counts)

    def log(self, **metrics: Any) -> None:
        """Show these numbers with the run, once the step at hand counts."""
        tensors = {name: _scalar(name, one) for name, one in metrics.items() if isinstance(one, torch.Tensor)}
        numbers = check_metrics({name: one for name, one in metrics.items() if name not in tensors})
        current = self._trainer.current
        (self._trainer.metrics if current is None or current.committed else current.metrics).update(tensors | numbers)

    def save(self, path: str | os.PathLike[str], what: Any = None) -> None:
        """Write the model's state_dict (or `what`) once, atomically, whichever member gets to do it.

        From a machine that does not share your disk it comes back to the run's coordinator: `shoal fetch`.
        """
        path, model = os.fspath(path), self._trainer.model
        if what is None and model is None:
            raise NotAttached("there is no model to save", do="call run.attach(model, optimizer) first")

        def write() -> None:
            part = f"{path}.{os.getpid()}.part"
            torch.save(model.state_dict() if what is None and model is not None else what, part)
            os.replace(part, path)

        self._save_once(path, write, self._trainer.looping)

    def _loop(self, feed: Feed, described: dict[str, Any], seed: int) -> Iterator[Any]:
        trainer = self._trainer
        if trainer.feed is not None:
            raise SecondTrainingLoop("this run already has a training loop", do="make one loop over all epochs")
        if trainer.model is None or not trainer.optimizers:
            raise NotAttached("run.attach was not called", do="call run.attach(model, optimizer) before the loop")
        refuse_strangers(trainer.model, trainer.optimizers)
        trainer.feed = feed
        if isinstance(self._session, EvaluatorSession):
            return self._follow(self._session, trainer.model)
        if feed.shard_range is not None:
            described |= make_alike(trainer.model, trainer.synchronised, self._session.settings.threads)
        return trainer.train(feed, self._identity(described), seed)

    def _follow(self, session: EvaluatorSession, model: torch.nn.Module) -> Iterator[Any]:
        """The loop of an evaluator: it has no batches, and ends with the process."""

        def score() -> Any:
            model.eval()
            with torch.no_grad():
                return asked.score() if asked is not None else None

        asked = self._evaluation
        mine = dataclasses.replace(asked, score=score) if asked is not None else None
        raise evaluation_evaluate.evaluate_checkpoints(
            session, self._training_state, mine, lambda path: torch.save(model.state_dict(), path)
        )
        yield

    def _identity(self, described: dict[str, Any]) -> str:
        trainer = self._trainer
        assert trainer.model is not None
        parameters, buffers, optimizer, _ = fingerprint(trainer.model, trainer.optimizers[0], {}).split("-")
        parts = {"parameters": parameters, "buffers": buffers, "optimizer": optimizer} | described
        return ";".join(f"{key}={value}" for key, value in parts.items())


def _scalar(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose number is read when it is told, so that nobody waits for a device here."""
    if tensor.numel() != 1 or tensor.is_complex() or tensor.is_meta:
        kind = f"{str(tensor.dtype).removeprefix('torch.')} tensor"
        raise bad_metric(name, kind, f"it is on {tensor.device} and has shape {tuple(tensor.shape)}")
    return tensor.detach()
