"""Gradients of leaf `ShardedTensor`s: `.grad`, hooks, and the reduction at the end of backward.

Autograd accumulates the gradient of a leaf in the layout dual to the leaf's own: where the leaf is
replicated, what each rank accumulates is its own share, and the sum over ranks is pending. When
backward ends, all new gradients are reduced, once, in buckets of equal axes and dtype, and added to
`.grad` in the leaf's own layout:

    rank 0   local.grad = [a]  \\                         .grad = [a + b]
                                > one all_reduce per bucket
    rank 1   local.grad = [b]  /                          .grad = [a + b]

Inside `accumulate_grads()` the reduction waits for the end of the block, over however many backward
passes.

Hooks on the local parts tell which leaves wait for it (`register_leaf`). Code that has gradients of
leaves before backward ends may reduce them at once: units of FSDP call `start`.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....mesh.comm.current_world import current_world
from ....mesh.comm.first_use import first_leaf
from ....mesh.comm.recording.recorder import CommTag
from ....mesh.comm.world import World
from ...autograd import engine_hooks
from ...autograd.grad_origin import Origin, note_origin, origin_of
from ...layout.layout import Layout, distinct_mesh_names
from ...lineage import comm_context, loss_lineage, mixed, seed_of, unpacked
from ...redistribute.autograd import redistribute_local
from ...redistribute.executor import executor_of_many
from ...redistribute.linear import redistribute_grad
from ..sharded_tensor import ShardedTensor

GRADIENT = seed_of("gradient")


class _Started(NamedTuple):
    """A reduction in flight: the leaves, the function that waits for the sums, their lineage."""

    leaves: Sequence[ShardedTensor]
    wait: Callable[[], list[Tensor]]
    lineage: int


class _GradReducer:
    """The leaves of one rank whose gradients are still to be reduced.

    Attributes:
        waiting: leaf number -> leaf; leaves are numbered in the order of creation, which is the
            same on every rank.
        accumulating: depth of `accumulate_grads()` blocks.
        outside_leaves: pairs of callbacks for gradients that are not in leaves: reduce them, before
            those of leaves, or drop them.
        before_flush: callbacks for the end of backward, before everything else.
        started: the reductions in flight.
        task: the backward pass that will call `flush` at its end; -1 if none will.
        count: number of leaves so far.
    """

    def __init__(self, _: World) -> None:
        self.waiting: dict[int, ShardedTensor] = {}
        self.accumulating = 0
        self.outside_leaves: list[tuple[Callable[[], None], Callable[[], None]]] = []
        self.before_flush: list[Callable[[], None]] = []
        self.started: list[_Started] = []
        self.task = -1
        self.count = 0

    def add(self, number: int, leaf: ShardedTensor) -> None:
        """Reduce this leaf's gradient at the end of the running backward."""
        self.waiting[number] = leaf
        self.flush_at_end()

    def flush_at_end(self) -> None:
        """Call `flush` once at the end of the running backward, if it may reduce gradients."""
        task = engine_hooks.current_backward()
        if not self.accumulating and task != self.task:
            self.task = task
            engine_hooks.at_end_of_backward(self.flush)

    def flush(self) -> None:
        """Reduce waiting gradients, move all to `.grad`, and call the hooks of their leaves."""
        self.task = -1
        if self.accumulating:
            return
        calls, self.before_flush = self.before_flush, []
        for call in calls:
            call()
        pairs, self.outside_leaves = self.outside_leaves, []
        for reduce, _ in pairs:
            reduce()
        leaves = [self.waiting[number] for number in sorted(self.waiting)]
        self.waiting.clear()
        done = self._finish_started()
        _reduce(leaves)
        changed = {id(leaf): leaf for leaf in (*done, *leaves)}
        for leaf in changed.values():
            for hook in list((leaf._after_grad_hooks or {}).values()):
                hook(leaf)

    def _finish_started(self) -> list[ShardedTensor]:
        """Wait for the reductions in flight, add the sums to `.grad`, and return the leaves."""
        started, self.started = self.started, []
        for reduction in started:
            for leaf, grad in zip(reduction.leaves, reduction.wait(), strict=True):
                _accumulate(leaf, grad, reduction.lineage)
        return [leaf for reduction in started for leaf in reduction.leaves]

    def drop_started(self) -> None:
        """Wait for the reductions that a failed backward has launched, and drop them."""
        self.before_flush.clear()
        started, self.started = self.started, []
        for reduction in started:
            reduction.wait()

    def give_up(self) -> None:
        """Drop gradients that are not in leaves after an exception in `accumulate_grads()`.

        So later ones do not include them.
        """
        pairs, self.outside_leaves = self.outside_leaves, []
        for _, drop in pairs:
            drop()


@contextmanager
def accumulate_grads() -> Iterator[None]:
    """Keep gradients pending over several backward passes; reduce them once, at the block's end.

    Until then `.grad` reads as a tensor with the sum still pending.

    Communication: none for gradients of leaves inside the block; at its end, one reduction per
    bucket.

    Example:
        >>> with sm.accumulate_grads():
        ...     for batch in micro_batches:
        ...         loss(model, batch).backward()
        >>> optimizer.step()
    """
    reducer = current_world().state(_GradReducer)
    reducer.accumulating += 1
    try:
        yield
    except BaseException:
        reducer.accumulating -= 1
        reducer.give_up()
        raise  # gradients in leaves stay pending; other ranks may not be here to reduce them
    reducer.accumulating -= 1
    reducer.flush()


def is_accumulating(world: World) -> bool:
    """Return True inside `accumulate_grads()`."""
    return world.state(_GradReducer).accumulating > 0


def before_reduction(world: World, call: Callable[[], None], give_up: Callable[[], None]) -> None:
    """Register a callback for the end of `accumulate_grads()`, before leaves are reduced.

    An exception calls `give_up` instead.
    """
    world.state(_GradReducer).outside_leaves.append((call, give_up))


def before_flush(world: World, call: Callable[[], None]) -> None:
    """Register a callback for the end of backward, where `start` can still launch reductions."""
    reducer = world.state(_GradReducer)
    reducer.before_flush.append(call)
    reducer.flush_at_end()


def add(leaf: ShardedTensor, part: Tensor) -> None:
    """Add to a leaf's gradient in place of autograd; `part` has the layout dual to the leaf's."""
    local = leaf._local
    local.grad = part if local.grad is None else local.grad + part
    if not _needs_no_reduction(leaf) or leaf._after_grad_hooks:
        leaf.mesh.world.state(_GradReducer).add(leaf._number, leaf)  # type: ignore[attr-defined]


def start(
    leaves: Sequence[ShardedTensor], grads: Sequence[Tensor], tag: CommTag, *, donate: bool = False
) -> None:
    """Launch the reduction of leaves' gradients during backward, in place of autograd.

    The sums are in `.grad` when it ends.

    Args:
        leaves, grads: the same on all ranks, in the same order.
        tag: what the reduction is for.
        donate: the gradients may be overwritten, and the sums may use their memory.
    """
    buckets = _buckets(zip(leaves, grads, strict=True))
    reducer = leaves[0].mesh.world.state(_GradReducer)
    for (mesh, *_), members in buckets.items():
        bucket_leaves, bucket_grads = zip(*members, strict=True)
        wait = _start_bucket(bucket_leaves, bucket_grads, tag, donate)
        reducer.started.append(_Started(bucket_leaves, wait, unpacked(loss_lineage(mesh))))
    reducer.flush_at_end()


def may_start(leaf: ShardedTensor, node: Any) -> bool:
    """Return True if `start` may reduce this leaf's gradient now; `node` is its accumulator.

    Hooks of the leaf get its gradient from autograd, before it is reduced.
    """
    if leaf._local._backward_hooks or _needs_no_reduction(leaf):
        return False
    return not is_accumulating(leaf.mesh.world) and engine_hooks.accumulates(node)


def drop_started(world: World) -> None:
    """Wait for the reductions that a failed backward has launched, and drop them."""
    world.state(_GradReducer).drop_started()


# -- leaves ----------------------------------------------------------------------------------------


def register_leaf(leaf: ShardedTensor) -> None:
    """Reduce this leaf's gradient at the end of each backward, if it needs a reduction."""
    first_leaf.begin()
    if not _needs_no_reduction(leaf):
        _register_hooks(leaf)


def _needs_no_reduction(leaf: ShardedTensor) -> bool:
    """Return True if autograd itself accumulates the gradient in the leaf's own layout.

    No rank holds a copy of another one's part then.
    """
    return _has_no_copies(leaf) and leaf.mesh.coordinate is not None


def _has_no_copies(leaf: ShardedTensor) -> bool:
    """Return True if the leaf is replicated over no axis."""
    return leaf._layout.dual is leaf._layout.grad


class _NotCopied(OrderedDict[Any, Any]):
    """What a leaf keeps for autograd, which torch's stager of state dicts does not copy."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _NotCopied:
        return self


def _register_hooks(leaf: ShardedTensor) -> None:
    """Let autograd report each gradient that it accumulates for the leaf: `_GradReducer.add`.

    Leaves are numbered in the order of these calls, the same on every rank; a second call for one
    does nothing.
    """
    if getattr(leaf, "_hooked_local", None) is leaf._local:
        return
    if leaf._local.is_inference():  # which has no gradient
        return
    leaf._hooked_local = leaf._local  # type: ignore[attr-defined]
    reducer = leaf._layout.mesh.world.state(_GradReducer)  # type: ignore[attr-defined]
    reducer.count += 1
    number = leaf._number = reducer.count  # type: ignore[attr-defined]
    reference = weakref.ref(leaf)
    # of the gradient that autograd is about to store, or to copy, in `.grad`
    origins: list[Origin] = []

    def before_accumulation(grads: tuple[Tensor, ...]) -> None:
        origins.clear()
        alive = reference()
        grad = grads[0]
        if alive is not None and grad is not None and alive._local.grad is None:
            origin = origin_of(grad, alive._layout.dual)
            origins.extend([] if origin.tensor is grad else [origin])

    def after_accumulation(local: Tensor) -> None:
        alive = reference()
        if alive is not None:
            if origins and local.grad is not None:
                note_origin(local.grad, alive._layout.dual, origins.pop())
            reducer.add(number, alive)

    with torch.inference_mode(False):
        node = torch.autograd.graph.get_gradient_edge(leaf._local).node
    node.register_prehook(before_accumulation)
    leaf._accumulator = _NotCopied(node=node)  # type: ignore[attr-defined]
    leaf._local.register_post_accumulate_grad_hook(after_accumulation)


# -- the reduction ---------------------------------------------------------------------------------


def _reduce(leaves: Sequence[ShardedTensor]) -> None:
    """Reduce the leaves' accumulated local gradients in buckets and move them to `.grad`.

    A gradient whose reduction fails stays pending.
    """
    pending = [(leaf, leaf._local.grad) for leaf in leaves if leaf._local.grad is not None]
    for (_, axes, _, is_differentiated), members in _buckets(pending).items():
        if not axes:
            reduced = [grad for _, grad in members]
        elif is_differentiated:
            reduced = [_reduce_differentiably(leaf, grad) for leaf, grad in members]
        else:
            bucket_leaves, grads = zip(*members, strict=True)
            reduced = _start_bucket(bucket_leaves, grads, None, False)()
        for (leaf, _), grad in zip(members, reduced, strict=True):
            leaf._local.grad = None
            _accumulate(leaf, grad, unpacked(loss_lineage(leaf.mesh)))


def _buckets(
    pairs: Iterable[tuple[ShardedTensor, Tensor]],
) -> dict[Any, list[tuple[ShardedTensor, Tensor]]]:
    """Group the leaves and gradients that are reduced together.

    Returns:
        (mesh, axes to reduce over, dtype, whether autograd records the gradients) -> the pairs.
    """
    buckets: dict[Any, list[tuple[ShardedTensor, Tensor]]] = {}
    for leaf, grad in pairs:
        layout = leaf._layout
        axes = layout.replicated_axes if layout.mesh.coordinate is not None else ()  # type: ignore[attr-defined]
        key = layout.mesh, axes, grad.dtype, grad.requires_grad
        buckets.setdefault(key, []).append((leaf, grad))
    return buckets


def _start_bucket(
    leaves: Sequence[ShardedTensor], grads: Sequence[Tensor], tag: CommTag | None, donate: bool
) -> Callable[[], list[Tensor]]:
    """Launch the reduction of a bucket; the returned function waits for the sums."""
    layouts = [
        leaf._layout if leaf._layout.dtype is grad.dtype else leaf._layout.replace(dtype=grad.dtype)
        for leaf, grad in zip(leaves, grads, strict=True)
    ]
    sources = [_source_of_sum(grad, layout) for grad, layout in zip(grads, layouts, strict=True)]
    pairs = tuple((src, layout.grad) for (_, src), layout in zip(sources, layouts, strict=True))
    are_grads = all(source is grad for (source, _), grad in zip(sources, grads, strict=True))
    mesh = leaves[0].mesh
    with comm_context(mesh.world, mixed(unpacked(loss_lineage(mesh)), leaves)):
        parts = executor_of_many(pairs).start(
            [source for source, _ in sources], donate=donate and are_grads, tag=tag
        )
    return lambda: [
        _shaped_like(part if source is grad else _copy_if_shared(part, source), grad)
        for part, (source, _), grad in zip(parts.wait(), sources, grads, strict=True)
    ]


def _source_of_sum(grad: Tensor, layout: Layout) -> tuple[Tensor, Layout]:
    """Return what a leaf's reduction starts from, and its layout.

    That is the gradient's origin if it is the sum already, else the gradient: origins in other
    layouts are not used, so that all gradients of a bucket are summed by one collective.

    Args:
        layout: of the leaf.
    """
    origin = origin_of(grad, layout.dual)
    return (origin.tensor, origin.layout) if origin.layout is layout.grad else (grad, layout.dual)


def _copy_if_shared(part: Tensor, origin: Tensor) -> Tensor:
    """Return the part, copied if it shares memory with its origin, which the leaf does not own."""
    return (
        part.clone() if part.untyped_storage()._cdata == origin.untyped_storage()._cdata else part
    )


def _shaped_like(part: Tensor, grad: Tensor) -> Tensor:
    """Return the part with the shape and strides of `grad`, which are those of the leaf."""
    if part is grad:
        return part
    whole = part.view(grad.shape)
    return whole if grad.is_contiguous() else torch.empty_like(grad).copy_(whole)


def _reduce_differentiably(leaf: ShardedTensor, grad: Tensor) -> Tensor:
    """Reduce one gradient that autograd records, as with `create_graph=True`."""
    layout = leaf._layout.replace(dtype=grad.dtype)
    with torch.enable_grad():
        return _copy_if_shared(
            redistribute_grad(grad, layout.dual, layout.grad), origin_of(grad, layout.dual).tensor
        )


def _gradient_of(leaf: ShardedTensor, grad: Tensor, layout: Layout) -> ShardedTensor:
    return ShardedTensor._make_guarded(grad, layout, mixed(GRADIENT, [leaf]))


def _accumulate(leaf: ShardedTensor, grad: Tensor, lineage: int) -> None:
    """Add to `.grad`; `lineage` is that of the value that backward started from."""
    old = leaf._reduced_grad
    if old is None:
        layout = leaf._layout.grad
        reduced = leaf._reduced_grad = _gradient_of(
            leaf, grad, layout if layout.dtype is grad.dtype else layout.replace(dtype=grad.dtype)
        )
    elif grad.requires_grad or old._local.requires_grad:
        reduced = leaf._reduced_grad = _gradient_of(leaf, old._local + grad, old._layout)
    else:
        old._local += grad
        reduced = old
    # Without copies its lineage is that of the leaf alone, as on ranks that need no reduction.
    if not _has_no_copies(leaf):
        reduced._lineage = mixed(lineage, [leaf] if old is None else [leaf, old])


# -- `.grad` ---------------------------------------------------------------------------------------


def get_grad(x: ShardedTensor) -> ShardedTensor | None:
    """Return the gradient of `x`, pending as a sum over axes not yet reduced. No communication."""
    done, fresh = x._reduced_grad, x._local.grad
    if fresh is None:
        return done
    pending = x._accumulated_grad
    if pending is None or pending._local is not fresh:
        # The same object at every read, until autograd accumulates anew.
        pending = _gradient_of(x, fresh, x._layout.dual.replace(dtype=fresh.dtype))
        x._accumulated_grad = pending
    if done is None:
        return pending
    return _gradient_of(
        x, redistribute_local(done._local, done._layout, pending._layout) + fresh, pending._layout
    )


def set_grad(x: ShardedTensor, value: Tensor | None) -> None:
    """Replace the gradient of `x`; assignment to `.grad`."""
    if value is not None:
        first_leaf.begin()
    if value is not None and not isinstance(value, ShardedTensor):
        raise TypeError(
            "the gradient of a ShardedTensor is a ShardedTensor; place the plain tensor with "
            "distribute_tensor"
        )
    if value is not None and value.shape != x.shape:
        raise ValueError(
            f"a gradient of shape {list(value.shape)} for a tensor of shape {list(x.shape)}"
        )
    if value is not None and value.mesh != x.mesh:
        grad_mesh, leaf_mesh = distinct_mesh_names(value.mesh, x.mesh)
        raise ValueError(
            f"a gradient on {grad_mesh} for a tensor on {leaf_mesh}; place value.full_tensor() on "
            "the tensor's mesh"
        )
    placed = None if value is None else value.redistribute(x._layout.grad.spec)
    whole = placed is not None and placed.dtype is x.dtype and _needs_no_reduction(x)
    if placed is not None:
        placed._expose_device()
    x._local.grad = placed._local if whole else None  # type: ignore[union-attr]
    x._accumulated_grad, x._reduced_grad = (placed, None) if whole else (None, placed)


# -- hooks -----------------------------------------------------------------------------------------


def register_hook(x: ShardedTensor, hook: Callable[[ShardedTensor], Tensor | None]) -> Any:
    """Call `hook` with the gradient, when it is computed, in the layout dual to this tensor's."""
    dual = x._layout.dual

    def on_local(local: Tensor) -> Tensor | None:
        answer = hook(ShardedTensor._make(local, dual.replace(dtype=local.dtype)))
        if answer is None:
            return None
        if not isinstance(answer, ShardedTensor):
            raise TypeError("a hook on a ShardedTensor returns None or a ShardedTensor")
        return redistribute_local(answer._local, answer._layout, dual.replace(dtype=answer.dtype))

    return x._local.register_hook(on_local)


def register_post_accumulate_grad_hook(
    x: ShardedTensor, hook: Callable[[ShardedTensor], None]
) -> Any:
    """Call `hook(x)` at the end of a backward, when `.grad` is complete and reduced."""
    if not x.requires_grad or not x.is_leaf:
        raise RuntimeError(
            "post accumulate grad hooks can only be registered on leaf tensors that require grad"
        )
    _register_hooks(x)
    hooks = vars(x).setdefault("_after_grad_hooks", _NotCopied())
    handle = torch.utils.hooks.RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
