"""Which feed a training loop has: what the script asks for, as far as the settings and the way of training allow it."""

from __future__ import annotations

from typing import Any

from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, IterableDataset

from shoal.core.batch.auto_batch import AutoBatch
from shoal.core.batch.goodput import Bounds, lr_scaling_for
from shoal.core.batch.setting import resolve_batch
from shoal.core.data.lanes import LaneLayout
from shoal.core.data.rounds import RoundOrder
from shoal.core.data.sample_order import SampleOrder
from shoal.core.shares.balancer import FIRST_WINDOWS, ShareBalancer
from shoal.errors import NotAttached, UnsupportedInExactMode, UnsupportedWithLocalSgd, UnusableData
from shoal.torch.data.fetch import reading, share_loader
from shoal.torch.gradients.sync_batchnorm import GlobalBatchNorm
from shoal.torch.gradients.tree_buckets import ShardFeed, ShardLoader
from shoal.torch.modes.every_step import TorchTrainer
from shoal.torch.modes.local_sgd import TorchLocalTrainer
from shoal.torch.modes.served import TorchServedTrainer
from shoal.worker.data.auto_batch_feed import LOOK_EVERY, AutoFeed
from shoal.worker.data.feed import Feed, IndexedFeed, StreamFeed, make_balancer
from shoal.worker.data.round_feed import FIRST_ROUNDS, BatchLoader, RoundFeed
from shoal.worker.data.share_loader import ShareLoader
from shoal.worker.data.stream_reader import LaneReader
from shoal.worker.training.training_state import TrainingState


def _refuse_unindexed(dataset: Any) -> None:
    loader = isinstance(dataset, DataLoader)
    if (
        loader
        or isinstance(dataset, IterableDataset)
        or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"))
    ):
        raise UnusableData(
            f"run.batches was given a {type(dataset).__name__}",
            why="it reads samples by their number, and makes batches of them by itself",
            do="pass the loader's data set; workers= and collate= are arguments of run.batches"
            if loader
            else "use run.stream for what can only be read from its start",
        )


class Feeds:
    """Makes the feed of a run's loop; what of it is state of the run is given to the training_state."""

    def __init__(
        self, trainer: TorchTrainer | TorchServedTrainer, training_state: TrainingState, settings: Any
    ) -> None:
        self._trainer, self._training_state, self._settings = trainer, training_state, settings

    def of_dataset(
        self,
        dataset: Any,
        order: dict[str, Any],
        loading: tuple[Any, ...],
        shares: str | None,
        exact: int | None,
        ahead: int,
    ) -> tuple[Feed, dict[str, Any]]:
        """A feed from a map-style dataset, and what members must agree on to share it."""
        _refuse_unindexed(dataset)
        exact = (self._settings.exact if exact is None else exact) or None
        wished = resolve_batch(self._settings.batch, order["size"], len(dataset))
        order = {"samples": len(dataset)} | order | {"size": wished.size}
        described = order | ({"exact": exact} if exact is not None else {})
        if isinstance(self._trainer, TorchLocalTrainer):
            self.refuse_locally(exact is not None, "exact=", "leave it out: members are to compute different things")
            self.refuse_locally(wished.bounds is not None, "batch=auto", "pass a number, or train with --sync step")
            return self._of_rounds(dataset, order, loading, shares, self._trainer.length), described
        batches, balance = SampleOrder(**order), self.balance(shares, ahead)
        balance.settings.check(wished.size)
        balance.allow_single_sample = exact is not None or not self._needs_pairs()
        if exact is not None and wished.bounds is not None:
            raise UnsupportedInExactMode(
                "exact mode has a fixed global batch", do="pass a number as batch, or leave exact= out"
            )
        if exact is not None:
            return ShardFeed(batches, ShardLoader(exact, *reading(dataset, batches, *loading)), balance), described
        loader = share_loader(dataset, batches, *loading)
        if wished.bounds is not None:
            return self._chosen(batches, loader, balance, wished.bounds), described
        return IndexedFeed(batches, loader, balance), described

    def of_stream(self, layout: LaneLayout, reader: LaneReader, shares: str) -> StreamFeed:
        self.refuse_locally(True, "run.stream", "use run.batches, or train with --sync step")
        if self._settings.exact:
            raise UnsupportedInExactMode(
                "a stream cannot be read in exact mode", do="use run.batches, or leave the setting exact out"
            )
        feed = StreamFeed(layout, reader, self.balance(shares, ahead=0))
        self._training_state.parts["stream"] = feed
        return feed

    def _of_rounds(
        self, dataset: Any, order: dict[str, Any], loading: tuple[Any, ...], shares: str | None, length: int
    ) -> RoundFeed:
        names = ("epochs", "seed", "last", "shuffle")
        rounds = RoundOrder.of(order["samples"], order["size"], length, *(order[name] for name in names))
        # What is read ahead of a round is little.
        balance = self.balance(shares, 0, FIRST_ROUNDS)
        balance.allow_single_sample = not self._needs_pairs()
        return RoundFeed(rounds, BatchLoader(*reading(dataset, rounds, *loading)), balance)

    def _chosen(self, order: SampleOrder, loader: ShareLoader, balance: ShareBalancer, bounds: Bounds) -> AutoFeed:
        trainer, settings = self._trainer, self._settings
        if not isinstance(trainer, TorchTrainer):
            raise trainer.unsupported("a global batch that is chosen while training", "pass a number as batch")
        if not trainer.optimizers:
            raise NotAttached("run.attach was not called", do="call run.attach(model, optimizer) before the loop")
        law = (
            lr_scaling_for(type(trainer.optimizers[0]).__name__)
            if settings.lr_scaling == "auto"
            else settings.lr_scaling
        )
        trainer.auto = AutoBatch(order.size, bounds, law, ahead=max(1, balance.ahead))
        trainer.noise_sampler.every_steps = min(settings.noise_every_steps or LOOK_EVERY, LOOK_EVERY)
        feed = AutoFeed(order, loader, balance, trainer.auto, trainer.noise_sampler.noise)
        self._training_state.parts["batch"] = feed
        return feed

    def balance(self, shares: str | None, ahead: int, first_windows: tuple[int, ...] = FIRST_WINDOWS) -> ShareBalancer:
        """What deals out the shares, by the settings; it is state of the run."""
        balance = make_balancer(self._settings, shares, ahead, first_windows)
        self._training_state.parts["shares"] = balance
        return balance

    def _needs_pairs(self) -> bool:
        """Whether the model refuses to train on a single sample: BatchNorm over a member's own share does."""
        modules = self._trainer.model.modules() if self._trainer.model is not None else ()
        return any(isinstance(m, _BatchNorm) and not isinstance(m, GlobalBatchNorm) for m in modules)

    def refuse_locally(self, asked: bool, what: str, do: str) -> None:
        """Raise if the script asks for what local training cannot do."""
        if asked and isinstance(self._trainer, TorchLocalTrainer):
            raise UnsupportedWithLocalSgd(f"{what} cannot be used with --sync local:{self._trainer.length}", do=do)
