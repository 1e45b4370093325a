"""torchft: a lighthouse, a manager in each replica, live recovery from a peer."""

import logging
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo

from benchmarks import job as jobs

logging.basicConfig(level=logging.CRITICAL)
REPLICA = int(os.environ["REPLICA_GROUP_ID"])
REPLICAS = int(os.environ["NUM_REPLICA_GROUPS"])
OPERATION_TIMEOUT = timedelta(seconds=float(os.environ["BENCH_TORCHFT_TIMEOUT_S"]))


class Ddp(DistributedDataParallel):
    """DDP that continues after a failed Gloo all-reduce; the hook of torchft 0.2 asserts and ends every survivor."""

    @staticmethod
    def _comm_hook(state: Manager, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        state.allreduce(bucket.buffer()).wait()
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done


job = jobs.from_arguments()
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
model = jobs.build_model(job.model)
optimizer = jobs.build_optimizer(model)
manager = Manager(
    pg=ProcessGroupGloo(timeout=OPERATION_TIMEOUT),
    load_state_dict=lambda state: (
        model.load_state_dict(state["model"]),
        optimizer.load_state_dict(state["optimizer"]),
    ),
    state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
    min_replica_size=1,
    rank=0,
    world_size=1,
    store_addr="127.0.0.1",
    store_port=store.port,
    replica_id=f"bench_{REPLICA}",
    hostname="127.0.0.1",
    timeout=timedelta(seconds=10),
    quorum_timeout=timedelta(seconds=30),
    connect_timeout=timedelta(seconds=10),
    heartbeat_interval=timedelta(milliseconds=50),
    init_sync=False,
)
model = Ddp(manager, model)
optimizer = Optimizer(manager, optimizer)
dataset = jobs.build_dataset()
sampler = DistributedSampler(
    dataset, replica_rank=REPLICA, num_replica_groups=REPLICAS, group_rank=0, num_replicas=1, shuffle=True
)
loader = DataLoader(dataset, batch_size=job.batch // REPLICAS, sampler=sampler, drop_last=True)

while True:
    for images, labels in loader:
        step = manager.current_step()
        optimizer.zero_grad()
        loss = job.forward(model, images, labels)
        loss.backward()
        contributes = manager.is_participating()
        optimizer.step()
        if manager.current_step() > step:
            job.committed(
                manager.current_step() - 1,
                world=manager._quorum_id,
                size=manager.num_participants(),
                samples=len(images) if contributes else 0,
            )
