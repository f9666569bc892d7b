"""Bytes and memory of a form by `eval_shape`: the program's step, as rank 0, without values.

Two copies of the model run, with one block and with two, for one and for two microbatches, and the
rest follows: bytes and memory are linear in both. Forms with a pipeline, those that recompute, and
those that split experts are not evaluated.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...mesh.abstract_mesh import AbstractMesh
from ...mesh.comm.report import CommReport, comm_report
from ..abstract.eval_shape import eval_shape
from ..layout.layout import Layout
from ..layout.spec import P
from ..parallel.context.attention import context_parallel
from ..parallel.data.fully_shard import data_parallel, fully_shard
from ..parallel.data.precision import MixedPrecisionPolicy
from ..parallel.tensor.plan import parallelize
from ..tensor.autograd.leaf_grads import accumulate_grads
from ..trees import map_tensors
from .counts import OperatorCounts, WithoutValues
from .description import Description, call
from .form import Form
from .plans import styles_of
from .program import mesh_axes


@dataclass(frozen=True)
class Exact:
    """What a step needs on rank 0, by `eval_shape`.

    Attributes:
        peak: the most bytes of tensors that are alive at one time.
        received: bytes received over each set of axes, such as "tp" or "fsdp,cp".
    """

    peak: float
    received: dict[str, float]


def evaluate(form: Form, model: Description) -> Exact:
    """Return what a step of the program needs on rank 0.

    Raises:
        ValueError: the form has a pipeline, recomputes, or splits experts.
    """
    if form.pp > 1 or form.recompute == "full" or form.ep > 1:
        raise ValueError(f"{form}: pipelines, recomputation and ep are not evaluated")
    one_block = _evaluate(form, model, blocks=1)
    if model.layers == 1:
        return one_block
    two_blocks = _evaluate(form, model, blocks=2)
    return _extrapolate(one_block, two_blocks, model.layers)


def _extrapolate(first: Exact, second: Exact, count: int) -> Exact:
    """Return the value for `count` of what `first` has one of and `second` two."""

    def line(one: float, two: float) -> float:
        return one + (count - 1) * (two - one)

    received = {
        axis: line(first.received.get(axis, 0), count_of_two)
        for axis, count_of_two in second.received.items()
    }
    return Exact(line(first.peak, second.peak), received)


def _evaluate(form: Form, model: Description, blocks: int) -> Exact:
    axes = mesh_axes(form)
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
    data = tuple(axis for axis in ("dp", "fsdp") if axis in axes)
    spec = P(data, "cp") if form.cp > 1 else P(data)
    rows = form.dp * form.fsdp * form.rows

    def layout_of(x: torch.Tensor) -> Layout:
        return Layout.of(mesh, spec, (rows, *x.shape[1:]), x.dtype)

    batch = map_tensors(layout_of, (model.one_row(),))[0]
    short = model.shortened(list(range(blocks)))
    once, received = _run(short, batch, form, model, mesh, 1)
    if form.microbatches == 1:
        return Exact(once, received)
    peak, of_two = _run(short, batch, form, model, mesh, 2)
    more = form.microbatches - 2
    received = {axis: size + more * (size - received.get(axis, 0)) for axis, size in of_two.items()}
    return Exact(peak, received)  # the second microbatch holds what all others hold


def _run(
    short: nn.Module, batch: Any, form: Form, model: Description, mesh: AbstractMesh, times: int
) -> tuple[float, dict[str, float]]:
    """Return the peak of two steps and the bytes received in the second.

    The first makes the optimizer's state.
    """

    def steps(module: nn.Module, batch: Any) -> CommReport:
        optimizer = _prepare(module, form, model)
        _step(module, optimizer, batch, form, model, times)
        with comm_report() as report:
            _step(module, optimizer, batch, form, model, times)
        return report

    evaluated = eval_shape(steps, short, batch, mesh=mesh)
    # the parameters before they were sharded are arguments, and stay
    whole = sum(x.numel() * x.element_size() for x in short.parameters())
    by_axis = evaluated.result.by_axis
    return evaluated.peak_bytes - whole, {axis: float(size) for axis, (_, size) in by_axis.items()}


def _prepare(module: nn.Module, form: Form, model: Description) -> torch.optim.Optimizer:
    """Apply the form to the model, as the program does."""
    policy = MixedPrecisionPolicy(param_dtype=model.dtype, reduce_dtype=torch.float32)
    shards = tuple(axis for axis in ("fsdp", "cp") if axis in mesh_axes(form))
    module.train()
    if form.tp > 1:
        parallelize(
            module,
            plan=styles_of(model.plan_of(form.sequence_parallel)),
            src_data_rank=None,
        )
    if shards and form.zero < 3:
        data_parallel(
            module,
            gradient=shards if form.zero == 2 else (),
            optimizer=shards,
            units="auto",
            mp_policy=policy,
            src_data_rank=None,
        )
    elif shards:
        fully_shard(module, axes=shards, units="auto", mp_policy=policy, src_data_rank=None)
    else:
        data_parallel(module, units="auto", mp_policy=policy, src_data_rank=None)
    return torch.optim.AdamW(module.parameters())


def _step(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    form: Form,
    model: Description,
    microbatches: int,
) -> None:
    ring = context_parallel("cp", method="ring") if form.cp > 1 else nullcontext()
    counts = OperatorCounts([])  # nothing is counted: the mode is not entered
    accumulating = accumulate_grads() if microbatches > 1 else nullcontext()
    with WithoutValues(counts), ring, accumulating:
        for _ in range(microbatches):
            model.loss(call(module, batch), batch).backward()
    optimizer.step()
    optimizer.zero_grad()
