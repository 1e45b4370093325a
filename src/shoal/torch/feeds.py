"""Feed of a training loop, chosen by the script's arguments, the settings and the sync mode; refuses combinations."""

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
from shoal.errors import UnsupportedInExactMode, UnsupportedWithLocalSgd, UnusableData
from shoal.torch.data.fetch import loader_parts, share_loader
from shoal.torch.data.shard_feed import ShardFeed, ShardLoader
from shoal.torch.gradients.sync_batchnorm import GlobalBatchNorm
from shoal.torch.gradients.unattached import check_attached
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
            why="it reads samples by their number, and makes the batches itself",
            do="pass the loader's data set; workers= and collate= are arguments of run.batches"
            if loader
            else "use run.stream for data that can only be read from its start",
        )


class Feeds:
    """Factory of the feed of a run's loop; registers what belongs to the run's state in `training_state`."""

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
        """Return the feed of a map-style dataset, and the settings that members must agree on.

        `order` are the arguments of a `SampleOrder`, `loading` those of `loader_parts`; `ahead` is how many steps are
        read ahead.
        """
        _refuse_unindexed(dataset)
        exact = (self._settings.exact if exact is None else exact) or None
        requested = resolve_batch(self._settings.batch, order["size"], len(dataset))
        order = {"samples": len(dataset)} | order | {"size": requested.size}
        described = order | ({"exact": exact} if exact is not None else {})
        if isinstance(self._trainer, TorchLocalTrainer):
            self.refuse_locally(
                exact is not None, "exact=", "leave it out: members compute different updates in this mode"
            )
            self.refuse_locally(requested.bounds is not None, "batch=auto", "pass a number, or train with --sync step")
            return self._of_rounds(dataset, order, loading, shares, self._trainer.length), described
        batches, balancer = SampleOrder(**order), self.balancer(shares, ahead)
        balancer.settings.check(requested.size)
        balancer.allow_single_sample = exact is not None or not self._needs_pairs()
        if exact is not None and requested.bounds is not None:
            raise UnsupportedInExactMode(
                "exact mode needs a fixed global batch", do="set batch to a number, or leave exact= out"
            )
        if exact is not None:
            return ShardFeed(
                batches, ShardLoader(exact, *loader_parts(dataset, batches, *loading)), balancer
            ), described
        loader = share_loader(dataset, batches, *loading)
        if requested.bounds is not None:
            return self._of_auto_batch(batches, loader, balancer, requested.bounds), described
        return IndexedFeed(batches, loader, balancer), described

    def of_stream(self, layout: LaneLayout, reader: LaneReader, shares: str) -> StreamFeed:
        """Return the feed of a stream."""
        self.refuse_locally(True, "run.stream", "use run.batches, or train with --sync step")
        if self._settings.exact:
            raise UnsupportedInExactMode(
                "run.stream cannot be used in exact mode", do="use run.batches, or leave the setting exact out"
            )
        feed = StreamFeed(layout, reader, self.balancer(shares, ahead=0))
        self._training_state.parts["stream"] = feed
        return feed

    def _of_rounds(
        self, dataset: Any, order: dict[str, Any], loading: tuple[Any, ...], shares: str | None, length: int
    ) -> RoundFeed:
        names = ("epochs", "seed", "last", "shuffle")
        rounds = RoundOrder.of(order["samples"], order["size"], length, *(order[name] for name in names))
        # Little is read ahead compared with a round, so shares can change without waste.
        balancer = self.balancer(shares, 0, FIRST_ROUNDS)
        balancer.allow_single_sample = not self._needs_pairs()
        return RoundFeed(rounds, BatchLoader(*loader_parts(dataset, rounds, *loading)), balancer)

    def _of_auto_batch(
        self, order: SampleOrder, loader: ShareLoader, balancer: ShareBalancer, bounds: Bounds
    ) -> AutoFeed:
        trainer, settings = self._trainer, self._settings
        if not isinstance(trainer, TorchTrainer):
            raise trainer.unsupported("an automatic global batch", "set batch to a number")
        check_attached(trainer.model, trainer.optimizers)
        law = (
            lr_scaling_for(type(trainer.optimizers[0]).__name__)
            if settings.lr_scaling == "auto"
            else settings.lr_scaling
        )
        trainer.auto = AutoBatch(order.size, bounds, law, ahead=max(1, balancer.ahead))
        trainer.noise_sampler.every_steps = min(settings.noise_every_steps or LOOK_EVERY, LOOK_EVERY)
        feed = AutoFeed(order, loader, balancer, trainer.auto, trainer.noise_sampler.noise)
        self._training_state.parts["batch"] = feed
        return feed

    def balancer(self, shares: str | None, ahead: int, first_windows: tuple[int, ...] = FIRST_WINDOWS) -> ShareBalancer:
        """Return the balancer of the loop's shares; it becomes part of the run's state."""
        balancer = make_balancer(self._settings, shares, ahead, first_windows)
        self._training_state.parts["shares"] = balancer
        return balancer

    def _needs_pairs(self) -> bool:
        """Return whether the model cannot train on a single sample, as BatchNorm over a member's own share cannot."""
        modules = self._trainer.model.modules() if self._trainer.model is not None else ()
        return any(isinstance(m, _BatchNorm) and not isinstance(m, GlobalBatchNorm) for m in modules)

    def refuse_locally(self, requested: bool, what: str, do: str) -> None:
        """Raise UnsupportedWithLocalSgd if local SGD is on and the script requested what it cannot do."""
        if requested and isinstance(self._trainer, TorchLocalTrainer):
            raise UnsupportedWithLocalSgd(f"{what} cannot be used with --sync local:{self._trainer.length}", do=do)
