"""Training loop of PyTorch for local SGD (``--sync local:H``): members train alone for a round, then average.

Theory of operation. A round holds H global batches. To the session a round is what a step is in other modes: it is
exchanged, committed and repeated as a whole. A member trains on its share of the round in *local batches*, each an
equal part of a global batch, with the script's own optimizer; a faster member gets more of them.

*A round on one member.* Before its first change, parameters, optimizers, schedulers and scaler are copied
(`RoundStart`). Each local batch then is a forward and backward pass, perhaps in micro-batches, and a real
`optimizer.step()`, with no exchange. After the last one `_end_round` sums the changes of all parameters over members,
weighted by samples, and the outer optimizer sets the parameters to start + step. If the exchange or the commit fails,
the copies are put back and the round is repeated in the next world.

*Schedulers.* The script calls `scheduler.step()` after its own local batches, and members have different numbers of
them, but at the end of a round all schedules must be at the same point: H steps further, because the round counts for H
global batches. A call after local batch b advances the schedule by the global batches that b completes, so that the
learning rate falls over the round as it would with one member. How the calls relate to the round is learned:

    the script steps the scheduler   calls in a round of n local batches  real steps made by
    -------------------------------  -----------------------------------  ------------------------------------------
    after every local batch          n (n differs between members)        each call: the global batches that it
                                                                          completes; `_complete_schedules`: what is
                                                                          missing to H - 1; the last call: 1
    only if run.committed            1, after the last batch              that call: 1
    at the end of an epoch           1 in some rounds, else 0             that call: 1
    after some batches, not others   in between                           UnsupportedWithLocalSgd

The two cases cannot be told apart in the last local batch, whose `scheduler.step()` comes after the round has been
exchanged. So members count the calls of all local batches but the last (`_scheduler_calls`) and sum the counts along
with the parameters: if their sum equals the sum of the batches, the scheduler is stepped after every batch
(`_steps_every_batch`). It is then brought to one step before the end of the round, and the script's last call makes
that step. A member with a single local batch has counted nothing, and one with an empty share reports zeros: the sum
over members tells both what to do. `_forced_steps` is how far a call of `_complete_schedules` itself advances; 0 means
that the script calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from shoal.core.state_check import TensorDigest
from shoal.core.sync_mode import SyncMode
from shoal.errors import UnsupportedWithLocalSgd, UnusableBackward
from shoal.torch.gradients.guards import missing_backward, refuse_step_outside_loop
from shoal.torch.modes.every_step import TorchTrainer
from shoal.torch.modes.outer_optimizer import OuterOptimizer, ParameterDeltas, RoundStart
from shoal.torch.state.digests import tensor_digests
from shoal.worker.data.round_feed import LocalBatch, RoundFeed
from shoal.worker.session.session import Session
from shoal.worker.session.standalone import StandaloneSession
from shoal.worker.training.step import Step
from shoal.worker.training.training_state import TrainingState
from shoal.worker.transport.exchange_broken import ExchangeBroken


@dataclass(slots=True)
class _LocalStep:
    """One local batch in progress: `complete` after its last backward pass, `applied` after the optimizers' steps."""

    current: Step
    number: int
    batch: LocalBatch
    weight: float = 0.0
    complete: bool = False
    applied: bool = False


class TorchLocalTrainer(TorchTrainer):
    """Trainer whose steps are rounds, in which the optimizers step without exchange."""

    feed: RoundFeed | None

    def __init__(self, session: Session | StandaloneSession, training_state: TrainingState, sync: SyncMode) -> None:
        super().__init__(session, training_state)
        # Gradients are not summed over members, so there are no two batch sizes to compare.
        self.noise_sampler.every_steps = 0
        self.length = sync.local
        self._outer = OuterOptimizer(session.settings.outer_lr, session.settings.outer_momentum)
        self._start = RoundStart()
        self._start_of: Step | None = None
        self._local_step: _LocalStep | None = None
        self._scheduler_calls: list[int] = []
        self._steps_every_batch: list[bool] = []
        self._forced_steps = 0
        training_state.parts["local"] = self

    def state_dict(self) -> dict[str, Any]:
        """Return what joiners and checkpoints need besides the script's own objects."""
        return {"velocities": self._outer.velocities, "every": self._steps_every_batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._outer.velocities, self._steps_every_batch = list(state["velocities"]), list(state["every"])

    # --- one local batch

    def backward(self, loss: torch.Tensor, weight: float | None) -> None:
        current = self.current
        if current is not None and not current.discarded:
            self._enter_local_batch(current)
        super().backward(loss, weight)

    def _enter_local_batch(self, current: Step) -> None:
        """Start a local step if this micro-batch is the first of a local batch."""
        assert self.feed is not None
        previous = self._local_step
        if previous is not None and previous.current is not current:
            previous = None
        if previous is not None and current.index <= previous.batch.last:
            return
        number = previous.number + 1 if previous is not None else 0
        if previous is None:
            self._scheduler_calls = [0] * len(self.schedulers)
        elif not previous.applied and not self._session.broken:
            raise UnusableBackward(
                f"batch {previous.number} of round {current.number} ended without optimizer.step",
                do="call optimizer.step() once per batch",
            )
        self._local_step = _LocalStep(current, number, self.feed.local_batches[number])
        self._sums.clear()
        current.global_batch_size = self._local_step.batch.samples or 1
        current.stepped.clear()

    def _backward_pass(self, current: Step, scaled: torch.Tensor) -> None:
        local, slowdown = self._local_step, self._slowdown
        assert local is not None
        assert self._buckets is not None
        parameters = self._buckets.parameters
        self._sums.put_into(parameters)
        if current.micro_batch_weight:
            scaled.backward()  # type: ignore[no-untyped-call]
            local.weight += current.micro_batch_weight
        local.complete = current.index == local.batch.last
        if not local.complete:
            self._sums.take_from(parameters)
            return
        if local.weight and local.weight != current.global_batch_size:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(local.weight / current.global_batch_size)
        if slowdown is not None:
            slowdown.before_exchange(local.batch.samples, current.micro_batches[current.index].samples)
            slowdown.after_backward()
            slowdown.begin(current.number)

    def _ensure_buckets(self) -> None:
        assert self.model is not None
        assert self._running_stats is not None
        parameters = list(self.model.parameters())
        if self._buckets is None or not self._buckets.fits(parameters):
            self._buckets = ParameterDeltas(
                parameters, self._running_stats.count, 1 + len(self.schedulers), self._running_stats.dtype
            )

    # --- StepGate

    @property
    def _valid_step(self) -> _LocalStep | None:
        """The local step in progress; None if it will be repeated."""
        local = self._local_step
        if local is None or local.current is not self.current or self._session.broken or local.current.discarded:
            return None
        return local

    @property
    def applied(self) -> bool:
        local = self._valid_step
        return local is not None and local.applied and not local.current.empty

    @property
    def has_gradient(self) -> bool:
        local = self._valid_step
        return local is not None and local.complete and not local.current.empty

    @property
    def accumulating(self) -> bool:
        local = self._valid_step
        return local is not None and not local.applied

    def apply(self, optimizer: torch.optim.Optimizer, real: Callable[[], Any]) -> Any:
        if self._in_scaler:
            return real()
        current = self.current
        if current is None:
            return refuse_step_outside_loop(optimizer)
        if self._is_no_op(current):
            return None
        result = self._step_locally(current, real)
        self._mark_stepped(current, optimizer)
        return result

    def apply_scaled(self, optimizer: torch.optim.Optimizer, real: Callable[[], Any]) -> Any:
        current = self.current
        if current is None or self._is_no_op(current):
            return None
        self._in_scaler = True
        try:
            result = self._step_locally(current, real)
        finally:
            self._in_scaler = False
        self._mark_stepped(current, optimizer)
        return result

    def _is_no_op(self, current: Step) -> bool:
        if self._session.broken or current.discarded:
            return True
        local = self._valid_step
        if current.backwards <= current.index or local is None:
            raise missing_backward("optimizer.step came before run.backward", self._has_script_gradients())
        if local.applied:
            raise UnusableBackward("optimizer.step was called twice for one batch", do="call it once for each batch")
        return not local.complete

    def _has_script_gradients(self) -> bool:
        # Gradients here are never views of the buckets, so those of a previous batch look like the script's own.
        return self._local_step is None and super()._has_script_gradients()

    def _step_locally(self, current: Step, real: Callable[[], Any]) -> Any:
        self._save_start(current)
        return None if current.empty else real()

    def _save_start(self, current: Step) -> None:
        """Copy the state at the start of the round, before its first change."""
        if self._start_of is current:
            return
        assert self._buckets is not None
        self._training_state.before_change()
        self._session.before_change()
        scaler = self._training_state.parts.get("scaler")
        others = [*self.schedulers, *([scaler] if scaler is not None else [])]
        self._start.save(self._buckets.parameters, self.optimizers, others)
        self._start_of = current

    def _mark_stepped(self, current: Step, optimizer: torch.optim.Optimizer) -> None:
        current.stepped.add(id(optimizer))
        if len(current.stepped) < len(self.optimizers):
            return
        assert self._local_step is not None
        self._local_step.applied = True
        if current.on_last_micro_batch:
            self._end_round(current)

    def _tensor_digests(self) -> Iterable[TensorDigest]:
        """Return those of the model: the state of the optimizers is each member's own."""
        return tensor_digests(self._training_state.parts, ())

    def _rate(self) -> float:
        """Return 0: members are at different points of the schedule within a round."""
        return 0.0

    def _misses_step(self, current: Step) -> bool:  # noqa: ARG002
        return True

    # --- the end of a round

    def _end_round(self, current: Step) -> None:
        assert isinstance(self._buckets, ParameterDeltas)
        assert self.feed is not None
        current.data_s += self.feed.read_s
        current.compute_s = time.perf_counter() - current.started_at - self.feed.read_s
        self._begin_exchange()
        current.sending = True
        try:
            self._average(current, self._buckets)
        except ExchangeBroken as broken:
            self._on_exchange_broken(current, broken)
            return
        steps_every_batch = self._detect_scheduler_calls(self._buckets)
        if not self._begin_commit():
            return
        self._outer.step(self._buckets, self._start.values)
        self._steps_every_batch = steps_every_batch
        self._commit(current)
        self._complete_schedules(current)

    def _average(self, current: Step, deltas: ParameterDeltas) -> None:
        assert self._running_stats is not None
        assert self._local_step is not None
        assert self._local_step.current is current
        began = time.perf_counter()
        total = self._receive_reports(current, self._send_report(current))
        fraction = current.weight / total if total else 0.0
        self._running_stats.write_to(deltas, fraction)
        # Local batches before the last one, and the calls of each scheduler after them.
        counts = [self._local_step.number, *self._scheduler_calls]
        deltas.counts.copy_(torch.tensor([0] * len(counts) if current.empty else counts))
        deltas.average(current.exchange, self._start.values, fraction)
        self._state_check.compare(current)
        current.wait_s = time.perf_counter() - began
        current.reduced = True

    def _undo_uncommitted(self) -> None:
        current = self.current
        if current is not None and not current.committed and self._start_of is current:
            self._start.restore()
        self._start_of = None
        super()._undo_uncommitted()

    # --- schedulers (see the table above)

    def scheduler_steps(self, scheduler: Any, *args: Any, **kwargs: Any) -> int:
        if self._forced_steps:
            return self._forced_steps
        if self.current is None:
            return 1
        local = self._valid_step
        if local is None or not local.applied:
            return 0
        if local.current.committed:
            return 1
        if args or kwargs:
            return 0
        index = next(i for i, attached in enumerate(self.schedulers) if attached is scheduler)
        self._scheduler_calls[index] += 1
        assert self.feed is not None
        step = local.current.number
        return self.feed.global_batches_due(step, local.number + 1) - self.feed.global_batches_due(step, local.number)

    def _detect_scheduler_calls(self, deltas: ParameterDeltas) -> list[bool]:
        """Return which schedulers are stepped after every batch, by the counts of all members.

        Raises UnsupportedWithLocalSgd if one is stepped after some batches and not after others.
        """
        batches, *calls = (int(number) for number in deltas.counts.tolist())
        if not batches:
            return self._steps_every_batch or [False] * len(calls)
        if any(count not in (0, batches) for count in calls):
            raise UnsupportedWithLocalSgd(
                "a scheduler was stepped after some batches of a round and not after others",
                why="members have different numbers of batches, so their schedules would diverge",
                do="step it after every batch, or only if run.committed or run.epoch_ended",
            )
        return [count == batches for count in calls]

    def _complete_schedules(self, current: Step) -> None:
        """Bring schedules to one step before the end of the round; the script's next call makes the last step."""
        assert self.feed is not None
        steps = self.feed.global_batches_in(current.number)
        callers = zip(self.schedulers, self._steps_every_batch, self._scheduler_calls, strict=True)
        for scheduler, every_batch, calls in callers:
            done = self.feed.global_batches_due(current.number, len(self.feed.local_batches) - 1) if calls else 0
            self._forced_steps = steps - 1 - done if every_batch else 0
            if self._forced_steps:
                scheduler.step()
            self._forced_steps = 0
