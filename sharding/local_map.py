"""`local_map`: a function of plain tensors, run on the parts of sharded ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from ..mesh.device_mesh import DeviceMesh
from .boundary import from_local
from .spec import P, SpecLike
from .tensor import ShardedTensor

Placed = Sequence[SpecLike] | None


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: SpecLike | tuple[SpecLike, ...] = None,
    in_placements: Placed = None,
    in_grad_placements: Placed = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """local_map(f, out_placements, in_placements) -> f on `ShardedTensor`s: it runs on the parts, and its results are parts.

        x = [a b]  S(0)      rank 0: f(a) = c      y = [c d]  as out_placements say
                             rank 1: f(b) = d

    The positional arguments are flattened (tuples, lists, dicts); each sharded one is replaced by this rank's part, all else
    goes to `func` as it is, and so do keyword arguments. If no argument is sharded, `func` is simply called.

    Args:
        func: a function of plain tensors. Left out, a decorator is returned.
        out_placements: how the results lie, which are this rank's parts: a `P` or one placement per axis, or a tuple of
            those, one for each flattened result; None for a result that is not a tensor.
        in_placements: how the arguments must lie, one for each flattened positional argument; None for those that are not
            sharded. By default they are taken as they lie.
        in_grad_placements: how the gradients of the parts make up those of the arguments, where that is not as the arguments
            lie: an argument that is replicated and meets another part of the data on every rank has a pending gradient,
            `[Partial()]`.
        device_mesh: the mesh of the results; by default that of the first sharded argument.
        redistribute_inputs: redistribute arguments that do not lie as `in_placements` say.

    Raises:
        ValueError: another number of placements than arguments or results, an argument that does not lie as it must, placements
            for what is not a tensor, or none for what is one.
        TypeError: `func` returned a `ShardedTensor`.
        RuntimeError: this rank is outside the mesh and has no parts; in backward, if the replicas of an argument have different
            gradients and `in_grad_placements` does not say that they add up.

    Communication: that of redistributing inputs; where a result is split, a small all_gather of its local shapes (so that
        uneven parts are right). Backward: as `to_local` and `from_local`.

    Example:
        >>> @local_map(out_placements=[Shard(0)], in_placements=([Shard(0)], [Replicate()]), in_grad_placements=([Shard(0)], [Partial()]))
        ... def scores(q, k):
        ...     return torch.softmax(q @ k.T, -1)
    """
    if func is None:
        return functools.partial(
            local_map, out_placements=out_placements, in_placements=in_placements, in_grad_placements=in_grad_placements,
            device_mesh=device_mesh, redistribute_inputs=redistribute_inputs,
        )  # fmt: skip
    function = func

    @functools.wraps(function)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        flat, tree = pytree.tree_flatten(args)
        first = next((x for x in flat if isinstance(x, ShardedTensor)), None)
        if first is None:
            return function(*args, **kwargs)
        mesh = first.mesh if device_mesh is None else device_mesh
        _check_inside(mesh)
        placed = _one_each("in_placements", in_placements, flat)
        placed_grads = _one_each("in_grad_placements", in_grad_placements, flat)
        _check_places(flat, placed, placed_grads, in_placements is not None, redistribute_inputs)
        parts = [_part(*each) for each in zip(flat, placed, placed_grads, strict=True)]
        return _wrapped(function(*pytree.tree_unflatten(parts, tree), **kwargs), mesh, out_placements)

    return mapped


# -- arguments ---------------------------------------------------------------------------------------------------------


def _check_inside(mesh: DeviceMesh) -> None:
    if mesh.coordinate is None:
        raise RuntimeError(f"local_map: rank {mesh.world.rank} is outside {mesh} and has no parts; call it on the ranks of the mesh")


def _one_each(name: str, placements: Placed, flat: Sequence[Any]) -> Sequence[SpecLike]:
    if placements is None:
        return [None] * len(flat)
    if len(placements) != len(flat):
        raise ValueError(f"local_map: {len(placements)} {name} for {len(flat)} flattened arguments; give one for each, None for plain ones")
    return placements


def _check_places(
    flat: Sequence[Any], placed: Sequence[SpecLike], placed_grads: Sequence[SpecLike], examine: bool, redistribute: bool
) -> None:
    """Raises: ValueError for placements of what is not a tensor, and for arguments that lie otherwise than they must."""
    for i, (x, place, grad_place) in enumerate(zip(flat, placed, placed_grads, strict=True)):
        if not isinstance(x, Tensor) and (place, grad_place) != (None, None):
            raise ValueError(f"local_map: argument {i} is {x!r}, no tensor, and has placements {place or grad_place}; write None")
        if isinstance(x, ShardedTensor) and examine:
            _check_place(i, x, place, redistribute)


def _check_place(i: int, x: ShardedTensor, place: SpecLike, redistribute: bool) -> None:
    if place is None:
        raise ValueError(f"local_map: argument {i} is sharded, {x.layout}, and its in_placements are None; say how it must lie")
    if not redistribute and x.layout.replace(place) is not x.layout:
        raise ValueError(
            f"local_map: argument {i} lies as {x.layout}, and in_placements ask for {place}; "
            "redistribute it, or pass redistribute_inputs=True"
        )


def _part(x: Any, place: SpecLike, grad_place: SpecLike) -> Any:
    if not isinstance(x, ShardedTensor):
        return x
    return (x if place is None else x.redistribute(place)).to_local(grad_placements=grad_place)


# -- results -----------------------------------------------------------------------------------------------------------


def _wrapped(out: Any, mesh: DeviceMesh, placements: Any) -> Any:
    """The results as `ShardedTensor`s."""
    flat, tree = pytree.tree_flatten(out)
    places = placements if isinstance(placements, tuple) and _is_one_each(placements) else (placements,)
    if len(places) != len(flat):
        raise ValueError(f"local_map: {len(places)} out_placements for {len(flat)} flattened results; give a tuple with one for each")
    for i, each in enumerate(zip(flat, places, strict=True)):
        _check_result(i, *each)
    made = [from_local(x, mesh, place) if isinstance(x, Tensor) else x for x, place in zip(flat, places, strict=True)]
    return pytree.tree_unflatten(made, tree)


def _is_one_each(placements: tuple[Any, ...]) -> bool:
    """Whether this is one entry for each result, and not one placement for each axis."""
    return all(p is None or isinstance(p, P | list | tuple) for p in placements)


def _check_result(i: int, x: Any, place: SpecLike) -> None:
    if isinstance(x, ShardedTensor):
        raise TypeError(f"local_map: result {i} is a ShardedTensor, {x.layout}; the function works on parts and returns parts")
    if isinstance(x, Tensor) != (place is not None):
        raise ValueError(
            f"local_map: result {i} is {'a tensor' if isinstance(x, Tensor) else repr(x)}, and its out_placements are {place}; "
            "write placements for tensors and None for all else"
        )
