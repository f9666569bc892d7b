"""Running a collective on what it is given: a tensor, a sharded tensor, a number, or a tree of them; now or under way.

Here a collective's two halves meet: what it does to the values (an `op`), and what it does to their types (a `Law`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...layout.bounded_cache import keep
from ...layout.spec import P
from ...tensor.autograd import engine_hooks
from ...tensor.sharded_tensor import ShardedTensor
from ..named_axes import Axes, AxisName, Groups, bound, bound_groups, captures_here, current_mapping
from ..signature import flattened, rebuilt
from ..types.type_checker import unfollowed
from ..types.types import Origin, ShardingTypeError, Tag, Type, place
from .linear_maps import Finish, apply

Applied = Callable[[Tensor, Any, Any, "Finish | None"], Tensor]


class Law(NamedTuple):
    """What a collective does to the type of a value, along its own axes.

    Attributes:
        name: of the collective.
        varies: whether the result varies along them.
        takes_pending: whether it may be given what is pending along them.
        linear: whether it may be given what is pending along others.
        pends: whether the result is pending along them, from what must be replicated.
    """

    name: str
    varies: bool = True
    takes_pending: bool = False
    linear: bool = True
    pends: bool = False

    def __call__(self, tag: Tag, axes: Axes) -> Tag:
        """What is known of the result.

        Raises: ShardingTypeError for a value that the collective has no meaning for.
        """
        names, given = frozenset(axes.names), tag.type
        wrong = given.pending & names if self.linear else given.pending
        if (wrong and not self.takes_pending) or (self.pends and given.varying & names):
            raise ShardingTypeError(self._refusal(tag, axes))
        pending = given.pending | names if self.pends else given.pending - names
        varying = given.varying | names if self.varies else given.varying - names
        kept = tag.retyped(Type.of(varying & given.varying, pending & given.pending))
        new = (varying | pending) - kept.type.varying - kept.type.pending
        origins = kept.origins | dict.fromkeys(new, Origin(self.name, place())) if new else kept.origins
        return Tag(Type.of(varying, pending), origins, tag.owner)

    def _refusal(self, tag: Tag, axes: Axes) -> str:
        where = f"{place()}: {self.name} over {axes} of a value"
        if self.pends:
            since = tag.since(tag.type.varying & frozenset(axes.names))
            return f"{where} that {tag.type}{since}; it can leave under unreduced= as it is, and be summed as it is"
        return f"{where} that {tag.type}{tag.since(tag.type.pending)}, of which each rank holds a share; psum or psum_scatter it"


def over(name: AxisName, law: Law, groups: Groups, equal: bool = False) -> tuple[Axes, Law]:
    """The axes that a collective names, or this rank's group along them, and its law there: what a group makes varies.

    Args:
        equal: whether groups must be of one length.

    Raises: as `bound` and `bound_groups`; ValueError for groups of several lengths.
    """
    if groups is None:
        return bound(name), law
    axes = bound_groups(name, groups)
    if equal and len(set(axes.sizes)) > 1:
        raise ValueError(f"{law.name} over {axes}: axis_index_groups of {list(axes.sizes)} places; give groups of one length")
    return axes, law._replace(varies=True, takes_pending=False)


class Prepared(NamedTuple):
    """What a collective does to one tensor.

    Attributes:
        op: the map over the ranks.
        before, after: what is done to this rank's part around it.
        dims: the dims that it works along; empty where it takes element by element.
    """

    op: Any
    before: Callable[[Tensor], Tensor] | None = None
    after: Callable[[Tensor], Tensor] | None = None
    dims: tuple[int, ...] = ()


class Call(NamedTuple):
    """A collective over some axes, with everything but the tensor.

    Attributes:
        axes: the axes.
        law: what it does to types.
        key: what, beside a tensor's shape and dtype, tells how it is prepared.
        prepare: what it does to a tensor, from its shape and dtype.
        apply: runs the op.
        number: what it gives for a number, which is the same on every rank.
        forward_dtype, backward_dtype: as in `collectives.py`.
        even: whether parts must have one shape.
    """

    axes: Axes
    law: Law
    key: Any
    prepare: Callable[[Axes, Tensor], Prepared]
    apply: Applied = apply
    number: Callable[[Any], Any] | None = None
    forward_dtype: torch.dtype | None = None
    backward_dtype: torch.dtype | None = None
    even: bool = True


class Later:
    """One tensor of a collective under way."""

    __slots__ = ("_finish", "_result")

    def __init__(self, finish: Callable[[], Any]) -> None:
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    def wait(self) -> Any:
        if self._finish is not None:
            self._result, self._finish = self._finish(), None
        return self._result


class _Thread(threading.local):
    starting = False


_thread = _Thread()


def is_starting() -> bool:
    """Whether a collective is to be left under way."""
    return _thread.starting


def start(collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Future:
    """start(psum, x, axis) -> Future: a collective under way, whose `wait()` gives the result. Inside a transform it is waited for at once.

        coming = sm.start(sm.ppermute, k, "sp", ring)      the next block travels
        out = attend(q, k)                                 while this one is worked on
        k = coming.wait()

    Args:
        collective: any collective of this library that takes an axis name.
        args, kwargs: its arguments.

    Raises: what the collective raises for its arguments.

    Communication: the collective's. Every rank starts and waits in the same order. Backward is waited for.
    """
    before, _thread.starting = _thread.starting, True
    try:
        return Future(collective(*args, **kwargs))
    finally:
        _thread.starting = before


class Future:
    """A collective under way; `wait()` gives what it returns."""

    def __init__(self, tree: Any) -> None:
        self._tree = tree

    def wait(self) -> Any:
        """The result; the same objects at every call."""
        if type(self._tree) is Later:
            return self._tree.wait()
        return pytree.tree_map(lambda part: part.wait() if isinstance(part, Later) else part, self._tree)


def done(future: Future) -> Any:
    """done(future) -> its result: `future.wait()` as a function."""
    return future.wait()


# -- trees -------------------------------------------------------------------------------------------------------------


def each(x: Any, call: Call) -> Any:
    """The collective on every tensor of a tree."""
    if isinstance(x, Tensor):
        return _one(x, call)
    return pytree.tree_map(lambda part: _one(part, call), x)


def together(x: Any, call: Call) -> Any:
    """An elementwise collective on every tensor of a tree, those of one dtype in one go."""
    if isinstance(x, Tensor):
        return _one(x, call)
    parts, tree = flattened(x)
    buckets: dict[Any, list[int]] = {}
    for i, part in enumerate(parts):
        key = (part.dtype, part.device) if type(part) in (Tensor, torch.nn.Parameter) else i
        buckets.setdefault(key, []).append(i)
    found = list(parts)
    for members in buckets.values():
        for i, out in zip(members, _bucket([parts[i] for i in members], call), strict=True):
            found[i] = out
    return rebuilt(tree, found)


def _bucket(parts: list[Any], call: Call) -> list[Any]:
    if len(parts) == 1:
        return [_one(parts[0], call)]
    checker, captures = checker_here(), captures_here()
    parts = parts if captures is None else [captures.of(part) for part in parts]
    tags = [] if checker is None else [_tag_after(checker, part, call) for part in parts]
    with unfollowed() if tags else nullcontext():
        if checker is not None and checker.uneven:
            _check_one_shape(parts, call)
        flat = torch.cat([part.reshape(-1) for part in parts])
        cut = partial(_cut, shapes=[part.shape for part in parts])
        out = _launched(flat, call)
        pieces = _cut_later(out, cut, len(parts)) if isinstance(out, Later) else cut(out)
    return [noted(checker, piece, tag) for piece, tag in zip(pieces, tags, strict=True)] if checker else pieces


def _cut(flat: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    split = torch.split if engine_hooks.transforming() else torch.unsafe_split_with_sizes  # pieces that may be written to
    return [piece.view(shape) for piece, shape in zip(split(flat, [shape.numel() for shape in shapes]), shapes, strict=True)]


def _cut_later(out: Later, cut: Callable[[Tensor], list[Tensor]], count: int) -> list[Any]:
    pieces = Later(lambda: cut(out.wait()))
    return [Later(lambda i=i: pieces.wait()[i]) for i in range(count)]


# -- one tensor --------------------------------------------------------------------------------------------------------


def _one(x: Any, call: Call) -> Any:
    if not isinstance(x, Tensor):
        return _number(x, call)
    checker, captures = checker_here(), captures_here()
    if captures is not None:
        x = captures.of(x)
    if checker is None:
        return _launched(x, call)
    tag = _tag_after(checker, x, call)
    with unfollowed():
        if checker.uneven and call.even:
            _check_one_shape([x], call)
        return noted(checker, _launched(x, call), tag)


def checker_here() -> Any:
    """Who follows types here; nobody in a backward pass, which computes pieces again, but in the backward of a custom function."""
    mapping = current_mapping()
    if mapping is None or mapping.checker is None or (engine_hooks.current_backward() >= 0 and not mapping.checker.in_backward):
        return None
    return mapping.checker


def _tag_after(checker: Any, x: Tensor, call: Call) -> Tag:
    return call.law(checker.joined(iter((x,)), checker.looked), call.axes)


def _check_one_shape(parts: list[Any], call: Call) -> None:
    """Where parts of arguments differ in shape, what is made of them may too, and a collective of unequal parts aborts or hangs.

    Raises: ValueError, on every rank, where they do.

    Communication: a small all_gather over the axes, while types are followed.
    """
    shapes = [list(getattr(x, "_local", x).shape) for x in parts]
    group = call.axes.group
    everyone = group.all_gather_object(shapes)
    if any(each != everyone[0] for each in everyone):
        told = ", ".join(f"rank {r}: {'; '.join(map(str, each))}" for r, each in zip(group.ranks, everyone, strict=True))
        raise ValueError(
            f"{place()}: {call.law.name} over {call.axes} takes parts of one shape, and they are {told}. The arguments are cut into uneven "
            "parts: pad them, or where the collective has sizes=, give these"
        )


def noted(checker: Any, out: Any, tag: Tag) -> Any:
    """The result, with what is known of it; now, or when it is there."""
    if isinstance(out, Later):
        return Later(partial(_wait_and_note, checker, out, tag))
    checker.note(out, tag)
    return out


def _wait_and_note(checker: Any, out: Later, tag: Tag) -> Any:
    with unfollowed():
        found = out.wait()
    checker.note(found, tag)
    return found


def _launched(x: Tensor, call: Call) -> Any:
    """The collective on one tensor, whatever its type; under way where it is being started."""
    if type(x) is ShardedTensor:
        return _on_sharded(x, call)
    if call.forward_dtype is not None and x.dtype is not call.forward_dtype:
        x = x.to(call.forward_dtype)
    op, before, after, _ = _prepared(x, call)
    if before is not None:
        x = before(x)
    if is_starting() and engine_hooks.transforming():  # a transform cannot see what is under way
        done = _after(call.apply(x, op, call.backward_dtype, None), after)
        return Later(lambda: done)
    if is_starting():
        ready = op.start(x.detach())
        return Later(lambda: _after(call.apply(x, op, call.backward_dtype, ready), after))
    out = call.apply(x, op, call.backward_dtype, None)
    return out if after is None else after(out)


def _prepared(x: Tensor, call: Call) -> Prepared:
    """What the collective does to a tensor of this shape and dtype, worked out once."""
    key = (call.law, call.key, x.shape, x.dtype)
    found = call.axes.ops.get(key)
    return keep(call.axes.ops, key, call.prepare(call.axes, x)) if found is None else found


def _after(out: Tensor, after: Callable[[Tensor], Tensor] | None) -> Tensor:
    return out if after is None else after(out)


def _on_sharded(x: ShardedTensor, call: Call) -> Any:
    """On every rank's part of a tensor that lies on the other axes of the mesh."""
    layout, local = x._layout, x._local
    prepared = _prepared(local, call)
    _check_dims(x, call, prepared)
    if layout.pending and not call.law.linear:
        raise ShardingTypeError(f"{call.law.name} of {layout}, which is pending over {sorted(layout.pending)}: redistribute it first")

    def wrapped(out: Tensor) -> ShardedTensor:
        if out.ndim != local.ndim:
            return ShardedTensor._make(out, layout.replace(P(unreduced=layout.pending), shape=out.shape, dtype=out.dtype))
        shape = [out.shape[d] if d in prepared.dims else n for d, n in enumerate(layout.shape)]
        return ShardedTensor._make(out, layout.replace(shape=shape, dtype=out.dtype))

    out = _launched(local, call)
    return Later(lambda: wrapped(out.wait())) if isinstance(out, Later) else wrapped(out)


def _check_dims(x: ShardedTensor, call: Call, prepared: Prepared) -> None:
    """Raises: NotImplementedError where a collective works along a dim that a global axis splits."""
    keeps = prepared.before is None and prepared.after is None
    dims = prepared.dims if keeps or not prepared.dims else range(x.ndim)
    split = [d for d in dims if x._layout.spec.dims[d]]
    if split:
        raise NotImplementedError(
            f"{call.law.name} over {call.axes} along dims {list(prepared.dims)} of {x._layout}: dim {split[0]} is split over axes that are "
            "not manual here; redistribute it so that the dim is whole, or make those axes manual too"
        )


def _number(x: Any, call: Call) -> Any:
    """Raises: TypeError for what is neither a tensor nor a number that the collective takes."""
    if call.number is None or not isinstance(x, (int, float, complex)):
        raise TypeError(f"{call.law.name} over {call.axes} takes tensors, or a tree of them, and got {x!r}")
    return call.number(x)
