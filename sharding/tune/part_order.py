"""In which order a block, and what is outside of the blocks, communicates and uses its parameters.

Two blocks of the model run forward and backward without values, as a rank of an axis "tp", without
FSDP, pipeline and other axes. What these add follows from the marks; see `events.py`.

    forward     all_gather  attention  reduce_scatter ...
    backward    all_gather  weights    ...  half  reduce_scatter  all
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...mesh.comm.current_world import current_world
from ...mesh.comm.group import CollectiveRecord
from ..tensor.autograd.leaf_grads import accumulate_grads
from ..tensor.sharded_tensor import ShardedTensor, local_of
from ..trees import tensors_in
from .counts import CountedWithoutValues, OperatorCounts
from .description import Description, call
from .mixtures import mixtures

# Marks besides the names of collectives over tp.
OUTPUT = "output"  # the gradient of the model's output exists
ATTENTION = "attention"
EXPERTS = "experts"  # in backward, the gradient of their result exists
SAVED = "saved"  # backward uses something that forward has saved, for the first time
WEIGHTS = "weights"  # backward uses a parameter, for the first time
HALF = "half"  # half of the gradients of parameters exist
ALL = "all"  # all do

_FEW = 2  # elements of an all_reduce that do not depend on the batch, such as a loss

Marks = tuple[str, ...]


@dataclass(frozen=True)
class PartOrder:
    """Marks of a part of the model, in order.

    Attributes:
        forward, backward: of one microbatch.
        again: those of forward that recomputation repeats. It ends where autograd last saves
            something.
        splits: whether tp splits parameters: the values that occur, in the order of parameters.
    """

    forward: Marks
    backward: Marks
    again: Marks = ()
    splits: tuple[bool, ...] = ()


@dataclass(frozen=True)
class ModelOrder:
    """Marks of what runs before the blocks, of a block of each kind, and of what runs after them.

    Attributes:
        blocks: by the first block of each kind.
    """

    before: PartOrder
    blocks: dict[int, PartOrder]
    after: PartOrder


def model_order(
    model: Description, tp: int, sequence_parallel: bool, *, own_experts: bool
) -> ModelOrder:
    """Return the order of a model's parts.

    Args:
        own_experts: whether parameters of experts are gathered apart from those of their block.

    Raises:
        ValueError: the model cannot run without values, or blocks do not follow one another.
    """
    first = model.block_like(0)
    kinds = dict.fromkeys(map(model.block_like, range(model.layers)))

    def run(kind: int) -> _Segments:
        def step(module: nn.Module, batch: Any) -> _Segments:
            marks = _Marks(module, model, own_experts)
            return _Segments(marks.run(batch), *marks.splits())

        return model.evaluate(step, [first, kind], tp, sequence_parallel, own_experts).result

    runs = {kind: run(kind) for kind in kinds}
    edges = runs[first]
    blocks = {kind: segments.last_block() for kind, segments in runs.items()}
    return ModelOrder(edges.before(blocks[first]), blocks, edges.after())


class _Marks:
    """Runs a copy of the model with two blocks, and marks what happens."""

    def __init__(self, module: nn.Module, model: Description, own_experts: bool) -> None:
        self._module, self._loss = module, model.loss
        self._blocks = list(module.get_submodule(model.blocks).children())
        self._experts = [inner for _, inner in mixtures(module)] if own_experts else []
        self._marks: list[str] = []
        self._block: int | None = None
        self._before: list[Tensor] = []  # parameters outside of blocks, by where they are used
        self._after: list[Tensor] = []

    def run(self, batch: Any) -> list[str]:
        handles: list[Any] = []
        for i, block in enumerate(self._blocks):
            handles.append(block.register_forward_pre_hook(partial(self._begin, i)))
            handles.append(block.register_forward_hook(partial(self._end, i)))
            self._mark_gradients(i)
        inside = {id(inner) for block in self._blocks for inner in block.modules()}
        for inner in self._module.modules():
            if id(inner) not in inside:
                handles.append(inner.register_forward_pre_hook(self._on_edge))
        for inner in self._experts:
            handles.append(inner.register_forward_pre_hook(lambda *_: self._add(EXPERTS)))
            handles.append(inner.register_forward_hook(self._end_experts))
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        observers = current_world().observers
        observers.append(self._observe)
        stack = ExitStack()
        try:
            with CountedWithoutValues(_AttentionMarks(self._add)):
                with hooks:
                    output = call(self._module, batch)
                    self._on_gradient(output, OUTPUT)
                    value = self._loss(output, batch)
                self._add("backward")
                stack.enter_context(accumulate_grads())  # sums of gradients are the program's
                value.backward()
        finally:
            observers.remove(self._observe)
            stack.close()
            for handle in handles:
                handle.remove()
        return self._marks

    def splits(self) -> tuple[tuple[bool, ...], ...]:
        """Return whether tp splits parameters: before the blocks, of the second, and after them."""
        parts = self._before, self._own_parameters(1), self._after
        return tuple(tuple(dict.fromkeys(map(_is_split, part))) for part in parts)

    def _own_parameters(self, index: int) -> list[Tensor]:
        apart = {id(x) for inner in self._experts for x in inner.parameters()}
        return [x for x in self._blocks[index].parameters() if id(x) not in apart]

    def _on_edge(self, module: nn.Module, args: Any) -> None:
        uses = self._after if "end 1" in self._marks else self._before
        uses += module.parameters(recurse=False)

    def _add(self, mark: str) -> None:
        self._marks.append(mark)

    def _observe(self, record: CollectiveRecord) -> None:
        ranks = len(record.ranks)
        whole = record.bytes_received * ranks / (2 * (ranks - 1))
        if record.op != "all_reduce" or whole > _FEW * record.dtype.itemsize:
            self._add(record.op)

    def _begin(self, index: int, module: nn.Module, args: Any) -> None:
        self._block = index
        self._add(f"begin {index}")

    def _end(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        self._block = None
        self._add(f"end {index}")
        self._on_gradient(output, f"backward {index}")

    def _end_experts(self, module: nn.Module, args: Any, output: Any) -> None:
        self._on_gradient(output, EXPERTS)

    def _on_gradient(self, output: Any, mark: str) -> None:
        """Mark when the gradient of the first tensor of an output exists."""
        x = next((local_of(x) for x in tensors_in((_fields(output),)) if x.requires_grad), None)
        if x is not None:
            x.register_hook(lambda _: self._add(mark))

    def _mark_gradients(self, index: int) -> None:
        """Mark when half of the gradients of a block exist, and when all do."""
        trained = [x for x in self._own_parameters(index) if x.requires_grad]
        waiting = set(range(len(trained)))
        half = len(trained) - (len(trained) + 1) // 2

        def on_gradient(number: int, _: Tensor) -> None:
            waiting.discard(number)
            if len(waiting) == half:
                self._add(f"{HALF} {index}")
            if not waiting:
                self._add(f"{ALL} {index}")

        for number, x in enumerate(trained):
            local_of(x).register_hook(partial(on_gradient, number))

    def _pack(self, x: Tensor) -> Any:
        if self._block is not None:
            self._add(f"{SAVED} {self._block}")
        return x, self._block

    def _unpack(self, saved: Any) -> Tensor:
        x, block = saved
        if block is not None:
            self._add(f"{SAVED} {block}")
            if local_of(x).untyped_storage()._cdata in self._storages(block):
                self._add(f"{WEIGHTS} {block}")
        return x

    def _storages(self, index: int) -> set[int]:
        parameters = map(local_of, self._own_parameters(index))
        return {x.untyped_storage()._cdata for x in parameters}


def _is_split(x: Tensor) -> bool:
    return isinstance(x, ShardedTensor) and bool(x.spec.axes)


def _fields(output: Any) -> Any:
    """Return an output as `tensors_in` takes it; those of Hugging Face are dicts."""
    return dict(output) if hasattr(output, "keys") else output


class _AttentionMarks(OperatorCounts):
    """Counts nothing; attention is marked."""

    def __init__(self, add: Callable[[str], None]) -> None:
        super().__init__([])
        self._add = add

    def record_attention(self, operands: Any, results: Any) -> None:
        self._add(ATTENTION)


class _Segments:
    """The marks of a run of two blocks, cut into those of its parts."""

    def __init__(
        self,
        marks: list[str],
        before: tuple[bool, ...],
        block: tuple[bool, ...],
        after: tuple[bool, ...],
    ) -> None:
        self._splits = before, block, after
        places = {mark: i for i, mark in enumerate(marks)}
        ends = ["begin 0", "end 0", "begin 1", "end 1", "backward", "backward 1", "backward 0"]
        if [mark for mark in marks if mark in ends] != ends:
            raise ValueError("tune: the order of events of a model whose blocks do not follow")
        self._forward, self._backward = (
            marks[: places["backward"]],
            marks[places["backward"] + 1 :],
        )

    def last_block(self) -> PartOrder:
        """Return the marks of the second block."""
        forward = _between(self._forward, "begin 1", "end 1")
        saves = [i for i, mark in enumerate(forward) if mark == f"{SAVED} 1"]
        again = forward[: saves[-1]] if saves else []
        backward = _between(self._backward, "backward 1", "backward 0")
        return PartOrder(_plain(forward), _firsts(backward, 1), _plain(again), self._splits[1])

    def before(self, block: PartOrder) -> PartOrder:
        """Return those of what runs before the blocks; its backward follows the first block's."""
        marks = _plain(_between(self._backward, "backward 0", None))
        own = [mark for mark in block.backward if mark not in (SAVED, WEIGHTS, HALF, ALL)]
        forward = _between(self._forward, None, "begin 0")
        return PartOrder(_plain(forward), marks[len(own) :], splits=self._splits[0])

    def after(self) -> PartOrder:
        """Return those of what runs after the blocks, with the loss."""
        backward = _between(self._backward, None, "backward 1")
        forward = _between(self._forward, "end 1", None)
        return PartOrder(_plain(forward), _plain(backward), splits=self._splits[2])


def _between(marks: list[str], begin: str | None, end: str | None) -> list[str]:
    first = 0 if begin is None else marks.index(begin) + 1
    last = len(marks) if end is None else marks.index(end)
    return marks[first:last]


def _plain(marks: list[str]) -> Marks:
    """Return collectives, attention, experts and the output."""
    return tuple(mark for mark in marks if " " not in mark)


def _firsts(marks: list[str], block: int) -> Marks:
    """Return those, and when a block's own parameters are first used and its gradients exist."""
    result: list[str] = []
    for mark in marks:
        name, _, index = mark.partition(" ")
        is_repeated = name in (SAVED, WEIGHTS) and name in result
        if not index or (index == str(block) and not is_repeated):
            result.append(name)
    return tuple(result)
