"""Plain DistributedDataParallel over Gloo."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks import job as jobs

job = jobs.from_arguments()
dist.init_process_group("gloo")
size = dist.get_world_size()
model = DistributedDataParallel(
    jobs.build_model(job.model), gradient_as_bucket_view=os.environ.get("BENCH_BUCKET_VIEW") == "1"
)
optimizer = jobs.build_optimizer(model)
dataset = jobs.build_dataset()
sampler = DistributedSampler(dataset, drop_last=True)
loader = DataLoader(dataset, batch_size=job.batch // size, sampler=sampler, drop_last=True)

step = 0
while True:
    sampler.set_epoch(step // len(loader))
    for images, labels in loader:
        job.wait_for_turn(step)
        loss = job.forward(model, images, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        job.committed(step, world=0, size=size, samples=len(images))
        step += 1
