"""The language model of `models.py` in every form of data parallelism, by itself and with tensor and sequence parallelism.

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
from tests.device import DEVICE
from tests.sharding.parallel.models import GPT, Block, Config, gpt, loss_of, tokens
from tests.sharding.parallel.plans import SPLIT, megatron, on_axes
from tests.sharding.ranks import collectives

STEPS, BATCHES, S = 20, 3, 5  # another batch in each of three steps; sequences are odd, so uneven over tp
EVEN = Config()
UNEVEN = Config(vocabulary=13, d=10, heads=3, kv_heads=None, f=15, bias=True)


@dataclass(frozen=True)
class Case:
    """A composition.

    Attributes:
        form: a row of the table of data parallelism.
        tp: "" for none, "tp" for tensor parallelism, "sp" with activations between layers split by sequence.
        inputs: "global" sharded tensors, or "plain" ones, other ones on each rank; with tp through torch's styles.
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
        """The axes over which the batch is split."""
        return tuple(axis for axis in self.names if axis != "tp")

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(self.names, self.shape, strict=True))

    @property
    def b(self) -> int:
        """Samples: where ranks may have different numbers of them, they do."""
        ranks = math.prod(self.sizes[axis] for axis in self.data)
        return ranks + 1 if self.inputs == "global" and self.config is not EVEN else max(ranks, 4)

    def __str__(self) -> str:
        sizes = "even" if self.config is EVEN else "uneven"
        return "-".join([self.form, self.tp or "alone", self.inputs, sizes, "x".join(map(str, self.shape))])


# -- making it ---------------------------------------------------------------------------------------------------------

Split = Callable[..., Any]

FORMS: dict[str, Callable[[tuple[str, ...]], dict[str, Any]]] = {  # from the data axes to what `data_parallel` is told
    "ddp": lambda axes: {},
    "zero1": lambda axes: {"optimizer": axes},
    "zero2": lambda axes: {"optimizer": axes, "gradient": axes},
    "fsdp": lambda axes: {"axes": axes},
    "hsdp": lambda axes: {"axes": axes[-1]},
    "hybrid": lambda axes: {"parameter": axes[-1], "gradient": axes, "optimizer": axes},
}


def split(model: nn.Module, mesh: sm.DeviceMesh, form: str, axes: tuple[str, ...], **options: Any) -> nn.Module:
    said = FORMS[form](axes)
    layer: Split = sm.fully_shard if "axes" in said else sm.data_parallel
    return layer(model, mesh, units=Block, src_data_rank=None, **said, **options)


def made(case: Case, mesh: sm.DeviceMesh, **options: Any) -> GPT:
    """The model, laid out as the case says; `options` are those of data parallelism."""
    model = gpt(case.config).to(DEVICE)
    if case.tp and case.inputs == "global":
        sm.parallelize(model, mesh, megatron(case.config, SPLIT if case.tp == "sp" else P()), src_data_rank=None)
    elif case.tp:
        sm.parallelize_module(model, mesh["tp"], torch_plan(case.tp), src_data_rank=None)
    return split(model, mesh, case.form, case.data, **options)  # type: ignore[return-value]


def torch_plan(tp: str) -> dict[str, Any]:
    """As torch's tutorial has it: plain tensors between modules."""
    stream = Shard(1) if tp == "sp" else Replicate()
    plan: dict[str, Any] = {
        "embed_tokens": sm.RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "layers.*.self_attn.[qkv]_proj": sm.ColwiseParallel(),
        "layers.*.self_attn.o_proj": sm.RowwiseParallel(output_layouts=stream),
        "layers.*.mlp.gate_proj": sm.ColwiseParallel(),
        "layers.*.mlp.up_proj": sm.ColwiseParallel(),
        "layers.*.mlp.down_proj": sm.RowwiseParallel(output_layouts=stream),
        "lm_head": sm.ColwiseParallel(input_layouts=stream, output_layouts=Replicate()),
    }
    if tp == "tp":
        return plan
    whole = {"input_layouts": (stream, None), "desired_input_layouts": (Replicate(), None)}
    return plan | {
        "norm": sm.SequenceParallel(),
        "layers.*.*_layernorm": sm.SequenceParallel(),
        "layers.*.self_attn": sm.PrepareModuleInput(**whole),
        "layers.*.mlp": sm.PrepareModuleInput(input_layouts=stream, desired_input_layouts=Replicate()),
    }


# -- training it -------------------------------------------------------------------------------------------------------


def batch(case: Case, mesh: sm.DeviceMesh | None, step: int, s: int = S) -> list[Any]:
    """Inputs and targets of a step: all of them without a mesh."""
    pair = tokens(case.b, s, case.config.vocabulary, seed=step % BATCHES)
    if mesh is None:
        return list(pair)
    if case.inputs == "global":
        return [sm.device_put(x, mesh, P(case.data or None), src_data_rank=None) for x in pair]
    ranks = math.prod(case.sizes[axis] for axis in case.data)
    return [x.chunk(ranks)[_place(case, mesh)] for x in pair]


def _place(case: Case, mesh: sm.DeviceMesh) -> int:
    """The number of this rank's part of the batch."""
    place = 0
    for axis in case.data:
        place = place * case.sizes[axis] + mesh.get_local_rank(axis)
    return place


def whole(x: Any) -> Tensor:
    return x.detach().full_tensor() if isinstance(x, sm.ShardedTensor) else x.detach()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def step_of(case: Case, model: nn.Module, mesh: sm.DeviceMesh | None, step: int) -> Tensor:
    inputs, targets = batch(case, mesh, step)
    loss = loss_of(model(inputs), targets)
    loss.backward()
    return whole(loss)


def train(case: Case, mesh: sm.DeviceMesh | None, model: nn.Module, steps: Sequence[int] = range(STEPS)) -> Tensor:
    """The losses."""
    optimizer, losses = adamw(model), []
    for step in steps:
        losses.append(step_of(case, model, mesh, step))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses)


@cache
def _by_one_process(b: int, config: Config) -> Tensor:
    case = Case("ddp", "", "global", config, (b,) if config is EVEN else (b - 1,))
    return train(case, None, gpt(config).to(DEVICE))


def by_one_process(case: Case) -> Tensor:
    """The losses of one process."""
    shape = case.b if case.config is EVEN else case.b
    return _by_one_process(shape, case.config)


def on(case: Case, program: Callable[[sm.DeviceMesh], Any]) -> list[Any]:
    """`program(mesh)` on every rank of the case's mesh."""
    return on_axes(case.shape, case.names, program)


def used(step: Callable[[], Any]) -> dict[str, tuple[int, int]]:
    """Calls and bytes received of each collective of what a function does."""
    with collectives() as records:
        step()
    found: dict[str, tuple[int, int]] = {}
    for record in records:
        calls, received = found.get(record.op, (0, 0))
        found[record.op] = calls + 1, received + record.bytes_received
    return found
