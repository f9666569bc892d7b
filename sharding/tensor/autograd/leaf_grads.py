"""Gradients of `ShardedTensor`s: seeds, `.grad`, and the reduction at the end of backward.

Autograd accumulates the gradient of a leaf in the layout dual to the leaf's own: where the leaf is replicated, what each
rank accumulates is its own share, and the sum over ranks is pending. When backward ends, every leaf that got a gradient
has it reduced, once, in buckets of equal axes and dtype, and added to `.grad` in the leaf's own layout:

    rank 0   local.grad = [a]  \\                         .grad = [a + b]
                                > one all_reduce per bucket
    rank 1   local.grad = [b]  /                          .grad = [a + b]

Inside `accumulate_grads()` the reduction waits for the end of the block, over however many backward passes.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ....mesh.comm.group import World, current_world
from ....mesh.monitor.recording.recorder import Note
from ...layout.layout import Layout, distinct_mesh_names
from ...ops.lineage import carrying, mixed, seed_of, unpacked
from ...redistribute.autograd import redistribute_local
from ...redistribute.executor import executor_of_many
from ...redistribute.linear import redistribute_grad
from ..sharded_tensor import ShardedTensor
from . import engine_hooks
from .grad_origin import Origin, note_origin, origin_of

_reducers: weakref.WeakKeyDictionary[World, _Reducer] = weakref.WeakKeyDictionary()


class _Reducer:
    """Per rank: the leaves whose gradients are still to be reduced.

    Attributes:
        waiting: leaf number -> leaf, in the order of their making, which is the same on every rank.
        accumulating: depth of `accumulate_grads()` blocks.
        before: what is still to be done with gradients that do not stand in leaves, before those are reduced, and how to give them up.
        flushing: what is to be called when backward ends, before all else.
        started: leaves whose gradients are being reduced while backward goes on, what gives the sums, and their lineage.
        task: the backward pass whose end has been asked to call `flush`.
        made: how many leaves there have been.
    """

    def __init__(self) -> None:
        self.waiting: dict[int, ShardedTensor] = {}
        self.accumulating = 0
        self.before: list[tuple[Callable[[], None], Callable[[], None]]] = []
        self.flushing: list[Callable[[], None]] = []
        self.started: list[tuple[Sequence[ShardedTensor], Callable[[], list[Tensor]], int]] = []
        self.task = -1
        self.made = 0

    def add(self, number: int, leaf: ShardedTensor) -> None:
        self.waiting[number] = leaf
        self.flush_at_end()

    def flush_at_end(self) -> None:
        task = engine_hooks.current_backward()
        if not self.accumulating and task != self.task:
            self.task = task
            engine_hooks.at_end_of_backward(self.flush)

    def flush(self) -> None:
        """Reduce what waits and move it to `.grad`."""
        self.task = -1
        if self.accumulating:
            return
        flushing, self.flushing = self.flushing, []
        for call in flushing:
            call()
        before, self.before = self.before, []
        for call, _ in before:
            call()
        leaves = [self.waiting[number] for number in sorted(self.waiting)]
        self.waiting.clear()
        done = self._finish_started()
        _reduce(leaves)
        _call_hooks([*done, *leaves])

    def _finish_started(self) -> list[ShardedTensor]:
        started, self.started = self.started, []
        for leaves, wait, lineage in started:
            for leaf, grad in zip(leaves, wait(), strict=True):
                _accumulate(leaf, grad, lineage)
        return [leaf for leaves, *_ in started for leaf in leaves]

    def drop_started(self) -> None:
        """What a backward that failed has left under way."""
        self.flushing.clear()
        started, self.started = self.started, []
        for _, wait, _ in started:
            wait()

    def give_up(self) -> None:
        """An exception has left `accumulate_grads()`: what nobody could see or clear is not added to later gradients."""
        before, self.before = self.before, []
        for _, forget in before:
            forget()


def _reducer(world: World) -> _Reducer:
    found = _reducers.get(world)
    if found is None:
        found = _reducers[world] = _Reducer()
    return found


@contextmanager
def accumulate_grads() -> Iterator[None]:
    """Let gradients stay pending over several backward passes; they are reduced once, at the end of the block.

    Until then `.grad` reads as a tensor with the sum still pending.

    Communication: none for gradients of leaves inside the block; at its end, one reduction per bucket.

    Example:
        >>> with sm.accumulate_grads():
        ...     for batch in micro_batches:
        ...         loss(model, batch).backward()
        >>> optimizer.step()
    """
    reducer = _reducer(current_world())
    reducer.accumulating += 1
    try:
        yield
    except BaseException:
        reducer.accumulating -= 1
        reducer.give_up()
        raise  # what was accumulated in leaves stays; other ranks may not be here to reduce it with
    reducer.accumulating -= 1
    reducer.flush()


def is_accumulating(world: World) -> bool:
    """Whether this is inside `accumulate_grads()`."""
    return _reducer(world).accumulating > 0


def before_reduction(world: World, call: Callable[[], None], give_up: Callable[[], None]) -> None:
    """Inside `accumulate_grads()`: call this at its end, before the leaves' gradients are reduced; `give_up` if an exception ends it."""
    _reducer(world).before.append((call, give_up))


def before_flush(world: World, call: Callable[[], None]) -> None:
    """In backward: call this at its end, when everything may still be launched by `start`."""
    reducer = _reducer(world)
    reducer.flushing.append(call)
    reducer.flush_at_end()


def add(leaf: ShardedTensor, part: Tensor) -> None:
    """Add to the gradient of a leaf what autograd would have added, in the layout dual to the leaf's."""
    local = leaf._local
    local.grad = part if local.grad is None else local.grad + part
    if not _arrives_whole(leaf):
        _reducer(leaf.mesh.world).add(leaf._number, leaf)  # type: ignore[attr-defined]


def start(leaves: Sequence[ShardedTensor], grads: Sequence[Tensor], note: Note, *, own: bool = False) -> None:
    """Launch the reduction of gradients that autograd would have added to leaves. The sums are in `.grad` when this backward ends.

    Args:
        leaves, grads: alike on all ranks, and in the same order.
        note: what it is for, for messages.
        own: nobody else has these gradients: they may be overwritten, and sums may lie where they were.
    """
    buckets = _buckets(zip(leaves, grads, strict=True))
    world = leaves[0].mesh.world
    reducer = _reducer(world)
    for members in buckets.values():
        mine, given = zip(*members, strict=True)
        reducer.started.append((mine, _start_bucket(mine, given, note, own), unpacked(world.carried.lineage)))
    reducer.flush_at_end()


def may_start(leaf: ShardedTensor, node: Any) -> bool:
    """Whether `start` may take this leaf's gradient in the backward pass that is running; `node` is what adds to its `.grad`."""
    return not (_arrives_whole(leaf) or is_accumulating(leaf.mesh.world)) and engine_hooks.accumulates(node)


def drop_started(world: World) -> None:
    """Wait for reductions that a backward has launched before it failed, and forget them."""
    _reducer(world).drop_started()


# -- leaves ------------------------------------------------------------------------------------------------------------


def watch(leaf: ShardedTensor) -> None:
    """Have this leaf's gradient reduced at the end of each backward, if it is not whole as it arrives."""
    if not _arrives_whole(leaf):
        _watch(leaf)


def _arrives_whole(leaf: ShardedTensor) -> bool:
    """Whether autograd itself accumulates the gradient in the leaf's own layout: no rank holds a copy of its part."""
    return _without_copies(leaf) and leaf.mesh.coordinate is not None


def _without_copies(leaf: ShardedTensor) -> bool:
    return leaf._layout.dual is leaf._layout.grad


def _watch(leaf: ShardedTensor) -> None:
    if getattr(leaf, "_watched", None) is leaf._local:
        return
    leaf._watched = leaf._local  # type: ignore[attr-defined]
    reducer = _reducer(leaf._layout.mesh.world)  # type: ignore[attr-defined]
    reducer.made += 1
    number = leaf._number = reducer.made  # type: ignore[attr-defined]
    reference = weakref.ref(leaf)
    origins: list[Origin] = []  # of the gradient that autograd is about to take, or to copy, as `.grad`

    def arrives(grads: tuple[Tensor, ...]) -> None:
        origins.clear()
        alive, grad = reference(), grads[0]
        if alive is not None and grad is not None and alive._local.grad is None:
            origin = origin_of(grad, alive._layout.dual)
            origins.extend([] if origin.tensor is grad else [origin])

    def arrived(local: Tensor) -> None:
        alive = reference()
        if alive is not None:
            if origins and local.grad is not None:
                note_origin(local.grad, alive._layout.dual, origins.pop())
            reducer.add(number, alive)

    leaf._accumulator = torch.autograd.graph.get_gradient_edge(leaf._local).node  # type: ignore[attr-defined]
    leaf._accumulator.register_prehook(arrives)  # type: ignore[attr-defined]
    leaf._local.register_post_accumulate_grad_hook(arrived)


def _reduce(leaves: Sequence[ShardedTensor]) -> None:
    """Reduce the leaves' accumulated local gradients in buckets and move them to `.grad`.

    A gradient whose reduction fails stays pending where it is.
    """
    there = [(leaf, leaf._local.grad) for leaf in leaves if leaf._local.grad is not None]
    for (_, axes, _, together), members in _buckets(there).items():
        if not axes:
            reduced = [grad for _, grad in members]
        elif together:
            reduced = _reduce_bucket(*zip(*members, strict=True))
        else:
            reduced = [_reduce_alone(leaf, grad) for leaf, grad in members]
        for (leaf, _), grad in zip(members, reduced, strict=True):
            leaf._local.grad = None
            _accumulate(leaf, grad, unpacked(leaf.mesh.world.carried.lineage))


def _call_hooks(leaves: Sequence[ShardedTensor]) -> None:
    for leaf in {id(leaf): leaf for leaf in leaves}.values():
        for hook in list(getattr(leaf, "_after_grad_hooks", {}).values()):
            hook(leaf)


GRADIENT = seed_of("gradient")


def _buckets(pairs: Iterable[tuple[ShardedTensor, Tensor]]) -> dict[Any, list[tuple[ShardedTensor, Tensor]]]:
    """Leaves and gradients that are reduced together."""
    found: dict[Any, list[tuple[ShardedTensor, Tensor]]] = {}
    for leaf, grad in pairs:
        found.setdefault(_bucket_of(leaf, grad), []).append((leaf, grad))
    return found


def _bucket_of(leaf: ShardedTensor, grad: Tensor) -> tuple[Any, tuple[str, ...], torch.dtype, bool]:
    layout = leaf._layout
    axes = layout.replicated_axes if layout.mesh.coordinate is not None else ()  # type: ignore[attr-defined]
    return layout.mesh, axes, grad.dtype, not grad.requires_grad


def _reduce_bucket(leaves: Sequence[ShardedTensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """Sum gradients over the axes on which their leaves are replicated, all in one buffer."""
    return _start_bucket(leaves, grads, None, False)()


def _start_bucket(
    leaves: Sequence[ShardedTensor], grads: Sequence[Tensor], note: Note | None, own: bool
) -> Callable[[], list[Tensor]]:
    layouts = [
        leaf._layout if leaf._layout.dtype is grad.dtype else leaf._layout.replace(dtype=grad.dtype)
        for leaf, grad in zip(leaves, grads, strict=True)
    ]
    world = leaves[0].mesh.world
    known = [_whole_origin(grad, layout) for grad, layout in zip(grads, layouts, strict=True)]
    pairs = tuple((src, layout.grad) for (_, src), layout in zip(known, layouts, strict=True))
    with carrying(world, mixed(unpacked(world.carried.lineage), leaves)):
        own = own and all(origin is grad for (origin, _), grad in zip(known, grads, strict=True))
        wait = executor_of_many(pairs).start([origin for origin, _ in known], donate=own, note=note)
    return lambda: [
        _shaped_like(part if origin is grad else _unaliased(part, origin), grad)
        for part, (origin, _), grad in zip(wait(), known, grads, strict=True)
    ]


def _whole_origin(grad: Tensor, layout: Layout) -> tuple[Tensor, Layout]:
    """What the gradient of a leaf was made from, if that is reduced already; else the gradient, so that all are summed in one bucket."""
    origin = origin_of(grad, layout.dual)
    return (origin.tensor, origin.layout) if origin.layout is layout.grad else (grad, layout.dual)


def _unaliased(part: Tensor, origin: Tensor) -> Tensor:
    """The part, copied where it lies in the memory of its origin, which is not the leaf's to keep."""
    return part.clone() if part.untyped_storage()._cdata == origin.untyped_storage()._cdata else part


def _shaped_like(part: Tensor, grad: Tensor) -> Tensor:
    """The part in the shape and with the strides of `grad`, which are those of the leaf."""
    if part is grad:
        return part
    whole = part.view(grad.shape)
    return whole if grad.is_contiguous() else torch.empty_like(grad).copy_(whole)


def _reduce_alone(leaf: ShardedTensor, grad: Tensor) -> Tensor:
    """The differentiable way, for `create_graph=True`."""
    layout = leaf._layout.replace(dtype=grad.dtype)
    with torch.set_grad_enabled(grad.requires_grad):
        return _unaliased(redistribute_grad(grad, layout.dual, layout.grad), origin_of(grad, layout.dual).tensor)


def _gradient_of(leaf: ShardedTensor, grad: Tensor, layout: Layout) -> ShardedTensor:
    out = ShardedTensor._make(grad, layout)
    out._lineage = mixed(GRADIENT, [leaf])
    return out


def _accumulate(leaf: ShardedTensor, grad: Tensor, lineage: int) -> None:
    """Add to `.grad`; `lineage` is that of the value whose gradient was asked for."""
    old = getattr(leaf, "_reduced_grad", None)
    before = [] if old is None else [old]
    if old is None:
        layout = leaf._layout.grad
        kept = leaf._reduced_grad = _gradient_of(leaf, grad, layout if layout.dtype is grad.dtype else layout.replace(dtype=grad.dtype))
    elif grad.requires_grad or old._local.requires_grad:
        kept = leaf._reduced_grad = _gradient_of(leaf, old._local + grad, old._layout)
    else:
        old._local += grad
        kept = old
    if not _without_copies(leaf):  # else it is known by its leaf alone, as on the ranks where it arrives whole
        kept._lineage = mixed(lineage, [leaf, *before])


# -- `.grad` -----------------------------------------------------------------------------------------------------------


def read(x: ShardedTensor) -> ShardedTensor | None:
    """The gradient of `x` as it stands: reduced, with what is still pending added as pending. No communication."""
    done, fresh = getattr(x, "_reduced_grad", None), x._local.grad
    if fresh is None:
        return done
    pending = _arrived(x, fresh)
    if done is None:
        return pending
    return _gradient_of(x, redistribute_local(done._local, done._layout, pending._layout) + fresh, pending._layout)


def _arrived(x: ShardedTensor, fresh: Tensor) -> ShardedTensor:
    """What autograd has accumulated, the same object each time it is asked for."""
    kept = getattr(x, "_arrived_grad", None)
    if kept is None or kept._local is not fresh:
        kept = x._arrived_grad = _gradient_of(x, fresh, x._layout.dual.replace(dtype=fresh.dtype))
    return kept


def write(x: ShardedTensor, value: Tensor | None) -> None:
    """Replace the gradient of `x`."""
    if value is not None and not isinstance(value, ShardedTensor):
        raise TypeError(
            "the gradient of a ShardedTensor is a ShardedTensor; place the plain tensor with distribute_tensor"
        )
    if value is not None and value.shape != x.shape:
        raise ValueError(f"a gradient of shape {list(value.shape)} for a tensor of shape {list(x.shape)}")
    if value is not None and value.mesh != x.mesh:
        there, here = distinct_mesh_names(value.mesh, x.mesh)
        raise ValueError(
            f"a gradient on {there} for a tensor on {here}; place value.full_tensor() on the tensor's mesh"
        )
    placed = None if value is None else value.redistribute(x._layout.grad.spec)
    whole = placed is not None and placed.dtype is x.dtype and _arrives_whole(x)
    x._local.grad = placed._local if whole else None  # type: ignore[union-attr]
    x._arrived_grad, x._reduced_grad = (placed, None) if whole else (None, placed)


# -- hooks -------------------------------------------------------------------------------------------------------------


def register_hook(x: ShardedTensor, hook: Callable[[ShardedTensor], Tensor | None]) -> Any:
    """A hook on the gradient of `x`, given and returning a `ShardedTensor`."""
    dual = x._layout.dual

    def on_local(local: Tensor) -> Tensor | None:
        answer = hook(ShardedTensor._make(local, dual.replace(dtype=local.dtype)))
        if answer is None:
            return None
        if not isinstance(answer, ShardedTensor):
            raise TypeError("a hook on a ShardedTensor returns None or a ShardedTensor")
        return redistribute_local(answer._local, answer._layout, dual.replace(dtype=answer.dtype))

    return x._local.register_hook(on_local)


def register_post_accumulate_grad_hook(x: ShardedTensor, hook: Callable[[ShardedTensor], None]) -> Any:
    """A hook called when `.grad` of this leaf is complete."""
    if not x.requires_grad or not x.is_leaf:
        raise RuntimeError("post accumulate grad hooks can only be registered on leaf tensors that require grad")
    _watch(x)
    hooks = vars(x).setdefault("_after_grad_hooks", OrderedDict())
    handle = torch.utils.hooks.RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


