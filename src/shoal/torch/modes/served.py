"""Training loop of PyTorch with parameter servers (``--sync async`` and ``--sync stale:K``).

See `worker.parameter_server.ticket_loop` for the loop. A trainer pushes its gradient when the script calls
`optimizer.step()`. The optimizers and schedulers themselves step on the servers (`server_shard`), which build them from
the same script; on a trainer they do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shoal.core.data.sample_order import SampleOrder
from shoal.errors import UnusableBackward
from shoal.torch.gradients.guards import missing_backward, refuse_step_outside_loop
from shoal.torch.gradients.micro_batch_sums import MicroBatchSums
from shoal.torch.gradients.oom_retry import is_out_of_memory
from shoal.torch.gradients.unattached import OptimizerWatch, check_loss, is_checked_step
from shoal.torch.modes.every_step import seed_everything
from shoal.torch.modes.server_shard import (
    PER_EPOCH,
    PER_STEP,
    TorchShardLayout,
    TorchShardStore,
    encode_push,
    load_part,
)
from shoal.torch.state.copies import ModelCopies
from shoal.worker.parameter_server.rpc import Raw
from shoal.worker.parameter_server.served_session import ServedSession
from shoal.worker.parameter_server.ticket_loop import TicketLoop, TicketStep
from shoal.worker.training.training_state import TrainingState


class TorchServedTrainer(TicketLoop):
    """Loop over tickets for PyTorch; also the gate of the guards (`StepGate`) and the OOM handler."""

    synchronised = False

    def __init__(self, session: ServedSession, training_state: TrainingState) -> None:
        super().__init__(session, training_state)
        self.model: torch.nn.Module | None = None
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[Any] = []
        self._layout: TorchShardLayout | None = None
        self._sums = MicroBatchSums()
        self._schedule_unit = 0
        self._saw_backward = False
        self._watch: OptimizerWatch | None = None
        self.copies = ModelCopies(self)

    def _start_loop(self) -> None:
        assert self.model is not None
        self._watch = OptimizerWatch(self.model, self.optimizers, self._step_in_progress)

    def _end_loop(self) -> None:
        if self._watch is not None:
            self._watch.close()

    def _step_in_progress(self) -> int | None:
        return self.current.granted.ticket.step if self.looping and self.current is not None else None

    # --- hooks of the loop

    def _shard_store(self, order: SampleOrder, parts: int) -> TorchShardStore:
        assert self.model is not None
        return TorchShardStore(self.model, self.optimizers, self.schedulers, order, parts)

    def _assign_parts(self, parts: int) -> None:
        assert self.model is not None
        self._layout = TorchShardLayout(self.model, parts)

    def _load_part(self, part: int, body: memoryview) -> None:
        assert self._layout is not None
        load_part(self._layout, part, body)

    def _gradients(self, current: TicketStep) -> Mapping[int, tuple[bytes, Sequence[Raw]]]:
        layout = self._layout
        assert layout is not None
        return {part: encode_push(layout, part, current.weight, self._schedule_unit) for part in layout.parts}

    def _seed(self, seed: int) -> None:
        seed_everything(seed)

    def _check_micro_batch(self, current: TicketStep, number: int) -> None:
        step = current.granted.ticket.step
        if current.backwards <= number:
            raise missing_backward(f"a batch of step {step} ended without run.backward", self._has_script_gradients())
        if current.on_last_micro_batch and not current.committed:
            raise UnusableBackward(
                f"a batch of step {step} ended without optimizer.step", do="call optimizer.step() once per batch"
            )

    def _end_ticket(self, current: TicketStep) -> None:
        if current.abandoned:
            self._clear_gradients()
        # A call after a batch that did not end an epoch shows that the script steps its schedulers every step.
        if current.scheduled:
            self._schedule_unit = PER_STEP if not current.last_of_epoch else self._schedule_unit or PER_EPOCH

    def _has_script_gradients(self) -> bool:
        # Gradients of a previous ticket look the same, so only the first ticket can tell.
        if self._saw_backward or self.model is None:
            return False
        return any(p.grad is not None for p in self.model.parameters())

    def _clear_gradients(self) -> None:
        assert self.model is not None
        for parameter in self.model.parameters():
            parameter.grad = None

    # --- one ticket

    def backward(self, loss: torch.Tensor, weight: float | None) -> None:
        """Compute the gradient of this member's batch; see `Run.backward`."""
        current = self.current
        if current is None:
            raise UnusableBackward("run.backward was called outside the training loop", do="call it in run.batches")
        if current.backwards > current.index:
            raise UnusableBackward(
                "run.backward was called twice for one batch", do="add the losses, then call it once"
            )
        if current.backwards == 0:
            self._sums.clear()
        current.backwards += 1
        self._saw_backward = True
        if current.abandoned:
            return
        samples = current.micro_batches[current.index].samples
        if current.backwards == 1 and is_checked_step(current.granted.ticket.step):
            assert self.model is not None
            check_loss(loss, [self.model])
        counts = float(samples if weight is None else weight)
        current.weight += counts
        if counts:
            current.loss = current.loss + loss.detach() * counts
        if current.on_last_micro_batch and self._slowdown is not None:
            self._slowdown.before_exchange(current.samples, samples)
        try:
            self._backward_pass(current, loss, counts)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self.on_out_of_memory(error)
            return
        if current.on_last_micro_batch:
            self._finish_gradient(current)

    def _backward_pass(self, current: TicketStep, loss: torch.Tensor, counts: float) -> None:
        assert self.model is not None
        self._sums.put_into(self.model.parameters())
        if counts:
            (loss * counts).backward()  # type: ignore[no-untyped-call]
        if not current.on_last_micro_batch:
            self._sums.take_from(self.model.parameters())

    def _finish_gradient(self, current: TicketStep) -> None:
        """Divide the sum over micro-batches by the total weight."""
        assert self.model is not None
        for parameter in self.model.parameters():
            if parameter.grad is not None and current.weight > 0:
                parameter.grad.div_(current.weight)
        if self._slowdown is not None:
            self._slowdown.after_backward()

    # --- StepGate

    @property
    def applied(self) -> bool:
        return self.committed

    def scheduler_steps(self, scheduler: Any, *args: Any, **kwargs: Any) -> int:  # noqa: ARG002
        """Return 1 on a server, 0 on a trainer, where only the call itself is recorded."""
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
        """Step on a server; on a trainer, push the gradient once all optimizers were called."""
        if self._serving:
            return real()
        current = self.current
        if current is None:
            return refuse_step_outside_loop(optimizer)
        if current.abandoned or not current.on_last_micro_batch:
            return None
        if current.committed:
            raise UnusableBackward("optimizer.step was called twice in one step", do="call it once for each batch")
        if current.backwards <= current.index:
            raise missing_backward("optimizer.step came before run.backward", self._has_script_gradients())
        current.stepped.add(id(optimizer))
        if len(current.stepped) == len(self.optimizers):
            self._push(current)
        return None

    def apply_scaled(self, optimizer: torch.optim.Optimizer, real: Callable[[], Any]) -> Any:  # noqa: ARG002
        self.refuse_scaler()

    def on_scaled(self, scale: Callable[[torch.Tensor], torch.Tensor]) -> None:
        del scale
        self.refuse_scaler()

    def refuse_copies(self) -> None:
        raise self.unsupported("an average of the weights", "average checkpoints afterwards")

    def refuse_scaler(self) -> None:
        raise self.unsupported("GradScaler", "train in bfloat16, which needs no scaler")
