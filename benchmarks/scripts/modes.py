"""The job of `benchmarks.synchrony`: a small network that logs the time and loss of every batch."""

import json
import os
import time
from pathlib import Path

import torch

import shoal.torch as shoal

torch.set_num_threads(1)
torch.manual_seed(0)
generator = torch.Generator().manual_seed(1)
x = torch.randn(2048, 8, generator=generator)
y = torch.sin(2 * x[:, :2].sum(1, keepdim=True)) + 0.3 * x[:, 2:3]
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh())
model.append(torch.nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), 3e-3)

run = shoal.join()
model, optimizer = run.attach(model, optimizer)
out = Path(os.environ["MODES_OUT"]) / f"{run.member.replace('/', '-')}.jsonl"
with out.open("a", buffering=1) as log:
    for a, b in run.batches(torch.utils.data.TensorDataset(x, y), 96, int(os.environ["MODES_EPOCHS"]), seed=3):
        loss = torch.nn.functional.mse_loss(model(a), b)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if run.committed and run.share:
            log.write(json.dumps([time.monotonic(), run.share, loss.item()]) + "\n")
