"""Memory and bytes of a form's printed program: its second step on "meta", as `eval_shape` runs it.

    ranks           0; of a pipeline also the one that needs most by the formulas, and the last, if
                    it needs nearly as much
    blocks          up to 8     of all, or on a rank: the program as it is
                    more        with 4 and 6, in pipelines with 3 and 4 in each stage; the rest
                                follows on a line. Of several kinds with whole periods
    microbatches    1 and 2     as they are
                    more        with 1 and 2, with dp 2 and 3, in a pipeline with enough to fill it
                                and with more; later ones receive and hold what the last does

Bytes are exact. The peak is the largest of the moments of a step, each on a line of its own: with
few blocks and a large vocabulary the step needs most at the loss, with many blocks in one of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from ..parallel.experts.token_dispatch import AssumedRows
from ..parallel.pipeline.transport import AssumedMetas
from ..tensor.autograd.backward import backward_inside
from ..tensor.sharded_tensor import ShardedTensor
from ..trees import map_tensors, tensors_in
from .counts import FUSED_ON_META, WithoutValues
from .description import Description, default_loss, stage_layers
from .form import Form
from .memory import memory_of, peak_memory, stages_of_rank
from .moments import Moment, MomentsOfMemory, Place
from .program import mesh_axes, program_text
from .step_time import StepTimes

_MOST_BLOCKS = 8  # on a rank, that run as they are
_FEW, _LONGER_BY = 4, 2  # blocks of a shorter model, at least
_FEW_IN_STAGE, _STAGE_LONGER_BY = 3, 1  # likewise, in each stage of a pipeline
_NEARLY = 0.9  # of the memory of the rank that needs most by the formulas
_SHARDS = frozenset({"fsdp", "cp", "ep"})
_SMALL = 64  # bytes of a collective of a few numbers: a loss, the norm of gradients


@dataclass(frozen=True)
class ProgramCosts:
    """What a step of the program needs on a rank.

    Attributes:
        peaks: the most bytes of tensors that are alive, by moment.
        received: bytes received over each axis, as in `StepTime.moved`.
        launches: collectives over each axis, without those of a few numbers.
    """

    peaks: Mapping[Moment, float]
    received: dict[str, float]
    launches: dict[str, float]

    @property
    def peak(self) -> float:
        """The most bytes of tensors that are alive at one time."""
        return max(self.peaks.values())

    def plus(self, other: ProgramCosts, factor: float = 1) -> ProgramCosts:
        """Return `self + factor * other`, of the moments that both have."""

        def sums(one: dict[str, float], two: dict[str, float]) -> dict[str, float]:
            return {axis: one.get(axis, 0.0) + factor * two.get(axis, 0.0) for axis in one | two}

        return ProgramCosts(
            {
                at: self.peaks[at] + factor * other.peaks[at]
                for at in self.peaks
                if at in other.peaks
            },
            sums(self.received, other.received),
            sums(self.launches, other.launches),
        )


CostsByRank = dict[int, ProgramCosts]  # by the place along the pipeline


@dataclass(frozen=True)
class Check:
    """A form's program next to what was computed of it, on the rank that needs most.

    Attributes:
        peak: the most bytes of tensors that are alive at one time.
        received: bytes over each axis.
        memory_error, bytes_error: what was computed over the program's, less one; 0.02 is 2 % more.
        rank: of the pipeline.
        why_not: why the program was not evaluated; the others are 0 then.
    """

    peak: float = 0.0
    received: dict[str, float] = field(default_factory=dict)
    memory_error: float = 0.0
    bytes_error: float = 0.0
    rank: int = 0
    why_not: str = ""


class NotEvaluatedError(ValueError):
    """A form that is not evaluated; the text is why."""


def check(form: Form, model: Description, times: StepTimes) -> Check:
    """Evaluate a form's program, and compare what was computed for the rank that needs most."""
    try:
        programs = evaluate(form, model)
    except NotEvaluatedError as error:
        return Check(why_not=str(error))
    except Exception as error:  # of the model: it reads values, or its output has no logits
        return Check(why_not=shortened(f"{type(error).__name__}: {error}", 200))
    rank = max(programs, key=lambda rank: programs[rank].peak)
    program = programs[rank]
    received = sum(program.received.values())
    moved = sum(times.of(form, rank=rank).moved.values())
    return Check(
        program.peak,
        program.received,
        memory_of(form, model, rank).total / program.peak - 1,
        moved / received - 1 if received else 0.0,
        rank,
    )


def why_not_evaluated(form: Form, model: Description) -> str | None:
    """Return why a form is not evaluated, in words; None if it is."""
    if model.experts and model.odd_experts is not None:
        return "which rows an expert computes depends on values"
    if form.compiled:
        return "compiled blocks run on devices alone"
    if form.regather:
        return "the program saves what it gathers"
    if sum(1 for _ in tensors_in((model.batch,))) > 1:
        return "the program has a batch of its own, of one tensor"
    if form.pp > 1 and max(_own_blocks(form, model).values()) > _MOST_BLOCKS:
        lengths = stage_layers(model.layers, form.pp * form.stages)
        if model.repetition.before or any(n % model.repetition.period for n in lengths):
            return "stages have blocks of several kinds, each in another order"
    return None


def evaluate(form: Form, model: Description) -> CostsByRank:
    """Return what a step of the program needs, for ranks of the pipeline; without one for rank 0.

    Raises:
        NotEvaluatedError: see `why_not_evaluated`.
    """
    reason = why_not_evaluated(form, model)
    if reason is not None:
        raise NotEvaluatedError(reason)
    blocks = _own_blocks(form, model)
    ranks = tuple(blocks)
    if max(blocks.values()) <= _MOST_BLOCKS:
        return _of_microbatches(form, model, ranks)
    few, more = _lengths(form, model)
    if more >= model.layers:
        return _of_microbatches(form, model, ranks)
    first, second = (
        _of_microbatches(
            form, _shortened(form, model, length), ranks, _places(form, model, few, length)
        )
        for length in (few, more)
    )
    return {
        rank: _on_line(first[rank], second[rank], (count / form.stages - few) / (more - few))
        for rank, count in blocks.items()
    }


def _own_blocks(form: Form, model: Description) -> dict[int, int]:
    """Return the numbers of blocks of those ranks of the pipeline that are evaluated."""
    layers = stage_layers(model.layers, form.pp * form.stages)
    busiest, memory = peak_memory(form, model)
    ranks = {0, busiest}
    if memory_of(form, model, form.pp - 1).total >= _NEARLY * memory.total:
        ranks.add(form.pp - 1)
    return {
        rank: sum(layers[stage] for stage in stages_of_rank(form, rank)) for rank in sorted(ranks)
    }


def _lengths(form: Form, model: Description) -> tuple[int, int]:
    """Return how many blocks each stage of two shorter models has; without a pipeline, they."""
    period = model.repetition.period
    if form.pp > 1:
        few = period * -(-_FEW_IN_STAGE // period)
        return few, few + period * -(-_STAGE_LONGER_BY // period)
    periods = -(-_FEW // period)
    longer = model.repetition.blocks_of(periods - (-_LONGER_BY // period))
    return len(model.repetition.blocks_of(periods)), len(longer)


def _shortened(form: Form, model: Description, length: int) -> Description:
    """Return the model with so many blocks in each stage, or in all without a pipeline."""
    if form.pp > 1:
        blocks = list(range(length)) * (form.pp * form.stages)
    else:
        left_out = model.layers - length
        blocks = model.repetition.blocks_of(
            model.repetition.periods - left_out // model.repetition.period
        )
    return Description(
        model.shortened(blocks),
        model.batch,
        loss=model.loss,
        plan=model.plan,
        dtype=model.dtype,
        imbalance=model.imbalance,
    )


def _places(form: Form, model: Description, few: int, length: int) -> list[Place | None]:
    """Return the places that blocks of a shortened model have in each with at least `few`.

    Blocks in the middle, which are those that it has beyond `few`, have none.
    """
    first = (model.repetition.before + few) // 2
    last = few - first
    places: list[Place | None] = []
    for stage in range(form.pp * form.stages):
        places += [(stage, index) for index in range(first)]
        places += [None] * (length - few)
        places += [(stage, index) for index in range(-last, 0)]
    return places


def _on_line(first: ProgramCosts, second: ProgramCosts, steps: float) -> ProgramCosts:
    """Return `first + steps * (second - first)`."""
    return first.plus(second.plus(first, -1), steps)


def _of_microbatches(
    form: Form,
    model: Description,
    ranks: Sequence[int],
    places: Sequence[Place | None] = (),
) -> CostsByRank:
    few, more = _few_microbatches(form)
    if form.microbatches <= more:
        return _run_all(form, model, ranks, places)
    first, second = (
        _run_all(replace(form, microbatches=count), model, ranks, places) for count in (few, more)
    )
    steps = (form.microbatches - few) / (more - few)
    return {
        rank: replace(_on_line(first[rank], second[rank], steps), peaks=second[rank].peaks)
        for rank in first
    }


def _few_microbatches(form: Form) -> tuple[int, int]:
    """Return two numbers of microbatches from which the costs of more of them follow."""
    if form.pp == 1:  # of one, dp sums the gradients of each unit by itself
        return (2, 3) if form.dp > 1 else (1, 2)
    if form.schedule == "gpipe":  # it holds all of them
        return form.microbatches, form.microbatches
    if form.stages == 1:
        return form.pp + 1, form.pp + 2
    # in rounds of pp, with equal ones
    in_round = form.microbatches // max(1, form.microbatches // form.pp)
    return in_round, 2 * in_round


def _run_all(
    form: Form, model: Description, ranks: Iterable[int], places: Sequence[Place | None]
) -> CostsByRank:
    """Run the program as these ranks; the first one tells the others what enters stages."""
    assumed: dict[Any, Any] = {}
    return {rank: _run(form, model, rank, places, assumed) for rank in ranks}


def _run(
    form: Form,
    model: Description,
    rank: int,
    places: Sequence[Place | None],
    assumed: dict[Any, Any],
) -> ProgramCosts:
    """Run two steps of the program, and count the second.

    The first, in a pipeline with one microbatch, makes the optimizer's state.

    What is alive when the second begins is counted where an operator takes it, so stages of other
    ranks, which are on "meta" on devices, too, do not count.

    Args:
        rank: of the pipeline.
        places: of the model's blocks, as in `MomentsOfMemory`; without, the step is one moment.
        assumed: as in `AssumedMetas`; filled by rank 0.
    """
    axes = mesh_axes(form)
    data = tuple(axis for axis in ("dp", "fsdp", "ep") if axis in axes)
    spec = P(data or None, "cp" if form.cp > 1 else None)
    dtype = torch.float32 if model.vocabulary is None else torch.int64
    memory = PeakMemory("meta")
    moments = MomentsOfMemory(memory)
    main = _main(form, model, moments, places)
    reports: list[CommReport] = []
    measured = ExitStack()

    def rows_of(step: int, mesh: Any) -> tuple[Any, ...]:
        if step == 1:
            measured.enter_context(memory)
            reports.append(measured.enter_context(comm_report()))
        is_short = step == 0 and form.pp > 1
        rows = form.data * form.rows * (1 if is_short else form.microbatches)
        shape = (rows, *model.one_row_shape[1:])
        layout = Layout.of(mesh, spec, shape, dtype)
        parts = (torch.empty(layout.local_shape, dtype=dtype, device="meta") for _ in range(2))
        inputs = tuple(ShardedTensor._make(part, layout) for part in parts)
        # of a list each value is a microbatch
        return tuple([x] for x in inputs) if is_short else inputs

    with (
        torch.random.fork_rng(devices=[]),  # a step of a pipeline draws a number
        null_world(form.devices, rank * (form.devices // form.pp)) as world,
        _FlashAttention(moments),
        measured,
    ):
        world.state(AssumedRows).imbalance = model.imbalance
        metas = world.state(AssumedMetas).metas
        metas.update(assumed)
        main(rows_of)
        assumed.update(metas)
    received, launches = _by_axis(reports[0], form)
    return ProgramCosts(moments.peaks(), received, launches)


def _main(
    form: Form, model: Description, moments: MomentsOfMemory, places: Sequence[Place | None]
) -> Callable[[Callable[..., Any]], None]:
    """Return a function that runs two steps of the printed program on "meta" with other data.

    Its loss is the caller's, if there is one.
    """
    names: dict[str, Any] = {"__name__": "train"}
    text = program_text(form, model, "def build(): ...", node=form.devices)
    text = text.replace("lr=3e-4)", "lr=3e-4, foreach=True)")  # the default on accelerators
    exec(compile(text, "train.py", "exec"), names)

    if model.loss is not default_loss:
        names["loss_fn"] = lambda output, labels: model.loss(output, _batch_of(model, labels))
    models = [copy.deepcopy(model.model).to(torch.float32)]  # before operators are counted
    if places:
        moments.watch(models[0].get_submodule(model.blocks).children(), places)

    def main(rows_of: Callable[..., Any]) -> None:
        names.update(build=models.pop, rows_of=rows_of)
        names["main"](device="meta", steps=2)

    return main


def _batch_of(model: Description, rows: Tensor) -> Any:
    """Return a batch with these rows, of the structure of the model's, which has one tensor."""
    return map_tensors(lambda _: rows, (model.batch,))[0]


def _by_axis(report: CommReport, form: Form) -> tuple[dict[str, float], dict[str, float]]:
    """Return bytes and launches; gathers and reductions over shards count as "fsdp".

    Axes with one rank, and objects that ranks tell each other in the first steps, do not count.
    """
    received: dict[str, float] = {}
    launches: dict[str, float] = {}
    for source, (count, size) in report.by_source.items():
        if source.op == "all_gather_object":
            continue
        axis = ",".join(name for name in source.axis.split(",") if getattr(form, name, 2) > 1)
        if set(axis.split(",")) <= _SHARDS and source.op in ("all_gather", "reduce_scatter"):
            axis = "fsdp"
        elif axis.startswith("ranks "):  # two of a pipeline
            axis = "pp"
        received[axis] = received.get(axis, 0.0) + size
        if size > _SMALL * count:
            launches[axis] = launches.get(axis, 0.0) + count
    return received, launches


class _FlashAttention(WithoutValues):
    """`WithoutValues`; attention on "meta" is one operator, as on devices.

    Backward runs inside of it, since blocks that are recomputed call attention there.
    """

    def __init__(self, moments: MomentsOfMemory) -> None:
        super().__init__()
        self._moments = moments

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward and isinstance(args[0], ShardedTensor):
            with self:  # the backward of the part comes back here
                result = ShardedTensor.__torch_function__(func, types, args, kwargs)
            self._moments.note("returned")
            return result
        if func is torch.autograd.backward and not any(issubclass(t, ShardedTensor) for t in types):
            result = backward_inside(self, *args, **kwargs)
            self._moments.note("returned")
            return result
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
