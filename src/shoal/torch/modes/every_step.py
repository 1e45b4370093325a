"""The training loop underneath a run: it gives out batches, exchanges gradients and commits steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from shoal.errors import UnusableBackward
from shoal.torch.data.fetch import TorchRngState
from shoal.torch.gradients.buckets import Buckets, StepAborted
from shoal.torch.gradients.gradient_norms import TorchGradientNorms
from shoal.torch.gradients.guards import forget_gradients, outside
from shoal.torch.gradients.micro_batch_sums import MicroBatchSums
from shoal.torch.gradients.oom_retry import is_out_of_memory
from shoal.torch.gradients.running_stats import RunningStats
from shoal.torch.gradients.tree_buckets import TreeBuckets, exact_weight
from shoal.torch.modes.lr_scaling import ScaledLearningRate
from shoal.worker.collectives.catch_up import ZeroBuffer
from shoal.worker.collectives.exchange import Exchange
from shoal.worker.data.feed import Feed, IndexedFeed
from shoal.worker.session.session import Session
from shoal.worker.session.standalone import StandaloneSession
from shoal.worker.training.loop import Loop
from shoal.worker.training.noise_sampling import is_halfway
from shoal.worker.training.step import Step
from shoal.worker.training.training_state import TrainingState
from shoal.worker.transport.exchange_broken import ExchangeBroken


class TorchTrainer(Loop):
    """The loop for PyTorch. Optimizers, schedulers, scalers and BatchNorm layers ask it what may happen now."""

    def __init__(self, session: Session | StandaloneSession, training_state: TrainingState) -> None:
        super().__init__(session, training_state)
        self.model: torch.nn.Module | None = None
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[Any] = []
        self.synchronised = False
        self._buckets: Buckets | None = None
        self._statistics: RunningStats | None = None
        self._gathered = MicroBatchSums()
        self._nested = False

    def _progress(self, calls: int) -> int:
        """How far a scheduler that has been called so often goes on; once, if the batch is what the script asked for.

        Only state that all members share may decide it: they must agree.
        """
        current, feed = self.current, self.feed
        if self.auto is None or current is None or feed is None:
            return 1
        ended = feed.ended(current.number + 1) or feed.cursor(current.number + 1).epoch > current.epoch
        at_every_step = not ended or calls > current.epoch
        return current.progress if at_every_step else 1

    # --- the loop

    def _start_loop(self, feed: Feed) -> bool:  # noqa: ARG002
        assert self.model is not None
        self._statistics = RunningStats(self.model)
        self._training_state.after_load.append(self._statistics.keep)
        self._choose_exchange()
        return all(p.device.type == "cpu" for p in self.model.parameters())

    def _choose_exchange(self) -> None:
        """Our own ring for CPUs; NCCL, which it cannot replace, for GPUs."""
        assert self.model is not None
        session, wanted = self._session, self._session.settings.exchange
        on_gpu = any(p.is_cuda for p in self.model.parameters())
        backend = ("nccl" if on_gpu else "ring") if wanted == "auto" else wanted
        if backend != "ring" and isinstance(session, Session):
            from shoal.torch.gradients import process_group

            session.use_exchange(partial(process_group.connect, session.peers, backend=backend))

    def _seed(self, seed: int) -> None:
        seed_everything(seed)

    def _rate(self) -> float:
        return sum(float(group.get("lr") or 0.0) for optimizer in self.optimizers for group in optimizer.param_groups)

    def _check_micro_batch(self, current: Step, number: int) -> None:
        if current.backwards <= number:
            raise UnusableBackward(
                f"step {current.number} ended without run.backward", do="call run.backward(loss) for every batch"
            )
        if current.on_last_micro_batch and not current.committed and self._lacks_step(current):
            left = f" of all {len(self.optimizers)} optimizers" if current.stepped else ""
            raise UnusableBackward(
                f"step {current.number} ended without optimizer.step{left}",
                do="call optimizer.step() of each every time",
            )

    def _lacks_step(self, current: Step) -> bool:
        """Whether a current that came to its end uncommitted did so because of the script."""
        return current.reduced

    def _zero_buffers(self) -> list[ZeroBuffer] | None:
        """What a shadow exchanges in our stead; unknown if layers exchange too, or if lanes are dealt out."""
        if self.synchronised or not isinstance(self.feed, IndexedFeed):
            return None
        self._bucket_up()
        return self._buckets.zero_buffers() if self._buckets is not None else None

    def _undo_uncommitted(self) -> None:
        current = self.current
        if current is not None and not current.committed and self._statistics is not None:
            self._statistics.put_back()
            self._gathered.begin()
            for parameter in self._buckets.parameters if self._buckets is not None else ():
                parameter.grad = None
            scaler = self._training_state.parts.get("scaler")
            if scaler is not None:
                forget_gradients(scaler)

    def _bucket_up(self) -> None:
        assert self.model is not None
        assert self._statistics is not None
        parameters = list(self.model.parameters())
        if self._buckets is None or not self._buckets.fits(parameters):
            if self._buckets is not None:
                self._buckets.close()
                self._gathered.lend(self._buckets.parameters)
            exact = self.feed is not None and self.feed.shard_range is not None
            self._buckets = (TreeBuckets if exact else Buckets)(parameters, self._statistics.count)

    # --- one step

    def backward(self, loss: torch.Tensor, weight: float | None) -> None:
        """See `Run.backward`."""
        current = self.current
        if current is None:
            raise UnusableBackward("run.backward was called outside the training loop", do="call it in run.batches")
        if current.backwards > current.index:
            raise UnusableBackward(
                "run.backward was called twice for one batch", do="add the losses, then call it once"
            )
        current.backwards += 1
        if current.discarded:
            return
        samples = current.micro_batches[current.index].samples
        own = float(samples if weight is None else weight) if samples else 0.0
        current.micro_batch_weight = own if current.shard_range is None else exact_weight(own)
        current.weight += current.micro_batch_weight
        if current.micro_batch_weight:
            current.loss = current.loss + loss.detach() * current.micro_batch_weight
        scaled = loss * (current.micro_batch_weight / current.global_batch_size)
        if self._session.broken:
            return
        if current.backwards == 1:
            self._bucket_up()
            assert self._buckets is not None
            self._buckets.refuse_others()
            self._gathered.begin()
            current.gradient_norms = self._buckets.squares = self._squares(current)
            if isinstance(self._buckets, TreeBuckets) and current.shard_range is not None:
                self._buckets.begin(current.shard_range)
        try:
            self._go_back(current, scaled)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self.on_out_of_memory(error)
            if current.sending and current.world.size > 1:
                # Some of our gradients may be on their way: all of them repeat the step, in another world.
                self._session.fail(ExchangeBroken(f"{self._session.me} ran out of memory"))

    def _go_back(self, current: Step, scaled: torch.Tensor) -> None:
        if current.on_last_micro_batch:
            self._exchange(current, scaled)
        elif isinstance(self._buckets, TreeBuckets):
            self._sum_shard(self._buckets, current, scaled)
        elif current.micro_batch_weight and self._buckets is not None:
            self._gathered.lend(self._buckets.parameters)
            scaled.backward()  # type: ignore[no-untyped-call]
            self._halve(current)
            self._gathered.take_back(self._buckets.parameters)

    def _squares(self, current: Step) -> TorchGradientNorms | None:
        """What takes the norms of this step's gradients, if it is time for that."""
        squares = TorchGradientNorms(self.optimizers) if self.noise_sampler.due(current) else None
        return squares if squares is not None and squares.ready else None

    def _halve(self, current: Step) -> None:
        buckets = self._buckets
        if buckets is not None and buckets.squares is not None and is_halfway(current):
            buckets.squares.halve(buckets.parameters, current.weight)

    def _sum_shard(self, buckets: TreeBuckets, current: Step, scaled: torch.Tensor) -> None:
        assert self._statistics is not None
        buckets.open()
        if current.counts:
            scaled.backward()  # type: ignore[no-untyped-call]
        self._statistics.send(buckets, current.micro_batch_weight / current.global_batch_size)
        buckets.shut()
        # Each shard begins with what the buffers were at the last commit, wherever it is computed.
        self._statistics.put_back()

    def _exchange(self, current: Step, scaled: torch.Tensor) -> None:
        assert self._buckets is not None
        assert self._statistics is not None
        session, exchange = self._session, current.exchange
        current.sending = True
        if self._slowdown is not None:
            self._slowdown.before_exchange(current.samples, current.micro_batches[-1].samples)
        try:
            pulses = self._send_report(current)
            self._gathered.lend(self._buckets.parameters)
            self._buckets.arm(exchange)
            if current.counts or self.synchronised:
                scaled.backward()  # type: ignore[no-untyped-call]
            if self._slowdown is not None:
                self._slowdown.after_backward()
            current.compute_s = time.perf_counter() - current.started_at
            session.set_phase("exchange")
            total = self._receive_reports(current, pulses)
            mine = current.weight / total if total else 0.0
            self._statistics.send(
                self._buckets,
                mine if current.shard_range is None else current.micro_batch_weight / current.global_batch_size,
            )
            self._buckets.finish(total / current.global_batch_size if total else 1.0, current.empty)
            current.wait_s = time.perf_counter() - current.started_at - current.compute_s
            current.reduced = True
        except ExchangeBroken as broken:
            session.fail(broken)
        except StepAborted as aborted:
            cause = aborted.__cause__
            session.fail(cause if isinstance(cause, ExchangeBroken) else ExchangeBroken("the world broke"))
        finally:
            self._buckets.disarm()

    # --- what guards ask (see shoal.torch.gradients.guards)

    @property
    def applied(self) -> bool:
        """Whether the optimizers' last step was a real one."""
        return self.committed

    def schedules(self, scheduler: Any, *args: Any, **kwargs: Any) -> int:  # noqa: ARG002
        """How many steps a scheduler is to make for the one that it was asked for."""
        if self.current is None:
            return 1
        return self._progress(getattr(scheduler, "last_epoch", 0)) if self.committed else 0

    @property
    def has_gradient(self) -> bool:
        return self.current is not None and self.current.reduced and not self._session.broken

    @property
    def accumulating(self) -> bool:
        current = self.current
        return current is not None and current.backwards > 0 and not current.committed and not self._session.broken

    def apply(self, optimizer: torch.optim.Optimizer, real: Callable[[], Any]) -> Any:
        """One optimizer's step; the run's step is committed with the last one's."""
        if self._nested:
            return self._step(optimizer, real)
        current = self.current
        if current is None:
            return outside(optimizer)
        if self._outside(current):
            return None
        if not current.stepped and not self._begin_commit():
            return None
        result = self._step(optimizer, real)
        self._stepped(current, optimizer)
        return result

    def _stepped(self, current: Step, optimizer: torch.optim.Optimizer) -> None:
        current.stepped.add(id(optimizer))
        if len(current.stepped) == len(self.optimizers):
            self._commit(current)

    def _step(self, optimizer: torch.optim.Optimizer, real: Callable[[], Any]) -> Any:
        if self.auto is None or self.current is None:
            return real()
        with ScaledLearningRate(optimizer, self.auto.lr_gain_at(self.current.number)):
            return real()

    def apply_scaled(self, optimizer: torch.optim.Optimizer, real: Callable[[], Any]) -> Any:
        """A scaler's step; whether it lets the optimizer step or not, it counts as that."""
        current = self.current
        if current is None or self._outside(current):
            return None
        if not current.stepped and not self._begin_commit():
            return None
        self._nested = True
        try:
            result = real()
        finally:
            self._nested = False
        self._stepped(current, optimizer)
        return result

    def _outside(self, current: Step) -> bool:
        if self._session.broken or not current.on_last_micro_batch or current.discarded:
            return True
        if current.committed:
            raise UnusableBackward("optimizer.step was called twice in one step", do="call it once for each batch")
        if not current.reduced:
            raise UnusableBackward("optimizer.step came before run.backward", do="call run.backward(loss) first")
        return False

    def _commit(self, current: Step) -> None:
        assert self._statistics is not None
        assert self._buckets is not None
        if any(p.weight for p in current.reports):
            self._statistics.receive(self._buckets)
        else:
            self._statistics.put_back()
        self._statistics.keep()
        super()._commit(current)

    def on_out_of_memory(self, error: BaseException) -> None:
        super().on_out_of_memory(error)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def refuse_scaler(self) -> None:
        """A scaler is welcome here."""

    # --- what synchronised BatchNorm asks (see shoal.torch.gradients.sync_batchnorm)

    def exchange_now(self) -> tuple[Exchange | None, float]:
        """The exchange of this step, and whether this member's samples count (1) or not (0)."""
        current = self.current
        if current is None or self._session.broken:
            return None, 1.0
        return current.exchange, 0.0 if current.empty else 1.0

    def lost(self, broken: ExchangeBroken) -> None:
        self._session.fail(broken)


def seed_everything(seed: int) -> None:
    """Let all random numbers start anew: Python's, NumPy's and torch's."""
    TorchRngState().seed(seed)
    # The general way takes a stack trace for each kind of device that is not there.
    if _has_devices():
        torch.manual_seed(seed)


@cache
def _has_devices() -> bool:
    return torch.cuda.device_count() > 0 or torch.backends.mps.is_available() or torch.xpu.is_available()
