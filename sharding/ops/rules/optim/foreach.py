"""Operators over lists of tensors: `_foreach_*` and the fused optimizer kernels.

Where the tensors at each index (a parameter, its gradient, its state) have one layout, the operator
runs once on the lists of local tensors. Otherwise the single operator runs for each index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ....layout.layout import Layout
from ....layout.mesh_answers import cached_on_mesh
from ....layout.spec import P
from ....lineage import mixed, seed_of
from ....tensor.autograd.local_part import known_local
from ....tensor.sharded_tensor import ShardedTensor
from ...plain_operands import plain_targets, refuse_without_value, write_plain
from ...sliced_from import check_bases
from ..decomposition_utils import reduce_pending
from ..reductions.reduction import accumulator_dtype, safe_root
from ..registry import HANDLERS, handler

_FUSED = ("_fused_adam_", "_fused_adamw_", "_fused_adagrad_", "_fused_sgd_")
# these take no number elsewhere
_OF_NUMBERS = {"maximum": ("maximum", "clamp_min"), "minimum": ("minimum", "clamp_max")}
# their lists have a scalar where these have value=
_TAKES_VALUE = ("addcmul", "addcmul_", "addcdiv", "addcdiv_")


def _lists(args: Any, kwargs: Any) -> list[Sequence[Any]]:
    return [
        a
        for a in (*args, *kwargs.values())
        if isinstance(a, (list, tuple)) and a and isinstance(a[0], Tensor)
    ]


def are_aligned(lists: Sequence[Sequence[Any]]) -> bool:
    """Return whether tensors at every index share shape and layout, so that locals can be used."""
    key = tuple(
        [
            tuple([x._layout if type(x) is ShardedTensor else x.ndim for x in tensors])
            for tensors in lists
        ]
    )
    first = next((item for items in key for item in items if type(item) is Layout), None)
    return first is None or _are_alike(first, key)


@cached_on_mesh(attrgetter("mesh"), 256)
def _are_alike(_: Layout, rows: tuple[tuple[Layout | int, ...], ...]) -> bool:
    return all(map(_is_alike, zip(*rows, strict=True)))


def _is_alike(row: Sequence[Layout | int]) -> bool:
    """Return whether an index is aligned; rows have layouts, and plain tensors' numbers of dims."""
    layouts = [item for item in row if isinstance(item, Layout)]
    if not layouts:  # plain tensors among sharded ones
        return True
    kinds = {(layout.mesh, layout.spec, layout.shape) for layout in layouts}
    if row[0] not in layouts:  # a plain tensor that may be written: see `_one_by_one`
        return False
    numbers = all(item == 0 for item in row if not isinstance(item, Layout))
    return len(kinds) <= 1 and numbers and not any(layout.pending for layout in layouts)


_part = attrgetter("_local")


def _local(argument: Any) -> Any:
    """Return the locals of a list; a single number next to lists is replicated."""
    if isinstance(argument, (list, tuple)):
        # in an optimizer's step gradients are off
        part = known_local if torch.is_grad_enabled() else _part
        return [part(x) if type(x) is ShardedTensor else x for x in argument]
    return argument.redistribute(P())._local if isinstance(argument, ShardedTensor) else argument


def _whole_lists(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a handler of an operator that works elementwise on each index of its lists."""
    seed = seed_of(func.__name__)

    def run(*args: Any, **kwargs: Any) -> Any:
        lists = _lists(args, kwargs)
        in_place = func.__name__.endswith("_")
        if not are_aligned(lists) or (
            in_place and torch.is_grad_enabled() and _number_is_written(lists[0], args, kwargs)
        ):
            return _one_by_one(func, args, kwargs)
        if any(
            isinstance(a, Tensor) and type(a) is not ShardedTensor and a.is_meta
            for a in (*args, *kwargs.values())
        ):
            refuse_without_value(func, [x for x in lists[0] if type(x) is ShardedTensor])
        if in_place:
            check_writable(lists[0])
        result = func(*map(_local, args), **{name: _local(a) for name, a in kwargs.items()})
        if result is None or in_place:
            for row in zip(*lists, strict=True):
                if type(row[0]) is ShardedTensor:
                    row[0]._lineage = mixed(seed, [x for x in row if type(x) is ShardedTensor])
            # torch's fused kernels do not say that they have written, nor its other ones for the
            # CPU under a dispatch mode.
            if func.__name__ in _FUSED or (in_place and torch._C._len_torch_dispatch_stack()):
                torch.autograd.graph.increment_version(
                    [_part(x) for x in lists[0] if type(x) is ShardedTensor]
                )
            return result if result is None else lists[0]
        return type(result)(map(_wrap_result, result, zip(*lists, strict=True)))

    return run


def _number_is_written(targets: Sequence[Any], args: Any, kwargs: Any) -> bool:
    """Return whether a sharded number is written into plain tensors, which have its gradient."""
    if not any(isinstance(a, ShardedTensor) and a.requires_grad for a in (*args, *kwargs.values())):
        return False
    return any(type(x) is not ShardedTensor for x in targets)


def check_writable(tensors: Sequence[Any]) -> None:
    """Raise if one of these is a view whose base had to be redistributed."""
    check_bases(x for x in tensors if isinstance(x, ShardedTensor))


def _wrap_result(local: Tensor, row: Sequence[Any]) -> Any:
    """Return a result in the layout of the operands at its index."""
    like = next((x for x in row if isinstance(x, ShardedTensor)), None)
    if like is None:
        return local
    return ShardedTensor._make(local, like._layout.replace(dtype=local.dtype))


def _one_by_one(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run the single operator for each index; the operator itself to write into plain tensors."""
    if len(plain_targets(func, args, kwargs)) == len(_lists(args, kwargs)[0]):
        return write_plain(func, args, kwargs)
    name = func.__name__.removeprefix("_foreach_")
    single = getattr(torch, name, None) or getattr(Tensor, name, None) or _in_place(name)
    if func.__name__ in _FUSED or single is None:
        raise ValueError(
            f"{func.__name__}: the tensors at one index (parameter, gradient, state) have "
            "different layouts, or are pending; redistribute them to the parameter's placements "
            "first"
        )
    if name in _TAKES_VALUE and len(args) == 4:
        *args, value = args
        kwargs = {**kwargs, "value": value.tolist() if isinstance(value, Tensor) else value}
    if name.rstrip("_") in _OF_NUMBERS and not isinstance(_at(args[1], 0), Tensor):
        single = getattr(Tensor, name.replace(*_OF_NUMBERS[name.rstrip("_")]))
    return _by_index(single, args, kwargs)


def _in_place(name: str) -> Callable[..., Any] | None:
    """Return the in-place variant of an operator that torch has for lists only: `maximum_`."""
    outside = getattr(torch, name.removesuffix("_"), None) if name.endswith("_") else None
    return outside and (lambda x, *rest, **kwargs: x.copy_(outside(x, *rest, **kwargs)))


def _by_index(single: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    count = len(_lists(args, kwargs)[0])
    return [
        single(*[_at(a, i) for a in args], **{name: _at(a, i) for name, a in kwargs.items()})
        for i in range(count)
    ]


def _at(argument: Any, i: int) -> Any:
    return argument[i] if isinstance(argument, (list, tuple)) else argument


@handler("_amp_foreach_non_finite_check_and_unscale_")
def _unscale(grads: Sequence[Any], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Unscale gradients for `torch.amp.GradScaler`; an infinity on any rank is reported on all.

    Communication: an all_reduce of one number over each mesh that has a part in the gradients.
    """
    torch._amp_foreach_non_finite_check_and_unscale_(
        [_local([x])[0] for x in grads], found_inf, inv_scale
    )
    for mesh in dict.fromkeys(x.mesh for x in grads if isinstance(x, ShardedTensor)):
        if mesh.coordinate is not None:
            mesh.group().all_reduce(found_inf, "max")


# -- reductions ------------------------------------------------------------------------------------


@handler("_foreach_norm")
def _foreach_norm(tensors: Any, ord: float = 2, dtype: torch.dtype | None = None) -> list[Any]:
    """Return norms of many tensors; Euclidean ones take one reduction for equal pending axes."""
    if ord != 2 or not all(isinstance(x, ShardedTensor) for x in tensors):
        return [torch.linalg.vector_norm(x, ord, dtype=dtype) for x in tensors]
    totals = []
    for x in tensors:
        size = reduce_pending(x if dtype is None else x.to(dtype)).abs()
        size = size.to(accumulator_dtype(size.dtype))
        totals.append((size * size).sum())
    norms: dict[int, Any] = {}
    for bucket in dict.fromkeys(total._layout for total in totals):
        indices = [i for i, total in enumerate(totals) if total._layout is bucket]
        roots = safe_root(reduce_pending(torch.stack([totals[i] for i in indices])))
        norms.update(zip(indices, roots.unbind(), strict=True))
    return [norms[i].to(dtype or x.dtype.to_real()) for i, x in enumerate(tensors)]


@handler("_foreach_powsum")
def _foreach_powsum(tensors: Any, ord: float = 2, dtype: torch.dtype | None = None) -> list[Any]:
    return [(x if dtype is None else x.to(dtype)).abs().pow(ord).sum() for x in tensors]


handler("_foreach_max")(lambda tensors: [x.amax() for x in tensors])
handler("_foreach_mm")(lambda self, mat2: list(map(torch.mm, self, mat2)))

for _name in dir(torch):
    _func = getattr(torch, _name)
    if (_name.startswith("_foreach_") or _name in _FUSED) and _func not in HANDLERS:
        handler(also=(_func,))(_whole_lists(_func))


def step_one_by_one(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Make ASGD step tensor by tensor: over lists it creates numbers on the wrappers' "meta"."""
    if isinstance(optimizer, torch.optim.ASGD):
        for group in optimizer.param_groups:
            if group["foreach"] and any(isinstance(p, ShardedTensor) for p in group["params"]):
                group["foreach"] = False
