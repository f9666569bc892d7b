"""Models and optimizers on meshes, and their comparison bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import shardmesh as sm
from shardmesh import Layout, P, ShardedTensor
from shardmesh.kernels.box import slices
from shardmesh.mesh.comm.current_world import current_world
from shardmesh.sharding.checkpoint.tree import leaves, name_of, without_stateful
from shardmesh.sharding.redistribute.plan.cross_mesh import box_on
from tests.device import DEVICE, on_device
from tests.sharding.ranks import place

State = dict[str, Any]
Build = Callable[[sm.DeviceMesh], State]


def on_ranks(n: int, program: Callable[[], Any]) -> list[Any]:
    def rank() -> Any:
        with on_device():
            return program()

    return sm.simulate(n)(rank)()


def mesh_over(ranks: Sequence[int], shape: Sequence[int], names: str) -> sm.DeviceMesh:
    numbers = torch.tensor(list(ranks), device="cpu").reshape(tuple(shape))
    return sm.DeviceMesh(DEVICE, numbers, axis_names=tuple(names))


# -- models on meshes ------------------------------------------------------------------------------


class Model(nn.Module):
    """Uneven sizes, a 0-d parameter and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.last = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).relu()) * self.scale


def with_optimizer(model: nn.Module) -> State:
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}


def ddp(mesh: sm.DeviceMesh) -> State:
    return with_optimizer(sm.parallel.data_parallel(Model(), mesh, src_data_rank=None))


def fsdp(mesh: sm.DeviceMesh) -> State:
    return with_optimizer(sm.parallel.fully_shard(Model(), mesh, src_data_rank=None))


def tensor_parallel(mesh: sm.DeviceMesh) -> State:
    plan = {"first": sm.parallel.colwise(axis="t"), "last": sm.parallel.rowwise(axis="t")}
    model = sm.parallel.parallelize(Model(), mesh, plan, src_data_rank=None)
    return with_optimizer(model)


def split_tensors(mesh: sm.DeviceMesh) -> State:
    """Return ragged and empty parts; without an optimizer, which processes import slowly."""
    whole = torch.arange(22.0).reshape(11, 2)
    wholes = {"x": whole, "y": torch.arange(3), "z": whole.double() + 0.5}
    return {name: place(mesh, x).redistribute(P(mesh.axis_names)) for name, x in wholes.items()}


def train(state: State, steps: int = 2) -> None:
    """Take steps with gradients that do not need a forward, different for each parameter."""
    for step in range(steps):
        for number, parameter in enumerate(state["model"].parameters()):
            parameter.grad = torch.full_like(parameter, 0.1 + number + step)
        state["optimizer"].step()
        state["optimizer"].zero_grad()


def whole_values(state: State) -> dict[str, torch.Tensor]:
    """Return the tensors of a state by name, whole."""
    named = ((name_of(path), leaf) for path, leaf in leaves(without_stateful(state)))
    return {
        name: (leaf.full_tensor() if isinstance(leaf, ShardedTensor) else leaf).clone()
        for name, leaf in named
        if isinstance(leaf, torch.Tensor)
    }


def assert_equals(state: State, expected: dict[str, torch.Tensor]) -> None:
    """Compare this rank's parts bit for bit."""
    named = {name_of(path): leaf for path, leaf in leaves(without_stateful(state))}
    tensors = {name: leaf for name, leaf in named.items() if isinstance(leaf, torch.Tensor)}
    assert tensors.keys() == expected.keys()
    rank = current_world().rank
    for name, leaf in tensors.items():
        part, whole = leaf, expected[name]
        if isinstance(leaf, ShardedTensor):
            if leaf.mesh.coordinate_of(rank) is None:
                continue
            part, whole = leaf.to_local(), part_at_box(whole, leaf._layout)
        assert bits_of(part) == bits_of(whole), name


def part_at_box(whole: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return this rank's part of a whole tensor."""
    return whole[slices(box_on(layout, current_world().rank))] if whole.dim() else whole


def bits_of(x: torch.Tensor) -> tuple[Any, ...]:
    flat = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return tuple(x.shape), x.dtype, bytes(flat.numpy()) if flat.numel() else b""


def lost_elements(state: State, alive: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return by name, of tensors with any, a mask of the elements that no rank of `alive` has."""
    masks: dict[str, torch.Tensor] = {}
    for path, leaf in leaves(without_stateful(state)):
        if isinstance(leaf, ShardedTensor):
            mask = torch.ones(leaf.shape or (1,), dtype=torch.bool, device="cpu")
            for rank in alive:
                mask[slices(box_on(leaf._layout, rank))] = False
            if mask.any():
                masks[name_of(path)] = mask
    return masks
