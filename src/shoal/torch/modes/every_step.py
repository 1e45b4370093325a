"""Training loop of PyTorch that synchronises every step (``--sync step``).

Theory of operation. `worker.training.loop` tells the life of a step; here is how three parties play it together.

- The *loop*, a generator that the script iterates. It enters worlds, gives out micro-batches, and rolls back what an
  uncommitted step left behind. It runs only between two loop bodies.
- The *guards* (`torch.gradients.guards`), methods of the script's own objects. They run inside the loop body and ask
  the trainer what is allowed.
- The *session*, which knows whether the world is intact and whether a commit is allowed. Its threads may break the
  world at any moment; the trainer asks `session.broken` at every call instead of being interrupted.

One step, seen from the script's body:

    script                       trainer                                       session
    ------                       -------                                       -------
    for batch in run.batches     roll back the last step if uncommitted;       next_step: block for a world
                                 seed; yield a micro-batch
    loss = f(model(batch))       (forward passes are guarded against OOM)
    run.backward(loss)           weight the loss, backward pass; with the      on_step_reports
                                 last micro-batch: all-reduce, `reduced`
    scaler.unscale_, clip        allowed if `has_gradient`
    optimizer.step()             first optimizer: ask for the commit;          begin_commit
                                 last optimizer: the step counts               commit
    scheduler.step()             steps only if the step was `committed`
    optimizer.zero_grad()        ignored while `accumulating`

Invariants:

- Parameters change only between `begin_commit` and `commit`. An exception in between, from the optimizer itself, ends
  the script, because a half-applied step cannot be undone.
- A step is either applied by an optimizer everywhere or copied from a member that applied it, never both.
- The script's body runs unchanged in all cases: when the world breaks in the middle, the remaining calls of the body
  become no-ops, and the same micro-batches are given out again later.
- Misuse (no run.backward, two optimizer steps, gradients of the script's own) raises UnusableBackward at the call that
  shows it, and what is trained without being attached raises NotAttached (`gradients.unattached`). Silence would train
  a different model on each member.
- Random numbers depend on the rank up to the exchange, and on the step alone after it, when members hold equal
  gradients: noise that a script adds to them is the same everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import cache, partial
from math import inf
from typing import Any

import torch

from shoal.core.state_check import TensorDigest
from shoal.errors import ShoalError, UnusableBackward, UnusableExchange
from shoal.torch.data.fetch import TorchRngState
from shoal.torch.gradients.buckets import Buckets, StepAborted
from shoal.torch.gradients.gradient_norms import TorchGradientNorms
from shoal.torch.gradients.guards import missing_backward, refuse_step_outside_loop, reset_scaler
from shoal.torch.gradients.micro_batch_sums import MicroBatchSums
from shoal.torch.gradients.oom_retry import is_out_of_memory
from shoal.torch.gradients.running_stats import RunningStats
from shoal.torch.gradients.suspicions import HiddenStateWatch, coupled_samples, sum_over_samples, warn
from shoal.torch.gradients.tree_buckets import TreeBuckets, exact_weight
from shoal.torch.gradients.unattached import OptimizerWatch, check_companions, check_loss, is_checked_step
from shoal.torch.modes.lr_scaling import ScaledLearningRate
from shoal.torch.state.copies import ModelCopies
from shoal.torch.state.digests import mode_digest, tensor_digests
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
    """Loop for PyTorch; also the gate of the guards (`StepGate`), the OOM handler and the reducer of BatchNorm."""

    def __init__(self, session: Session | StandaloneSession, training_state: TrainingState) -> None:
        super().__init__(session, training_state)
        self.model: torch.nn.Module | None = None
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[Any] = []
        self.synchronised = False
        self._buckets: Buckets | None = None
        self._running_stats: RunningStats | None = None
        self._sums = MicroBatchSums()
        self._in_scaler = False
        self._loss_scale: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._known_rate: float | None = None
        self._watch: OptimizerWatch | None = None
        self._hidden_states: HiddenStateWatch | None = None
        self._suspects: list[Callable[[torch.Tensor, int], ShoalError | None]] = [coupled_samples, sum_over_samples]
        self.copies = ModelCopies(self)

    def _progress(self, calls: int) -> int:
        """Return how far a scheduler advances that has been called `calls` times; 1 if the batch size is fixed.

        With an automatic batch, a scheduler that steps with every step advances by the progress of the step (in global
        batches of the script's size); one that steps at the end of epochs advances by one. All members must agree, so
        only state that they share decides which it is.
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
        self._running_stats = RunningStats(self.model)
        self._training_state.after_load.append(self._running_stats.save)
        self._choose_exchange()
        self._watch = OptimizerWatch(self.model, self.optimizers, self._step_in_progress)
        self._hidden_states = HiddenStateWatch(self.model, warns=lambda: self._session.is_writer)
        return all(p.device.type == "cpu" for p in self.model.parameters())

    def _end_loop(self) -> None:
        if self._watch is not None:
            self._watch.close()
        if self._hidden_states is not None:
            self._hidden_states.close()

    def _step_in_progress(self) -> int | None:
        return self.current.number if self.looping and self.current is not None else None

    def _choose_exchange(self) -> None:
        """Use the ring on CPUs and NCCL on GPUs, unless the setting `exchange` says otherwise."""
        assert self.model is not None
        session, setting = self._session, self._session.settings.exchange
        on_gpu = any(p.is_cuda for p in self.model.parameters())
        backend = ("nccl" if on_gpu else "ring") if setting == "auto" else setting
        if setting == "nccl" and not on_gpu and isinstance(session, Session):
            raise UnusableExchange(
                "exchange=nccl cannot sum a model on the CPU",
                do='move the model to the GPU before run.attach, as with model.to("cuda"), or use exchange=auto',
            )
        if backend != "ring" and isinstance(session, Session):
            from shoal.torch.gradients import process_group

            session.use_exchange(partial(process_group.connect, session.peers, backend=backend))

    def _seed(self, seed: int) -> None:
        seed_everything(seed)

    def _tensor_digests(self) -> Iterable[TensorDigest]:
        return tensor_digests(self._training_state.parts, self.optimizers)

    def _arithmetic(self) -> str:
        assert self.model is not None
        devices = {p.device.type for p in self.model.parameters()}
        return f"torch {torch.__version__}, {torch.get_num_threads()} threads, {sorted(devices)}"

    def _rate(self) -> float:
        return sum(float(group.get("lr") or 0.0) for optimizer in self.optimizers for group in optimizer.param_groups)

    def _begin_body(self, current: Step) -> None:
        if self._buckets is not None:
            self._buckets.sealed = False
        if is_checked_step(current.number):
            self.copies.begin_body()
        if self._hidden_states is not None:
            self._hidden_states.begin_body(current.number)

    def _check_micro_batch(self, current: Step, number: int) -> None:
        if is_checked_step(current.number):
            self.copies.check_body()
        if current.backwards <= number:
            raise missing_backward(f"step {current.number} ended without run.backward", self._has_script_gradients())
        if current.on_last_micro_batch and not current.committed and self._misses_step(current):
            which = f" of all {len(self.optimizers)} optimizers" if current.stepped else ""
            raise UnusableBackward(
                f"step {current.number} ended without optimizer.step{which}",
                do="call step() of every attached optimizer once per batch",
            )

    def _misses_step(self, current: Step) -> bool:
        """Return whether a step ended uncommitted because the script did not call `optimizer.step`."""
        return current.reduced

    def _has_script_gradients(self) -> bool:
        """Return whether the script computed gradients by itself, as with loss.backward()."""
        if self._buckets is not None:
            return self._buckets.has_foreign_gradients
        return self.model is not None and any(p.grad is not None for p in self.model.parameters())

    def _zero_buffers(self) -> list[ZeroBuffer] | None:
        """Return the buffers of a catching-up member; None if BatchNorm layers exchange too, or for streams."""
        if self.synchronised or not isinstance(self.feed, IndexedFeed):
            return None
        self._ensure_buckets()
        return self._buckets.zero_buffers() if self._buckets is not None else None

    def _undo_uncommitted(self) -> None:
        current = self.current
        if current is not None and not current.committed and self._running_stats is not None:
            self._running_stats.roll_back()
            self._sums.clear()
            if self._buckets is not None:
                self._buckets.sealed = False
            for parameter in self._buckets.parameters if self._buckets is not None else ():
                parameter.grad = None
            scaler = self._training_state.parts.get("scaler")
            if scaler is not None:
                reset_scaler(scaler)

    def _ensure_buckets(self) -> None:
        """Lay out buckets, again if the script froze or unfroze parameters."""
        assert self.model is not None
        assert self._running_stats is not None
        parameters = list(self.model.parameters())
        if self._buckets is None or not self._buckets.fits(parameters):
            if self._buckets is not None:
                self._buckets.close()
                self._sums.put_into(self._buckets.parameters)
            exact = self.feed is not None and self.feed.shard_range is not None
            self._buckets = (TreeBuckets if exact else Buckets)(
                parameters, self._running_stats.count, self._running_stats.dtype
            )

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
        loss_scale, self._loss_scale = self._loss_scale, None
        if current.discarded:
            return
        samples = current.micro_batches[current.index].samples
        if current.backwards == 1 and samples and is_checked_step(current.number):
            self._check_loss(loss, samples)
        counts = float(samples if weight is None else weight) if samples else 0.0
        current.micro_batch_weight = counts if current.shard_range is None else exact_weight(counts)
        current.weight += current.micro_batch_weight
        if current.micro_batch_weight:
            shown = loss.detach()
            if loss_scale is not None:
                shown = shown / loss_scale(torch.ones_like(shown))
            current.loss = current.loss + shown * current.micro_batch_weight
        scaled = loss * (current.micro_batch_weight / current.global_batch_size)
        if self._session.broken:
            return
        if current.backwards == 1:
            self._ensure_buckets()
            assert self._buckets is not None
            self._buckets.refuse_foreign_gradients()
            self._sums.clear()
            current.gradient_norms = self._buckets.norms = self._norms_due(current)
            if isinstance(self._buckets, TreeBuckets) and current.shard_range is not None:
                self._buckets.begin_step(current.shard_range)
        assert self._buckets is not None
        self._buckets.in_backward = True
        try:
            self._backward_pass(current, scaled)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self.on_out_of_memory(error)
            if current.sending and current.world.size > 1:
                # Some gradients may have been sent already: all members repeat the step, in another world.
                self._session.fail(ExchangeBroken(f"{self._session.me} ran out of memory"))
        finally:
            self._buckets.in_backward, self._buckets.sealed = False, True

    def _check_loss(self, loss: torch.Tensor, samples: int) -> None:
        assert self.model is not None
        check_loss(loss, [self.model, *(copy for copy in self.copies.copies if isinstance(copy, torch.nn.Module))])
        if self._session.is_writer:
            for suspect in tuple(self._suspects):
                suspicion = suspect(loss, samples)
                if suspicion is not None:
                    self._suspects.remove(suspect)
                    warn(suspicion)

    def _backward_pass(self, current: Step, scaled: torch.Tensor) -> None:
        if current.on_last_micro_batch:
            self._exchange(current, scaled)
        elif isinstance(self._buckets, TreeBuckets):
            self._sum_shard(self._buckets, current, scaled)
        elif current.micro_batch_weight and self._buckets is not None:
            self._sums.put_into(self._buckets.parameters)
            scaled.backward()  # type: ignore[no-untyped-call]
            self._split_halves(current)
            self._sums.take_from(self._buckets.parameters)

    def _norms_due(self, current: Step) -> TorchGradientNorms | None:
        """Return an object that measures the norms of this step's gradients, None if none are due."""
        norms = TorchGradientNorms(self.optimizers) if self.noise_sampler.due(current) else None
        return norms if norms is not None and norms.ready else None

    def _split_halves(self, current: Step) -> None:
        buckets = self._buckets
        if buckets is not None and buckets.norms is not None and is_halfway(current):
            buckets.norms.split_halves(buckets.parameters, current.weight)

    def _sum_shard(self, buckets: TreeBuckets, current: Step, scaled: torch.Tensor) -> None:
        assert self._running_stats is not None
        buckets.begin_shard()
        if current.counts:
            scaled.backward()  # type: ignore[no-untyped-call]
        self._running_stats.write_to(buckets, current.micro_batch_weight / current.global_batch_size)
        buckets.end_shard()
        # Each shard starts from the buffers of the last commit, whichever member computes it.
        self._running_stats.roll_back()

    def _exchange(self, current: Step, scaled: torch.Tensor) -> None:
        assert self._buckets is not None
        assert self._running_stats is not None
        exchange = current.exchange
        current.sending = True
        if self._slowdown is not None:
            self._slowdown.before_exchange(current.samples, current.micro_batches[-1].samples)
        if current.digest is not None and self.model is not None:
            current.digest = current.digest.plus(mode_digest(self.model))
        try:
            reports = self._send_report(current)
            self._sums.put_into(self._buckets.parameters)
            self._buckets.arm(exchange)
            if current.counts or self.synchronised:
                scaled.backward()  # type: ignore[no-untyped-call]
            if self._slowdown is not None:
                self._slowdown.after_backward()
            current.compute_s = time.perf_counter() - current.started_at
            self._begin_exchange()
            total = self._receive_reports(current, reports)
            fraction = current.weight / total if total else 0.0
            if current.shard_range is not None:
                fraction = current.micro_batch_weight / current.global_batch_size
            self._running_stats.write_to(self._buckets, fraction)
            self._buckets.finish(total / current.global_batch_size if total else 1.0, current.empty)
            self._state_check.compare(current)
            current.wait_s = time.perf_counter() - current.started_at - current.compute_s
            current.reduced = True
            # Gradients are equal now. What the script draws from here on, such as noise for them, must be equal too.
            self._seed(current.common_seed)
        except ExchangeBroken as broken:
            self._on_exchange_broken(current, broken)
        except StepAborted as aborted:
            cause = aborted.__cause__
            self._on_exchange_broken(
                current, cause if isinstance(cause, ExchangeBroken) else ExchangeBroken("the world broke")
            )
        finally:
            self._buckets.disarm()

    # --- StepGate

    @property
    def applied(self) -> bool:
        """Whether the last `optimizer.step()` changed the parameters."""
        return self.committed

    def scheduler_steps(self, scheduler: Any, *args: Any, **kwargs: Any) -> int:  # noqa: ARG002
        """Return how many steps one call of `scheduler.step` makes; 0 if the step did not commit."""
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
        """Apply the gradient if the step may commit; it commits with the step of the last optimizer."""
        if self._in_scaler:
            return self._step_with_gain(optimizer, real)
        current = self.current
        if current is None:
            return refuse_step_outside_loop(optimizer)
        if self._is_no_op(current):
            return None
        if not current.stepped and not self._begin_commit():
            return None
        self._check_rates()
        result = self._step_with_gain(optimizer, real)
        self._mark_stepped(current, optimizer)
        return result

    def _check_rates(self) -> None:
        """Search once for a scheduler that is not attached, when a learning rate changes though none is attached."""
        if self.schedulers or self._known_rate == inf:
            return
        rate = self._rate()
        if self._known_rate is not None and rate != self._known_rate:
            assert self.model is not None
            check_companions(self.model, self.optimizers, self._training_state.parts.values())
            rate = inf
        self._known_rate = rate

    def _mark_stepped(self, current: Step, optimizer: torch.optim.Optimizer) -> None:
        current.stepped.add(id(optimizer))
        if len(current.stepped) == len(self.optimizers):
            self._commit(current)

    def _step_with_gain(self, optimizer: torch.optim.Optimizer, real: Callable[[], Any]) -> Any:
        """Step with the learning rate scaled to the automatic batch, if there is one."""
        current = self.current
        if self.auto is None or current is None:
            return real()
        with ScaledLearningRate(optimizer, self.auto.lr_gain_at(current.number, current.global_batch_size)):
            return real()

    def apply_scaled(self, optimizer: torch.optim.Optimizer, real: Callable[[], Any]) -> Any:
        """Let the scaler step; it counts as the optimizer's step even if the scaler skips that because of infs."""
        current = self.current
        if current is None or self._is_no_op(current):
            return None
        if not current.stepped and not self._begin_commit():
            return None
        self._in_scaler = True
        try:
            result = real()
        finally:
            self._in_scaler = False
        self._mark_stepped(current, optimizer)
        return result

    def _is_no_op(self, current: Step) -> bool:
        """Return whether `optimizer.step` has nothing to do now; raise UnusableBackward if it must not be called."""
        if self._session.broken or not current.on_last_micro_batch or current.discarded:
            return True
        if current.committed:
            raise UnusableBackward("optimizer.step was called twice in one step", do="call it once for each batch")
        if not current.reduced:
            raise missing_backward("optimizer.step came before run.backward", self._has_script_gradients())
        return False

    def _commit(self, current: Step) -> None:
        assert self._running_stats is not None
        assert self._buckets is not None
        if any(p.weight for p in current.reports):
            self._running_stats.read_from(self._buckets)
        else:
            self._running_stats.roll_back()
        self._running_stats.save()
        self._buckets.sealed = False
        super()._commit(current)

    def on_out_of_memory(self, error: BaseException) -> None:
        super().on_out_of_memory(error)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def on_scaled(self, scale: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._loss_scale = scale

    def refuse_scaler(self) -> None:
        """Accept a GradScaler: this mode supports it."""

    def refuse_copies(self) -> None:
        """Accept averages of the weights: this mode supports them."""

    # --- BatchNormReducer

    def current_exchange(self) -> tuple[Exchange | None, float]:
        """Return the exchange of this step, and 1.0 if this member's samples count, else 0.0."""
        current = self.current
        if current is None or self._session.broken:
            return None, 1.0
        return current.exchange, 0.0 if current.empty else 1.0

    def on_exchange_broken(self, broken: ExchangeBroken) -> None:
        self._session.fail(broken)


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch on all devices."""
    TorchRngState().seed(seed)
    # Skipped without devices: torch.manual_seed takes a stack trace for each kind of device that is absent.
    if _has_devices():
        torch.manual_seed(seed)


@cache
def _has_devices() -> bool:
    return torch.cuda.device_count() > 0 or torch.backends.mps.is_available() or torch.xpu.is_available()
