"""Shoal on machines of unequal speeds: the loop of its README, which waits for its turn between steps."""

from __future__ import annotations

import os

import shoal.torch as shoal
from benchmarks import job as jobs
from shoal.core import emulation

job = jobs.from_arguments()
number = emulation.member_number(os.environ["SHOAL_MEMBER"])
job.follow(number)
run = shoal.join()
job.is_member(number)
model = jobs.build_model(job.model)
model, optimizer = run.attach(model, jobs.build_optimizer(model))

for images, labels in run.batches(jobs.build_dataset(), size=job.batch, epochs=1_000_000, last="drop"):
    step = run.step
    loss = job.forward(model, images, labels)
    run.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if run.committed:
        job.committed(step, world=run.world, size=run.size, samples=run.share)
        # Not at the top of the body: waiting there would be measured as computing.
        job.wait_for_turn(step + 1)
