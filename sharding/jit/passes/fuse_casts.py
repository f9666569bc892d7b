"""Cast and scale where fewer elements are handled, and in the copies that collectives need anyway.

    send_before_widening    all_gather(x.to(f32))               ->   all_gather(x).to(f32)
    apply_before_moving     all_gather(x).to(bf16)              ->   all_gather(x.to(bf16))
                            all_gather(x) * 0.5                 ->   all_gather(x * 0.5)
                            buffer.copy_(y); buffer.to(bf16)    ->   bf16 buffer.copy_(y)
    cast_in_copies          buffer.copy_(x.to(bf16))            ->   buffer.copy_(x)
    apply_after_slicing     (all_reduce(x) * 0.5)[part]         ->   all_reduce(x)[part] * 0.5

The first two send half the bytes or handle fewer elements, a copy that casts is one kernel in place
of two, and behind a slice `reduce_scatter` can follow.

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
# Arguments of a cast that say nothing of strides.
_CAST_ARGUMENTS = {"dtype", "layout", "device", "pin_memory", "non_blocking"}


def fuse_casts(graph: fx.Graph) -> int:
    """Move casts and multiplications by numbers to where they cost less.

    They go to where fewer elements are handled or fewer bytes are sent, and into packing copies.

    Returns: how many places have changed.
    """
    changed = 0
    for rewrite in (send_before_widening, apply_before_moving, cast_in_copies, apply_after_slicing):
        while count := rewrite(graph, Movement(graph)):
            changed += count
    return changed


class Elementwise(NamedTuple):
    """What a node does to each element of its operand: kind is "cast" or "scale"."""

    kind: str
    text: str


def elementwise(node: fx.Node) -> Elementwise | None:
    """Return what a node does to each element; None if it does something else."""
    if any("val" not in x.meta for x in (node, *node.all_input_nodes)):
        return None
    x: Any = node.args[0] if node.args else None
    if node.target is aten._to_copy.default:
        same_device = node.meta["val"][3] == x.meta["val"][3]
        if same_device and node.kwargs.keys() <= _CAST_ARGUMENTS:
            return Elementwise("cast", str(_dtype(node)))
    elif node.target is aten.copy_.default:
        source: Any = node.args[1]
        if _dtype(node) != _dtype(source) and source is not x:
            return Elementwise("cast", str(_dtype(node)))
    elif node.target in _SCALES and not node.kwargs and type(node.args[1]) in (int, float):
        return Elementwise("scale", f"{node.target} {node.args[1]!r}")
    return None


# -- all_gather(x.to(f32))  ->  all_gather(x).to(f32) ----------------------------------------------


def send_before_widening(graph: fx.Graph, move: Movement) -> int:
    """Send what was cast to a larger dtype before the cast.

    Both results must fit into memory next to each other.
    """
    live = live_bytes(graph, move.use)
    for start in filter(is_moving, move.nodes):
        cast = _wide_cast(start.args[0])  # type: ignore[arg-type]
        if cast is None or len(start.users) != 1 or not move.is_private(start):
            continue
        narrow: Any = cast.args[0]
        (wait,) = start.users
        between = range(move.at[cast] + 1, move.at[wait] + 1)
        is_written = move.is_written(narrow, between) or move.is_written(cast, between)
        if wait.target is not WAIT or is_written or not is_contiguous(narrow):
            continue
        more = nbytes(narrow) + nbytes(start) * _dtype(narrow).itemsize // _dtype(start).itemsize
        if max(live[i] for i in between) + more > max(live):
            continue
        wide, size = _dtype(start), math.prod(narrow.meta["val"][0])
        with graph.inserting_before(start):
            flat = graph.call_function(aten.view.default, (narrow, [size]))
        flat.meta["val"] = (size,), (1,), *narrow.meta["val"][2:]
        start.replace_input_with(start.args[0], flat)  # type: ignore[arg-type]
        _set_dtype(start, _dtype(narrow))
        _set_dtype(wait, _dtype(narrow))
        start.meta["moved"] = f"{start.meta.get('moved', '')} before {wide}"
        with graph.inserting_after(wait):
            whole = _call_like(graph, aten._to_copy.default, (wait,), {"dtype": wide}, wide)
        _replace(wait, whole)
        for node in reversed(list(graph.nodes)):
            if not node.users and (is_view(node) or node is cast):
                graph.erase_node(node)
        return 1
    return 0


def _wide_cast(x: fx.Node) -> fx.Node | None:
    """Return the cast to a larger dtype that a node is a flat view of; None if it is none."""
    while is_view(x) and x.target is aten.view.default:
        x = x.all_input_nodes[0]
    is_cast = x.target is aten._to_copy.default and elementwise(x) is not None
    return x if is_cast and _has_all_values(_dtype(x), _dtype(x.args[0])) else None


def _has_all_values(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Return whether a larger dtype has all values of a smaller one."""
    return (
        narrow.itemsize < wide.itemsize
        and narrow is not torch.bool
        and torch.promote_types(narrow, wide) is wide
        and narrow.is_floating_point == wide.is_floating_point
    )


# -- all_gather(x).to(bf16)  ->  all_gather(x.to(bf16)) --------------------------------------------


class Region(NamedTuple):
    """Memory between a collective and what is done to each element that it has moved.

    Attributes:
        classes: the memory, which has one dtype and is filled by copies of values in it.
        inputs: nodes that read values from outside, and which.
        exits: the nodes that use the values otherwise.
    """

    classes: set[int]
    inputs: list[tuple[fx.Node, fx.Node]]
    exits: list[fx.Node]

    def function(self) -> Elementwise | None:
        """Return what all exits do to each element; None if they do different or other things."""
        functions = {elementwise(node) for node in self.exits}
        return functions.pop() if len(functions) == 1 else None


def apply_before_moving(graph: fx.Graph, move: Movement) -> int:
    """Apply what all uses of a moved value do to each element before it is moved."""
    changed = 0
    touched: set[int] = set()
    for start in [node for node in move.nodes if node.target in OPERATORS]:
        own = move.own(start)
        for first in move.classes_derived_from(start):
            if first == own and not is_moving(start):
                continue  # a sum
            region = _region(move, first)
            if region is None or touched & region.classes:
                continue
            function = region.function()
            if function is None:
                continue
            dtype = _dtype(region.exits[0])
            if function.kind == "cast":
                if dtype.itemsize >= _dtype(move.use.made_by[first]).itemsize:
                    continue
            elif first != own or not _has_fewer_inputs(move, region, start):
                continue
            touched |= region.classes | move.use.union(region.exits)
            if first == own:
                start.meta["moved"] = f"{start.meta.get('moved', '')} after {function.text}"
            _apply_at_inputs(graph, move, region, function.kind == "cast")
            changed += 1
    return changed


def _region(move: Movement, first: int) -> Region | None:
    """Return the memory to which the values of a class are copied, up to nodes that do something.

    The result is None if the memory may not change.
    """
    use, at = move.use, move.at
    classes: set[int] = set()
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
        if not all(map(_is_filler, fillers)):
            return None
        for node in move.readers.get(c, ()):
            is_wait = node.target is WAIT and use.of[node] <= classes
            if node in fillers or is_wait or is_empty(node):
                continue
            if at[fillers[-1]] > at[node]:
                return None  # written after it was read
            copied = (use.writes[node] or use.of[node]) if node.target in _COPIES else frozenset()
            same_dtype = copied and _dtype(node) == _dtype(use.made_by[c])
            if same_dtype and not copied & (use.inputs | use.outputs):
                work += copied
            else:
                exits.append(node)
    dtypes = {_dtype(node) for c in classes for node in move.holders[c] if "val" in node.meta}
    if not exits or len(dtypes) != 1:
        return None
    inputs: list[tuple[fx.Node, fx.Node]] = []
    for node in sorted({node for c in classes for node in move.fillers[c]}, key=at.__getitem__):
        if not is_empty(node):
            source: Any = node.args[1 if node.target is aten.copy_.default else 0]
            if not use.of[source] <= classes:
                inputs.append((node, source))
    return Region(classes, inputs, list(dict.fromkeys(exits)))


def _is_filler(node: fx.Node) -> bool:
    return node.target in OPERATORS or node.target in _COPIES or is_empty(node)


def _has_fewer_inputs(move: Movement, region: Region, start: fx.Node) -> bool:
    """Return whether a scale runs on fewer elements before a collective than after.

    Nothing may be left of it after the collective.
    """
    same_dtype = _dtype(start) is _dtype(region.exits[0])
    is_fewer = nbytes(start) > nbytes(start.args[0])  # type: ignore[arg-type]
    return same_dtype and is_fewer and all(_is_removable(move, node) for node in region.exits)


def _is_removable(move: Movement, node: fx.Node) -> bool:
    """Return whether users of an exit may read the memory of the region instead.

    Nothing may write the memory or depend on where it is, and no more memory may be kept than they
    read.
    """
    x: Any = node.args[0]
    if node.target is aten.copy_.default or not move.is_private(node):
        return False
    (own,), (c,) = move.use.of[node], move.use.of[x]
    shape, strides, *_ = x.meta["val"]
    is_whole = math.prod(shape) == math.prod(move.use.made_by[c].meta["val"][0])
    is_strided = any(user.target is aten.as_strided.default for user in move.holders[own])
    return is_whole and not is_strided and node.meta["val"][:2] == (shape, strides)


def _apply_at_inputs(graph: fx.Graph, move: Movement, region: Region, is_cast: bool) -> None:
    """Do at the inputs of a region what its exits do.

    The users of the exits then take the values of the region as they are.
    """
    function, dtype = region.exits[0], _dtype(region.exits[0])
    removable = [node for node in region.exits if _is_removable(move, node)]
    for node, source in region.inputs:
        if not is_cast:
            with graph.inserting_before(node):
                node.replace_input_with(source, _apply_to(graph, function, source))
        elif node.target is aten.clone.default:
            _cast_instead(node, dtype)
        elif node.target is not aten.copy_.default:  # which casts itself
            with graph.inserting_before(node):
                node.replace_input_with(source, _cast(graph, source, dtype))
    for node in {node for c in region.classes for node in move.holders[c] if "val" in node.meta}:
        _set_dtype(node, dtype)
        if is_empty(node):
            node.kwargs = {**node.kwargs, "dtype": dtype}
    for node in removable:
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        graph.erase_node(node)


def _cast(graph: fx.Graph, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Add a cast of a contiguous operand.

    If only the collective reads the copy that packs the operand, that copy casts instead.
    """
    chain = [x]
    while is_view(chain[-1]) and len(chain[-1].users) == 1:
        chain.append(chain[-1].all_input_nodes[0])
    if chain[-1].target is aten.clone.default and len(chain[-1].users) == 1:
        _cast_instead(chain[-1], dtype)
        for node in chain:
            _set_dtype(node, dtype)
        return x
    return _call_like(graph, aten._to_copy.default, (x,), {"dtype": dtype}, dtype)


# -- buffer.copy_(x.to(bf16))  ->  buffer.copy_(x) -------------------------------------------------


def cast_in_copies(graph: fx.Graph, move: Movement) -> int:
    """Let copies into the buffers of collectives cast."""
    sent = move.use.union(node.args[0] for node in move.nodes if node.target in OPERATORS)
    changed = 0
    for node in move.nodes:
        if node.target is not aten.copy_.default or not move.use.writes[node] <= sent:
            continue
        cast: Any = node.args[1]
        if cast.target is not aten._to_copy.default or elementwise(cast) is None:
            continue
        x: Any = cast.args[0]
        is_exact = _dtype(cast) is _dtype(node) or _has_all_values(_dtype(cast), _dtype(x))
        # The larger value would be kept for longer.
        is_late = nbytes(x) > nbytes(cast) and node.prev is not cast
        is_written = move.is_written(x, range(move.at[cast], move.at[node] + 1))
        if is_exact and len(cast.users) == 1 and not is_late and not is_written:
            node.replace_input_with(cast, x)
            graph.erase_node(cast)
            changed += 1
    return changed


# -- (all_reduce(x) * 0.5)[part]  ->  all_reduce(x)[part] * 0.5 ------------------------------------


def apply_after_slicing(graph: fx.Graph, move: Movement) -> int:
    """Cast and scale what a slice takes of a collective's result, and not the whole."""
    for node in move.nodes:
        if node.target is aten.copy_.default or elementwise(node) is None:
            continue
        x: Any = node.args[0]
        is_fixed = bool(move.use.of[x] & move.use.outputs) or not is_contiguous(x)
        is_written = move.is_written(x, range(move.at[node] + 1, len(move.nodes)))
        if is_fixed or not _is_of_collective(move, x) or not move.is_private(node) or is_written:
            continue
        chain = _up_to_slice(node)
        if not chain or not is_contiguous(chain[-1]):
            continue
        part = chain[-1]
        if math.prod(part.meta["val"][0]) >= math.prod(x.meta["val"][0]):
            continue
        if nbytes(x) > nbytes(node) and move.at[part] - move.at[node] > len(chain):
            continue  # the larger value would be kept for longer
        with graph.inserting_after(part):
            applied = _apply_to(graph, node, part, _dtype(node))
        _replace(part, applied)
        for view in chain:
            _set_dtype(view, _dtype(x))
        chain[0].replace_input_with(node, x)
        graph.erase_node(node)
        return 1
    return 0


def _is_of_collective(move: Movement, x: fx.Node) -> bool:
    """Return whether a value is a collective's result, or was cast or scaled from one."""
    nodes: set[Any] = {x}
    while nodes:
        made_by = (move.use.made_by.get(c) for c in move.use.union(nodes))
        makers = {node for node in made_by if node is not None}
        if any(node.target in OPERATORS for node in makers):
            return True
        makers = {node for node in makers if node.target is not aten.copy_.default}
        operands: list[Any] = [node.args[0] for node in makers if elementwise(node) is not None]
        nodes = set(operands)
    return False


def _up_to_slice(node: fx.Node) -> list[fx.Node]:
    """Return the views that are the only uses of a node, up to a slice.

    The result is empty if there is no slice.
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


# -- nodes -----------------------------------------------------------------------------------------


def _dtype(node: Any) -> torch.dtype:
    return node.meta["val"][2]


def _set_dtype(node: fx.Node, dtype: torch.dtype) -> None:
    shape, strides, _, device = node.meta["val"]
    node.meta["val"] = shape, strides, dtype, device


def _cast_instead(clone: fx.Node, dtype: torch.dtype) -> None:
    """Let a copy cast."""
    clone.target = aten._to_copy.default
    clone.kwargs = {**clone.kwargs, "dtype": dtype}


def _apply_to(
    graph: fx.Graph, function: fx.Node, x: fx.Node, dtype: torch.dtype | None = None
) -> fx.Node:
    """Add a node that does to each element of x what another node does to its operand."""
    args = (x, *function.args[1:])
    return _call_like(graph, function.target, args, function.kwargs, dtype or _dtype(function))


def _call_like(graph: fx.Graph, target: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> fx.Node:
    """Add a node that computes with each element of its first operand."""
    node = graph.call_function(target, args, kwargs)
    shape, strides, _, device = args[0].meta["val"]
    strides = torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()
    node.meta["val"] = shape, strides, dtype, device
    return node


def _replace(x: fx.Node, new: fx.Node) -> None:
    """Let all users of x take what was made of it."""
    x.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
