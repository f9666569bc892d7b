"""What a model computes, holds and sends, counted by running two short copies without values.

    the model with one block      edges + block         T(2) - T(1)     a block
    the model with two            edges + 2 blocks      2 T(1) - T(2)   embedding, head, loss

Both run on "meta" as one rank of an axis "tp", with the plan of that form applied by `parallelize`,
so what splits and what is sent are those of the program, and no formula knows the model. Blocks of
several kinds (dense ones before mixtures) are counted one by one and averaged.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property, partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...mesh.abstract_mesh import AbstractMesh
from ...mesh.comm.report import comm_report
from ...mesh.text import shortened
from ..abstract.eval_shape import eval_shape
from ..abstract.peak_memory import PeakMemory
from ..layout.layout import Layout
from ..layout.spec import P
from ..parallel.data.storage.flat import piece_of_rows, split_dims
from ..parallel.data.wrap import AUTO, matching_modules
from ..parallel.experts.token_wise import token_wise
from ..parallel.experts.transformers_experts import why_not_moe
from ..parallel.tensor.plan import parallelize
from ..tensor.sharded_tensor import ShardedTensor
from ..trees import map_tensors, tensors_in
from .counts import CountedWithoutValues, OperatorCounts, Phase, Progress, by_op
from .mixtures import OwnRows, mixture_inputs, mixtures
from .moments import MomentsOfMemory
from .plans import GATHERED, IN_SEQUENCE, own_plan, paths_of, plan_of_copy, sequence_plan, styles_of
from .repeated import Repetition, kinds_of, shorten
from .variants import backward_transient, compile_tape, eager, fused, received_in_block, select

Loss = Callable[[Any, Any], Any]
OutputKind = Literal["logits of tokens", "logits", "tensor", "tuple", "dict"]

# Rows of the busiest rank's experts over the mean. pith-train (mlc-ai/pith-train,
# tools/memory_estimator) measured 1.18 for Qwen3-30B-A3B, 8 of 128 experts and 4,096 tokens, and
# takes 1.2.
IMBALANCE = 1.2


@dataclass(frozen=True)
class Costs:
    """What a part of a model costs one rank, for one row of the batch.

    Attributes:
        parameters: elements that the rank holds.
        experts: those of experts among them; of an axis "ep" a rank has a part of these.
        forward, backward: what it computes and sends.
        again: what selective recomputation computes and sends again in backward. It ends where
            autograd last saves something: before the last product of a block, and its last
            collective.
        again_whole: the same of full recomputation.
        saved: bytes that forward saves for backward.
        selected: bytes that it saves with selective recomputation, without the input of a block.
        gathered: bytes that it saves of what was gathered along the sequence.
        keys_and_values: bytes of the keys and values of attention.
        dispatched: bytes of the rows that go to experts, each to all of its experts.
        saved_by_experts, selected_by_experts: those of `saved` and `selected` that experts compute.
    """

    parameters: float = 0
    experts: float = 0
    forward: Phase = field(default_factory=Phase)
    backward: Phase = field(default_factory=Phase)
    again: Phase = field(default_factory=Phase)
    again_whole: Phase = field(default_factory=Phase)
    saved: float = 0
    selected: float = 0
    gathered: float = 0
    keys_and_values: float = 0
    dispatched: float = 0
    saved_by_experts: float = 0
    selected_by_experts: float = 0

    def plus(self, other: Costs, factor: float = 1) -> Costs:
        """Return `self + factor * other`."""
        return Costs(
            self.parameters + factor * other.parameters,
            self.experts + factor * other.experts,
            self.forward.plus(other.forward, factor),
            self.backward.plus(other.backward, factor),
            self.again.plus(other.again, factor),
            self.again_whole.plus(other.again_whole, factor),
            max(0.0, self.saved + factor * other.saved),
            max(0.0, self.selected + factor * other.selected),
            max(0.0, self.gathered + factor * other.gathered),
            self.keys_and_values + factor * other.keys_and_values,
            self.dispatched + factor * other.dispatched,
            max(0.0, self.saved_by_experts + factor * other.saved_by_experts),
            max(0.0, self.selected_by_experts + factor * other.selected_by_experts),
        )

    def parameters_on(self, ep: int) -> float:
        """Return the elements that a rank of ep holds."""
        return self.parameters - self.experts + self.experts / ep


@dataclass(frozen=True)
class ModelCosts:
    """What a model costs one rank in one form of tensor parallelism, for one row.

    Attributes:
        block: a block, on average.
        kinds: a block of each kind.
        edges: what is outside of the blocks, with the loss.
        before: of its communication, that of forward before the blocks, and of backward after them.
        first: parameters outside of blocks that are used before them, such as an embedding.
        tied: whether a parameter is used on both sides.
        stream: bytes of the input of a block.
        transient: bytes that backward holds for a moment at the loss, beyond what was saved.
        block_transient: the same in the blocks.
        odd_attention: what attention of the blocks is called with besides queries, keys and values,
            in words: a mask or dropout. None if nothing.
    """

    block: Costs
    kinds: tuple[Costs, ...]
    edges: Costs
    before: tuple[Phase, Phase]
    first: float
    tied: bool
    stream: float
    transient: float
    block_transient: float
    odd_attention: str | None = None

    def largest_block(self, ep: int = 1) -> float:
        """Return the parameters of the largest block on a rank of ep."""
        return max(kind.parameters_on(ep) for kind in self.kinds)


@dataclass(frozen=True)
class Stages:
    """Stages of a pipeline; without one, a single stage.

    Attributes:
        layers: the number of blocks of each.
        parameters: elements that a tp rank holds of each, with those of the edges.
    """

    layers: tuple[int, ...]
    parameters: tuple[float, ...]


def stage_layers(layers: int, stages: int) -> list[int]:
    """Return how many blocks each stage has; the first and last, with the edges, have fewer."""
    base, more = divmod(layers, stages)
    counts = [base] * stages
    inner_first = [*range(1, stages - 1), stages - 1, 0]
    for stage in inner_first[:more]:
        counts[stage] += 1
    return counts


class Description:
    """A model, counted in each form of tensor parallelism when it is first asked for.

    Args:
        model: a module on "meta", with blocks that repeat.
        batch: its input: a tensor, or a tuple or dict of tensors; dim 0 is rows, dim 1 of the first
            tensor positions.
        loss: a function of output and batch; see `default_loss`.
        plan: a plan of tensor parallelism in place of the model's own.
        proposed: a plan for a model that has none, if none is given.
        why_none_proposed: why no plan is, for reasons; "" if that says nothing.
        dtype: in which the model computes.
        imbalance: rows that the experts of the busiest rank of ep compute, over the mean.

    Attributes:
        rows, sequence: of the batch.
        layers: the number of blocks.
        indices_of_kinds: the indices of the blocks of each kind, see `BlockList.kinds`.
        kinds: of how many kinds they are.
        repetition: how the kinds repeat.
        blocks: the path of their list.
        units: the `units` of `fully_shard` that are these blocks alone: "auto", or their classes.
        parameters: elements of all parameters; `table` those of embeddings.
        heads, key_value_heads, width: of the configuration; None if it has none.
        vocabulary: ids are smaller, of the configuration or of the first embedding; None if the
            first tensor of the batch has no ids.
        experts: of a mixture, the fewest if its blocks have different ones; 0 without mixtures.
        expert_weights: the paths of the weights of experts, as patterns.
        plan: of tensor parallelism; {} if there is none.
        is_plan_proposed: whether that is the proposed one.
        why_none_proposed: the argument.
        odd_experts: why programs cannot split them; None if they can.

    Raises:
        ValueError: the model has no blocks that repeat, or cannot run without values; an imbalance
            below 1.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        *,
        loss: Loss | None = None,
        plan: Mapping[str, Any] | None = None,
        proposed: Mapping[str, Any] | None = None,
        why_none_proposed: str = "",
        dtype: torch.dtype = torch.bfloat16,
        imbalance: float = IMBALANCE,
    ) -> None:
        if not 1 <= imbalance < float("inf"):
            raise ValueError(
                f"tune(imbalance={imbalance!r}): rows of the busiest rank over the mean, at least 1"
            )
        self.model = model
        self.batch = dict(batch) if isinstance(batch, Mapping) else batch
        self.dtype, self.imbalance = dtype, imbalance
        self.loss = loss or default_loss
        first = next(iter(tensors_in((self.batch,))), None)
        if first is None or first.ndim == 0:
            raise ValueError(
                f"tune: the batch is {batch!r}; pass a tensor whose dim 0 is rows, or a tuple or "
                "dict of such tensors"
            )
        self.rows = first.shape[0]
        self.one_row_shape = (1, *first.shape[1:])
        self.sequence = first.shape[1] if first.ndim > 1 else 1
        self.blocks, self.units = _list_of_blocks(model)
        parent: Any = model.get_submodule(self.blocks)
        self.layers = len(parent)
        self.indices_of_kinds = kinds_of(model, self.blocks)
        self.kinds = len(self.indices_of_kinds)
        self.repetition = Repetition.of([self.block_like(index) for index in range(self.layers)])
        self.parameters = sum(x.numel() for x in model.parameters())
        self.table = sum(
            inner.weight.numel() for inner in model.modules() if isinstance(inner, nn.Embedding)
        )
        config = getattr(model, "config", None)
        self.heads: int | None = getattr(config, "num_attention_heads", None)
        self.key_value_heads: int | None = getattr(config, "num_key_value_heads", self.heads)
        self.vocabulary = _vocabulary(model, first)
        self.width: int | None = getattr(config, "hidden_size", None)
        with_experts = dict(mixtures(model))
        self.experts: int = min((inner.num_experts for inner in with_experts.values()), default=0)
        self.expert_weights = sorted(
            {
                f"{self._pattern(path)}.{name}"
                for path, inner in with_experts.items()
                for name, _ in inner.named_parameters()
            }
        )
        odd = map(why_not_moe, with_experts.values())
        self.odd_experts: str | None = next((why for why in odd if why is not None), None)
        self._is_callers_plan = plan is not None
        own = own_plan(model)
        self.why_none_proposed = why_none_proposed
        self.is_plan_proposed = plan is None and not own and bool(proposed)
        self.plan: dict[str, Any] = dict(plan) if plan is not None else own or dict(proposed or {})
        self.sequence_plan = sequence_plan(model, self.blocks, self.plan)
        self._others: dict[torch.dtype, Description] = {}
        self._costs: dict[tuple[int, bool, bool, bool], ModelCosts] = {}
        self._stages: dict[tuple[int, bool, int, bool], Stages] = {}
        self._of_units: dict[tuple[str, int, int | None], float] = {}
        self._why_not_tp: dict[tuple[int, bool, bool], str | None] = {}

    def computing_in(self, dtype: str) -> Description:
        """Return the description of the same model that computes in "bfloat16" or "float32"."""
        torch_dtype: torch.dtype = getattr(torch, dtype)
        if torch_dtype is self.dtype:
            return self
        other = self._others.get(torch_dtype)
        if other is None:
            other = copy.copy(self)
            others: dict[torch.dtype, Description] = {self.dtype: self}
            self._others[torch_dtype] = other
            other.dtype, other._others = torch_dtype, others
            other._costs, other._stages, other._why_not_tp = {}, {}, {}
        return other

    def _pattern(self, path: str) -> str:
        """Return a path with a star for the index of the block."""
        inside = path.removeprefix(f"{self.blocks}.")
        if inside == path:
            return path
        return f"{self.blocks}.*.{inside.partition('.')[2]}"

    def plan_of(
        self,
        sequence_parallel: bool,
        experts_over: tuple[str, ...] | None = None,
        *,
        has_tp: bool = True,
    ) -> dict[str, Any]:
        """Return the plan of tensor parallelism.

        Args:
            has_tp: whether there is an axis "tp"; without one the plan has experts alone.
            experts_over: the axes over which the stacks of experts are split, in place of what the
                plan says of experts; None leaves that.
        """
        plan: dict[str, Any] = (self.sequence_plan if sequence_parallel else self.plan) or {}
        plan = plan if has_tp else {}
        if experts_over is None:
            return plan
        plan = {path: x for path, x in plan.items() if not self._is_of_experts(path)}
        if has_tp and sequence_parallel:
            plan |= dict.fromkeys(self.norms_of_mixtures, IN_SEQUENCE)
        return plan | dict.fromkeys(self.expert_weights, P(experts_over))

    @cached_property
    def norms_of_mixtures(self) -> tuple[str, ...]:
        """The norms, as patterns, whose results mixtures alone take, and need not whole.

        With sequence parallelism and rows that travel to experts, ranks of tp then compute the rows
        of their part of the sequence. () if that is not so in all blocks, or if tp splits other
        layers of a mixture, such as shared experts.
        """
        plan = self.sequence_plan or {}

        def step(module: nn.Module, batch: Any) -> tuple[str, ...]:
            with CountedWithoutValues(OperatorCounts([])):
                inputs = mixture_inputs(module, partial(call, module, batch))
            return tuple(sorted({self._pattern(path) for path in inputs}))

        def of_kind(index: int) -> tuple[str, ...]:
            block = self.model.get_submodule(f"{self.blocks}.{index}")
            parents = [path.rpartition(".")[0] for path, _ in mixtures(block)]
            inside = [
                f"{self.blocks}.{index}.{parent}.{name}"
                for parent in parents
                for name, _ in block.get_submodule(parent).named_modules()
                if parent
            ]
            others = [path for path in plan if not self._is_of_experts(path)]
            if not inside or any(fnmatchcase(x, path) for x in inside for path in others):
                return ()
            result: tuple[str, ...] = self.evaluate(step, [index], 1, False).result
            return result

        norms = {of_kind(members[0]) for members in self.indices_of_kinds} if plan else {()}
        first = next(iter(norms))
        is_gathered = all(plan.get(path) == GATHERED for path in first)
        return first if len(norms) == 1 and is_gathered else ()

    def _is_of_experts(self, pattern: str) -> bool:
        """Return whether an entry of a plan is for experts alone, or for a part of them."""
        experts = tuple(path for path, _ in mixtures(self.model))
        inside = tuple(f"{path}." for path in experts)
        matched = [path for path in paths_of(self.model) if fnmatchcase(path, pattern)]
        return bool(matched) and all(path in experts or path.startswith(inside) for path in matched)

    def costs(
        self,
        tp: int,
        sequence_parallel: bool = False,
        compiled: bool = False,
        dispatches: bool = False,
    ) -> ModelCosts:
        """Return what the model costs a rank of an axis "tp" of this size. Cached.

        Args:
            dispatches: whether rows travel to experts, which are split over an axis "ep" and "tp":
                a rank of tp has as many experts as if "ep" had one rank, and computes as many rows
                as it has of its own. Otherwise the plan says how tp splits experts.
        """
        key = (tp, sequence_parallel and tp > 1, compiled, dispatches and tp > 1)
        if key not in self._costs:
            self._costs[key] = self._count(*key)
        return self._costs[key]

    def why_not_tp(
        self, tp: int, sequence_parallel: bool = False, dispatches: bool = False
    ) -> str | None:
        """Return why the model does not run as a rank of an axis "tp"; None if it does. Cached.

        Raises:
            ValueError: it does not run with the plan of the caller.
        """
        key = (tp, sequence_parallel, dispatches)

        def count() -> None:
            self.costs(tp, sequence_parallel, dispatches=dispatches)

        if self._is_callers_plan:
            count()
            return None
        if key not in self._why_not_tp:
            try:
                count()
                self._why_not_tp[key] = None
            except ValueError as error:
                self._why_not_tp[key] = shortened(str(error).removeprefix("tune: "), 300)
        return self._why_not_tp[key]

    def why_not_cp(self) -> str | None:
        """Return why sequences cannot be split with the model's attention; None if they can."""
        costs = self.costs(1)
        if costs.odd_attention is not None:
            return f"attention has {costs.odd_attention}, which ring attention does not take"
        if not all(kind.keys_and_values for kind in costs.kinds):
            return (
                "keys and values are sent round for scaled_dot_product_attention, and blocks of "
                "the model do not call it"
            )
        if any(path.rsplit(".", 2)[0] == f"{self.blocks}.*" for path in self.expert_weights):
            return "blocks call experts themselves, for which they would gather sequences"
        return None

    def stages(
        self, tp: int, sequence_parallel: bool, count: int, dispatches: bool = False
    ) -> Stages:
        """Return the blocks and parameters of each of so many stages. Cached."""
        key = (tp, sequence_parallel, count, dispatches)
        if key not in self._stages:
            costs = self.costs(tp, sequence_parallel, dispatches=dispatches)
            layers = stage_layers(self.layers, count)
            parameters = [blocks * costs.block.parameters for blocks in layers]
            parameters[0] += costs.first
            parameters[-1] += costs.edges.parameters - costs.first
            if costs.tied and count > 1:
                parameters[-1] += costs.first
            self._stages[key] = Stages(tuple(layers), tuple(parameters))
        return self._stages[key]

    def held_beside(self, parts: int, expert_ranks: int | None) -> float:
        """Return how many elements a rank holds twice in a block, on average. Cached.

        Stacks of several matrices that `fully_shard` splits along dim 1 are no intervals of its
        buffer, and are held beside the rank's piece of it.

        Args:
            parts: the number of ranks that share the parameters.
            expert_ranks: the number of ranks over which experts are split, which are a unit of
                their own; None if they are in the unit of their block.
        """

        def of_block(shapes: Sequence[tuple[int, ...]]) -> float:
            dims = split_dims(shapes, parts)
            sizes = (math.prod(x) for x, dim in zip(shapes, dims, strict=True) if dim and x[0] > 1)
            # the busiest rank may have a part of them alone
            return min(sum(sizes), sum(map(math.prod, shapes)) / parts)

        return self._on_average("held beside", of_block, parts, expert_ranks)

    def padding(self, parts: int, expert_ranks: int | None) -> float:
        """Return by how many elements a rank's piece of a block is longer than the mean. Cached.

        `data_parallel` splits parameters between the rows of dim 0, which are experts in a stack of
        matrices, and all pieces are as long as the longest. Arguments are those of `held_beside`.
        """

        def of_block(shapes: Sequence[tuple[int, ...]]) -> float:
            return piece_of_rows(shapes, parts) - sum(map(math.prod, shapes)) / parts

        return self._on_average("padding", of_block, parts, expert_ranks)

    def _on_average(
        self,
        name: str,
        of_block: Callable[[Sequence[tuple[int, ...]]], float],
        parts: int,
        expert_ranks: int | None,
    ) -> float:
        """Return the mean over blocks of a number for the shapes of a unit with experts."""
        key = (name, parts, expert_ranks)
        if key not in self._of_units:
            self._of_units[key] = sum(
                len(members) / self.layers * of_block(shapes)
                for members in self.indices_of_kinds
                if parts > 1 and (shapes := self._shapes(members[0], expert_ranks))
            )
        return self._of_units[key]

    def _shapes(self, index: int, expert_ranks: int | None) -> list[tuple[int, ...]]:
        """Return the shapes of a block, or of its experts on a rank."""
        block = self.model.get_submodule(f"{self.blocks}.{index}")
        if expert_ranks is None:
            return [tuple(x.shape) for x in block.parameters()]
        return [
            (x.shape[0] // expert_ranks, *x.shape[1:])
            for _, experts in mixtures(block)
            for x in experts.parameters()
        ]

    def shortened(self, blocks: list[int]) -> nn.Module:
        """Return a copy of the model with copies of some of its blocks."""
        return shorten(self.model, {self.blocks: blocks})

    def one_row(self) -> Any:
        """Return the first row of the batch, without values."""
        return map_tensors(lambda x: torch.empty_like(x[:1], device="meta"), (self.batch,))[0]

    def _count(
        self, tp: int, sequence_parallel: bool, compiled: bool, dispatches: bool
    ) -> ModelCosts:
        form = tp, sequence_parallel, compiled, dispatches
        first = self.indices_of_kinds[0][0]
        one = self._run([first], *form)
        average, costs_of_kinds = Costs(), []
        edges = one.costs
        odd_attention = one.odd_attention
        for members in self.indices_of_kinds:
            two = self._run([first, members[0]], *form)
            block = two.costs.plus(one.costs, -1)
            average = average.plus(block, len(members) / self.layers)
            costs_of_kinds.append(block)
            odd_attention = odd_attention or two.odd_attention
            if members[0] == first:
                edges = one.costs.plus(block, -1)
        return ModelCosts(
            average,
            tuple(costs_of_kinds),
            edges,
            one.before,
            one.first,
            one.tied,
            one.stream,
            one.transient,
            one.block_transient,
            odd_attention,
        )

    @cached_property
    def output_kind(self) -> OutputKind:
        """What the model returns, see `output_kind_of`."""

        def step(module: nn.Module, batch: Any) -> OutputKind:
            return output_kind_of(call(module, batch), batch)

        with CountedWithoutValues(OperatorCounts([])):
            kind: OutputKind = self.evaluate(step, [0], 1, False).result
        return kind

    def block_like(self, index: int) -> int:
        """Return the first block of the same kind as a block."""
        return next(members[0] for members in self.indices_of_kinds if index in members)

    def evaluate(
        self,
        step: Callable[[nn.Module, Any], Any],
        blocks: list[int],
        tp: int,
        sequence_parallel: bool,
        dispatches: bool = False,
    ) -> Any:
        """Run a function of model and batch by `eval_shape`, as a rank of an axis "tp".

        Args:
            blocks: those of a copy of the model, which the function gets, with the plan applied.
            dispatches: as in `costs`.

        Raises:
            ValueError: the model cannot run without values.
        """
        mesh = AbstractMesh((tp,), ("tp",))
        model = self.shortened(blocks).to(self.dtype).train()  # as programs do
        whole_plan = self.plan_of(sequence_parallel, ("tp",) if dispatches else None)
        plan = styles_of(plan_of_copy(whole_plan, self.model, model))

        def prepared(module: nn.Module) -> nn.Module:
            if tp == 1:
                return module
            parallelize(module, plan=plan, src_data_rank=None)
            if dispatches:
                for path, experts in list(mixtures(module)):
                    module.set_submodule(path, OwnRows(experts, "tp"))
                    if sequence_parallel and self.norms_of_mixtures:
                        token_wise(module.get_submodule(path.rpartition(".")[0]))
            return module

        def place(x: Tensor) -> Any:
            shape = (1, *x.shape[1:])
            dtype = self.dtype if x.is_floating_point() else x.dtype  # as units cast their inputs
            if tp > 1:
                return Layout.of(mesh, P(), shape, dtype)
            return torch.empty(shape, dtype=dtype, device="meta")

        try:
            model = eval_shape(prepared, model, mesh=mesh).result
            batch = map_tensors(place, (self.batch,))[0]
            return eval_shape(step, model, batch, mesh=mesh)
        except (RuntimeError, NotImplementedError) as error:
            where = f" as a rank of tp={tp}" if tp > 1 else ""
            raise ValueError(
                f"tune: {type(model).__name__} cannot run without values{where}, which counting "
                f"needs: {error}"
            ) from error

    def _run(
        self,
        blocks: list[int],
        tp: int,
        sequence_parallel: bool,
        compiled: bool,
        dispatches: bool,
    ) -> _Run:
        def step(module: nn.Module, batch: Any) -> _Run:
            return _run_once(module, batch, self.loss, self.blocks, is_compiled=compiled)

        return self.evaluate(step, blocks, tp, sequence_parallel, dispatches).result


@dataclass(frozen=True)
class _Run:
    costs: Costs
    before: tuple[Phase, Phase]
    first: float
    tied: bool
    stream: float
    transient: float
    block_transient: float
    odd_attention: str | None


def _run_once(model: nn.Module, batch: Any, loss: Loss, blocks: str, *, is_compiled: bool) -> _Run:
    """Run forward and backward on this rank, and count."""
    parameters = list(model.parameters())
    counts = OperatorCounts([*parameters, *model.buffers()])
    places = _Places(model, blocks, counts)
    hooks = torch.autograd.graph.saved_tensors_hooks(counts.save, lambda x: x)
    memory = PeakMemory("meta")
    moments = MomentsOfMemory(memory)
    last = (0, -1)
    moments.watch(list(model.get_submodule(blocks).children())[-1:], [last])
    with CountedWithoutValues(counts), places, memory:
        with counts, hooks, comm_report() as report:
            counts.report = report
            value = loss(call(model, batch), batch)
        if len(places.begin) < len(list(model.get_submodule(blocks).children())):
            raise ValueError(
                f"tune: forward of {type(model).__name__} does not call each block of {blocks}; "
                "what a block computes is counted when it is called"
            )
        if not isinstance(value, Tensor) or value.numel() != 1:
            shape = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"tune: the loss is {shape}; return a tensor with one element")
        counts.add_communication(report)
        forward, counts.phase = counts.phase, Phase()
        forward_operations, counts.tape.operations = counts.tape.operations, []
        with counts, comm_report() as report:
            counts.report = report
            value.backward()
        counts.add_communication(report)
    # of backward what is left when it leaves the blocks
    before = places.before_blocks, Phase(communication=by_op(report)).plus(places.to_blocks, -1)
    tape, backward, saved = counts.tape, counts.phase, counts.saved
    selective = select(forward_operations)
    kernels_of = partial(fused, tape) if is_compiled else eager
    selected = {id(operation) for operation in selective.again}
    again, again_whole = Phase(), Phase()
    for block, end in counts.until_saved.items():
        begin = places.begin[block]
        operations = forward_operations[begin.operations : end.operations]
        part = counts.between(begin, end, kernels_of(operations))
        again_whole = again_whole.plus(part)
        kernels = kernels_of([x for x in operations if id(x) in selected])
        again = again.plus(replace(part, attention=0.0, whole_attention=0.0, kernels=kernels))
    if is_compiled:
        compiled = compile_tape(tape, forward_operations, tape.operations, saved)
        saved = compiled.saved
        forward = replace(forward, kernels=compiled.forward)
        backward = replace(backward, kernels=compiled.backward)
    by_experts = counts.rows_of_experts
    in_experts = {id(x): x for _, inner in mixtures(model) for x in inner.parameters()}
    begin = memory.of(([*parameters, *model.buffers()], batch))
    peaks = moments.peaks()
    # of the whole step for a model whose last block returns the loss
    at_loss = peaks.get(("after forward", last, 0), max(peaks.values()))
    transient = at_loss - begin - sum(tape.sizes[key] for key in counts.saved)
    costs = Costs(
        sum(map(_local_numel, parameters)),
        sum(map(_local_numel, in_experts.values())),
        forward,
        backward,
        again,
        again_whole,
        sum(tape.sizes[key] for key in saved),
        sum(tape.sizes[key] for key in selective.saved),
        sum(tape.sizes[key] for key in saved & received_in_block(forward_operations)),
        counts.keys_and_values,
        places.dispatched,
        sum(tape.sizes[key] for key in saved & by_experts),
        sum(tape.sizes[key] for key in selective.saved & by_experts),
    )
    return _Run(
        costs,
        before,
        places.first_parameters(),
        places.is_tied(),
        places.stream,
        max(0.0, transient),
        backward_transient(
            tape, forward_operations, tape.operations, counts.saved, counts.of_weights
        ),
        counts.odd_attention,
    )


def call(model: nn.Module, batch: Any) -> Any:
    """Call a model with a batch: a tensor, a tuple of arguments, or a dict of keyword arguments."""
    options = {"use_cache": False} if takes_use_cache(model) else {}
    if isinstance(batch, Mapping):
        return model(**batch, **options)
    if isinstance(batch, tuple | list):
        return model(*batch, **options)
    return model(batch, **options)


def _list_of_blocks(model: nn.Module) -> tuple[str, str | tuple[str, ...]]:
    """Return the path of the list whose entries are the blocks, and `Description.units`.

    Modules that a model of Hugging Face does not split besides, such as the embeddings of BERT, are
    no blocks.

    Raises:
        ValueError: there is none, or several, as an encoder and a decoder have.
    """
    name = type(model).__name__
    try:
        paths = [path for path, _ in matching_modules(model, AUTO)]
    except ValueError:
        raise ValueError(
            f"tune: {name} neither names its blocks, as models of Hugging Face do in "
            "_no_split_modules, nor has it a ModuleList of blocks of one class; tune takes models "
            "whose blocks repeat in one list"
        ) from None
    parents = Counter(path.rpartition(".")[0] for path in paths)
    lists = {
        path: entries
        for path, entries in ((path, model.get_submodule(path)) for path in parents)
        if isinstance(entries, nn.ModuleList | nn.Sequential) and len(entries) == parents[path]
    }
    if not lists:
        raise ValueError(
            f"tune: the blocks of {name} are {paths[:4]}..., which are not the entries of one "
            "ModuleList; tune takes models whose blocks repeat in one list"
            f"{_text_model_hint(model)}"
        )
    if len(lists) > 1:
        counts = " and ".join(f"{path} ({len(entries)})" for path, entries in lists.items())
        hint = _text_model_hint(model) or (
            '. sm.propose_plan, fully_shard(units="auto") and pipeline take it'
        )
        raise ValueError(
            f"tune: {name} has {len(lists)} lists of blocks, {counts}; tune takes models whose "
            f"blocks repeat in one list{hint}"
        )
    ((path, entries),) = lists.items()
    classes = tuple(dict.fromkeys(type(block).__name__ for block in entries))
    return path, AUTO if len(entries) == len(paths) else classes


def _text_model_hint(model: nn.Module) -> str:
    """Return what to do with a model of Hugging Face of which a language model is one part."""
    config: Any = getattr(model, "config", None)
    get_text_config = getattr(config, "get_text_config", None)
    if get_text_config is None or get_text_config() is config:
        return ""
    return ". Take its language model: the configuration config.get_text_config(), by itself"


def takes_use_cache(model: nn.Module) -> bool:
    """Return whether forward has the argument of models of Hugging Face that keep a cache."""
    return hasattr(getattr(model, "config", None), "use_cache")


def default_loss(output: Any, batch: Any) -> Any:
    """Return the loss that the model returns; else that of its logits, or the mean of its output.

    The model's own is `output.loss`, or the first scalar of a tuple, list or dict that it returns.
    Of logits of models of Hugging Face, one row for each element of the batch's first tensor, it is
    the cross entropy in float32 with targets of that tensor's shape.
    """
    own = getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    kind = output_kind_of(output, batch)
    if kind == "logits of tokens":
        targets = next(iter(tensors_in((batch,))))
        return F.cross_entropy(output.logits.float().transpose(1, 2), targets)
    if kind == "logits":
        return output.logits.float().mean()
    results = [x for x in tensors_in((output,)) if x.is_floating_point()]
    if not results:
        raise ValueError(
            f"tune: the model returns {shortened(repr(output))}, in which there is no tensor of "
            "floating-point numbers; pass loss=, a function of output and batch"
        )
    scalar = next((x for x in results if x.ndim == 0), None)
    return results[0].float().mean() if scalar is None else scalar


def output_kind_of(output: Any, batch: Any) -> OutputKind:
    """Return what a model returns: a tensor, or something else that holds tensors.

    "logits" are those of an output of Hugging Face, and "logits of tokens" if there is a row of
    them for each element of the batch's first tensor, which has ids.
    """
    logits = getattr(output, "logits", None)
    if logits is not None:
        first = next(iter(tensors_in((batch,))))
        has_ids = not first.is_floating_point()
        return "logits of tokens" if has_ids and logits.shape[:-1] == first.shape else "logits"
    if isinstance(output, Mapping):
        return "dict"
    return "tensor" if isinstance(output, Tensor) else "tuple"


def _vocabulary(model: nn.Module, first: Tensor) -> int | None:
    """Return the number of ids that a batch may have; None for one without ids."""
    if first.is_floating_point():
        return None
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    embeddings = (inner for inner in model.modules() if isinstance(inner, nn.Embedding))
    return size or next((inner.num_embeddings for inner in embeddings), None)


class _EndOfBackward(torch.autograd.Function):
    """Identity; calls a function in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[], None]) -> Tensor:
        ctx.function = function
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.function()
        return grads[0], None


class _Places:
    """Where modules with parameters are called: before the blocks, or after the first of them.

    Tells the counts in which block they are, and whether in its experts.

    Attributes:
        stream: bytes of the tensors that the first block is called with.
        dispatched: bytes of the rows that go to experts.
        begin: index of a block -> where forward stood when it began.
        before_blocks: the communication of forward before them.
        to_blocks: that of backward until the gradient of what the first block is called with.
    """

    def __init__(self, model: nn.Module, blocks: str, counts: OperatorCounts) -> None:
        self._model, self._blocks = model, model.get_submodule(blocks)
        self._counts = counts
        self._inside = {id(inner) for inner in self._blocks.modules()}
        self._before: list[Tensor] = []
        self._after: list[Tensor] = []
        self._handles: list[Any] = []
        self.stream = self.dispatched = 0.0
        self.begin: dict[int, Progress] = {}
        self.before_blocks = self.to_blocks = Phase()

    def __enter__(self) -> None:
        first_block = next(self._blocks.children())
        self._handles.append(
            first_block.register_forward_pre_hook(self._on_block, with_kwargs=True)
        )
        for index, block in enumerate(self._blocks.children()):
            self._handles.append(block.register_forward_pre_hook(partial(self._enter, index)))
            self._handles.append(block.register_forward_hook(self._leave, always_call=True))
        for _, inner in mixtures(self._model):
            self._handles.append(inner.register_forward_pre_hook(self._enter_experts))
            self._handles.append(inner.register_forward_hook(self._leave_experts))
        for inner in self._model.modules():
            own = list(inner.parameters(recurse=False))
            if own and id(inner) not in self._inside:
                self._handles.append(inner.register_forward_pre_hook(self._on_module))

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def first_parameters(self) -> float:
        """Return the elements of the parameters that are used before the blocks."""
        return sum(_local_numel(x) for x in {id(x): x for x in self._before}.values())

    def is_tied(self) -> bool:
        return bool({id(x) for x in self._before} & {id(x) for x in self._after})

    def _on_block(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        streams = [x for x in args if isinstance(x, Tensor)]
        if not streams:
            streams = [x for x in kwargs.values() if isinstance(x, Tensor)][:1]
        self.stream = sum(_local_numel(x) * x.element_size() for x in streams)
        self.before_blocks = self._communication()
        for x in streams:
            if x.requires_grad:
                x.register_hook(self._on_gradient)

    def _on_gradient(self, grad: Tensor) -> None:
        self.to_blocks = self._communication()

    def _communication(self) -> Phase:
        return Phase(communication=by_op(self._counts.report))

    def _enter(self, index: int, module: nn.Module, args: Any) -> None:
        self._counts.block = index
        self.begin[index] = self._counts.progress()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._counts.block = None

    def _enter_experts(self, module: nn.Module, args: Any) -> Any:
        """Note what goes to experts; a call has rows, and the experts of each."""
        tensors = [x for x in args if isinstance(x, Tensor)]
        if len(tensors) < 2 or isinstance(tensors[0], ShardedTensor):
            return None  # which the plan splits inside of each expert, and no rows travel
        rows, choices = tensors[:2]
        self.dispatched += choices.numel() * rows.shape[-1] * rows.element_size()
        self._set_in_experts(True)
        if args[0] is not rows or not rows.requires_grad:
            return None
        return _EndOfBackward.apply(rows, partial(self._set_in_experts, False)), *args[1:]

    def _leave_experts(self, module: nn.Module, args: Any, output: Any) -> None:
        self._set_in_experts(False)
        is_marked = any(isinstance(x, Tensor) and x.grad_fn is not None for x in args[:1])
        if is_marked and isinstance(output, Tensor) and not isinstance(output, ShardedTensor):
            output.register_hook(lambda grad: self._set_in_experts(True))

    def _set_in_experts(self, value: bool) -> None:
        self._counts.in_experts = value

    def _on_module(self, module: nn.Module, args: Any) -> None:
        uses = self._after if self.stream else self._before
        uses += module.parameters(recurse=False)


def _local_numel(x: Tensor) -> int:
    return x._local.numel() if isinstance(x, ShardedTensor) else x.numel()
