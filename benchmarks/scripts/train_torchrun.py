"""DistributedDataParallel under torchrun elastic, with a checkpoint every few steps to come back from."""

from __future__ import annotations

import itertools
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks import job as jobs

CHECKPOINT_EVERY_STEPS = 10
COLLECTIVE_TIMEOUT = timedelta(seconds=10)

job = jobs.from_arguments()
dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
rank, size = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(jobs.build_model(job.model))
optimizer = jobs.build_optimizer(model)
dataset = jobs.build_dataset()
sampler = DistributedSampler(dataset, drop_last=True)
loader = DataLoader(dataset, batch_size=job.batch // size, sampler=sampler, drop_last=True)

checkpoint = job.directory / "checkpoint.pt"
step = 0
if checkpoint.exists():
    saved = torch.load(checkpoint, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
world = os.environ["MASTER_PORT"]  # a new one each rendezvous; restart counts differ from agent to agent

while True:
    sampler.set_epoch(step // len(loader))
    for images, labels in itertools.islice(loader, step % len(loader), None):
        loss = job.forward(model, images, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        job.committed(step, world=world, size=size, samples=len(images))
        step += 1
        if rank == 0 and step % CHECKPOINT_EVERY_STEPS == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, checkpoint.with_suffix(".part"))
            checkpoint.with_suffix(".part").rename(checkpoint)
