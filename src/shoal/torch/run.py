"""The run as a training script sees it."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch

from shoal.core import plan, pulse
from shoal.core.order import Order
from shoal.core.stream import LaneLayout
from shoal.core.world import World
from shoal.errors import NotAttached, OutOfStep, SecondLoop, UnusableBackward
from shoal.torch.batchnorm import synchronise
from shoal.torch.buckets import Buckets, StepAborted
from shoal.torch.feed import Feed, IndexedFeed, StreamFeed
from shoal.torch.fingerprint import fingerprint
from shoal.torch.guard import guard_optimizer, guard_scaler, guard_scheduler
from shoal.torch.keeper import StateKeeper, UserState
from shoal.torch.loader import ShareLoader
from shoal.torch.statistics import Statistics
from shoal.torch.stream import LaneReader
from shoal.torch.turn import Turn
from shoal.worker.exchange import Exchange, ExchangeBroken
from shoal.worker.session import Session
from shoal.worker.shadow import Blank
from shoal.worker.solo import Solo

NOTICE_S = 30.0


class Run:
    """This process's part in a run; alone, if it was not started by `shoal run`."""

    def __init__(self, session: Session | Solo, name: str, directory: str) -> None:
        self._session = session
        self._keeper = StateKeeper(session, name, directory)
        self._model: torch.nn.Module | None = None
        self._optimizers: list[torch.optim.Optimizer] = []
        self._buckets: Buckets | None = None
        self._statistics: Statistics | None = None
        self._synchronised = False
        self._feed: Feed | None = None
        self._turn: Turn | None = None
        self._last: Turn | None = None
        self._nested = False
        self._world_seen = 0
        self._usual_step_s = 0.0
        self._samples_per_s = 0.0
        self._committed_at = 0.0
        self._loss: float | None = None
        self._metrics: dict[str, Any] = {}
        session.status = self._status

    # --- where the run is

    @property
    def step(self) -> int:
        """How many steps have been committed."""
        return self._session.step or 0

    @property
    def epoch(self) -> int:
        """The epoch of the batch that was given out last."""
        return self._turn.epoch if self._turn is not None else 0

    @property
    def epoch_ended(self) -> bool:
        """Whether the step that was just committed was the last of its epoch."""
        turn, feed = self._turn, self._feed
        if turn is None or feed is None or not turn.committed:
            return False
        return feed.over(self.step) or feed.cursor(self.step).epoch > turn.epoch

    @property
    def world(self) -> int:
        """The number of the world that this member is in."""
        world = self._session.world
        return world.number if world is not None else 0

    @property
    def rank(self) -> int:
        return self._session.rank

    @property
    def size(self) -> int:
        """How many members the world has."""
        return self._session.size

    @property
    def share(self) -> int:
        """How many samples of the global batch this member has in this step."""
        return self._turn.samples if self._turn is not None else 0

    @property
    def member(self) -> str:
        return self._session.me

    @property
    def committed(self) -> bool:
        """Whether the last optimizer step counted; it is done again if not."""
        return self._turn is not None and self._turn.committed

    # --- what the script does

    def attach(self, *parts: Any) -> Any:
        """Take part in the training of a model: pass it with its optimizers, schedulers and scaler; get them back."""
        for part in parts:
            if isinstance(part, torch.nn.Module):
                if self._model is not None and self._model is not part:
                    raise NotAttached("two models were attached", do="put both into one torch.nn.Module")
                self._model = part
                self._keeper.parts["model"] = part
            elif isinstance(part, torch.optim.Optimizer):
                guard_optimizer(self, part)
                self._optimizers.append(part)
                self._keeper.parts[f"optimizer{len(self._optimizers)}"] = part
            elif isinstance(part, torch.amp.GradScaler):
                guard_scaler(self, part)
                self._keeper.parts["scaler"] = part
            elif part is not None:
                guard_scheduler(self, part)
                count = sum(name.startswith("scheduler") for name in self._keeper.parts)
                self._keeper.parts[f"scheduler{count + 1}"] = part
        return parts[0] if len(parts) == 1 else parts

    def state(self, name: str, save: Callable[[], Any], load: Callable[[Any], object]) -> None:
        """Make something of the script's own part of the state that joiners and checkpoints carry."""
        self._keeper.parts[f"user:{name}"] = UserState(save, load)

    def sync_batchnorm(self, model: torch.nn.Module) -> torch.nn.Module:
        """Make BatchNorm layers normalise over the whole global batch instead of each member's share."""
        self._synchronised = True
        return synchronise(model, self)

    def batches(
        self,
        dataset: Any,
        size: int,
        epochs: int = 1,
        seed: int = 0,
        *,
        shuffle: bool = True,
        last: Literal["keep", "drop"] = "keep",
        shares: str = "equal",
        micro: int | None = None,
        workers: int = 0,
        prefetch: int = 2,
        collate: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
    ) -> Iterator[Any]:
        """This member's share of every global batch of `size` samples, each sample once an epoch.

        `micro` cuts a share into batches of at most so many samples, which the loop's body sees one by one and which
        together make one step. `workers` processes read ahead.
        """
        order = Order(len(dataset), size, epochs, seed, last, shuffle)
        loader = ShareLoader(dataset, order, workers, prefetch, collate, micro, pin_memory)
        described = {"samples": len(dataset), "size": size, "epochs": epochs, "seed": seed, "last": last}
        return self._loop(IndexedFeed(order, loader, plan.parse(shares)), described | {"shuffle": shuffle}, seed)

    def stream(
        self,
        shards: Sequence[Any],
        size: int,
        epochs: int = 1,
        seed: int = 0,
        *,
        lanes: int | None = None,
        shuffle: bool = False,
        open: Callable[[Any], Any] | None = None,
        workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Iterator[Any]:
        """This member's part of global batches from shards that can only be read from their start."""
        layout = LaneLayout.of(len(shards), size, lanes, epochs, seed, shuffle)
        reader = LaneReader(shards, layout, collate, open, workers)
        feed = StreamFeed(layout, reader, plan.Equal())
        self._keeper.parts["stream"] = feed
        described = {"shards": len(shards), "size": size, "epochs": epochs, "lanes": layout.lanes, "seed": seed}
        return self._loop(feed, described | {"shuffle": shuffle}, seed)

    def backward(self, loss: torch.Tensor, weight: float | None = None) -> None:
        """Compute gradients and sum them over all members; on return they are those of the whole global batch.

        `loss` is the mean over this batch, which counts for `weight` (default: its number of samples).
        """
        turn = self._turn
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

    def log(self, **metrics: Any) -> None:
        """Show these numbers with the run."""
        if self.committed or self._turn is None:
            self._metrics.update((k, v.detach() if isinstance(v, torch.Tensor) else v) for k, v in metrics.items())

    def save(self, path: str | os.PathLike[str], what: Any = None) -> None:
        """Write the model's state_dict (or `what`) once, atomically, whichever member gets to do it."""
        path = os.fspath(path)
        if self._session.claim(path):
            if what is None:
                if self._model is None:
                    raise NotAttached("there is no model to save", do="call run.attach(model, optimizer) first")
                what = self._model.state_dict()
            part = f"{path}.{os.getpid()}.part"
            torch.save(what, part)
            os.replace(part, path)
            self._session.fulfil(path)

    def close(self) -> None:
        """Let go of connections; called by itself at the end of the process."""
        self._keeper.close()
        self._session.close()

    # --- the loop

    def _loop(self, feed: Feed, described: dict[str, Any], seed: int) -> Iterator[Any]:
        if self._feed is not None:
            raise SecondLoop("this run already has a training loop", do="make one loop over all epochs")
        if self._model is None or not self._optimizers:
            raise NotAttached("run.attach was not called", do="call run.attach(model, optimizer) before the loop")
        self._feed = feed
        return self._train(feed, self._identity(described), seed)

    def _identity(self, described: dict[str, Any]) -> str:
        assert self._model is not None
        parameters, buffers, optimizer, _ = fingerprint(self._model, self._optimizers[0], {}).split("-")
        parts = {"parameters": parameters, "buffers": buffers, "optimizer": optimizer} | described
        return ";".join(f"{key}={value}" for key, value in parts.items())

    def _train(self, feed: Feed, identity: str, seed: int) -> Iterator[Any]:
        assert self._model is not None
        session = self._session
        self._statistics = Statistics(self._model)
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
        assert self._model is not None
        session, wanted = self._session, self._session.settings.exchange
        on_gpu = any(p.is_cuda for p in self._model.parameters())
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
        self._last, self._turn = self._turn, turn
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
        before = self._turn
        if before is None or before.step != step - 1:
            return ()
        return tuple(rank for rank, p in enumerate(before.everybody) if p.wishes & pulse.GHOST)

    def _blanks(self) -> list[Blank] | None:
        """What a shadow exchanges in our stead; unknown if layers exchange too, or if lanes are dealt out."""
        if self._synchronised or not isinstance(self._feed, IndexedFeed):
            return None
        self._bucket_up()
        return self._buckets.blanks() if self._buckets is not None else None

    def _ends(self, everybody: tuple[pulse.Pulse, ...]) -> bool:
        step = max(p.step for p in everybody)
        return self._feed is None or self._feed.over(step + 1)

    def _undo_uncommitted(self) -> None:
        turn = self._turn
        if turn is not None and not turn.committed and self._statistics is not None:
            self._statistics.put_back()
            for parameter in self._buckets.parameters if self._buckets is not None else ():
                parameter.grad = None

    def _bucket_up(self) -> None:
        assert self._model is not None
        assert self._statistics is not None
        parameters = list(self._model.parameters())
        if self._buckets is None or not self._buckets.fits(parameters):
            if self._buckets is not None:
                self._buckets.close()
            self._buckets = Buckets(parameters, self._statistics.count)

    # --- one step

    def _exchange(self, turn: Turn, scaled: torch.Tensor) -> None:
        assert self._buckets is not None
        assert self._statistics is not None
        session, exchange = self._session, turn.exchange
        try:
            gathered = exchange.gather(pulse.encode(self._pulse(turn)))
            self._buckets.arm(exchange)
            if not turn.empty or self._synchronised:
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
        assert self._feed is not None
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
            more=self._feed.more(),
        )

    def _last_loss(self) -> float:
        """Our part of the mean loss of the step before; reading it now does not wait for a device."""
        last = self._last
        total = sum(p.weight for p in last.everybody) if last is not None and last.committed else 0.0
        return float(last.loss) / total if last is not None and total else 0.0

    def _check(self, turn: Turn) -> None:
        reason = pulse.desync(turn.everybody)
        if reason:
            raise OutOfStep("the members are not at the same step", where=f"world {self.world}", why=reason)
        if self._last is not None and self._last.committed:
            self._loss = sum(p.loss for p in turn.everybody)

    # --- what guards ask (see shoal.torch.guard)

    @property
    def has_gradient(self) -> bool:
        return self._turn is not None and self._turn.reduced and not self._session.broken

    @property
    def accumulating(self) -> bool:
        turn = self._turn
        return turn is not None and turn.backwards > 0 and not turn.committed and not self._session.broken

    def apply(self, optimizer: torch.optim.Optimizer, real: Callable[[], Any]) -> Any:
        """One optimizer's step; the run's step is committed with the last one's."""
        if self._nested:
            return real()
        turn = self._turn
        if turn is None or self._outside(turn):
            return None
        if not turn.stepped and not self._may_apply():
            return None
        result = real()
        turn.stepped.add(id(optimizer))
        if len(turn.stepped) == len(self._optimizers):
            self._commit(turn)
        return result

    def apply_all(self, real: Callable[[], Any]) -> Any:
        """A scaler's step; whether it lets the optimizer step or not, the run's step is committed."""
        turn = self._turn
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
        assert self._feed is not None
        self._statistics.receive(self._buckets)
        self._statistics.keep()
        self._feed.committed(turn.everybody)
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
        turn, feed = self._turn, self._feed
        return {
            "usual_step_s": self._usual_step_s,
            "epoch": turn.epoch if turn is not None else 0,
            "total_steps": feed.total if feed is not None else None,
            "share": turn.samples if turn is not None else 0,
            "loss": self._loss,
            "samples_per_s": self._samples_per_s,
            "metrics": {name: float(value) for name, value in list(self._metrics.items())},
        }

    # --- what synchronised BatchNorm asks (see shoal.torch.batchnorm)

    def exchange_now(self) -> tuple[Exchange | None, float]:
        """The exchange of this step, and whether this member's samples count (1) or not (0)."""
        turn = self._turn
        if turn is None or self._session.broken:
            return None, 1.0
        return turn.exchange, 0.0 if turn.empty else 1.0

    def lost(self, broken: ExchangeBroken) -> None:
        self._session.fail(broken)


def handle_sigterm(session: Session) -> None:
    """SIGTERM is a notice: hand over and go. A second one ends the process at once."""
    if threading.current_thread() is not threading.main_thread():
        return

    def leave(_signal: int, _frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # In a thread of its own: the main thread may hold the very lock that leaving needs.
        threading.Thread(target=session.leave, args=(NOTICE_S, "SIGTERM"), daemon=True).start()

    signal.signal(signal.SIGTERM, leave)


def _seed_everything(seed: int, step: int, rank: int) -> None:
    """Random numbers of a step depend on the step and the rank alone, so that doing it again gives the same."""
    value = hash((seed, step, rank)) & 0x7FFF_FFFF_FFFF_FFFF
    torch.manual_seed(value)
    random.seed(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(value & 0xFFFF_FFFF)
