"""The training loop underneath a run: it gives out batches, exchanges gradients and commits steps."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch

from shoal.core import pulse
from shoal.core.goodput import AutoBatch
from shoal.core.world import World
from shoal.errors import OutOfStep, UnusableBackward
from shoal.torch.auto import Gained
from shoal.torch.buckets import Buckets, StepAborted
from shoal.torch.exact import TreeBuckets, exact_weight
from shoal.torch.feed import Feed, IndexedFeed
from shoal.torch.guard import forget_gradients
from shoal.torch.keeper import StateKeeper
from shoal.torch.memory import is_out_of_memory
from shoal.torch.meter import Meter
from shoal.torch.soundings import Soundings
from shoal.torch.statistics import Statistics
from shoal.torch.turn import Turn
from shoal.worker.exchange import Exchange, ExchangeBroken
from shoal.worker.pace import pace_of
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
        self._loss: float | None = None
        self.soundings = Soundings(session.settings.noise_every)
        self.meter = Meter(self.soundings.noise)
        self.auto: AutoBatch | None = None
        self._pace = pace_of(session.me, session.settings.emulate)
        session.status = self._status

    @property
    def committed(self) -> bool:
        return self.turn is not None and self.turn.committed

    def _progress(self, calls: int) -> int:
        """How far a scheduler that has been called so often goes on; once, if the batch is what the script asked for.

        Only state that all members share may decide it: they must agree.
        """
        turn, feed = self.turn, self.feed
        if self.auto is None or turn is None or feed is None:
            return 1
        ended = feed.over(turn.step + 1) or feed.cursor(turn.step + 1).epoch > turn.epoch
        at_every_step = not ended or calls > turn.epoch
        return turn.progress if at_every_step else 1

    def train(self, feed: Feed, identity: str, seed: int) -> Iterator[Any]:
        """Yield this member's batches until the last step is committed by all."""
        assert self.model is not None
        session = self._session
        self._statistics = Statistics(self.model)
        self._keeper.loaded.append(self._statistics.keep)
        self._keeper.blanks, self._keeper.ends = self._blanks, self._ends
        self._choose_exchange()
        feed.start()
        session.begin(identity, self._keeper, on_cpu=all(p.device.type == "cpu" for p in self.model.parameters()))
        over = False
        try:
            while not over:
                # First, because others may be given our state when the next world is entered.
                self._undo_uncommitted()
                step = session.turn()
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
        if self._pace is not None:
            self._pace.begin(step)
        ghosts = self._ghosts(world, step)
        pieces = feed.pieces(step, world, session.rank, ghosts)
        turn = Turn(
            step,
            feed.cursor(step).epoch,
            pieces,
            feed.nominal(step),
            exchange,
            world,
            feed.units,
            ghosts,
            first=not self.meter.commits,
            held=feed.held,
        )
        if self.turn is None or not self.turn.spoiled:
            self._last = self.turn
        self.turn = turn
        _seed_everything(seed, step, session.rank)
        turn.data_s = time.perf_counter() - began
        session.phase("compute")
        turn.given_at = time.perf_counter()
        for number, piece in enumerate(pieces):
            turn.piece = number
            if turn.shard is not None:
                _seed_everything(seed, step, turn.shard)
            yield piece.take()
            if session.broken or turn.spoiled:
                return
            if turn.backwards <= number:
                raise UnusableBackward(
                    f"step {step} ended without run.backward", do="call run.backward(loss) for every batch"
                )
        if not turn.committed and not session.broken and self._lacks_step(turn):
            raise UnusableBackward(f"step {step} ended without optimizer.step", do="call optimizer.step() every time")

    def _lacks_step(self, turn: Turn) -> bool:
        """Whether a turn that came to its end uncommitted did so because of the script."""
        return turn.reduced

    def _ghosts(self, world: World, step: int) -> tuple[int, ...]:
        """The ranks without a share: newcomers in their first step here, and as long as they are catching up."""
        if self._world_seen != world.number:
            self._world_seen = world.number
            return world.ghosts
        before = self.turn
        if before is not None and before.spoiled and before.step == step:
            return before.ghosts
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
            scaler = self._keeper.parts.get("scaler")
            if scaler is not None:
                forget_gradients(scaler)

    def _bucket_up(self) -> None:
        assert self.model is not None
        assert self._statistics is not None
        parameters = list(self.model.parameters())
        if self._buckets is None or not self._buckets.fits(parameters):
            if self._buckets is not None:
                self._buckets.close()
            exact = self.feed is not None and self.feed.held is not None
            self._buckets = (TreeBuckets if exact else Buckets)(parameters, self._statistics.count)

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
        if turn.spoiled:
            return
        samples = turn.pieces[turn.piece].samples
        own = float(samples if weight is None else weight) if samples else 0.0
        turn.own = own if turn.held is None else exact_weight(own)
        turn.weight += turn.own
        turn.loss = turn.loss + loss.detach() * turn.own
        scaled = loss * (turn.own / turn.nominal)
        if self._session.broken:
            return
        if turn.backwards == 1:
            self._bucket_up()
            turn.squares = self.soundings.begin(turn, self.optimizers)
            if isinstance(self._buckets, TreeBuckets) and turn.held is not None:
                self._buckets.begin(turn.held)
        try:
            self._go_back(turn, scaled)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self.too_large(error)
            if turn.sending and turn.world.size > 1:
                # Some of our gradients may be on their way: all of them repeat the step, in another world.
                self._session.fail(ExchangeBroken(f"{self._session.me} ran out of memory"))

    def _go_back(self, turn: Turn, scaled: torch.Tensor) -> None:
        if turn.last_piece:
            self._exchange(turn, scaled)
        elif isinstance(self._buckets, TreeBuckets):
            self._sum_shard(self._buckets, turn, scaled)
        elif turn.own:
            scaled.backward()  # type: ignore[no-untyped-call]
            self.soundings.halfway(turn, self._buckets.parameters if self._buckets is not None else ())

    def _sum_shard(self, buckets: TreeBuckets, turn: Turn, scaled: torch.Tensor) -> None:
        assert self._statistics is not None
        buckets.open()
        if turn.counts:
            scaled.backward()  # type: ignore[no-untyped-call]
        self._statistics.send(buckets, turn.own / turn.nominal)
        buckets.shut()
        # Each shard begins with what the buffers were at the last commit, wherever it is computed.
        self._statistics.put_back()

    def _exchange(self, turn: Turn, scaled: torch.Tensor) -> None:
        assert self._buckets is not None
        assert self._statistics is not None
        session, exchange = self._session, turn.exchange
        turn.sending = True
        if self._pace is not None:
            self._pace.before_exchange(turn.samples, turn.pieces[-1].samples)
        try:
            gathered = exchange.gather(pulse.encode(self._pulse(turn)))
            self._buckets.squares = turn.squares
            self._buckets.arm(exchange)
            if turn.counts or self.synchronised:
                scaled.backward()  # type: ignore[no-untyped-call]
            if self._pace is not None:
                self._pace.after_backward()
            turn.compute_s = time.perf_counter() - turn.given_at
            session.phase("exchange")
            turn.everybody = pulse.decode(gathered.result())
            self._check(turn)
            session.agree(turn.everybody)
            total = sum(p.weight for p in turn.everybody)
            mine = turn.weight / total if total else 0.0
            self._statistics.send(self._buckets, mine if turn.held is None else turn.own / turn.nominal)
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
            measured=last.measured if last else 0,
            micro=self.feed.micro or 0,
            **self.soundings.told(last, turn),
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
        dealt = sum(p.samples for p in turn.everybody)
        if isinstance(self.feed, IndexedFeed) and dealt != self.feed.nominal(turn.step):
            shares = ", ".join(str(p.samples) for p in turn.everybody)
            raise OutOfStep(
                f"the members do not agree on their shares of step {turn.step}",
                where=f"world {self._world_seen}",
                why=f"shares of {shares} make {dealt} of {self.feed.nominal(turn.step)} samples",
                do="this is an error of Shoal: please report it with the output of shoal why",
            )
        if self._last is not None and self._last.committed:
            self._loss = sum(p.loss for p in turn.everybody)

    # --- what a forward pass that does not fit asks (see shoal.torch.memory)

    @property
    def piece_samples(self) -> int:
        turn = self.turn
        inside = turn is not None and turn.given_at and not turn.committed and not turn.spoiled
        return turn.pieces[turn.piece].samples if turn is not None and inside else 0

    def too_large(self, error: BaseException) -> None:
        turn, feed, session = self.turn, self.feed, self._session
        samples = self.piece_samples
        if turn is None or feed is None or not feed.shrink(samples):
            raise error
        turn.spoiled = True
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        reason = f"{session.me} ran out of memory with {samples} samples at once; it computes {feed.micro} at most"
        sys.stderr.write(f"shoal: {reason}, and repeats step {turn.step}\n")
        session.decided(turn.step, "memory", {session.me: feed.micro or 0}, reason)

    # --- what guards ask (see shoal.torch.guard)

    @property
    def applied(self) -> bool:
        """Whether the optimizers' last step was a real one."""
        return self.committed

    def schedules(self, scheduler: Any, *args: Any, **kwargs: Any) -> int:  # noqa: ARG002
        """How many steps a scheduler is to make for the one that it was asked for."""
        return self._progress(getattr(scheduler, "last_epoch", 0)) if self.committed else 0

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
            return self._step(optimizer, real)
        turn = self.turn
        if turn is None or self._outside(turn):
            return None
        if not turn.stepped and not self._may_apply():
            return None
        result = self._step(optimizer, real)
        turn.stepped.add(id(optimizer))
        if len(turn.stepped) == len(self.optimizers):
            self._commit(turn)
        return result

    def _step(self, optimizer: torch.optim.Optimizer, real: Callable[[], Any]) -> Any:
        if self.auto is None or self.turn is None:
            return real()
        with Gained(optimizer, self.auto.gain_at(self.turn.step)):
            return real()

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
        if self._session.broken or not turn.last_piece or turn.spoiled:
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
        if any(p.weight for p in turn.everybody):
            self._statistics.receive(self._buckets)
        else:
            self._statistics.put_back()
        self._statistics.keep()
        self.soundings.learn(turn.everybody)
        before = self.auto.progress if self.auto is not None else 0.0
        decisions = self.feed.committed(turn.step, turn.world, turn.everybody)
        turn.progress = int(self.auto.progress) - int(before) if self.auto is not None else 1
        self._session.commit()
        turn.committed = True
        self.meter.commit(turn, self._session.rank, self.feed.balance, time.monotonic())
        for one in decisions:
            self._session.decided(one.step, one.what, one.values, one.reason, tell=self._session.is_writer)

    def _status(self) -> dict[str, Any]:
        turn, feed = self.turn, self.feed
        return {
            "epoch": turn.epoch if turn is not None else 0,
            "total_steps": feed.total if feed is not None else None,
            "share": turn.samples if turn is not None else 0,
            "loss": self._loss,
            "metrics": {name: float(value) for name, value in list(self.metrics.items())},
            **self.meter.status(),
        }

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


@cache
def _has_devices() -> bool:
    return torch.cuda.device_count() > 0 or torch.backends.mps.is_available() or torch.xpu.is_available()


def _seed_everything(seed: int, step: int, rank: int) -> None:
    """Random numbers of a step depend on the step and the rank alone, so that doing it again gives the same."""
    value = hash((seed, step, rank)) & 0x7FFF_FFFF_FFFF_FFFF
    if _has_devices():
        torch.manual_seed(value)
    else:
        # The general way takes a stack trace for each kind of device that is not there.
        torch.default_generator.manual_seed(value)
    random.seed(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(value & 0xFFFF_FFFF)
