"""Cast and scale where fewer elements are handled, and in the copies that collectives need anyway.

    all_gather(x).to(bf16)             ->   all_gather(x.to(bf16))       half the bytes
    all_gather(x.to(f32))              ->   all_gather(x).to(f32)        half the bytes
    all_gather(x) * 0.5                ->   all_gather(x * 0.5)          fewer elements
    (all_reduce(x) * 0.5)[part]        ->   all_reduce(x)[part] * 0.5    may be a `reduce_scatter`
    buffer.copy_(y); buffer.to(bf16)   ->   bf16 buffer.copy_(y)         one kernel: `copy_` casts
    buffer.copy_(x.to(bf16))           ->   buffer.copy_(x)              one kernel

All bits stay: what is done to each element alone may be done before elements are moved or after. A
scale does not change places with a sum, not even a power of two: the sum of the larger numbers
might overflow.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import fx

from ..collectives import OPERATORS, WAIT
from .alias import is_contiguous, is_view, live_bytes, nbytes
from .movement import Movement, is_empty, is_moving

aten = torch.ops.aten
_COPIES = (aten.copy_.default, aten.clone.default)
_SCALES = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)
_FREE = {
    "dtype",
    "layout",
    "device",
    "pin_memory",
    "non_blocking",
}  # arguments of a cast that say nothing of strides


class _CastRegion(NamedTuple):
    """Memory between a collective and what is done to each element that it has moved.

    Attributes:
        classes: the memory.
        inputs: nodes that read values from outside, and which.
        exits: nodes that do it.
    """

    classes: set[int]
    inputs: list[tuple[fx.Node, fx.Node]]
    exits: list[fx.Node]


def fuse_casts(graph: fx.Graph) -> int:
    """Move casts and multiplications by numbers to where fewer elements are handled or fewer bytes
    are sent, and into packing copies.

    Returns: how many places have changed.
    """
    changed = 0
    for step in (_send_narrow, _before, _cast_in_copies, _after_slices):
        while count := step(graph, Movement(graph)):
            changed += count
    return changed


def _before(graph: fx.Graph, move: Movement) -> int:
    """Apply what all uses of a moved value do to each element before it is moved."""
    changed, touched = 0, set()
    for start in [node for node in move.nodes if node.target in OPERATORS]:
        own = move.own(start)
        for first in move.derived(start):
            if first == own and not is_moving(start):
                continue
            region = _region(move, first)
            if region is None or touched & region.classes:
                continue
            kinds = {_kind(node) for node in region.exits}
            kind = kinds.pop()
            if kinds or kind is None:
                continue
            dtype = _dtype(region.exits[0])
            if kind[0] == "cast" and dtype.itemsize >= _dtype(move.use.made_by[first]).itemsize:
                continue
            if kind[0] == "scale" and not (first == own and _has_fewer_inputs(move, region, start)):
                continue
            touched |= region.classes | {c for node in region.exits for c in move.use.of[node]}
            if first == own:
                start.meta["moved"] = f"{start.meta.get('moved', '')} after {kind[1]}"
            _apply(graph, move, region, kind[0] == "cast", dtype)
            changed += 1
    return changed


def _region(move: Movement, first: int) -> _CastRegion | None:
    """Return the memory to which the values of a class are copied, up to nodes that do something;
    None if it may not change.
    """
    use, at = move.use, move.at
    classes: set[int] = set()
    inputs: list[tuple[fx.Node, fx.Node]] = []
    exits: list[fx.Node] = []
    work = [first]
    while work:
        c = work.pop()
        if c in classes:
            continue
        if c in use.inputs | use.outputs | move.mixed or c not in use.made_by:
            return None
        classes.add(c)
        fillers = move.fillers[c]
        if not all(
            node.target in OPERATORS or is_empty(node) or node.target in _COPIES for node in fillers
        ):
            return None
        for node in move.readers.get(c, ()):
            if (
                node in fillers
                or (node.target is WAIT and use.of[node] <= classes)
                or is_empty(node)
            ):
                continue
            if at[fillers[-1]] > at[node]:
                return None  # written after it was read
            copied = node.target in _COPIES and (use.writes[node] or use.of[node])
            if (
                copied
                and _dtype(node) == _dtype(use.made_by[c])
                and not copied & (use.inputs | use.outputs)
            ):
                work += copied
            else:
                exits.append(node)
    for node in sorted({node for c in classes for node in move.fillers[c]}, key=at.__getitem__):
        source: Any = (
            None
            if is_empty(node)
            else node.args[1]
            if node.target is aten.copy_.default
            else node.args[0]
        )
        if source is not None and not use.of[source] <= classes:
            inputs.append((node, source))
    dtypes = {_dtype(node) for c in classes for node in move.holders[c] if "val" in node.meta}
    return (
        _CastRegion(classes, inputs, list(dict.fromkeys(exits)))
        if exits and len(dtypes) == 1
        else None
    )


def _kind(node: fx.Node) -> tuple[str, str] | None:
    """Return what a node does to each element of its operand; None if it does something else."""
    if any("val" not in x.meta for x in (node, *node.all_input_nodes)):
        return None
    if node.target is aten._to_copy.default and node.kwargs.keys() <= _FREE and _same_device(node):
        return "cast", str(_dtype(node))
    if (
        node.target is aten.copy_.default
        and _dtype(node) != _dtype(node.args[1])  # type: ignore[arg-type]
        and node.args[1] is not node.args[0]
    ):
        return "cast", str(_dtype(node))
    if node.target in _SCALES and not node.kwargs and type(node.args[1]) in (int, float):
        return "scale", f"{node.target} {node.args[1]!r}"
    return None


def _apply(
    graph: fx.Graph, move: Movement, region: _CastRegion, is_cast: bool, dtype: torch.dtype
) -> None:
    """Do at the inputs of a region what its exits do, and let their users take its values as they
    are.
    """
    function = region.exits[0]
    droppable = [node for node in region.exits if _can_go(move, node)]
    for node, source in region.inputs:
        if is_cast and node.target is aten.copy_.default:
            continue  # it casts itself
        if is_cast and node.target is aten.clone.default:
            node.target = aten._to_copy.default
            node.kwargs = {**node.kwargs, "dtype": dtype}
            continue
        with graph.inserting_before(node):
            if is_cast:
                made = _cast(graph, source, dtype)
            else:
                made = _applied(graph, function, source, dtype)
        node.replace_input_with(source, made)
    for node in {node for c in region.classes for node in move.holders[c] if "val" in node.meta}:
        _retype(node, dtype)
        if is_empty(node):
            node.kwargs = {**node.kwargs, "dtype": dtype}
    for node in droppable:
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        graph.erase_node(node)


def _cast(graph: fx.Graph, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Add a cast of a contiguous operand; in the copy that packs it, if only the collective reads
    that.
    """
    chain = [x]
    while is_view(chain[-1]) and len(chain[-1].users) == 1:
        chain.append(chain[-1].all_input_nodes[0])
    if chain[-1].target is aten.clone.default and len(chain[-1].users) == 1:
        chain[-1].target = aten._to_copy.default
        chain[-1].kwargs = {**chain[-1].kwargs, "dtype": dtype}
        for node in chain:
            _retype(node, dtype)
        return x
    made = graph.call_function(aten._to_copy.default, (x,), {"dtype": dtype})
    return _note(made, x, dtype)


def _can_go(move: Movement, node: fx.Node) -> bool:
    """Return whether users of an exit may read the memory of the region instead: nothing writes it
    or depends on where it is.
    """
    if node.target is aten.copy_.default:
        return False
    use, x = move.use, node.args[0]
    (made,) = use.of[node]
    if (
        made in use.outputs
        or made in move.mixed
        or move.fillers[made] != [node]
        or node.meta["val"][:2] != x.meta["val"][:2]  # type: ignore[union-attr]
    ):
        return False
    (c,) = use.of[x]  # type: ignore[index]
    if math.prod(x.meta["val"][0]) != math.prod(use.made_by[c].meta[("val")][0]):  # type: ignore[union-attr]
        return False  # it would keep more than it reads
    return not any(user.target is aten.as_strided.default for user in move.holders[made])


def _has_fewer_inputs(move: Movement, region: _CastRegion, start: fx.Node) -> bool:
    """Return whether a scale runs on fewer elements before a collective than after, and nothing is
    left of it there.
    """
    kept = _dtype(start) is _dtype(region.exits[0]) and nbytes(start) > nbytes(start.args[0])  # type: ignore[arg-type]
    return kept and all(_can_go(move, node) for node in region.exits)


def _send_narrow(graph: fx.Graph, move: Movement) -> int:
    """Send what was cast to a larger dtype before the cast, where both results fit into memory next
    to each other.
    """
    live = live_bytes(graph, move.use)
    for start in filter(is_moving, move.nodes):
        cast, own = _widening(start.args[0]), move.own(start)  # type: ignore[arg-type]
        if (
            cast is None
            or len(start.users) != 1
            or own in move.mixed | move.use.outputs
            or move.fillers[own] != [start]
        ):
            continue
        narrow: Any = cast.args[0]
        (wait,) = start.users
        between = range(move.at[cast] + 1, move.at[wait] + 1)
        if (
            wait.target is not WAIT
            or not is_contiguous(narrow)
            or any(_is_written(move, x, between) for x in (narrow, cast))
        ):
            continue
        more = nbytes(narrow) + nbytes(start) * _dtype(narrow).itemsize // _dtype(start).itemsize
        if max(live[i] for i in between) + more > max(live):
            continue
        wide, size = _dtype(start), math.prod(narrow.meta["val"][0])
        with graph.inserting_before(start):
            flat = graph.call_function(aten.view.default, (narrow, [size]))
        flat.meta["val"] = (size,), (1,), *narrow.meta["val"][2:]
        start.replace_input_with(start.args[0], flat)  # type: ignore[arg-type]
        for node in (start, wait):
            _retype(node, _dtype(narrow))
        start.meta["moved"] = f"{start.meta.get('moved', '')} before {wide}"
        with graph.inserting_after(wait):
            whole = _note(
                graph.call_function(aten._to_copy.default, (wait,), {"dtype": wide}), wait, wide
            )
        _replace(wait, whole)
        for node in reversed(list(graph.nodes)):
            if not node.users and (is_view(node) or node is cast):
                graph.erase_node(node)
        return 1
    return 0


def _is_written(move: Movement, x: fx.Node, between: range) -> bool:
    """Return whether the memory of a value is written at one of these places."""
    return any(move.at[node] in between for c in move.use.of[x] for node in move.fillers.get(c, ()))


def _widening(x: fx.Node) -> fx.Node | None:
    """Return the cast to a larger dtype that a node is a flat view of; None if it is none."""
    while is_view(x) and x.target is aten.view.default:
        x = x.all_input_nodes[0]
    kind = _kind(x) if x.target is aten._to_copy.default else None
    return x if kind is not None and _is_exact(_dtype(x.args[0]), _dtype(x)) else None  # type: ignore[arg-type]


def _is_exact(given: torch.dtype, made: torch.dtype) -> bool:
    """Return whether a larger dtype has all values of a smaller one."""
    return (
        given.itemsize < made.itemsize
        and given is not torch.bool
        and torch.promote_types(given, made) is made
        and (given.is_floating_point == made.is_floating_point)
    )


def _cast_in_copies(graph: fx.Graph, move: Movement) -> int:
    """Let copies into the buffers of collectives cast."""
    changed = 0
    sent = {c for node in move.nodes if node.target in OPERATORS for c in move.use.of[node.args[0]]}  # type: ignore[index]
    for node in move.nodes:
        cast: Any = node.args[1] if node.target is aten.copy_.default else None
        if (
            cast is None
            or not move.use.writes[node] <= sent
            or cast.target is not aten._to_copy.default
            or _kind(cast) is None
        ):
            continue
        x: Any = cast.args[0]
        same = _dtype(cast) is _dtype(node) or _is_exact(_dtype(x), _dtype(cast))
        if not same or len(cast.users) > 1 or (nbytes(x) > nbytes(cast) and node.prev is not cast):
            continue
        if _is_written(move, x, range(move.at[cast], move.at[node] + 1)):
            continue
        node.replace_input_with(cast, x)
        graph.erase_node(cast)
        changed += 1
    return changed


def _after_slices(graph: fx.Graph, move: Movement) -> int:
    """Cast and scale what a slice takes of a collective's result, and not the whole."""
    for node in move.nodes:
        if _kind(node) is None or node.target is aten.copy_.default:
            continue
        x: Any = node.args[0]
        made, given = move.use.of[node], move.use.of[x]
        if not _is_of_collective(move, x):
            continue
        if (
            made & (move.use.outputs | move.mixed)
            or any(move.fillers[c] != [node] for c in made)
            or given & move.use.outputs
        ):
            continue
        if any(
            move.at[filler] > move.at[node] for c in given for filler in move.fillers[c]
        ) or not is_contiguous(x):
            continue
        chain = _up_to_slice(node)
        if (
            not chain
            or math.prod(chain[-1].meta["val"][0]) >= math.prod(x.meta["val"][0])
            or not is_contiguous(chain[-1])
        ):
            continue
        part = chain[-1]
        if nbytes(x) > nbytes(node) and move.at[part] - move.at[node] > len(chain):
            continue  # the larger value would be kept for longer
        with graph.inserting_after(part):
            again = _applied(graph, node, part, _dtype(node))
        _replace(part, again)
        for view in chain:
            _retype(view, _dtype(x))
        chain[0].replace_input_with(node, x)
        graph.erase_node(node)
        return 1
    return 0


def _is_of_collective(move: Movement, x: fx.Node) -> bool:
    """Return whether a value is a collective's result, or was cast or scaled from one."""
    found: set[Any] = {x}
    while found:
        found = {move.use.made_by.get(c) for node in found for c in move.use.of[node]} - {None}
        if any(node.target in OPERATORS for node in found):
            return True
        found = {
            node.args[0]
            for node in found
            if _kind(node) is not None and node.target is not aten.copy_.default
        }
    return False


def _up_to_slice(node: fx.Node) -> list[fx.Node]:
    """Return the views that are the only uses of a node, up to a slice; none if there is no
    slice.
    """
    chain: list[fx.Node] = []
    while len(node.users) == 1:
        (node,) = node.users
        if node.target not in (aten.view.default, aten.slice.Tensor):
            break
        chain.append(node)
        if node.target is aten.slice.Tensor:
            return chain
    return []


def _dtype(node: fx.Node) -> torch.dtype:
    return node.meta["val"][2]


def _same_device(node: fx.Node) -> bool:
    return node.meta["val"][3] == node.args[0].meta["val"][3]  # type: ignore[union-attr]


def _applied(graph: fx.Graph, function: fx.Node, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Add a node that does to each element of x what another node does to its operand."""
    return _note(
        graph.call_function(function.target, (x, *function.args[1:]), function.kwargs),  # type: ignore[arg-type]
        x,
        dtype,
    )


def _replace(x: fx.Node, made: fx.Node) -> None:
    """Let all users of x take what was made of it."""
    x.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)


def _note(made: fx.Node, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Note the shape of a node that computes with each element of another."""
    shape, strides, _, device = x.meta["val"]
    made.meta["val"] = (
        shape,
        torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride(),
        dtype,
        device,
    )
    return made


def _retype(node: fx.Node, dtype: torch.dtype) -> None:
    shape, strides, _, device = node.meta["val"]
    node.meta["val"] = shape, strides, dtype, device
