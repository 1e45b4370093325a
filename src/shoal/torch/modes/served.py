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

    def __init__(self, session: ServedSession, keeper: TrainingState) -> None:
        super().__init__(session, keeper)
        self.model: torch.nn.Module | None = None
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[Any] = []
        self._layout: TorchShardLayout | None = None
        self._gathered = MicroBatchSums()
        self._pace = 0

    # --- what the loop asks

    def _vault(self, order: SampleOrder, parts: int) -> TorchShardStore:
        assert self.model is not None
        return TorchShardStore(self.model, self.optimizers, self.schedulers, order, parts)

    def _lay_out(self, parts: int) -> None:
        assert self.model is not None
        self._layout = TorchShardLayout(self.model, parts)

    def _take_over(self, part: int, body: memoryview) -> None:
        assert self._layout is not None
        take_over(self._layout, part, body)

    def _gradients(self, turn: TicketStep) -> Mapping[int, tuple[bytes, Sequence[Raw]]]:
        layout = self._layout
        assert layout is not None
        return {part: gradients_of(layout, part, turn.weight, self._pace) for part in layout.parts}

    def _seed(self, seed: int) -> None:
        seed_everything(seed)

    def _check_piece(self, turn: TicketStep, number: int) -> None:
        step = turn.granted.ticket.step
        if turn.backwards <= number:
            raise UnusableBackward(
                f"a batch of step {step} ended without run.backward", do="call run.backward(loss) for every batch"
            )
        if turn.last_piece and not turn.committed:
            raise UnusableBackward(
                f"a batch of step {step} ended without optimizer.step", do="call optimizer.step() every time"
            )

    def _end_ticket(self, turn: TicketStep) -> None:
        if turn.abandoned:
            self._clear()
        # How the script calls its schedulers, as its batches show.
        if turn.scheduled:
            self._pace = PER_STEP if not turn.last_of_epoch else self._pace or PER_EPOCH

    def _clear(self) -> None:
        assert self.model is not None
        for parameter in self.model.parameters():
            parameter.grad = None

    # --- one ticket

    def backward(self, loss: torch.Tensor, weight: float | None) -> None:
        """See `Run.backward`; the gradient is that of this member's batch."""
        turn = self.turn
        if turn is None:
            raise UnusableBackward("run.backward was called outside the training loop", do="call it in run.batches")
        if turn.backwards > turn.piece:
            raise UnusableBackward(
                "run.backward was called twice for one batch", do="add the losses, then call it once"
            )
        if turn.backwards == 0:
            self._gathered.begin()
        turn.backwards += 1
        if turn.abandoned:
            return
        samples = turn.pieces[turn.piece].samples
        own = float(samples if weight is None else weight)
        turn.weight += own
        if own:
            turn.loss = turn.loss + loss.detach() * own
        if turn.last_piece and self._slow is not None:
            self._slow.before_exchange(turn.samples, samples)
        try:
            self._go_back(turn, loss, own)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self.too_large(error)
            return
        if turn.last_piece:
            self._complete(turn)

    def _go_back(self, turn: TicketStep, loss: torch.Tensor, own: float) -> None:
        assert self.model is not None
        self._gathered.lend(self.model.parameters())
        if own:
            (loss * own).backward()  # type: ignore[no-untyped-call]
        if not turn.last_piece:
            self._gathered.take_back(self.model.parameters())

    def _complete(self, turn: TicketStep) -> None:
        """All pieces are summed up: make it the mean."""
        assert self.model is not None
        for parameter in self.model.parameters():
            if parameter.grad is not None and turn.weight > 0:
                parameter.grad.div_(turn.weight)
        if self._slow is not None:
            self._slow.after_backward()

    # --- what guards ask (see shoal.torch.gradients.guards)

    @property
    def applied(self) -> bool:
        return self.committed

    def schedules(self, scheduler: Any, *args: Any, **kwargs: Any) -> int:  # noqa: ARG002
        """Schedulers step on the servers; that the script wanted its to is noted here."""
        if args or kwargs:
            raise self.unusable("a schedule that needs a metric", "use one that counts steps or epochs")
        if not self._serving and self.turn is not None and self.turn.committed:
            self.turn.scheduled = True
        return int(self._serving or self.turn is None)

    @property
    def has_gradient(self) -> bool:
        return self.turn is not None and self.turn.backwards > 0

    @property
    def accumulating(self) -> bool:
        turn = self.turn
        return turn is not None and turn.backwards > 0 and not turn.committed and not turn.abandoned

    def apply(self, optimizer: torch.optim.Optimizer, real: Callable[[], Any]) -> Any:
        """On a server, step; on a trainer, push the gradient when the last optimizer is asked to step."""
        if self._serving:
            return real()
        turn = self.turn
        if turn is None:
            return outside(optimizer)
        if turn.abandoned or not turn.last_piece:
            return None
        if turn.committed:
            raise UnusableBackward("optimizer.step was called twice in one step", do="call it once for each batch")
        if turn.backwards <= turn.piece:
            raise UnusableBackward("optimizer.step came before run.backward", do="call run.backward(loss) first")
        turn.stepped.add(id(optimizer))
        if len(turn.stepped) == len(self.optimizers):
            self._push(turn)
        return None

    def apply_scaled(self, optimizer: torch.optim.Optimizer, real: Callable[[], Any]) -> Any:  # noqa: ARG002
        self.refuse_scaler()

    def refuse_scaler(self) -> None:
        raise self.unusable("GradScaler", "train in bfloat16, which needs no scaler")
