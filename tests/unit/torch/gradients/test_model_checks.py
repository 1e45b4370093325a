"""A model that torch distributes by itself is refused, whatever its dtype, with the line to change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from shoal.errors import UnusableExchange, UnusableModel
from shoal.torch.gradients.model_checks import refuse_distributed, refuse_exchange
from shoal.torch.run import Run
from shoal.worker.session.standalone import StandaloneSession


@pytest.fixture(autouse=True, scope="module")
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    # A thread keeps groups that it used with DTensor. A process that another thread forks would destroy them, and wait
    # for ever for threads of theirs that it does not have.
    torch._C._clear_DTensor_sharding_propagator_cache()
    dist.destroy_process_group()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(StandaloneSession(), "alone", str(tmp_path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_ddp_is_refused_by_attach(run: Run, dtype: torch.dtype) -> None:
    with pytest.raises(UnusableModel, match="wrapped in DistributedDataParallel") as raised:
        run.attach(DistributedDataParallel(torch.nn.Linear(2, 1, dtype=dtype)))
    assert raised.value.code == "S318"
    assert "remove `model = DistributedDataParallel(model)`" in raised.value.do
    assert raised.value.where.startswith("test_model_checks.py:")


def test_ddp_deep_inside_is_refused(run: Run) -> None:
    inner = DistributedDataParallel(torch.nn.Linear(2, 1))
    with pytest.raises(UnusableModel, match="DistributedDataParallel"):
        run.attach(torch.nn.Sequential(torch.nn.Linear(2, 2), inner))


def test_ddp_around_the_attached_model_is_refused_by_the_loop(run: Run) -> None:
    model = torch.nn.Linear(2, 1)
    run.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    wrapped = DistributedDataParallel(model)
    with pytest.raises(UnusableModel, match="DistributedDataParallel"):
        run.batches(TensorDataset(torch.ones(4, 2)), size=2)
    del wrapped


def test_fsdp_is_refused(run: Run) -> None:
    with pytest.raises(UnusableModel, match="FullyShardedDataParallel"):
        run.attach(FullyShardedDataParallel(torch.nn.Linear(2, 1), device_id=torch.device("cpu")))


@pytest.mark.parametrize("root_only", [True, False])
def test_fully_sharded_model_is_refused(run: Run, root_only: bool) -> None:
    mesh = init_device_mesh("cpu", (1,))
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    if not root_only:
        fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    with pytest.raises(UnusableModel, match="FSDPModule") as raised:
        run.attach(model)
    assert "remove `fully_shard(model)`" in raised.value.do


def test_dtensor_parameters_are_refused() -> None:
    model = torch.nn.Linear(2, 1)
    mesh = init_device_mesh("cpu", (1,))
    model.weight = torch.nn.Parameter(DTensor.from_local(model.weight.detach(), mesh))
    with pytest.raises(UnusableModel, match="weight is a DTensor"):
        refuse_distributed(model)


def test_dtensor_in_an_optimizer_is_refused() -> None:
    mesh = init_device_mesh("cpu", (1,))
    divided = torch.nn.Parameter(DTensor.from_local(torch.zeros(2), mesh))
    with pytest.raises(UnusableModel, match="a parameter of the optimizer is a DTensor"):
        refuse_distributed(torch.nn.Linear(2, 1), [torch.optim.SGD([divided], lr=0.1)])


def test_plain_model_is_accepted_beside_a_process_group() -> None:
    refuse_distributed(torch.nn.Linear(2, 1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_nccl_without_a_gpu_is_refused_with_a_code() -> None:
    with pytest.raises(UnusableExchange, match="exchange=nccl cannot work here") as refused:
        refuse_exchange("nccl")
    assert refused.value.code == "S104"
    assert "no GPU" in refused.value.why or "no NCCL" in refused.value.why
    for backend in ("auto", "ring", "gloo"):
        refuse_exchange(backend)
