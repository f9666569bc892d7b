"""The language model of `models.py` in every form of data parallelism, alone and with tensor and
sequence parallelism.

A mesh has the axis "tp" last where there is tensor parallelism; all other axes are for data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import shardmesh as sm
from shardmesh import P, Replicate, Shard
from shardmesh.mesh.comm.group import CollectiveRecord
from shardmesh.parallel import data_parallel, fully_shard, parallelize
from tests.device import DEVICE
from tests.sharding.parallel.models import Config, SmallGPT, TransformerBlock, gpt, loss_of, tokens
from tests.sharding.parallel.plans import SPLIT, megatron, on_axes
from tests.sharding.ranks import collectives

Used = dict[str, tuple[int, int]]  # by collective: calls, and bytes that a rank receives

# another batch in each of three steps; sequences are odd, so uneven over tp
STEPS = 20
BATCHES = 3
S = 5
EVEN = Config()
UNEVEN = Config(vocabulary=13, d=10, heads=3, f=15, bias=True)


@dataclass(frozen=True)
class Composition:
    """A composition.

    Attributes:
        form: a row of the table of data parallelism.
        tp: "" for none, "tp" for tensor parallelism, "sp" with activations between layers split by
            sequence.
        inputs: "global" sharded tensors, or "plain" ones that differ between ranks; with tp through
            torch's styles.
        config: shapes of the model.
        shape: of the mesh.
    """

    form: str
    tp: str
    inputs: str
    config: Config
    shape: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        data = ("dp", "fsdp", "more")
        return (*data[: len(self.shape) - 1], "tp") if self.tp else data[: len(self.shape)]

    @property
    def data(self) -> tuple[str, ...]:
        """Return the axes over which the batch is sharded."""
        return tuple(axis for axis in self.names if axis != "tp")

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(self.names, self.shape, strict=True))

    @property
    def b(self) -> int:
        """Number of samples: uneven wherever ranks may have different numbers."""
        ranks = math.prod(self.sizes[axis] for axis in self.data)
        return ranks + 1 if self.inputs == "global" and self.config != EVEN else max(ranks, 4)

    def __str__(self) -> str:
        sizes = "even" if self.config == EVEN else "uneven"
        return "-".join(
            [self.form, self.tp or "alone", self.inputs, sizes, "x".join(map(str, self.shape))]
        )


# -- making it -------------------------------------------------------------------------------------

Split = Callable[..., Any]

FORMS: dict[
    str, Callable[[tuple[str, ...]], dict[str, Any]]
] = {  # from the data axes to what `data_parallel` is told
    "ddp": lambda _: {},
    "zero1": lambda axes: {"optimizer": axes},
    "zero2": lambda axes: {"optimizer": axes, "gradient": axes},
    "fsdp": lambda axes: {"axes": axes},
    "hsdp": lambda axes: {"axes": axes[-1]},
    "hybrid": lambda axes: {"parameter": axes[-1], "gradient": axes, "optimizer": axes},
}


def split(
    model: nn.Module, mesh: sm.DeviceMesh, form: str, axes: tuple[str, ...], **options: Any
) -> nn.Module:
    said = FORMS[form](axes)
    layer: Split = fully_shard if "axes" in said else data_parallel
    return layer(model, mesh, units=TransformerBlock, src_data_rank=None, **said, **options)


def parallelized(case: Composition, mesh: sm.DeviceMesh, **options: Any) -> SmallGPT:
    """Return the model, parallelized for the case; `options` are those of data parallelism."""
    model = gpt(case.config).to(DEVICE)
    if case.tp and case.inputs == "global":
        parallelize(
            model,
            mesh,
            megatron(case.config, SPLIT if case.tp == "sp" else P()),
            src_data_rank=None,
        )
    elif case.tp:
        sm.compat.parallelize_module(model, mesh["tp"], torch_plan(case.tp), src_data_rank=None)
    return split(model, mesh, case.form, case.data, **options)  # type: ignore[return-value]


def torch_plan(tp: str) -> dict[str, Any]:
    """Return the plan of torch's tutorial: plain tensors between modules."""
    stream = Shard(1) if tp == "sp" else Replicate()
    plan: dict[str, Any] = {
        "embed_tokens": sm.compat.RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "layers.*.self_attn.[qkv]_proj": sm.compat.ColwiseParallel(),
        "layers.*.self_attn.o_proj": sm.compat.RowwiseParallel(output_layouts=stream),
        "layers.*.mlp.gate_proj": sm.compat.ColwiseParallel(),
        "layers.*.mlp.up_proj": sm.compat.ColwiseParallel(),
        "layers.*.mlp.down_proj": sm.compat.RowwiseParallel(output_layouts=stream),
        "lm_head": sm.compat.ColwiseParallel(input_layouts=stream, output_layouts=Replicate()),
    }
    if tp == "tp":
        return plan
    whole = {"input_layouts": (stream, None), "desired_input_layouts": (Replicate(), None)}
    return plan | {
        "norm": sm.compat.SequenceParallel(),
        "layers.*.*_layernorm": sm.compat.SequenceParallel(),
        "layers.*.self_attn": sm.compat.PrepareModuleInput(**whole),
        "layers.*.mlp": sm.compat.PrepareModuleInput(
            input_layouts=stream, desired_input_layouts=Replicate()
        ),
    }


# -- training it -----------------------------------------------------------------------------------


def batch_of(config: Config, b: int, step: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a step, each [b, s]."""
    return tokens(b, S, config.vocabulary, seed=step % BATCHES)


def batch(case: Composition, mesh: sm.DeviceMesh, step: int) -> list[Any]:
    """Return this rank's part, or sharded tensors."""
    pair = batch_of(case.config, case.b, step)
    if case.inputs == "global":
        return [sm.device_put(x, mesh, P(case.data or None), src_data_rank=None) for x in pair]
    ranks = math.prod(case.sizes[axis] for axis in case.data)
    return [x.chunk(ranks)[_place(case, mesh)] for x in pair]


def _place(case: Composition, mesh: sm.DeviceMesh) -> int:
    """Return the index of this rank's part of the batch."""
    place = 0
    for axis in case.data:
        place = place * case.sizes[axis] + mesh.get_local_rank(axis)
    return place


def whole(x: Any) -> Tensor:
    return x.detach().full_tensor() if isinstance(x, sm.ShardedTensor) else x.detach()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with an eps as large as the gradients; with a small eps, steps would not show
    gradients that are wrong by a factor.
    """
    return torch.optim.AdamW(model.parameters(), lr=3e-2, eps=1e-2)


def loss_in(case: Composition, model: nn.Module, mesh: sm.DeviceMesh, step: int) -> Tensor:
    inputs, targets = batch(case, mesh, step)
    return loss_of(model(inputs), targets)


def stepped(optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    """Take an optimizer step and return the loss."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return whole(loss)


def train(
    case: Composition, mesh: sm.DeviceMesh, model: nn.Module
) -> tuple[Tensor, list[Used], dict[str, int]]:
    """Return the losses, the communication of each step's forward and backward, and the rank's
    position.
    """
    optimizer, losses, all_used = adamw(model), [], []
    for step in range(STEPS):
        with collectives() as records:
            loss = loss_in(case, model, mesh, step)
            loss.backward()
        all_used.append(summed_up(records))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(whole(loss))
    return (
        torch.stack(losses),
        all_used,
        dict(zip(mesh.axis_names, mesh.coordinate or (), strict=True)),
    )


def by_one_process(case: Composition) -> Tensor:
    """Return the losses of one process."""
    return _by_one_process(case.config, case.b)


@cache
def _by_one_process(config: Config, b: int) -> Tensor:
    model, losses = gpt(config).to(DEVICE), []
    optimizer = adamw(model)
    for step in range(STEPS):
        inputs, targets = batch_of(config, b, step)
        losses.append(stepped(optimizer, loss_of(model(inputs), targets)))
    return torch.stack(losses)


def on(case: Composition, program: Callable[[sm.DeviceMesh], Any]) -> list[Any]:
    """Run `program(mesh)` on every rank of the case's mesh."""
    return on_axes(case.shape, case.names, program)


def used(step: Callable[[], Any]) -> Used:
    """Return calls and bytes received of each collective in a function."""
    with collectives() as records:
        step()
    return summed_up(records)


def summed_up(records: Sequence[CollectiveRecord]) -> Used:
    total: Used = {}
    for record in records:
        calls, received = total.get(record.op, (0, 0))
        total[record.op] = calls + 1, received + record.bytes_received
    return total
