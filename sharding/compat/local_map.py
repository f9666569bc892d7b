"""`local_map`: `shard_map` by DTensor's argument names, over flattened arguments and results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from ...mesh.comm.thread_context import thread_context
from ...mesh.device_mesh import DeviceMesh
from ..functional.shard_map import Mapped
from ..layout.bounded_cache import HEAVY_LIMIT, keep
from ..layout.layout import Layout, MeshLayouts
from ..layout.spec import P, SpecLike
from ..ops.torch_compile import keep_compiler_out, not_compiled
from ..tensor.convert import with_grad_layout
from ..tensor.sharded_tensor import ShardedTensor

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
    """local_map(f, out_placements, in_placements) -> f on `ShardedTensor`s: it runs on parts.

        x = [a b]  S(0)      rank 0: f(a) = c      y = [c d]  laid out as out_placements
                             rank 1: f(b) = d

    `shard_map` by DTensor's argument names, without type checking, since such functions may call
    `torch.distributed` themselves. The positional arguments are flattened (tuples, lists, dicts);
    each sharded one is replaced by this rank's part; other positional arguments and keyword
    arguments are passed unchanged. If no argument is sharded, `func` is simply called.

    Args:
        func: a function of plain tensors. Without it, a decorator is returned.
        out_placements: the layout of the results, which are this rank's parts: a `P` or one
            placement per axis, or a tuple of those, one for each flattened result; None for a
            result that is not a tensor.
        in_placements: the layout that the arguments must have, one for each flattened positional
            argument; None for those that are not sharded. By default their own.
        in_grad_placements: how the gradients of the parts make up those of the arguments. By
            default as in `shard_map`: the gradients of a replicated argument are summed over the
            ranks.
        device_mesh: the mesh; by default that of the first sharded argument.
        redistribute_inputs: redistribute arguments whose layout is not that of `in_placements`.

    Raises:
        ValueError: another number of placements than arguments or results, an argument with another
            layout than `in_placements`, placements for a value that is not a tensor, or none for a
            tensor.
        TypeError: `func` returned a `ShardedTensor`; a result of another shape than in the previous
            call with such arguments.
        RuntimeError: this rank is outside the mesh and has no parts.

    Communication: that of redistributing inputs; the first time with such arguments a small
    all_gather of the results' shapes.

    Example:
        >>> @local_map(
        ...     out_placements=[Shard(0)],
        ...     in_placements=([Shard(0)], [Replicate()]),
        ...     in_grad_placements=([Shard(0)], [Partial()]),
        ... )
        ... def scores(q, k):
        ...     return torch.softmax(q @ k.T, -1)
    """
    if func is None:
        return functools.partial(
            local_map,
            out_placements=out_placements,
            in_placements=in_placements,
            in_grad_placements=in_grad_placements,
            device_mesh=device_mesh,
            redistribute_inputs=redistribute_inputs,
        )
    function: Callable[..., Any] = func

    @not_compiled("it calls a function of the program outside of any graph", calls_program=True)
    @functools.wraps(function)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        keep_compiler_out()
        flat, tree = pytree.tree_flatten(args)
        first = next((x for x in flat if isinstance(x, ShardedTensor)), None)
        if first is None:
            return function(*args, **kwargs)
        placed = _one_each("in_placements", in_placements, flat)
        grads = _one_each("in_grad_placements", in_grad_placements, flat)
        _check_places(flat, placed, grads, in_placements is not None, redistribute_inputs)
        layouts = [
            x._layout.replace(place) if isinstance(x, ShardedTensor) else None
            for x, place in zip(flat, placed, strict=True)
        ]
        known = MeshLayouts.of(first.mesh).functions.setdefault(mapped, {})
        key = (tree, *layouts)
        if key not in known:
            keep(
                known,
                key,
                _FlatFunction(
                    function, tree, layouts, grads, out_placements, device_mesh or first.mesh
                ),
                HEAVY_LIMIT,
            )
        return known[key](flat, kwargs)

    return mapped


class _FlatFunction:
    """The mapped function over flattened arguments and results."""

    def __init__(
        self,
        function: Any,
        tree: Any,
        layouts: Any,
        grads: Any,
        out_placements: Any,
        mesh: DeviceMesh,
    ) -> None:
        self.function = function
        self.tree = tree
        self.layouts = layouts
        self.grads = grads
        self.out_placements = out_placements
        specs = tuple(None if layout is None else layout.spec for layout in layouts)
        # One entry for each result, not one placement for each axis.
        is_one_each = isinstance(out_placements, tuple) and all(
            p is None or isinstance(p, P | list | tuple) for p in out_placements
        )
        outs = out_placements if is_one_each else (out_placements,)
        self.mapped = Mapped(self.on_parts, mesh, specs, outs, None, False)
        self.mapped.name = f"local_map({getattr(function, '__name__', 'function')})"
        self.places = outs

    def __call__(self, flat: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        results = self.mapped(*flat, **kwargs)
        tree, thread_context.local_map_tree = thread_context.local_map_tree, None
        return pytree.tree_unflatten(results, tree)

    def on_parts(self, *parts: Any, **kwargs: Any) -> tuple[Any, ...]:
        inputs = [
            _with_gradient(*each) for each in zip(parts, self.layouts, self.grads, strict=True)
        ]
        results = self.function(*pytree.tree_unflatten(inputs, self.tree), **kwargs)
        flat, thread_context.local_map_tree = pytree.tree_flatten(results)
        if len(self.places) != len(flat):
            raise ValueError(
                f"local_map: {len(self.places)} out_placements for {len(flat)} flattened results; "
                "give a tuple with one for each"
            )
        for i, each in enumerate(zip(flat, self.places, strict=True)):
            _check_result(i, *each)
        return tuple(flat)


def _with_gradient(part: Any, layout: Layout | None, grad_place: SpecLike) -> Any:
    """Return the part, whose gradient is laid out as the placements."""
    return (
        part
        if layout is None or grad_place is None
        else with_grad_layout(part, layout, layout.replace(grad_place))
    )


# -- arguments -------------------------------------------------------------------------------------


def _one_each(name: str, placements: Placed, flat: Sequence[Any]) -> Sequence[SpecLike]:
    if placements is None:
        return [None] * len(flat)
    if len(placements) != len(flat):
        raise ValueError(
            f"local_map: {len(placements)} {name} for {len(flat)} flattened arguments; give one "
            "for each, None for plain ones"
        )
    return placements


def _check_places(
    flat: Sequence[Any],
    placed: Sequence[SpecLike],
    placed_grads: Sequence[SpecLike],
    examine: bool,
    redistribute: bool,
) -> None:
    """Raise a ValueError for placements that do not fit the arguments.

    Placements of values that are not tensors, and arguments with another layout than required.
    """
    for i, (x, place, grad_place) in enumerate(zip(flat, placed, placed_grads, strict=True)):
        if not isinstance(x, Tensor) and (place, grad_place) != (None, None):
            raise ValueError(
                f"local_map: argument {i} is {x!r}, not a tensor, and has placements "
                f"{place or grad_place}; write None"
            )
        if isinstance(x, ShardedTensor) and examine:
            _check_place(i, x, place, redistribute)


def _check_place(i: int, x: ShardedTensor, place: SpecLike, redistribute: bool) -> None:
    if place is None:
        raise ValueError(
            f"local_map: argument {i} is sharded, {x._layout}, and its in_placements are None; "
            "give its placements"
        )
    if not redistribute and x._layout.replace(place) is not x._layout:
        raise ValueError(
            f"local_map: argument {i} is laid out as {x._layout}, and in_placements require "
            f"{place}; redistribute it, or pass redistribute_inputs=True"
        )


# -- results ---------------------------------------------------------------------------------------


def _check_result(i: int, x: Any, place: SpecLike) -> None:
    if isinstance(x, ShardedTensor):
        raise TypeError(
            f"local_map: result {i} is a ShardedTensor, {x._layout}; the function works on parts "
            "and returns parts"
        )
    if isinstance(x, Tensor) != (place is not None):
        raise ValueError(
            f"local_map: result {i} is {'a tensor' if isinstance(x, Tensor) else repr(x)}, and its "
            f"out_placements are {place}; write placements for tensors and None for all else"
        )
