"""`Run`, the API of a PyTorch training script: attach, batches, backward, log, save.

It validates arguments, builds the feed (`feeds`) and the trainer of the sync mode (`modes`), and delegates to them.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch.optim.swa_utils import AveragedModel

from shoal.core import sync_mode
from shoal.core.data.lanes import LaneLayout
from shoal.core.validation import checked_int
from shoal.errors import NotAttached, SecondTrainingLoop, UnusableBackward, UnusableShard
from shoal.torch.data.fetch import lane_reader
from shoal.torch.feeds import Feeds
from shoal.torch.gradients.guards import guard_optimizer, guard_scaler, guard_scheduler
from shoal.torch.gradients.model_checks import refuse_distributed, refuse_exchange, refuse_meta
from shoal.torch.gradients.oom_retry import guard_model
from shoal.torch.gradients.sync_batchnorm import synchronise
from shoal.torch.gradients.tree_buckets import fix_numerics
from shoal.torch.gradients.unattached import check_attached, check_companions
from shoal.torch.modes.every_step import TorchTrainer
from shoal.torch.modes.local_sgd import TorchLocalTrainer
from shoal.torch.modes.served import TorchServedTrainer
from shoal.torch.modes.sharded_checkpoint import load
from shoal.torch.state.capture import capture_bytes, restore
from shoal.torch.state.copies import is_copy
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
    """This process's membership in a run; standalone if it was not started by `shoal run`."""

    def __init__(self, session: Session | ServedSession | StandaloneSession, name: str, directory: str) -> None:
        if isinstance(session, Session):
            refuse_exchange(session.settings.exchange)
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

    # --- position

    @property
    def epoch(self) -> int:
        """Epoch of the last batch that was given out."""
        current = self._trainer.current
        return current.epoch if current is not None else 0

    @property
    def epoch_ended(self) -> bool:
        """Whether the last committed step was the last of its epoch."""
        current, feed = self._trainer.current, self._trainer.feed
        self._trainer.copies.asked = True
        if current is None or feed is None or not current.committed:
            return False
        if isinstance(current, TicketStep):
            return current.last_of_epoch
        return feed.ended(self.step) or feed.cursor(self.step).epoch > current.epoch

    @property
    def share(self) -> int:
        """Number of samples of the global batch that this member has in this step."""
        current = self._trainer.current
        return current.samples if current is not None else 0

    @property
    def committed(self) -> bool:
        """Whether `optimizer.step()` has just completed a step.

        With micro-batches, only after the last one of a step; never for a step that is repeated. So code under
        ``if run.committed:`` runs once per step.
        """
        self._trainer.copies.asked = True
        return self._trainer.committed

    # --- training

    def attach(self, *parts: Any) -> Any:
        """Train these objects with the other members: a model, its optimizers, schedulers and scaler; return them.

        Their state is shared with joiners and checkpoints. Averages of the model's weights (EMA, SWA) and anything
        else with a state_dict can be attached too. Raises NotAttached for objects without a state, and UnusableModel
        for a model without memory (meta device) or one that torch distributes by itself (DDP, FSDP).
        """
        trainer = self._trainer
        self._attach_model(parts)
        for part in parts:
            if any(part is attached for attached in self._training_state.parts.values()):
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

    def _attach_model(self, parts: Sequence[Any]) -> None:
        """Attach the model among these parts: the module that an optimizer trains, or else the first one."""
        trainer = self._trainer
        modules = [part for part in parts if isinstance(part, torch.nn.Module)]
        given = [part for part in parts if isinstance(part, torch.optim.Optimizer)]
        trained = {id(p) for o in (*trainer.optimizers, *given) for group in o.param_groups for p in group["params"]}
        for module in modules:
            refuse_distributed(module, given)
            refuse_meta(module)
        models = _without_holders(
            [module for module in modules if any(id(p) in trained for p in module.parameters())], trainer.model
        )
        if trainer.model is None and not models:
            models = [module for module in modules if not isinstance(module, AveragedModel)][:1]
        for model in models:
            if trainer.model is None:
                guard_model(trainer, model)
                trainer.model = self._training_state.parts["model"] = model
            elif trainer.model is not model:
                raise NotAttached(
                    "two models were attached",
                    do="put both into one: run.attach(torch.nn.ModuleList([first, second]), optimizer1, optimizer2)",
                )

    def _attach_other(self, part: Any) -> None:
        """Attach a scheduler, or another object with a state."""
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise NotAttached(
                f"a {type(part).__name__} cannot be attached",
                why="it has no state_dict and load_state_dict",
                do="pass the model, optimizers and schedulers one by one; use run.state for anything else",
            )
        kind = "scheduler" if callable(getattr(part, "step", None)) else "state"
        if kind == "scheduler":
            guard_scheduler(self._trainer, part)
            self._trainer.schedulers.append(part)
        count = sum(name.startswith(kind) for name in self._training_state.parts)
        self._training_state.parts[f"{kind}{count + 1}"] = part

    def sync_batchnorm(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model with BatchNorm layers that normalise over the global batch, not over each share."""
        self._feeds.refuse_locally(
            True, "run.sync_batchnorm", "remove the call: running statistics are averaged after each round"
        )
        if not isinstance(self._trainer, TorchTrainer):
            raise self._trainer.unsupported("run.sync_batchnorm", "remove the call")
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
        """Yield this member's share of every global batch of `size` samples, each sample once per epoch.

        `shares` divides each batch: "model" (by measured speed), "ratio", "equal" or, for example, "fixed:3,1"; the
        default is the setting `shares.policy`. `micro` splits a share into batches of at most that many samples, which
        the loop body gets one by one and which together make one step. `exact` splits the global batch into that many
        shards instead, which members get whole and one by one: the result is then bitwise independent of which member
        computes what. The default is the setting `exact`; 0 turns it off. `workers` processes read `prefetch` batches
        ahead each.
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
        """Yield this member's part of global batches from shards that can only be read from their start.

        `shares` divides the lanes. A member that gets a lane must first read its shard up to the current position, so
        the default, "equal", moves as few lanes as possible.
        """
        if isinstance(shards, str | bytes) or not hasattr(shards, "__len__"):
            raise UnusableShard(
                f"run.stream was given a {type(shards).__name__} instead of a list of shards",
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
        """Let an evaluator (`shoal run --evaluator`) score checkpoints during the training; call it before the loop.

        `fn` evaluates the model and returns a dict of numbers. `best` names the one that decides: ``max:accuracy`` or
        ``min:loss``. The best model so far is written to `export`, and the run ends early after `patience` evaluations
        without a better one. Trainers ignore all of it.
        """
        self._evaluation = evaluation_evaluate.evaluation_request(fn, best, patience, export)

    def backward(self, loss: torch.Tensor, weight: float | None = None) -> None:
        """Compute gradients and all-reduce them; on return, `.grad` holds those of the whole global batch.

        `loss` is the mean over this batch; the batch counts with `weight`, by default its number of samples.
        """
        counts = None if weight is None else float(weight)
        if counts is not None and not 0.0 <= counts < float("inf"):
            raise UnusableBackward(
                f"invalid weight={counts:g} in run.backward",
                do="pass the number of samples or tokens that the loss is the mean of",
            )
        self._trainer.backward(loss, counts)

    def log(self, **metrics: Any) -> None:
        """Report these numbers as metrics of the run, once the current step is committed."""
        tensors = {name: _scalar(name, value) for name, value in metrics.items() if isinstance(value, torch.Tensor)}
        numbers = check_metrics({name: value for name, value in metrics.items() if name not in tensors})
        current = self._trainer.current
        (self._trainer.metrics if current is None or current.committed else current.metrics).update(tensors | numbers)

    def save(self, path: str | os.PathLike[str], what: Any = None) -> None:
        """Write the model's state_dict (or `what`) to `path` atomically; exactly one member does it.

        If that member does not share your disk, the file is uploaded to the coordinator; get it with `shoal fetch`.
        """
        path, model = os.fspath(path), self._trainer.model
        if what is None and model is None:
            raise NotAttached("run.save has no model to save", do="call run.attach(model, optimizer) first")

        def write() -> None:
            partial = f"{path}.{os.getpid()}.part"
            torch.save(model.state_dict() if what is None and model is not None else what, partial)
            os.replace(partial, path)

        self._save_once(path, write, self._trainer.looping)

    def _loop(self, feed: Feed, described: dict[str, Any], seed: int) -> Iterator[Any]:
        trainer = self._trainer
        if trainer.feed is not None:
            raise SecondTrainingLoop("this run already has a training loop", do="write one loop over all epochs")
        check_attached(trainer.model, trainer.optimizers)
        assert trainer.model is not None
        refuse_distributed(trainer.model, trainer.optimizers)
        check_companions(trainer.model, trainer.optimizers, self._training_state.parts.values())
        self._guard_copies(trainer.model)
        trainer.feed = feed
        if isinstance(self._session, EvaluatorSession):
            return self._follow(self._session, trainer.model)
        if feed.shard_range is not None:
            described |= fix_numerics(trainer.model, trainer.synchronised, self._session.settings.threads)
        if not isinstance(self._session, StandaloneSession):
            described |= {"data": feed.signatures()}
        return trainer.train(feed, fingerprint(trainer.model, trainer.optimizers, described), seed)

    def _guard_copies(self, model: torch.nn.Module) -> None:
        """Let attached averages of the weights change only when a step commits."""
        trainer = self._trainer
        for name, part in self._training_state.parts.items():
            if name.startswith("state") and is_copy(part, model):
                trainer.refuse_copies()
                trainer.copies.add(part, model)

    def _follow(self, session: EvaluatorSession, model: torch.nn.Module) -> Iterator[Any]:
        """Evaluate checkpoints until the run ends, then end the process: an evaluator has no batches."""

        def score() -> Any:
            model.eval()
            with torch.no_grad():
                return evaluation.score() if evaluation is not None else None

        evaluation = self._evaluation
        request = dataclasses.replace(evaluation, score=score) if evaluation is not None else None
        raise evaluation_evaluate.evaluate_checkpoints(
            session, self._training_state, request, lambda path: torch.save(model.state_dict(), path)
        )
        yield


def _without_holders(models: list[torch.nn.Module], attached: torch.nn.Module | None) -> list[torch.nn.Module]:
    """Leave out modules that hold another one and train nothing more, such as an average that refers to its model."""
    inner = models if attached is None else [*models, attached]

    def trained(module: torch.nn.Module) -> set[int]:
        return {id(p) for p in module.parameters() if p.requires_grad}

    def holds(outer: torch.nn.Module, model: torch.nn.Module) -> bool:
        return outer is not model and model in set(outer.modules()) and trained(outer) == trained(model)

    return [module for module in models if not any(holds(module, model) for model in inner)]


def _scalar(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor of a metric, which is read when the metric is reported, so that nothing blocks on a device."""
    if tensor.numel() != 1 or tensor.is_complex() or tensor.is_meta:
        kind = f"{str(tensor.dtype).removeprefix('torch.')} tensor"
        raise bad_metric(name, kind, f"it is on {tensor.device} and has shape {tuple(tensor.shape)}")
    return tensor.detach()
