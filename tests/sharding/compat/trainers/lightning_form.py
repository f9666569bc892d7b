"""A classifier trained in the form of Lightning Fabric's `ModelParallelStrategy`.

The strategy makes a mesh (data_parallel, tensor_parallel), calls the user's
`parallelize_fn(model, mesh)`, fills the modules that are on "meta", accumulates gradients without
synchronization, clips, and saves shards by `torch.distributed.checkpoint`.

The import lines are torch's; `tests.sharding.compat.trainers.imports` changes them.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

FEATURES, WIDTH, CLASSES, ROWS = 6, 8, 5, 4


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, 3 * WIDTH)
        self.w2 = nn.Linear(3 * WIDTH, WIDTH)
        self.w3 = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.w2(F.silu(self.w1(x)) * self.w3(x))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.Sequential(FeedForward(), FeedForward())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)))


def parallelize_fn(model: Classifier, device_mesh: DeviceMesh) -> Classifier:
    """Apply tensor parallelism, then FSDP2, as a user of the strategy does."""
    tp_mesh, dp_mesh = device_mesh["tensor_parallel"], device_mesh["data_parallel"]
    if tp_mesh.size() > 1:
        whole = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, tp_mesh, {"stem": whole, "head": whole})
        for block in model.blocks:
            plan = {"w1": ColwiseParallel(), "w2": RowwiseParallel(), "w3": ColwiseParallel()}
            parallelize_module(block, tp_mesh, plan)
    if dp_mesh.size() > 1:
        assert dp_mesh.ndim == 1
        for block in model.blocks:
            fully_shard(block, mesh=dp_mesh)
        fully_shard(model, mesh=dp_mesh)
    return model


def materialize(model: nn.Module) -> None:
    """Give the modules on "meta" memory and initial values."""
    for module in model.modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(t.is_meta for t in tensors):
            module.to_empty(device="cpu", recurse=False)
            module.reset_parameters()  # type: ignore[operator]


@contextmanager
def no_backward_sync(model: nn.Module, enabled: bool) -> Any:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(not enabled, recurse=False)
    yield
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(True, recurse=False)


def has_dtensors(model: nn.Module) -> bool:
    return any(isinstance(p, DTensor) for p in model.parameters())


def save_checkpoint(path: str, state: dict[str, Any]) -> None:
    """Save shards of modules and optimizers, and the rest on rank 0."""
    (model,) = [x for x in state.values() if isinstance(x, nn.Module)]
    converted, rest = {}, {}
    options = StateDictOptions(cpu_offload=True)
    for key, value in state.items():
        if isinstance(value, nn.Module):
            converted[key] = get_model_state_dict(value, options=options)
        elif isinstance(value, torch.optim.Optimizer):
            converted[key] = get_optimizer_state_dict(model, value, options=options)
        else:
            rest[key] = value
    writer = dcp.FileSystemWriter(path, single_file_per_rank=True)
    dcp.save(converted, storage_writer=writer)
    if dist.get_rank() == 0:
        torch.save(rest, f"{path}/meta.pt")
    dist.barrier()


def load_checkpoint(path: str, state: dict[str, Any]) -> None:
    model = state["model"]
    assert has_dtensors(model)
    module_state = {"model": get_model_state_dict(model)}
    dcp.load(module_state, storage_reader=dcp.FileSystemReader(path))
    model.load_state_dict(module_state["model"], strict=True)
    optim_state = {"optimizer": get_optimizer_state_dict(model, state["optimizer"])}
    dcp.load(optim_state, storage_reader=dcp.FileSystemReader(path))
    set_optimizer_state_dict(
        model,
        state["optimizer"],
        optim_state_dict=optim_state["optimizer"],
        options=StateDictOptions(cpu_offload=True),
    )
    state["step"] = torch.load(f"{path}/meta.pt")["step"]


def rows(step: int, part: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + part)
    x = torch.randn(2 * ROWS, FEATURES, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, CLASSES, (2 * ROWS,), generator=generator)


def initial_values() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return Classifier().double().state_dict()


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def train_step(model: Any, optimizer: Any, step: int, rank: int, ranks: int) -> list[float]:
    """Accumulate two microbatches, clip, step."""
    losses = []
    for part in range(2):
        x, y = (t.chunk(ranks)[rank] for t in rows(step, part))
        with no_backward_sync(model, enabled=part == 0):
            loss = F.cross_entropy(model(x), y) / 2
            loss.backward()
        losses.append(loss.item())
    norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    optimizer.step()
    optimizer.zero_grad()
    return [*losses, norm.item()]


def build(mesh: DeviceMesh) -> tuple[Classifier, Any]:
    with torch.device("meta"):
        model = Classifier().double()
    model = parallelize_fn(model, mesh)
    materialize(model)
    return model, optimizer_of(model)


def train(shape: tuple[int, int], folder: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data_parallel", "tensor_parallel"))
    data = mesh["data_parallel"]
    rank, ranks = data.get_local_rank(), data.size()
    model, optimizer = build(mesh)
    options = StateDictOptions(broadcast_from_rank0=True, full_state_dict=True, strict=True)
    set_model_state_dict(model, initial_values() if dist.get_rank() == 0 else {}, options=options)
    logs = [train_step(model, optimizer, step, rank, ranks) for step in range(2)]
    save_checkpoint(folder, {"model": model, "optimizer": optimizer, "step": 2})
    logs.append(train_step(model, optimizer, 2, rank, ranks))

    resumed, again = build(mesh)
    state: dict[str, Any] = {"model": resumed, "optimizer": again, "step": None}
    load_checkpoint(folder, state)
    assert train_step(resumed, again, state["step"], rank, ranks) == logs[-1]
    whole = get_model_state_dict(
        resumed, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    return {"norms": [log[-1] for log in logs], "parameters": whole}


def train_alone() -> dict[str, Any]:
    """Return what one process computes, without any parallelism."""
    model = Classifier().double()
    model.load_state_dict(initial_values())
    optimizer = optimizer_of(model)
    logs = [train_step(model, optimizer, step, 0, 1) for step in range(3)]
    return {"norms": [log[-1] for log in logs], "parameters": model.state_dict()}
