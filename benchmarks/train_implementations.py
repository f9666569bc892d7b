"""The implementations that `train.py` compares: one model, optimizer and batch, parallelized by
shardmesh and by torch.

Both of a pair do the same work on the same batch: data-parallel ranks take rows of it,
tensor-parallel ranks all of its rows and a part of the weights. Every process creates the model
from the same seed, so no weights are sent.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as dt
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.device_mesh import init_device_mesh as init_torch_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import parallel as theirs
from torch.nn.parallel import DistributedDataParallel
from train_model import Block, Model, Size, batch, cross_entropy, make_model

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import data_parallel, parallelize, rowwise, sequence_parallel

RATE = 1e-3


class Setup:
    """The process group, our and torch's meshes over it, and the optimizer's options: AdamW's
    defaults, or `fused=True`.
    """

    def __init__(self, size: Size, ranks: int, fused: bool = False, device: str = "cpu") -> None:
        self.size, self.device, shape = size, device, (ranks // 2, 2)
        self.options: dict[str, Any] = {"lr": RATE, "fused": True} if fused else {"lr": RATE}
        self.line = sm.init_device_mesh(device, (ranks,), axis_names=("dp",))
        self.tensor_line = sm.init_device_mesh(device, (ranks,), axis_names=("tp",))
        self.grid = sm.init_device_mesh(device, shape, axis_names=("fsdp", "tp"))
        self._shape = shape

    @cached_property
    def their_line(self) -> TorchMesh:
        return init_torch_mesh(self.device, (self.line.size(),), mesh_dim_names=("tp",))

    @cached_property
    def their_grid(self) -> TorchMesh:
        return init_torch_mesh(self.device, self._shape, mesh_dim_names=("fsdp", "tp"))

    def model(self) -> Model:
        """Return the model, the same in every process."""
        return make_model(self.size).to(self.device)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the whole batch."""
        x, y = batch(self.size, step)
        return x.to(self.device), y.to(self.device)

    def rows(self, step: int, part: int, parts: int) -> tuple[Tensor, Tensor]:
        """Return part number `part` of `parts` of the batch."""
        x, y = self.batch(step)
        return x.chunk(parts)[part], y.chunk(parts)[part]

    def own_rows(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the rows of this rank, for data parallelism over all ranks."""
        return self.rows(step, self.line.get_rank(), self.line.size())


@dataclass
class Training:
    """A model in training.

    Attributes:
        data: maps the number of a step to inputs and targets.
        context: creates the context manager in which forward and backward run.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    data: Callable[[int], tuple[Any, Any]]
    context: Callable[[], Any] = nullcontext
    steps: int = 0

    def step(self) -> Tensor:
        """Run forward, backward and the optimizer; return the loss."""
        inputs, targets = self.data(self.steps)
        with self.context():
            loss = cross_entropy(self.model(inputs), targets)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return loss.detach()


def loss_of_batch(loss: Any) -> float:
    """Return the loss of the whole batch. Communication: at least one all_reduce."""
    whole = loss.full_tensor() if hasattr(loss, "full_tensor") else loss.clone()
    dist.all_reduce(whole)
    return whole.item() / dist.get_world_size()


def with_adamw(
    setup: Setup,
    model: nn.Module,
    data: Callable[[int], tuple[Any, Any]],
    context: Callable[[], Any] = nullcontext,
) -> Training:
    return Training(model, torch.optim.AdamW(model.parameters(), **setup.options), data, context)


def alone(setup: Setup) -> Training:
    """Return the training of one process on the whole batch."""
    return with_adamw(setup, setup.model(), lambda step: setup.batch(step))


# -- data parallelism ------------------------------------------------------------------------------


def our_fsdp(setup: Setup, reshard: bool, compiled: bool = False) -> Training:
    model = sm.parallel.fully_shard(
        setup.model(), setup.line, units=Block, reshard_after_forward=reshard, src_data_rank=None
    )
    return with_adamw(setup, _compiled(model) if compiled else model, setup.own_rows)


def _compiled(model: Any) -> nn.Module:
    """Compile each block, in place."""
    for block in model.blocks:
        block.compile()
    return model


def our_fsdp_of_sharded_inputs(setup: Setup) -> Training:
    model = sm.parallel.fully_shard(setup.model(), setup.line, units=Block, src_data_rank=None)
    return with_adamw(
        setup, model, lambda step: _sharded(setup.own_rows(step), setup.line, P("dp"), setup.size)
    )


def _sharded(
    rows: tuple[Tensor, Tensor], mesh: sm.DeviceMesh, spec: P, size: Size
) -> tuple[Any, Any]:
    x, y = (sm.from_local(part, mesh, spec, shape=(size.b, size.s)) for part in rows)
    return x, y


def their_fsdp(setup: Setup, reshard: bool, compiled: bool = False) -> Training:
    model: Any = setup.model()
    if compiled:  # before fully_shard, so that its hooks are not compiled
        for i, block in enumerate(model.blocks):
            model.blocks[i] = torch.compile(block)
    return with_adamw(setup, _their_fsdp(model, setup.their_line, reshard), setup.own_rows)


def _their_fsdp(model: Any, mesh: TorchMesh, reshard: bool) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


def our_ddp(setup: Setup, compiled: bool = False) -> Training:
    model = data_parallel(setup.model(), setup.line, units=Block, src_data_rank=None)
    return with_adamw(setup, _compiled(model) if compiled else model, setup.own_rows)


def their_ddp(setup: Setup, compiled: bool = False) -> Training:
    return with_adamw(setup, _their_ddp(setup, compiled), setup.own_rows)


def _their_ddp(setup: Setup, compiled: bool = False) -> nn.Module:
    model = setup.model()
    return DistributedDataParallel(
        _compiled(model) if compiled else model, gradient_as_bucket_view=True
    )


def our_zero(setup: Setup) -> Training:
    model = data_parallel(
        setup.model(), setup.line, optimizer="dp", units=Block, src_data_rank=None
    )
    return with_adamw(setup, model, setup.own_rows)


def their_zero(setup: Setup) -> Training:
    model = _their_ddp(setup)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **setup.options
    )
    return Training(model, optimizer, setup.own_rows)


# -- tensor and sequence parallelism ---------------------------------------------------------------

_BY_POSITION = P(None, "tp")


def our_plan() -> dict[str, Any]:
    """Return the plan: activations between layers are sharded by position, logits by byte value."""
    return {
        "embedding": rowwise(out=_BY_POSITION),
        "blocks.*_norm": sequence_parallel(1, out=P()),
        **dict.fromkeys(("*.q", "*.k", "*.v", "*.gate", "*.up"), sm.parallel.colwise()),
        **dict.fromkeys(("*.o", "*.down"), rowwise(out=_BY_POSITION)),
        "norm": sequence_parallel(1, out=P()),
        "head": sm.parallel.colwise(),
    }


def their_block_plan() -> dict[str, Any]:
    """Return the same plan of a block in torch's styles, as in torch's tensor parallelism
    tutorial.
    """
    position, whole, colwise = dt.Shard(1), dt.Replicate(), theirs.ColwiseParallel()
    return {
        "attention_norm": theirs.SequenceParallel(),
        "mlp_norm": theirs.SequenceParallel(),
        "attention": theirs.PrepareModuleInput(
            input_layouts=(position, None), desired_input_layouts=(whole, None)
        ),
        "attention.q": colwise,
        "attention.k": colwise,
        "attention.v": colwise,
        "attention.o": theirs.RowwiseParallel(output_layouts=position),
        "mlp": theirs.PrepareModuleInput(input_layouts=(position,), desired_input_layouts=(whole,)),
        "mlp.gate": colwise,
        "mlp.up": colwise,
        "mlp.down": theirs.RowwiseParallel(output_layouts=position),
    }


def their_outer_plan() -> dict[str, Any]:
    position = dt.Shard(1)
    return {
        "embedding": theirs.RowwiseParallel(input_layouts=dt.Replicate(), output_layouts=position),
        "norm": theirs.SequenceParallel(),
        "head": theirs.ColwiseParallel(
            input_layouts=position, output_layouts=dt.Shard(-1), use_local_output=False
        ),
    }


def our_tensor_parallel(setup: Setup) -> Training:
    model = parallelize(setup.model(), setup.tensor_line, our_plan(), src_data_rank=None)
    return with_adamw(
        setup, model, lambda step: _sharded(setup.batch(step), setup.tensor_line, P(), setup.size)
    )


def their_tensor_parallel(setup: Setup) -> Training:
    model = _their_tensor_parallel(setup.model(), setup.their_line)
    return with_adamw(setup, model, lambda step: setup.batch(step), theirs.loss_parallel)


def _their_tensor_parallel(model: Any, mesh: TorchMesh) -> nn.Module:
    theirs.parallelize_module(model, mesh, their_outer_plan(), src_data_rank=None)
    for block in model.blocks:
        theirs.parallelize_module(block, mesh, their_block_plan(), src_data_rank=None)
    return model


def our_two_axes(setup: Setup) -> Training:
    model = parallelize(setup.model(), setup.grid, our_plan(), src_data_rank=None)
    sm.parallel.fully_shard(model, setup.grid, units=Block, src_data_rank=None)
    part, parts = setup.grid.get_local_rank("fsdp"), setup.grid.size("fsdp")
    return with_adamw(
        setup,
        model,
        lambda step: _sharded(setup.rows(step, part, parts), setup.grid, P("fsdp"), setup.size),
    )


def their_two_axes(setup: Setup) -> Training:
    mesh = setup.their_grid
    model = _their_fsdp(_their_tensor_parallel(setup.model(), mesh["tp"]), mesh["fsdp"], True)
    part, parts = mesh.get_local_rank("fsdp"), mesh.size(0)
    return with_adamw(
        setup, model, lambda step: setup.rows(step, part, parts), theirs.loss_parallel
    )


# -- all pairs -------------------------------------------------------------------------------------

Make = Callable[[Setup], Training]


@dataclass(frozen=True)
class Pair:
    """Two implementations of a form of parallelism; `goal` is the target for time of ours /
    theirs.
    """

    name: str
    ours: str
    theirs: str
    goal: float | None = None


FSDP, KEPT, INPUTS = "ours FSDP", "ours FSDP, kept", "ours FSDP, sharded inputs"
FSDP2, FSDP2_KEPT = "torch FSDP2", "torch FSDP2, kept"
COMPILED, FSDP2_COMPILED = "ours FSDP, compiled", "torch FSDP2, compiled"
MAKERS: dict[str, Make] = {
    FSDP: lambda setup: our_fsdp(setup, True),
    INPUTS: our_fsdp_of_sharded_inputs,
    FSDP2: lambda setup: their_fsdp(setup, True),
    KEPT: lambda setup: our_fsdp(setup, False),
    FSDP2_KEPT: lambda setup: their_fsdp(setup, False),
    COMPILED: lambda setup: our_fsdp(setup, True, compiled=True),
    FSDP2_COMPILED: lambda setup: their_fsdp(setup, True, compiled=True),
    "ours DDP": our_ddp,
    "torch DDP": their_ddp,
    "ours DDP, compiled": lambda setup: our_ddp(setup, compiled=True),
    "torch DDP, compiled": lambda setup: their_ddp(setup, compiled=True),
    "ours ZeRO-1": our_zero,
    "torch DDP + ZeRO": their_zero,
    "ours TP + SP": our_tensor_parallel,
    "DTensor TP + SP": their_tensor_parallel,
    "ours FSDP x TP": our_two_axes,
    "FSDP2 x DTensor TP": their_two_axes,
}
PAIRS = (
    Pair("FSDP", FSDP, FSDP2, 0.75),
    Pair("FSDP, inputs sharded", INPUTS, FSDP2, 0.75),
    Pair("FSDP, parameters kept for backward", KEPT, FSDP2_KEPT, 0.75),
    Pair("FSDP, blocks compiled", COMPILED, FSDP2_COMPILED, 1.0),
    Pair("DDP", "ours DDP", "torch DDP", 1.00),
    Pair("DDP, blocks compiled", "ours DDP, compiled", "torch DDP, compiled"),
    Pair("ZeRO-1", "ours ZeRO-1", "torch DDP + ZeRO", 0.95),
    Pair("TP + SP", "ours TP + SP", "DTensor TP + SP", 0.50),
    Pair("FSDP x TP + SP", "ours FSDP x TP", "FSDP2 x DTensor TP"),
)
