"""The training loop underneath a run: it gives out batches, exchanges gradients and commits steps."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from shoal.core import pulse
from shoal.core.world import World
from shoal.errors import OutOfStep, UnusableBackward
from shoal.torch.buckets import Buckets, StepAborted
from shoal.torch.feed import Feed, IndexedFeed
from shoal.torch.keeper import StateKeeper
from shoal.torch.statistics import Statistics
from shoal.torch.turn import Turn
from shoal.worker.exchange import Exchange, ExchangeBroken
from shoal.worker.session import Session
from shoal.worker.shadow import Blank
from shoal.worker.solo import Solo


class Trainer:
    """Does the steps of one loop. Optimizers, schedulers, scalers and BatchNorm layers ask it what may happen now."""

    def __init__(self, session: Session | Solo, keeper: StateKeeper) -> None:
        self.model: torch.nn.Module | None = None
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[Any] = []
        self.synchronised = False
        self.feed: Feed | None = None
        self.turn: Turn | None = None
        self.metrics: dict[str, Any] = {}
        self._session, self._keeper = session, keeper
        self._buckets: Buckets | None = None
        self._statistics: Statistics | None = None
        self._last: Turn | None = None
        self._nested = False
        self._world_seen = 0
        self._usual_step_s = 0.0
        self._samples_per_s = 0.0
        self._committed_at = 0.0
        self._loss: float | None = None
        session.status = self._status

    @property
    def committed(self) -> bool:
        return self.turn is not None and self.turn.committed

    def train(self, feed: Feed, identity: str, seed: int) -> Iterator[Any]:
        """Yield this member's batches until the last step is committed by all."""
        assert self.model is not None
        session = self._session
        self._statistics = Statistics(self.model)
        self._keeper.loaded.append(self._statistics.keep)
        self._keeper.blanks, self._keeper.ends = self._blanks, self._ends
        self._choose_exchange()
        feed.start()
        session.begin(identity, self._keeper)
        over = False
        try:
            while not over:
                step = session.turn()
                self._undo_uncommitted()
                self._keeper.at_boundary(step)
                if feed.over(step):
                    over = session.finish()
                    continue
                yield from self._give_out(feed, step, seed)
            over = True
        finally:
            if not over and sys.exc_info()[0] is GeneratorExit:
                session.quit()
            feed.close()

    def _choose_exchange(self) -> None:
        """Our own ring for CPUs; NCCL, which it cannot replace, for GPUs."""
        assert self.model is not None
        session, wanted = self._session, self._session.settings.exchange
        on_gpu = any(p.is_cuda for p in self.model.parameters())
        backend = ("nccl" if on_gpu else "ring") if wanted == "auto" else wanted
        if backend != "ring" and isinstance(session, Session):
            from shoal.torch import collective

            session.exchange_over(partial(collective.connect, session.port, backend=backend))

    def _give_out(self, feed: Feed, step: int, seed: int) -> Iterator[Any]:
        """Give the loop's body its pieces of one step."""
        session = self._session
        world, exchange = session.world, session.exchange
        if world is None or exchange is None:
            return
        began = time.perf_counter()
        session.phase("data")
        ghosts = self._ghosts(world, step)
        pieces = feed.pieces(step, session.rank, world.size, ghosts)
        turn = Turn(step, feed.cursor(step).epoch, pieces, feed.nominal(step), exchange)
        self._last, self.turn = self.turn, turn
        _seed_everything(seed, step, session.rank)
        turn.data_s = time.perf_counter() - began
        session.phase("compute")
        turn.given_at = time.perf_counter()
        for number, piece in enumerate(pieces):
            turn.piece = number
            yield piece.batch
            if session.broken:
                return
            if turn.backwards <= number:
                raise UnusableBackward(
                    f"step {step} ended without run.backward", do="call run.backward(loss) for every batch"
                )
        if not turn.committed and not session.broken and turn.reduced:
            raise UnusableBackward(f"step {step} ended without optimizer.step", do="call optimizer.step() every time")

    def _ghosts(self, world: World, step: int) -> tuple[int, ...]:
        """The ranks without a share: newcomers in their first step here, and as long as they are catching up."""
        if self._world_seen != world.number:
            self._world_seen = world.number
            return world.ghosts
        before = self.turn
        if before is None or before.step != step - 1:
            return ()
        return tuple(rank for rank, p in enumerate(before.everybody) if p.wishes & pulse.GHOST)

    def _blanks(self) -> list[Blank] | None:
        """What a shadow exchanges in our stead; unknown if layers exchange too, or if lanes are dealt out."""
        if self.synchronised or not isinstance(self.feed, IndexedFeed):
            return None
        self._bucket_up()
        return self._buckets.blanks() if self._buckets is not None else None

    def _ends(self, everybody: tuple[pulse.Pulse, ...]) -> bool:
        step = max(p.step for p in everybody)
        return self.feed is None or self.feed.over(step + 1)

    def _undo_uncommitted(self) -> None:
        turn = self.turn
        if turn is not None and not turn.committed and self._statistics is not None:
            self._statistics.put_back()
            for parameter in self._buckets.parameters if self._buckets is not None else ():
                parameter.grad = None

    def _bucket_up(self) -> None:
        assert self.model is not None
        assert self._statistics is not None
        parameters = list(self.model.parameters())
        if self._buckets is None or not self._buckets.fits(parameters):
            if self._buckets is not None:
                self._buckets.close()
            self._buckets = Buckets(parameters, self._statistics.count)

    # --- one step

    def backward(self, loss: torch.Tensor, weight: float | None) -> None:
        """See `Run.backward`."""
        turn = self.turn
        if turn is None:
            raise UnusableBackward("run.backward was called outside the training loop", do="call it in run.batches")
        if turn.backwards > turn.piece:
            raise UnusableBackward(
                "run.backward was called twice for one batch", do="add the losses, then call it once"
            )
        turn.backwards += 1
        samples = turn.pieces[turn.piece].samples
        own = float(samples if weight is None else weight) if samples else 0.0
        turn.weight += own
        turn.loss = turn.loss + loss.detach() * own
        scaled = loss * (own / turn.nominal)
        if self._session.broken:
            return
        if turn.backwards == 1:
            self._bucket_up()
        if turn.last_piece:
            self._exchange(turn, scaled)
        elif own:
            scaled.backward()  # type: ignore[no-untyped-call]

    def _exchange(self, turn: Turn, scaled: torch.Tensor) -> None:
        assert self._buckets is not None
        assert self._statistics is not None
        session, exchange = self._session, turn.exchange
        try:
            gathered = exchange.gather(pulse.encode(self._pulse(turn)))
            self._buckets.arm(exchange)
            if not turn.empty or self.synchronised:
                scaled.backward()  # type: ignore[no-untyped-call]
            turn.compute_s = time.perf_counter() - turn.given_at
            session.phase("exchange")
            turn.everybody = pulse.decode(gathered.result())
            self._check(turn)
            session.agree(turn.everybody)
            total = sum(p.weight for p in turn.everybody)
            self._statistics.send(self._buckets, turn.weight / total if total else 0.0)
            self._buckets.finish(total / turn.nominal if total else 1.0, turn.empty)
            turn.wait_s = time.perf_counter() - turn.given_at - turn.compute_s
            turn.reduced = True
        except ExchangeBroken as broken:
            session.fail(broken)
        except StepAborted as aborted:
            cause = aborted.__cause__
            session.fail(cause if isinstance(cause, ExchangeBroken) else ExchangeBroken("the world broke"))
        finally:
            self._buckets.disarm()

    def _pulse(self, turn: Turn) -> pulse.Pulse:
        last = self._last
        assert self.feed is not None
        return pulse.Pulse(
            step=turn.step,
            samples=turn.samples,
            weight=turn.weight,
            loss=self._last_loss(),
            compute_s=last.compute_s if last else 0.0,
            data_s=last.data_s if last else 0.0,
            wait_s=last.wait_s if last else 0.0,
            prepared=self._session.announce(),
            wishes=self._session.wishes,
            more=self.feed.more(),
        )

    def _last_loss(self) -> float:
        """Our part of the mean loss of the step before; reading it now does not wait for a device."""
        last = self._last
        total = sum(p.weight for p in last.everybody) if last is not None and last.committed else 0.0
        return float(last.loss) / total if last is not None and total else 0.0

    def _check(self, turn: Turn) -> None:
        reason = pulse.desync(turn.everybody)
        if reason:
            raise OutOfStep("the members are not at the same step", where=f"world {self._world_seen}", why=reason)
        if self._last is not None and self._last.committed:
            self._loss = sum(p.loss for p in turn.everybody)

    # --- what guards ask (see shoal.torch.guard)

    @property
    def has_gradient(self) -> bool:
        return self.turn is not None and self.turn.reduced and not self._session.broken

    @property
    def accumulating(self) -> bool:
        turn = self.turn
        return turn is not None and turn.backwards > 0 and not turn.committed and not self._session.broken

    def apply(self, optimizer: torch.optim.Optimizer, real: Callable[[], Any]) -> Any:
        """One optimizer's step; the run's step is committed with the last one's."""
        if self._nested:
            return real()
        turn = self.turn
        if turn is None or self._outside(turn):
            return None
        if not turn.stepped and not self._may_apply():
            return None
        result = real()
        turn.stepped.add(id(optimizer))
        if len(turn.stepped) == len(self.optimizers):
            self._commit(turn)
        return result

    def apply_all(self, real: Callable[[], Any]) -> Any:
        """A scaler's step; whether it lets the optimizer step or not, the run's step is committed."""
        turn = self.turn
        if turn is None or self._outside(turn) or not self._may_apply():
            return None
        self._nested = True
        try:
            result = real()
        finally:
            self._nested = False
        self._commit(turn)
        return result

    def _outside(self, turn: Turn) -> bool:
        if self._session.broken or not turn.last_piece:
            return True
        if turn.committed:
            raise UnusableBackward("optimizer.step was called twice in one step", do="call it once for each batch")
        if not turn.reduced:
            raise UnusableBackward("optimizer.step came before run.backward", do="call run.backward(loss) first")
        return False

    def _may_apply(self) -> bool:
        self._keeper.before_change()
        return self._session.may_apply()

    def _commit(self, turn: Turn) -> None:
        assert self._statistics is not None
        assert self._buckets is not None
        assert self.feed is not None
        self._statistics.receive(self._buckets)
        self._statistics.keep()
        self.feed.committed(turn.everybody)
        self._session.commit()
        turn.committed = True
        self._measure(turn)

    def _measure(self, turn: Turn) -> None:
        now = time.monotonic()
        if self._committed_at:
            took_s = now - self._committed_at
            smooth = 0.9 if self._usual_step_s else 0.0
            self._usual_step_s = smooth * self._usual_step_s + (1 - smooth) * took_s
            rate = sum(p.samples for p in turn.everybody) / max(took_s, 1e-9)
            self._samples_per_s = smooth * self._samples_per_s + (1 - smooth) * rate
        self._committed_at = now

    def _status(self) -> dict[str, Any]:
        turn, feed = self.turn, self.feed
        return {
            "usual_step_s": self._usual_step_s,
            "epoch": turn.epoch if turn is not None else 0,
            "total_steps": feed.total if feed is not None else None,
            "share": turn.samples if turn is not None else 0,
            "loss": self._loss,
            "samples_per_s": self._samples_per_s,
            "metrics": {name: float(value) for name, value in list(self.metrics.items())},
        }

    def schedules(self, *_args: Any, **_kwargs: Any) -> bool:
        """Whether a scheduler's step counts."""
        return self.committed

    def refuse_scaler(self) -> None:
        """A scaler is welcome here."""

    # --- what synchronised BatchNorm asks (see shoal.torch.batchnorm)

    def exchange_now(self) -> tuple[Exchange | None, float]:
        """The exchange of this step, and whether this member's samples count (1) or not (0)."""
        turn = self.turn
        if turn is None or self._session.broken:
            return None, 1.0
        return turn.exchange, 0.0 if turn.empty else 1.0

    def lost(self, broken: ExchangeBroken) -> None:
        self._session.fail(broken)


def _seed_everything(seed: int, step: int, rank: int) -> None:
    """Random numbers of a step depend on the step and the rank alone, so that doing it again gives the same."""
    value = hash((seed, step, rank)) & 0x7FFF_FFFF_FFFF_FFFF
    torch.manual_seed(value)
    random.seed(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(value & 0xFFFF_FFFF)
