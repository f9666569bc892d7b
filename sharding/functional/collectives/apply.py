"""Apply a collective, synchronously or asynchronously.

To a tensor, a sharded tensor, a number, or a tree of them.

A collective consists of its effect on values (an `op`) and its effect on types (a `TypingRule`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ....mesh.comm.agreement import same_on_all
from ....mesh.comm.pending import Pending
from ....mesh.comm.thread_context import thread_context
from ....mesh.comm.work import DONE
from ...autograd import engine_hooks
from ...autograd.named_axes import (
    Axes,
    AxisName,
    Groups,
    bound_axes,
    bound_groups,
    current_captures,
)
from ...layout.bounded_cache import keep
from ...layout.spec import P
from ...tensor.sharded_tensor import ShardedTensor
from ...trees import flatten, unflatten
from ..mapped_env import current_mapped_env
from ..types.type_checker import untracked
from ..types.types import ShardingTypeError, Tag, Type, TypeOrigin, user_location
from .linear_maps import apply

Applied = Callable[[Tensor, Any, Any, "Pending[Tensor] | None"], Tensor]


class TypingRule(NamedTuple):
    """The effect of a collective on the type of a value, along its own axes.

    Attributes:
        name: the collective's name.
        varies: whether the result varies along them.
        takes_pending: whether the operand may be pending along them.
        linear: whether the operand may be pending along other axes.
        pends: whether the result is pending along them; then the operand must be replicated.
    """

    name: str
    varies: bool = True
    takes_pending: bool = False
    linear: bool = True
    pends: bool = False

    def __call__(self, tag: Tag, axes: Axes) -> Tag:
        """Return the tag of the result.

        Raises: ShardingTypeError for a value of a type that the collective is not defined for.
        """
        names, operand = frozenset(axes.names), tag.type
        wrong = operand.pending & names if self.linear else operand.pending
        if (wrong and not self.takes_pending) or (self.pends and operand.varying & names):
            raise ShardingTypeError(self._refusal(tag, axes))
        pending = operand.pending | names if self.pends else operand.pending - names
        varying = operand.varying | names if self.varies else operand.varying - names
        common = tag.with_type(Type.of(varying & operand.varying, pending & operand.pending))
        new = (varying | pending) - common.type.varying - common.type.pending
        origins = (
            common.origins | dict.fromkeys(new, TypeOrigin(self.name, user_location()))
            if new
            else common.origins
        )
        return Tag(Type.of(varying, pending), origins, tag.owner)

    def _refusal(self, tag: Tag, axes: Axes) -> str:
        where = f"{user_location()}: {self.name} over {axes} of a value"
        if self.pends:
            since = tag.since(tag.type.varying & frozenset(axes.names))
            return (
                f"{where} that {tag.type}{since}; return it under unreduced= unchanged, and it is "
                "summed"
            )
        return (
            f"{where} that {tag.type}{tag.since(tag.type.pending)}: each rank holds a share of a "
            "sum; psum or psum_scatter it first"
        )


def resolve_axes(
    name: AxisName, rule: TypingRule, groups: Groups, equal: bool = False
) -> tuple[Axes, TypingRule]:
    """Return the axes that a collective names, and its typing rule.

    With groups, this rank's group along the axes, and a result that varies.

    Args:
        equal: whether groups must be of one size.

    Raises: as `bound_axes` and `bound_groups`; ValueError for groups of several sizes.
    """
    if groups is None:
        return bound_axes(name), rule
    axes = bound_groups(name, groups)
    if equal and len(set(axes.sizes)) > 1:
        raise ValueError(
            f"{rule.name} over {axes}: axis_index_groups of {list(axes.sizes)} places; give groups "
            "of one size"
        )
    return axes, rule._replace(varies=True, takes_pending=False)


class Prepared(NamedTuple):
    """The effect of a collective on one tensor.

    Attributes:
        op: the map over the ranks.
        before, after: functions applied to this rank's part before and after it.
        dims: the dims that it works along; empty for an elementwise collective.
    """

    op: Any
    before: Callable[[Tensor], Tensor] | None = None
    after: Callable[[Tensor], Tensor] | None = None
    dims: tuple[int, ...] = ()


class CollectiveCall(NamedTuple):
    """A collective over some axes, with everything but the tensor.

    Attributes:
        axes: the axes.
        rule: its effect on types.
        key: with a tensor's shape and dtype, the cache key of `prepare`.
        prepare: returns its effect on a tensor, from its shape and dtype.
        apply: runs the op.
        number: its effect on a number, which is the same on every rank.
        forward_dtype, backward_dtype: as in `collectives.py`.
        even: whether parts must have one shape.
    """

    axes: Axes
    rule: TypingRule
    key: Any
    prepare: Callable[[Axes, Tensor], Prepared]
    apply: Applied = apply
    number: Callable[[Any], Any] | None = None
    forward_dtype: torch.dtype | None = None
    backward_dtype: torch.dtype | None = None
    even: bool = True


def is_starting() -> bool:
    """Return whether collectives are to be left in flight: this is a call by `start`."""
    return thread_context.starts_async


def async_start(collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Pending[Any]:
    """async_start(psum, x, axis) -> Pending: launch a collective without waiting.

    `wait()` returns the result, the same objects at every call.

        coming = sm.async_start(sm.ppermute, k, "sp", ring)      the next block travels
        out = attend(q, k)                                 while this one is worked on
        k = coming.wait()

    Args:
        collective: any collective of this library that takes an axis name.
        args, kwargs: its arguments.

    Raises: what the collective raises for its arguments.

    Communication: the collective's. Every rank must start and wait in the same order. Backward, and
        a collective inside a transform, is synchronous.
    """
    before, thread_context.starts_async = thread_context.starts_async, True
    try:
        tree = collective(*args, **kwargs)
    finally:
        thread_context.starts_async = before
    if isinstance(tree, Pending):
        return tree
    parts = [part for part in pytree.tree_leaves(tree) if isinstance(part, Pending)]
    return Pending(lambda: pytree.tree_map_only(Pending, Pending.wait, tree), DONE, *parts)


# -- trees -----------------------------------------------------------------------------------------


def map_collective(x: Any, call: CollectiveCall) -> Any:
    """Apply the collective to every tensor of a tree."""
    if isinstance(x, Tensor):
        return _apply_one(x, call)
    return pytree.tree_map(lambda part: _apply_one(part, call), x)


def map_bucketed(x: Any, call: CollectiveCall) -> Any:
    """Apply an elementwise collective to every tensor of a tree.

    To all tensors of one dtype at once.
    """
    if isinstance(x, Tensor):
        return _apply_one(x, call)
    parts, tree = flatten(x)
    buckets: dict[Any, list[int]] = {}
    for i, part in enumerate(parts):
        key = (part.dtype, part.device) if type(part) in (Tensor, torch.nn.Parameter) else i
        buckets.setdefault(key, []).append(i)
    results = list(parts)
    for members in buckets.values():
        for i, out in zip(members, _bucket([parts[i] for i in members], call), strict=True):
            results[i] = out
    return unflatten(tree, results)


def _bucket(parts: list[Any], call: CollectiveCall) -> list[Any]:
    if len(parts) == 1:
        return [_apply_one(parts[0], call)]
    checker, captures = current_checker(), current_captures()
    parts = parts if captures is None else [captures.local(part) for part in parts]
    tags = [] if checker is None else [_tag_after(checker, part, call) for part in parts]
    with untracked() if tags else nullcontext():
        if checker is not None and checker.uneven:
            _check_one_shape(parts, call)
        flat = torch.cat([part.reshape(-1) for part in parts])
        cut = partial(_cut, shapes=[part.shape for part in parts])
        out = _launch(flat, call)
        pieces = _cut_later(out, cut, len(parts)) if isinstance(out, Pending) else cut(out)
    return (
        [with_tag(checker, piece, tag) for piece, tag in zip(pieces, tags, strict=True)]
        if checker
        else pieces
    )


def _cut(flat: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    # Pieces that may be written to.
    split = torch.split if engine_hooks.transforming() else torch.unsafe_split_with_sizes
    return [
        piece.view(shape)
        for piece, shape in zip(
            split(flat, [shape.numel() for shape in shapes]), shapes, strict=True
        )
    ]


def _cut_later(
    out: Pending[Tensor], cut: Callable[[Tensor], list[Tensor]], count: int
) -> list[Pending[Tensor]]:
    pieces = out.then(cut)
    return [pieces.then(itemgetter(i)) for i in range(count)]


# -- one tensor ------------------------------------------------------------------------------------


def _apply_one(x: Any, call: CollectiveCall) -> Any:
    if not isinstance(x, Tensor):
        return _number(x, call)
    checker, captures = current_checker(), current_captures()
    if captures is not None:
        x = captures.local(x)
    if checker is None:
        return _launch(x, call)
    tag = _tag_after(checker, x, call)
    with untracked():
        if checker.uneven and call.even:
            _check_one_shape([x], call)
        return with_tag(checker, _launch(x, call), tag)


def current_checker() -> Any:
    """Return the type checker, None without one and where backward recomputes a piece.

    In the backward of a custom function there is one.
    """
    env = current_mapped_env()
    if (
        env is None
        or env.checker is None
        or (engine_hooks.current_backward() >= 0 and not env.checker.tracks_backward)
    ):
        return None
    return env.checker


def _tag_after(checker: Any, x: Tensor, call: CollectiveCall) -> Tag:
    return call.rule(checker.join_all(iter((x,)), checker.control_tag), call.axes)


def _check_one_shape(parts: list[Any], call: CollectiveCall) -> None:
    """Check that all ranks pass parts of one shape.

    Arguments are uneven, and a collective of unequal parts aborts or hangs.

    Raises: ValueError, on every rank, if they differ.

    Communication: a small all_gather over the axes, in tracked calls.
    """

    def error(shapes: dict[int, list[list[int]]]) -> ValueError:
        listing = ", ".join(
            f"rank {rank}: {'; '.join(map(str, its_shapes))}" for rank, its_shapes in shapes.items()
        )
        return ValueError(
            f"{user_location()}: {call.rule.name} over {call.axes} takes parts of one shape, and "
            f"they are {listing}. The arguments are split unevenly: pad them, or pass sizes= to a "
            "collective that takes it"
        )

    same_on_all(call.axes.group, [list(getattr(x, "_local", x).shape) for x in parts], error)


def with_tag(checker: Any, out: Any, tag: Tag) -> Any:
    """Set the tag of the result, or of the result to come, and return it."""
    if isinstance(out, Pending):
        return Pending(partial(_wait_with_tag, checker, out, tag), out)
    checker.set_tag(out, tag)
    return out


def _wait_with_tag(checker: Any, out: Pending[Any], tag: Tag) -> Any:
    with untracked():
        result = out.wait()
    checker.set_tag(result, tag)
    return result


def _launch(x: Tensor, call: CollectiveCall) -> Any:
    """Launch the collective on one tensor, whatever its type; leave it in flight inside `start`."""
    if type(x) is ShardedTensor:
        return _on_sharded(x, call)
    if call.forward_dtype is not None and x.dtype is not call.forward_dtype:
        x = x.to(call.forward_dtype)
    op, before, after, _ = _prepare(x, call)
    if before is not None:
        x = before(x)
    # A transform cannot see a collective in flight.
    if is_starting() and engine_hooks.transforming():
        done = _after(call.apply(x, op, call.backward_dtype, None), after)
        return Pending(lambda: done, DONE)
    if is_starting():
        ready = op.start(x.detach())
        return Pending(lambda: _after(call.apply(x, op, call.backward_dtype, ready), after), ready)
    out = call.apply(x, op, call.backward_dtype, None)
    return out if after is None else after(out)


def _prepare(x: Tensor, call: CollectiveCall) -> Prepared:
    """Return the effect of the collective on a tensor of this shape and dtype, computed once."""
    key = (call.rule, call.key, x.shape, x.dtype)
    prepared = call.axes.ops.get(key)
    return keep(call.axes.ops, key, call.prepare(call.axes, x)) if prepared is None else prepared


def _after(out: Tensor, after: Callable[[Tensor], Tensor] | None) -> Tensor:
    return out if after is None else after(out)


def _on_sharded(x: ShardedTensor, call: CollectiveCall) -> Any:
    """Apply the collective to the local tensor of a `ShardedTensor`.

    It lies on the other axes of the mesh.
    """
    layout, local = x._layout, x._local
    prepared = _prepare(local, call)
    _check_dims(x, call, prepared)
    if layout.pending and not call.rule.linear:
        raise ShardingTypeError(
            f"{call.rule.name} of {layout}, which is pending over {sorted(layout.pending)}: "
            "redistribute it first"
        )

    def wrap(out: Tensor) -> ShardedTensor:
        if out.ndim != local.ndim:
            return ShardedTensor._make(
                out, layout.replace(P(unreduced=layout.pending), shape=out.shape, dtype=out.dtype)
            )
        shape = [out.shape[d] if d in prepared.dims else n for d, n in enumerate(layout.shape)]
        return ShardedTensor._make(out, layout.replace(shape=shape, dtype=out.dtype))

    out = _launch(local, call)
    return out.then(wrap) if isinstance(out, Pending) else wrap(out)


def _check_dims(x: ShardedTensor, call: CollectiveCall, prepared: Prepared) -> None:
    """Raise NotImplementedError if a collective works along a dim that a global axis splits."""
    keeps = prepared.before is None and prepared.after is None
    dims = prepared.dims if keeps or not prepared.dims else range(x.ndim)
    split = [d for d in dims if x._layout.spec.dims[d]]
    if split:
        raise NotImplementedError(
            f"{call.rule.name} over {call.axes} along dims {list(prepared.dims)} of {x._layout}: "
            f"dim {split[0]} is split over axes that are not manual here; redistribute it so that "
            "the dim is whole, or make those axes manual too"
        )


def _number(x: Any, call: CollectiveCall) -> Any:
    """Apply the collective to a number.

    Raises: TypeError for anything else, or if the collective takes tensors only.
    """
    if call.number is None or not isinstance(x, (int, float, complex)):
        raise TypeError(
            f"{call.rule.name} over {call.axes} takes tensors, or a tree of them, and got {x!r}"
        )
    return call.number(x)
