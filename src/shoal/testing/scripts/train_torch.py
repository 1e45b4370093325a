"""Task of the conformance suite in PyTorch."""

from __future__ import annotations

import torch

import shoal.torch as shoal
from shoal.testing.scripts.task import RunRecord, TrainingTask


def build(task: TrainingTask) -> torch.nn.Module:
    layers = torch.nn.Linear(task.features, task.width), torch.nn.Tanh(), torch.nn.Linear(task.width, 1)
    model = torch.nn.Sequential(*layers).double()
    with torch.no_grad():
        for parameter, start in zip(model.parameters(), task.start(), strict=True):
            parameter.copy_(torch.from_numpy(start.T))
    return model


def main() -> None:
    torch.set_num_threads(1)
    task, run = TrainingTask.read(), shoal.join()
    record = RunRecord(task, run.member)
    model = build(task)
    optimizer = torch.optim.SGD(model.parameters(), task.rate, task.momentum)
    model, optimizer = run.attach(model, optimizer)
    data = torch.utils.data.TensorDataset(*map(torch.from_numpy, task.data()))

    def parameters() -> list[torch.Tensor]:
        return [parameter.detach().t() for parameter in model.parameters()]

    record.ready()
    for x, y in run.batches(data, task.batch, task.epochs, seed=task.seed):
        step, world = run.step, run.world
        record.given(step, world, x[:, 0].tolist() if run.share else [])
        run.backward(torch.nn.functional.mse_loss(model(x[:, 1:]), y))
        optimizer.step()
        optimizer.zero_grad()
        if run.committed:
            record.commit(step, world, run.size, parameters())
    record.done(run.step, parameters())


if __name__ == "__main__":
    main()
