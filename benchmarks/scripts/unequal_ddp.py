"""Plain DistributedDataParallel on machines of the same emulated speeds: every member has an equal share."""

from __future__ import annotations

import os
import time

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks import job as jobs
from shoal.core import emulation

job = jobs.from_arguments()
dist.init_process_group("gloo")
size, rank = dist.get_world_size(), dist.get_rank()
job.is_member(rank)
told = emulation.parse(os.environ.get("BENCH_EMULATE", ""))
model = DistributedDataParallel(jobs.build_model(job.model))
optimizer = jobs.build_optimizer(model)
dataset = jobs.build_dataset()
sampler = DistributedSampler(dataset, drop_last=True)
loader = DataLoader(dataset, batch_size=job.batch // size, sampler=sampler, drop_last=True)


def own_backward_s() -> float:
    """Return the time of a backward pass without its all-reduce, by which the emulated sleep is shortened."""
    images, labels = next(iter(loader))
    took_s = []
    for _ in range(5):
        with model.no_sync():
            loss = job.forward(model, images, labels)
            began = time.perf_counter()
            loss.backward()
            took_s.append(time.perf_counter() - began)
    optimizer.zero_grad()
    return min(took_s)


backward_s = own_backward_s()
step = 0
while True:
    sampler.set_epoch(step // len(loader))
    batches = iter(loader)
    for _ in range(len(loader)):
        began = time.perf_counter()
        images, labels = next(batches)
        loss = job.forward(model, images, labels)
        if told is not None:
            until = began + (told.cost_s(rank, len(images), step) or 0.0) - backward_s
            time.sleep(max(0.0, until - time.perf_counter()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        job.committed(step, world=0, size=size, samples=len(images))
        step += 1
        job.wait_for_turn(step)
