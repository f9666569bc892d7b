"""Redistribution of `ShardedTensor`s: one, many at once, now or under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...mesh.comm.group import current_world
from ...mesh.device_mesh import DeviceMesh, as_device_mesh, is_mesh
from ..functional.named_axes import captures_here
from ..layout.layout import Layout, distinct_mesh_names
from ..layout.spec import Sharding, SpecLike
from ..ops import dispatch
from ..ops.lineage import carrying, mixed
from ..redistribute.autograd import redistribute_local, start_redistribute
from ..redistribute.cross_mesh import redistribute_cross_mesh
from . import from_dtensor
from .autograd.engine_hooks import transforms_active
from .mesh_arguments import mesh_and_spec
from .sharded_tensor import DonatedTensor, ShardedTensor


class Resharding:
    """A redistribution under way, from `redistribute(..., async_op=True)`: `wait()` gives the tensor."""

    def __init__(self, finish: Callable[[], Any]) -> None:
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    def wait(self) -> Any:
        """The redistributed tensor (or the list of them); the same object at every call.

        Raises: what went wrong in the collective.
        """
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        return self._result

    def __repr__(self) -> str:
        return f"Resharding({'under way' if self._finish is not None else self._result!r})"


def redistribute(
    x: ShardedTensor,
    *where: Any,
    placements: SpecLike = None,
    device_mesh: DeviceMesh | None = None,
    async_op: bool = False,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    max_bytes: int | None = None,
    accumulate_dtype: torch.dtype | None = None,
    transport: str | None = None,
    donate: bool = False,
    out: ShardedTensor | None = None,
) -> Any:
    """redistribute(x, placements) -> x laid out as `placements`; differentiable any number of times.

    Args:
        x: a sharded tensor; a DTensor of torch's is converted first.
        where: `placements`, or `device_mesh, placements` as in torch; placements may be a `P`, or a `NamedSharding`, which brings its mesh
            along.
        placements: the same by name.
        device_mesh: the tensor's own mesh, by default, or another one of the same world: with other axes, other ranks or
            the same ranks in another order. Then all ranks of both call this, and backward; those outside a mesh hold
            empty parts.
        async_op: return a handle while the (last) collective is under way; its `wait()` gives the tensor.
        forward_dtype: cast to this dtype before moving; the result has it.
        backward_dtype: dtype in which the gradient travels back; it arrives in the dtype of `x`.
        max_bytes: the most that a rank may hold at a time (its part before, its part after, buffers); exchanges are
            done in rounds until they fit. Backward is not limited.
        accumulate_dtype: torch.float32 to have sums of 16-bit floats added up in fp32 and rounded once, while they travel
            in 16 bits: half the bytes of casting first. No effect on other dtypes.
        transport: "int8" or "fp8" to let 16- and 32-bit floats travel in 8 bits, in blocks of 128 with a scale each, and sums
            be formed in fp32: 1.03 bytes an element. In each step of the plan that moves, an element of a block whose largest
            is m is off by at most m / 252 ("int8"), or by x / 16 or m / 425,984, whichever is more ("fp8"); inf and NaN arrive.
            Replicas are equal, bit for bit. Gradients travel back whole.
        donate: `x` is not needed any more: its memory is reused where that saves a copy (a reduction in place, a
            reduce_scatter into its own input) and freed otherwise. `x` raises from then on.
        out: a contiguous tensor of the wanted layout that the result is put into and that is returned. An all_gather
            whose parts lie one after the other arrives in it directly, and a part that is a view of its place in `out`
            is not copied either.

    Returns:
        The tensor in its new layout; never sharing memory with `x` unless donated. With `async_op`, a `Resharding`.

    Raises:
        ValueError: the placements do not fit, no plan fits into `max_bytes`, `out` has another layout, the dtype or what is
            pending cannot be quantised, a tensor that requires grad is donated or has `out`, or the mesh is another one and
            more than the plain move is asked for.

    Communication: the plan's; `explain(typeof(x), placements)` prints it. To another mesh: a reduction of what is pending,
        and one all_to_all over the ranks of both.

    Example:
        >>> y = x.redistribute([Replicate(), Shard(1)])
        >>> z = x.redistribute(P(None, ("dp", "tp")))
        >>> coming = x.redistribute(P(), async_op=True)
        >>> whole = coming.wait()
        >>> elsewhere = x.redistribute(other_mesh, [Shard(0)])
    """
    if type(x) is not ShardedTensor and from_dtensor.is_dtensor(x):
        x = from_dtensor.from_dtensor(x)
    if (captures := captures_here()) is not None:
        captures.check_inside(x, "redistribute")
    local, layout, target = _prepared(x, _wanted(x, where, device_mesh, placements), forward_dtype)
    if target.mesh is not layout.mesh:
        _check_plain(
            layout, target, async_op=async_op, max_bytes=max_bytes, accumulate_dtype=accumulate_dtype,
            transport=transport, donate=donate, out=out,
        )  # fmt: skip
        moved = redistribute_cross_mesh(local.to(layout.dtype), layout, target, backward_dtype=backward_dtype)
        return _made(x, _unshared(moved, local), target)
    if target is x._layout and out is None:
        return Resharding(lambda: x) if async_op else x
    plain = not (async_op or donate or max_bytes is not None or accumulate_dtype or transport or out is not None)
    if plain:  # the common way, and the shortest
        with carrying(layout.mesh.world, x._lineage):  # type: ignore[attr-defined]
            moved = redistribute_local(local, layout, target, backward_dtype=backward_dtype)
        return _made(x, _unshared(moved, local), target)
    _check_writable(x, target, donate, out)
    kept, into = None if donate else local, None if out is None else [dispatch.known_local(out)]
    tensors = [local]
    del local
    if donate:
        DonatedTensor.take(x)
    lineage = x._lineage
    with carrying(layout.mesh.world, lineage):  # type: ignore[attr-defined]
        wait = start_redistribute(
            tensors, [(layout, target)],
            backward_dtype=backward_dtype, max_bytes=max_bytes, accumulate_dtype=accumulate_dtype, transport=transport,
            donate=donate, outs=into,
        )  # fmt: skip

    def finish() -> ShardedTensor:
        (moved,) = wait()
        found = out if out is not None else ShardedTensor._make(_unshared(moved, kept), target)
        found._lineage = lineage
        return found

    return Resharding(finish) if async_op else finish()


def reshard(x: ShardedTensor, spec: SpecLike) -> ShardedTensor:
    """reshard(x, P(...)) -> x laid out as the spec says: `redistribute` by JAX's name. Communication: the plan's."""
    return redistribute(x, spec)


def redistribute_many(
    tensors: Sequence[ShardedTensor],
    placements: Sequence[SpecLike],
    *,
    async_op: bool = False,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    donate: bool = False,
) -> Any:
    """redistribute_many(xs, placements) -> [each x laid out as its placements say], in as few collectives as possible.

        x: dp reduce_scatter   \
        y: dp reduce_scatter    >   one reduce_scatter over dp, one all_gather over tp
        z: tp all_gather       /

    Collectives over the same ranks, of the same kind and dtype, become one; so they do in backward. The tensors may lie
    on different meshes of one world (each stays on its own).

    Args:
        tensors: sharded tensors.
        placements: one `P` or list of placements for each.
        async_op, forward_dtype, backward_dtype, donate: as for `redistribute`, for all of them.

    Returns:
        The tensors in their new layouts, in order. With `async_op`, a `Resharding` whose `wait()` gives the list.

    Raises:
        ValueError: another number of placements than tensors; or as `redistribute`, for one of them.

    Communication: one collective per group, kind of collective, reduction and dtype, for each stage of the plans.

    Example:
        >>> params = sm.redistribute_many(shards, [P()] * len(shards))
    """
    if len(tensors) != len(placements):
        raise ValueError(
            f"{len(tensors)} tensors and {len(placements)} placements; give one P or list of placements for each tensor"
        )
    prepared = [_prepared(x, _wanted(x, (where,), None, None), forward_dtype) for x, where in zip(tensors, placements, strict=True)]
    targets = [target for _, _, target in prepared]
    for x, target in zip(tensors, targets, strict=True):
        _check_writable(x, target, donate, None)
    if donate and len({id(x) for x in tensors}) < len(tensors):
        raise ValueError("a tensor that is donated appears twice among the tensors; pass each once")
    kept = [None if donate else local for local, _, _ in prepared]
    locals_, pairs = [local for local, _, _ in prepared], [(layout, target) for _, layout, target in prepared]
    del prepared
    lineages = [x._lineage for x in tensors]
    with carrying(current_world(), mixed(0, tensors)):
        for x in tensors if donate else ():
            DonatedTensor.take(x)
        wait = start_redistribute(locals_, pairs, backward_dtype=backward_dtype, donate=donate)

    def finish() -> list[ShardedTensor]:
        moved = [ShardedTensor._make(_unshared(out, local), to) for out, local, to in zip(wait(), kept, targets, strict=True)]
        for x, lineage in zip(moved, lineages, strict=True):
            x._lineage = lineage
        return moved

    return Resharding(finish) if async_op else finish()


# ----------------------------------------------------------------------------------------------------------------------


def _wanted(
    x: ShardedTensor, where: Sequence[Any], mesh: DeviceMesh | None, placements: SpecLike
) -> tuple[DeviceMesh, SpecLike]:
    """The mesh and the placements that were asked for.

    Raises:
        TypeError: too many arguments.
        ValueError: for another mesh, without placements.
    """
    rest = list(where)
    if rest and is_mesh(rest[0]):
        mesh = rest.pop(0)
    elif len(rest) == 2 and rest[0] is None:
        rest.pop(0)
    if rest:
        placements = rest.pop(0)
    if isinstance(placements, Sharding):
        mesh, placements = mesh_and_spec(mesh, placements)
    if rest:
        raise TypeError(f"redistribute takes placements, or a mesh and placements; got {where!r}")
    to: DeviceMesh = x.mesh if mesh is None else as_device_mesh(mesh)
    if placements is None and to is not x.mesh:
        here, there = distinct_mesh_names(x.mesh, to)
        raise ValueError(f"{x._layout} on {here} has no placements on {there}; write x.redistribute(mesh, placements)")
    return to, x._layout.spec if placements is None else placements


def _prepared(
    x: ShardedTensor, wanted: tuple[DeviceMesh, SpecLike], forward_dtype: torch.dtype | None
) -> tuple[Tensor, Layout, Layout]:
    """This rank's part (cast when it is packed), its layout in the dtype in which it travels, and the wanted one."""
    local, layout = dispatch.known_local(x), x._layout
    if forward_dtype is not None and forward_dtype != layout.dtype:
        layout = layout.replace(dtype=forward_dtype)
    return local, layout, Layout.of(*wanted, layout.shape, layout.dtype)


def _check_plain(layout: Layout, target: Layout, **options: Any) -> None:
    """Raises: ValueError for any option on the way to another mesh."""
    given = [name for name, value in options.items() if value is not None and value is not False]
    if given:
        here, there = distinct_mesh_names(layout.mesh, target.mesh)
        raise ValueError(
            f"{given[0]}= is for a redistribution on one mesh, and {layout} goes from {here} to {there}; leave it out, and "
            "redistribute on one of the meshes with it"
        )


def _made(x: ShardedTensor, moved: Tensor, target: Layout) -> ShardedTensor:
    """The same values in another layout."""
    out = ShardedTensor._make(moved, target)
    out._lineage = x._lineage
    return out


def _unshared(moved: Tensor, local: Tensor | None) -> Tensor:
    """The result, copied if it lies in the memory of the part before; of donated memory, if it is but a piece."""
    if transforms_active():
        return moved  # a new tensor
    storage = moved.untyped_storage()
    if local is None:
        piece = storage.nbytes() > moved.nbytes and not moved.is_contiguous()
        return moved.clone(memory_format=torch.contiguous_format) if piece else moved
    shared = _place(storage) == _place(local.untyped_storage())
    return moved.clone(memory_format=torch.contiguous_format) if shared else moved


def _place(storage: Any) -> int:
    """Where a storage lies; one on "meta" lies nowhere and is told by its own number."""
    return storage.data_ptr() or storage._cdata


def _check_writable(x: ShardedTensor, target: Layout, donate: bool, out: ShardedTensor | None) -> None:
    """Raises: ValueError for `donate` or `out` where gradients or layouts forbid them."""
    if donate and x._local.requires_grad:
        raise ValueError(f"{x._layout} requires grad, so backward may need it: it cannot be donated; donate x.detach()")
    if out is None:
        return
    if out._layout is not target:
        raise ValueError(f"out is {out._layout}, and the result is {target}; pass sm.empty of that layout")
    if out._local.requires_grad or (x._local.requires_grad and torch.is_grad_enabled()):
        raise ValueError(f"out= takes no part in autograd, and {x._layout} or out requires grad; use torch.no_grad()")
    if not out._local.is_contiguous():
        raise ValueError(f"out= needs a contiguous local tensor, and this one has strides {out._local.stride()}")
