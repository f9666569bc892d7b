"""Memory and bytes of a form's printed program: its second step on "meta", as `eval_shape` runs it.

    blocks          up to 8     the program as it is
                    more        with 4 and 6 blocks; the rest follows on a line
    microbatches    1 and 2     as they are
                    more        with 1 and 2; later ones receive and hold what the second does

Bytes are exact. The peak is the larger of several sums that grow with the number of blocks, and a
line through two of its values may pass below it, if another sum is the largest with more blocks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...mesh.comm.null import null_world
from ...mesh.comm.report import CommReport, comm_report
from ...mesh.text import shortened
from ..abstract.peak_memory import PeakMemory
from ..layout.layout import Layout
from ..layout.spec import P
from ..tensor.autograd.backward import backward_inside
from ..tensor.sharded_tensor import ShardedTensor
from ..trees import tensors_in
from .counts import FUSED_ON_META, WithoutValues
from .description import Description, default_loss
from .form import Form
from .memory import memory_of
from .program import mesh_axes, program_text
from .step_time import StepTimes

_MOST_BLOCKS = 8  # that run as they are
_FEW, _MORE = 4, 6  # blocks of a shorter model
_SHARDS = frozenset({"fsdp", "cp", "ep"})
_SMALL = 64  # bytes of a collective of a few numbers: a loss, the norm of gradients


@dataclass(frozen=True)
class ProgramCosts:
    """What a step of the program needs on rank 0.

    Attributes:
        peak: the most bytes of tensors that are alive at one time.
        received: bytes received over each axis, as in `StepTime.moved`.
        launches: collectives over each axis, without those of a few numbers.
    """

    peak: float
    received: dict[str, float]
    launches: dict[str, float]


@dataclass(frozen=True)
class Check:
    """A form's program next to what was computed of it, on rank 0.

    Attributes:
        peak: the most bytes of tensors that are alive at one time.
        received: bytes over each axis.
        memory_error, bytes_error: what was computed over the program's, less one; 0.02 is 2 % more.
        why_not: why the program was not evaluated; the others are 0 then.
    """

    peak: float = 0.0
    received: dict[str, float] = field(default_factory=dict)
    memory_error: float = 0.0
    bytes_error: float = 0.0
    why_not: str = ""


def check(form: Form, model: Description, times: StepTimes) -> Check:
    """Evaluate a form's program, and compare what was computed for the rank that it runs as."""
    reason = why_not_evaluated(form, model)
    if reason is not None:
        return Check(why_not=reason)
    try:
        program = evaluate(form, model)
    except Exception as error:  # of the model: it reads values, or its output has no logits
        return Check(why_not=shortened(f"{type(error).__name__}: {error}", 200))
    received = sum(program.received.values())
    moved = sum(times.of(form, rank=0).moved.values())
    return Check(
        program.peak,
        program.received,
        memory_of(form, model, 0).total / program.peak - 1,
        moved / received - 1 if received else 0.0,
    )


def why_not_evaluated(form: Form, model: Description) -> str | None:
    """Return why a form is not evaluated, in words; None if it is."""
    if form.pp > 1:
        return "the other stages of a pipeline would count, which are on meta in every program"
    if form.ep > 1:
        return "how many rows go to a rank's experts depends on values"
    if model.experts and model.odd_experts is not None:
        return "which rows an expert computes depends on values"
    if form.compiled:
        return "compiled blocks run on devices alone"
    if form.regather:
        return "the program saves what it gathers"
    if model.loss is not default_loss:
        return "the program has a loss of its own"
    if sum(1 for _ in tensors_in((model.batch,))) > 1:
        return "the program has a batch of its own, of one tensor"
    if model.kinds > 1 and model.layers > _MOST_BLOCKS:
        return "blocks are of several kinds"
    return None


def evaluate(form: Form, model: Description) -> ProgramCosts:
    """Return what a step of the program needs on rank 0.

    Raises:
        ValueError: see `why_not_evaluated`.
    """
    reason = why_not_evaluated(form, model)
    if reason is not None:
        raise ValueError(f"{form} is not evaluated: {reason}")
    if model.layers <= _MOST_BLOCKS:
        return _of_microbatches(form, model)
    few, more = (_of_microbatches(form, _shortened(model, count)) for count in (_FEW, _MORE))
    return _on_line(few, more, (model.layers - _FEW) / (_MORE - _FEW))


def _shortened(model: Description, blocks: int) -> Description:
    short = model.shortened([0] * blocks)
    return Description(
        short,
        model.batch,
        loss=model.loss,
        plan=model.plan,
        dtype=model.dtype,
        imbalance=model.imbalance,
    )


def _on_line(first: ProgramCosts, second: ProgramCosts, steps: float) -> ProgramCosts:
    """Return `first + steps * (second - first)`."""

    def line(one: float, two: float) -> float:
        return one + steps * (two - one)

    def lines(one: dict[str, float], two: dict[str, float]) -> dict[str, float]:
        return {axis: line(one.get(axis, 0.0), value) for axis, value in two.items()}

    return ProgramCosts(
        line(first.peak, second.peak),
        lines(first.received, second.received),
        lines(first.launches, second.launches),
    )


def _of_microbatches(form: Form, model: Description) -> ProgramCosts:
    if form.microbatches <= 2:
        return _run(form, model)
    one, two = (_run(replace(form, microbatches=count), model) for count in (1, 2))
    return replace(_on_line(one, two, form.microbatches - 1), peak=two.peak)


def _run(form: Form, model: Description) -> ProgramCosts:
    """Run two steps of the program, and count the second; the first makes the optimizer's state."""
    axes = mesh_axes(form)
    data = tuple(axis for axis in ("dp", "fsdp") if axis in axes)
    spec = P(data or None, "cp" if form.cp > 1 else None)
    shape = (form.data * form.rows * form.microbatches, *model.one_row_shape[1:])
    dtype = torch.float32 if model.vocabulary is None else torch.int64
    main = _main(form, model)
    memory = PeakMemory("meta")
    reports: list[CommReport] = []
    measured = ExitStack()

    def begin_second_step() -> None:
        memory.peak = memory.live
        reports.append(measured.enter_context(comm_report()))

    def rows_of(step: int, mesh: Any) -> tuple[ShardedTensor, ...]:
        if step == 1:
            begin_second_step()
        layout = Layout.of(mesh, spec, shape, dtype)
        parts = (torch.empty(layout.local_shape, dtype=dtype, device="meta") for _ in range(2))
        return tuple(ShardedTensor._make(part, layout) for part in parts)

    with null_world(form.devices, 0), memory, _FlashAttention(), measured:
        main(rows_of)
    received, launches = _by_axis(reports[0])
    return ProgramCosts(float(memory.peak), received, launches)


def _main(form: Form, model: Description) -> Callable[[Callable[..., Any]], None]:
    """Return a function that runs two steps of the printed program on "meta" with other data."""
    names: dict[str, Any] = {"__name__": "train"}
    text = program_text(form, model, "def build(): ...", node=form.devices)
    exec(compile(text, "train.py", "exec"), names)

    models = [copy.deepcopy(model.model).to(torch.float32)]  # before operators are counted

    def main(rows_of: Callable[..., Any]) -> None:
        names.update(build=models.pop, rows_of=rows_of)
        names["main"](device="meta", steps=2)

    return main


def _by_axis(report: CommReport) -> tuple[dict[str, float], dict[str, float]]:
    """Return bytes and launches; gathers and reductions over shards count as "fsdp"."""
    received: dict[str, float] = {}
    launches: dict[str, float] = {}
    for source, (count, size) in report.by_source.items():
        axis = source.axis
        if set(axis.split(",")) <= _SHARDS and source.op in ("all_gather", "reduce_scatter"):
            axis = "fsdp"
        received[axis] = received.get(axis, 0.0) + size
        if size > _SMALL * count:
            launches[axis] = launches.get(axis, 0.0) + count
    return received, launches


class _FlashAttention(WithoutValues):
    """`WithoutValues`; attention on "meta" is one operator, as on devices.

    Backward runs inside of it, since blocks that are recomputed call attention there.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward and isinstance(args[0], ShardedTensor):
            with self:  # the backward of the part comes back here
                return ShardedTensor.__torch_function__(func, types, args, kwargs)
        if func is torch.autograd.backward and not any(issubclass(t, ShardedTensor) for t in types):
            return backward_inside(self, *args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)

    def attention(self, *args: Any, **kwargs: Any) -> Tensor:
        if not all(x.is_meta for x in args[:3]):
            return F.scaled_dot_product_attention(*args, **kwargs)
        return _flash_attention(*args, **kwargs)


def _flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> Tensor:
    return FUSED_ON_META(query, key, value, dropout_p, is_causal)[0]
