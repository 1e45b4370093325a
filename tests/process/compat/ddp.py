"""A script that does not use Shoal: torch.distributed from the environment, DDP, checkpoints of its own."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

OUT = Path(os.environ["RECORDS"])
PLAN = json.loads(os.environ["FAULTS"])
CHECKPOINT = OUT / "checkpoint.pt"


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    log = (OUT / f"{rank}.{restarts}.jsonl").open("a", buffering=1)

    def record(event: str, **fields) -> None:
        base = {"event": event, "rank": rank, "size": size, "restarts": restarts, "pid": os.getpid()}
        log.write(json.dumps(base | {"at": time.time()} | fields) + "\n")

    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    first = 0
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT, weights_only=True)
        model.module.load_state_dict(saved["model"])
        first = saved["epoch"] + 1
    x = torch.randn(96, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = DistributedSampler(data, seed=1)
    record("ready", first=first, local_rank=int(os.environ["LOCAL_RANK"]), port=int(os.environ["MASTER_PORT"]))
    for epoch in range(first, PLAN["epochs"]):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=16, sampler=sampler):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        time.sleep(PLAN["pause_s"])
        if rank == 0:
            torch.save({"model": model.module.state_dict(), "epoch": epoch}, OUT / "part")
            os.replace(OUT / "part", CHECKPOINT)
        dist.barrier()
        record("epoch", epoch=epoch)
        # The test decides when the last epochs may run.
        while epoch == 3 and (OUT / "hold").exists():
            time.sleep(0.05)
    total = torch.cat([p.detach().flatten() for p in model.parameters()]).sum()
    record("done", sum=total.item())
    print("trained as rank", rank, "of", size, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
