"""Ray Train: DistributedDataParallel in a TorchTrainer, with a checkpoint every few steps to come back from."""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks import job as jobs

CHECKPOINT_EVERY_STEPS = 10
COLLECTIVE_TIMEOUT_S = 10


def train(config: dict[str, Any]) -> None:
    job = jobs.from_arguments(config["job"])
    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    model = prepare_model(jobs.build_model(job.model))
    optimizer = jobs.build_optimizer(model)
    dataset = jobs.build_dataset()
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, batch_size=job.batch // size, sampler=sampler, drop_last=True)
    step = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as where:
            saved = torch.load(Path(where, "checkpoint.pt"), weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    world = os.environ["MASTER_PORT"]  # a new one each time that the workers are started
    while True:
        sampler.set_epoch(step // len(loader))
        for images, labels in itertools.islice(loader, step % len(loader), None):
            loss = job.forward(model, images, labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            job.committed(step, world=world, size=size, samples=len(images))
            step += 1
            if step % CHECKPOINT_EVERY_STEPS == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                report(step, state if rank == 0 else None)


def report(step: int, state: dict[str, Any] | None) -> None:
    """Report from all workers, with the checkpoint of the first, as Ray Train requires."""
    with tempfile.TemporaryDirectory() as where:
        if state is not None:
            torch.save(state, Path(where, "checkpoint.pt"))
        ray.train.report({"step": step}, checkpoint=ray.train.Checkpoint(where) if state is not None else None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--storage", required=True)
    given, job = parser.parse_known_args()
    TorchTrainer(
        train,
        train_loop_config={"job": job},
        torch_config=TorchConfig(backend="gloo", timeout_s=COLLECTIVE_TIMEOUT_S),
        scaling_config=ray.train.ScalingConfig(num_workers=given.workers, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(
            storage_path=given.storage,
            failure_config=ray.train.FailureConfig(max_failures=-1),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


if __name__ == "__main__":
    main()
