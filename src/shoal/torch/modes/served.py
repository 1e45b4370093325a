"""The training loop of PyTorch underneath a run whose parameters are held by servers (see
`shoal.worker.parameter_server.ticket_loop`).

The gradient is pushed when the script calls its optimizer. The optimizer itself, and the schedulers, work on servers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shoal.core.data.sample_order import SampleOrder
from shoal.errors import UnusableBackward
from shoal.torch.gradients.guards import outside
from shoal.torch.gradients.micro_batch_sums import MicroBatchSums
from shoal.torch.gradients.oom_retry import is_out_of_memory
from shoal.torch.modes.every_step import seed_everything
from shoal.torch.modes.server_shard import (
    PER_EPOCH,
    PER_STEP,
    TorchShardLayout,
    TorchShardStore,
    gradients_of,
    take_over,
)
from shoal.worker.parameter_server.rpc import Raw
from shoal.worker.parameter_server.served_session import ServedSession
from shoal.worker.parameter_server.ticket_loop import TicketLoop, TicketStep
from shoal.worker.training.training_state import TrainingState


class TorchServedTrainer(TicketLoop):
    """Does the tickets of one loop; optimizers and schedulers ask it what may happen now."""

    synchronised = False

    def __init__(self, session: ServedSession, training_state: TrainingState) -> None:
        super().__init__(session, training_state)
        self.model: torch.nn.Module | None = None
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[Any] = []
        self._layout: TorchShardLayout | None = None
        self._gathered = MicroBatchSums()
        self._schedule_unit = 0

    # --- what the loop asks

    def _shard_store(self, order: SampleOrder, parts: int) -> TorchShardStore:
        assert self.model is not None
        return TorchShardStore(self.model, self.optimizers, self.schedulers, order, parts)

    def _assign_parts(self, parts: int) -> None:
        assert self.model is not None
        self._layout = TorchShardLayout(self.model, parts)

    def _load_part(self, part: int, body: memoryview) -> None:
        assert self._layout is not None
        take_over(self._layout, part, body)

    def _gradients(self, current: TicketStep) -> Mapping[int, tuple[bytes, Sequence[Raw]]]:
        layout = self._layout
        assert layout is not None
        return {part: gradients_of(layout, part, current.weight, self._schedule_unit) for part in layout.parts}

    def _seed(self, seed: int) -> None:
        seed_everything(seed)

    def _check_micro_batch(self, current: TicketStep, number: int) -> None:
        step = current.granted.ticket.step
        if current.backwards <= number:
            raise UnusableBackward(
                f"a batch of step {step} ended without run.backward", do="call run.backward(loss) for every batch"
            )
        if current.on_last_micro_batch and not current.committed:
            raise UnusableBackward(
                f"a batch of step {step} ended without optimizer.step", do="call optimizer.step() every time"
            )

    def _end_ticket(self, current: TicketStep) -> None:
        if current.abandoned:
            self._clear()
        # How the script calls its schedulers, as its batches show.
        if current.scheduled:
            self._schedule_unit = PER_STEP if not current.last_of_epoch else self._schedule_unit or PER_EPOCH

    def _clear(self) -> None:
        assert self.model is not None
        for parameter in self.model.parameters():
            parameter.grad = None

    # --- one ticket

    def backward(self, loss: torch.Tensor, weight: float | None) -> None:
        """See `Run.backward`; the gradient is that of this member's batch."""
        current = self.current
        if current is None:
            raise UnusableBackward("run.backward was called outside the training loop", do="call it in run.batches")
        if current.backwards > current.index:
            raise UnusableBackward(
                "run.backward was called twice for one batch", do="add the losses, then call it once"
            )
        if current.backwards == 0:
            self._gathered.begin()
        current.backwards += 1
        if current.abandoned:
            return
        samples = current.micro_batches[current.index].samples
        own = float(samples if weight is None else weight)
        current.weight += own
        if own:
            current.loss = current.loss + loss.detach() * own
        if current.on_last_micro_batch and self._slowdown is not None:
            self._slowdown.before_exchange(current.samples, samples)
        try:
            self._go_back(current, loss, own)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self.on_out_of_memory(error)
            return
        if current.on_last_micro_batch:
            self._complete(current)

    def _go_back(self, current: TicketStep, loss: torch.Tensor, own: float) -> None:
        assert self.model is not None
        self._gathered.lend(self.model.parameters())
        if own:
            (loss * own).backward()  # type: ignore[no-untyped-call]
        if not current.on_last_micro_batch:
            self._gathered.take_back(self.model.parameters())

    def _complete(self, current: TicketStep) -> None:
        """All pieces are summed up: make it the mean."""
        assert self.model is not None
        for parameter in self.model.parameters():
            if parameter.grad is not None and current.weight > 0:
                parameter.grad.div_(current.weight)
        if self._slowdown is not None:
            self._slowdown.after_backward()

    # --- what guards ask (see shoal.torch.gradients.guards)

    @property
    def applied(self) -> bool:
        return self.committed

    def schedules(self, scheduler: Any, *args: Any, **kwargs: Any) -> int:  # noqa: ARG002
        """Schedulers step on the servers; that the script wanted its to is noted here."""
        if args or kwargs:
            raise self.unsupported("a schedule that needs a metric", "use one that counts steps or epochs")
        if not self._serving and self.current is not None and self.current.committed:
            self.current.scheduled = True
        return int(self._serving or self.current is None)

    @property
    def has_gradient(self) -> bool:
        return self.current is not None and self.current.backwards > 0

    @property
    def accumulating(self) -> bool:
        current = self.current
        return current is not None and current.backwards > 0 and not current.committed and not current.abandoned

    def apply(self, optimizer: torch.optim.Optimizer, real: Callable[[], Any]) -> Any:
        """On a server, step; on a trainer, push the gradient when the last optimizer is asked to step."""
        if self._serving:
            return real()
        current = self.current
        if current is None:
            return outside(optimizer)
        if current.abandoned or not current.on_last_micro_batch:
            return None
        if current.committed:
            raise UnusableBackward("optimizer.step was called twice in one step", do="call it once for each batch")
        if current.backwards <= current.index:
            raise UnusableBackward("optimizer.step came before run.backward", do="call run.backward(loss) first")
        current.stepped.add(id(optimizer))
        if len(current.stepped) == len(self.optimizers):
            self._push(current)
        return None

    def apply_scaled(self, optimizer: torch.optim.Optimizer, real: Callable[[], Any]) -> Any:  # noqa: ARG002
        self.refuse_scaler()

    def refuse_scaler(self) -> None:
        raise self.unsupported("GradScaler", "train in bfloat16, which needs no scaler")
