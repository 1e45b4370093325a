"""Shoal: the loop of its README, with a commit log."""

from __future__ import annotations

import shoal.torch as shoal
from benchmarks import job as jobs

job = jobs.from_arguments()
run = shoal.join()
model = jobs.build_model(job.model)
model, optimizer = run.attach(model, jobs.build_optimizer(model))

for images, labels in run.batches(jobs.build_dataset(), size=job.batch, epochs=1_000_000, last="drop"):
    step = run.step
    job.wait_for_turn(step)
    loss = job.forward(model, images, labels)
    run.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if run.committed:
        job.committed(step, world=run.world, size=run.size, samples=run.share)
