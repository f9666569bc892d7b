"""What a step computes, moves and saves if blocks are compiled, or recomputed in part.

Both are derived from the operators of an eager run, in the order in which they ran.

    compiled    operators between products, attention and collectives are one kernel each, which
                reads what comes from outside and writes what is used outside; saved is the smallest
                set of tensors from which backward can compute the rest without products again,
                which is a minimum cut, as torch's partitioner makes it
    selective   saved are the input of a block, the results of attention, and those of every second
                product, grouped ones aside; backward computes the rest of the block again
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from .counts import GROUPED, Kernel, Operation, Tape


class Compiled(NamedTuple):
    """Kernels of forward and backward, and the numbers of what is saved."""

    forward: dict[Kernel, float]
    backward: dict[Kernel, float]
    saved: set[int]


def compile_tape(
    tape: Tape, forward: Sequence[Operation], backward: Sequence[Operation], saved: set[int]
) -> Compiled:
    """Return the kernels of a compiled program.

    Args:
        tape: has the sizes of tensors.
        forward, backward: the operators of the eager program.
        saved: the numbers of what its forward saves.
    """
    stored = smallest_saved(tape, forward, saved)
    producers = _producers(forward)
    sources = {key: _sources(key, producers, stored | tape.constants) for key in saved - stored}
    return Compiled(
        fused(tape, forward, written=stored),
        fused(tape, backward, before=_tensors_of(forward), sources=sources),
        stored,
    )


def smallest_saved(tape: Tape, forward: Sequence[Operation], saved: set[int]) -> set[int]:
    """Return the tensors with the fewest bytes from which backward can compute those saved.

    Products, attention and reductions are not computed again.
    """
    import networkx

    producers = _producers(forward)
    graph = networkx.DiGraph()
    graph.add_node("source")
    graph.add_node("sink")
    waiting, seen = list(saved), set(saved)
    while waiting:
        key = waiting.pop()
        size = 0 if key in tape.constants else tape.sizes[key]
        graph.add_edge(("in", key), ("out", key), capacity=size)
        operation = producers.get(key)
        if operation is None:
            graph.add_edge("source", ("in", key))
            continue
        for operand in operation.inputs:
            graph.add_edge(("out", operand), ("in", key))
            if operand not in seen:
                seen.add(operand)
                waiting.append(operand)
    for key in saved:
        graph.add_edge(("out", key), "sink")
    if not saved:
        return set()
    _, (reached, _) = networkx.minimum_cut(graph, "source", "sink")
    cut = {key for key in seen if ("in", key) in reached and ("out", key) not in reached}
    return cut - tape.constants


def _producers(operations: Iterable[Operation]) -> dict[int, Operation]:
    """Return, for each result that can be computed again, the operator that makes it."""
    producers = {}
    for operation in operations:
        for key, size in operation.results.items():
            is_small = 4 * size <= max(operation.inputs.values(), default=0)  # of a reduction
            if key in operation.inputs:
                producers.pop(key, None)  # written in place
            elif operation.kernel.kind == "other" and operation.inputs and not is_small:
                producers[key] = operation
    return producers


def _sources(key: int, producers: Mapping[int, Operation], stops: set[int]) -> set[int]:
    """Return what is read to compute a tensor again."""
    sources, waiting, seen = set(), [key], {key}
    while waiting:
        current = waiting.pop()
        operation = producers.get(current)
        if current in stops or operation is None:
            sources.add(current)
            continue
        fresh = [operand for operand in operation.inputs if operand not in seen]
        seen.update(fresh)
        waiting += fresh
    return sources


class _Group:
    """Operators that are one kernel: bytes by the number of each tensor that it reads or writes."""

    def __init__(self) -> None:
        self.reads: dict[int, int] = {}
        self.writes: dict[int, int] = {}
        self.of_experts = False


def fused(
    tape: Tape,
    operations: Sequence[Operation],
    written: Collection[int] = (),
    before: Collection[int] = (),
    sources: Mapping[int, set[int]] = MappingProxyType({}),
) -> dict[Kernel, float]:
    """Return the kernels of operators that are fused between products.

    Args:
        written: tensors that are written, whoever reads them.
        before: tensors that exist before the operators run.
        sources: tensors that are computed again -> from what.
    """
    kernels: dict[Kernel, float] = {}
    level_of = dict.fromkeys((*tape.constants, *before), 0)  # the number of products before it
    group_of: dict[int, _Group] = {}  # tensor -> the group that computes it
    levels: dict[int, list[_Group]] = {}
    again: set[int] = set()
    top = 0

    def add(kernel: Kernel) -> None:
        kernels[kernel] = kernels.get(kernel, 0) + 1

    for operation in operations:
        is_fused = operation.kernel.kind == "other"
        reads: dict[int, int] = {}
        for key, size in operation.inputs.items():
            if key not in sources:
                reads[key] = size
            elif is_fused:
                reads |= {source: tape.sizes[source] for source in sources[key]}
            elif key not in again:  # a kernel writes it for the product
                again.add(key)
                again_reads = {source: tape.sizes[source] for source in sources[key]}
                add(_kernel(tape, again_reads, [size], operation.kernel.of_experts))
        # what no operator made comes from a collective, after all that was before
        level = max((level_of.setdefault(key, top) for key in reads), default=top)
        if not is_fused:
            if operation.kernel.kind == "matmul":
                add(operation.kernel)
            for key in reads:
                _write(group_of, key, tape)
            top = max(top, level + 1)
            for key in operation.results:
                level_of[key] = level + 1
                group_of.pop(key, None)
            continue
        top = max(top, level)
        group = _Group()
        groups = levels.setdefault(level, [])
        for key, size in reads.items():
            producer = group_of.get(key)
            if producer is not None and level_of[key] == level:
                group = _merge(producer, group, group_of, groups)
            else:
                _write(group_of, key, tape)
                group.reads[key] = size
        if all(group is not known for known in groups):
            groups.append(group)
        group.of_experts |= operation.kernel.of_experts
        for key in operation.results:
            level_of[key] = level
            group_of[key] = group
    read = {key for operation in operations for key in operation.inputs}
    for key in group_of:
        if key in written or key not in read:  # results, and what collectives read
            _write(group_of, key, tape)
    for groups in levels.values():
        for group in groups:
            add(_kernel(tape, group.reads, group.writes.values(), group.of_experts))
    return kernels


def _tensors_of(operations: Iterable[Operation]) -> set[int]:
    keys: set[int] = set()
    for operation in operations:
        keys |= operation.inputs.keys() | operation.results.keys()
    return keys


def _write(group_of: Mapping[int, _Group], key: int, tape: Tape) -> None:
    """Note that a tensor is read outside of the group that computes it."""
    if key in group_of:
        group_of[key].writes[key] = tape.sizes[key]


def _merge(one: _Group, other: _Group, group_of: dict[int, _Group], groups: list[_Group]) -> _Group:
    """Move the tensors of `other` to `one`."""
    if one is other:
        return one
    one.reads |= other.reads
    one.writes |= other.writes
    one.of_experts |= other.of_experts
    if other in groups:
        groups.remove(other)
    for key, group in group_of.items():
        if group is other:
            group_of[key] = one
    return one


def _kernel(
    tape: Tape, reads: Mapping[int, int], writes: Iterable[int], of_experts: bool
) -> Kernel:
    fixed = sum(size for key, size in reads.items() if key in tape.constants)
    moved = sum(reads.values()) - fixed + sum(writes)
    return Kernel("other", 0, moved, fixed, of_experts)


# -- selective recomputation -----------------------------------------------------------------------


class Selective(NamedTuple):
    """What selective recomputation saves of blocks, without their inputs, and computes again.

    Attributes:
        saved: numbers of tensors.
        again: the operators that run again, in order.
    """

    saved: set[int]
    again: list[Operation]


def select(forward: Sequence[Operation]) -> Selective:
    """Return what is saved if attention and every second product of a block are.

    Products are those whose flops torch counts, which is how programs tell them: grouped ones, of
    experts, are not among them.
    """
    saved: set[int] = set()
    again: list[Operation] = []
    products: dict[int, int] = {}
    for operation in forward:
        if operation.block is None:
            continue
        is_saved = operation.kernel.kind == "attention"
        if operation.kernel.kind == "matmul" and operation.name not in GROUPED:
            products[operation.block] = products.get(operation.block, 0) + 1
            is_saved = products[operation.block] % 2 == 1
        if is_saved:
            saved.update(operation.results)
        else:
            again.append(operation)
    return Selective(saved, again)


def eager(operations: Iterable[Operation]) -> dict[Kernel, float]:
    """Return the kernels of operators that run one by one."""
    kernels: dict[Kernel, float] = {}
    for operation in operations:
        if operation.kernel.kind != "attention":
            kernels[operation.kernel] = kernels.get(operation.kernel, 0) + 1
    return kernels


# -- memory ----------------------------------------------------------------------------------------


def backward_transient(
    tape: Tape,
    forward: Sequence[Operation],
    backward: Sequence[Operation],
    saved: Collection[int],
    gradients: Collection[int],
) -> int:
    """Return the bytes that backward of blocks holds beyond what is saved at its beginning.

    Args:
        saved: the numbers of what forward saves.
        gradients: the numbers of parameters and of their gradients, which do not count.
    """
    of_blocks = {
        key
        for operation in forward
        if operation.block is not None
        for key in operation.results.keys() & saved
    }
    first = next(
        (i for i, operation in enumerate(backward) if of_blocks & operation.inputs.keys()), None
    )
    if first is None:
        return 0
    last_read = {key: i for i, operation in enumerate(backward) for key in operation.inputs}
    live = {key for key in saved if last_read.get(key, -1) >= first}
    size = begin = sum(tape.sizes[key] for key in live)
    most = 0
    for i, operation in enumerate(backward):
        fresh = [key for key in operation.results if key not in live and key not in gradients]
        if i >= first or any(last_read.get(key, -1) >= first for key in fresh):
            live.update(fresh)
            size += sum(tape.sizes[key] for key in fresh)
            most = max(most, size)
        for key in (*operation.inputs, *operation.results):
            if key in live and last_read.get(key, -1) <= i:
                live.discard(key)
                size -= tape.sizes[key]
    return most - begin


# -- gathering again -------------------------------------------------------------------------------


def received_in_block(forward: Sequence[Operation]) -> set[int]:
    """Return the operands of products in blocks that no operator makes: collectives do."""
    computed = {key for operation in forward for key in operation.results}
    return {
        key
        for operation in forward
        if operation.block is not None and operation.kernel.kind == "matmul"
        for key in operation.inputs.keys() - computed
    }
