"""Results on "meta" for calls that torch's meta kernel rejects but the device's kernel accepts.

The two do not always support the same dtypes and strides: `grouped_mm` supports float32 on a CPU,
and only bfloat16 on "meta". The shape of the result follows from the operator's rule; a run with
small operands on the device gives the dtype, or the error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .rules.notation import Dim, Rule

# sizes up to this one stay; larger ones keep their remainder modulo half of it, which kernels may
# check
_LARGEST = 32


def device_result(
    func: Callable[..., Any], rule: Rule, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Return the results, as meta tensors, of a call that the meta kernel rejects.

    None if the device's kernel rejects it too.

    A call that is rejected for its sizes stays rejected: the meta kernel accepts it when they are
    small.

    Args:
        func: the operator.
        rule: its rule.
        args, kwargs: its arguments, with meta tensors of the global shapes.
    """
    shapes = _small_shapes(rule)
    if not shapes or _run(func, args, kwargs, shapes, "meta") is not None:
        return None
    device = rule.operands[0]._operand.mesh.device_type  # type: ignore[attr-defined]
    small = _run(rule.local or func, args, kwargs, shapes, device)
    tensors, structure = pytree.tree_flatten(small)
    if (
        not tensors
        or len(tensors) != len(rule.outputs)
        or not all(isinstance(x, Tensor) for x in tensors)
    ):
        return None
    # the rule does not give these sizes
    if any(factors == () for dims in rule.outputs for factors in dims):
        return None
    full = [
        torch.empty(_shape(dims, rule.sizes), dtype=x.dtype, device="meta")
        for dims, x in zip(rule.outputs, tensors, strict=True)
    ]
    return pytree.tree_unflatten(full, structure)


def _small_shapes(rule: Rule) -> dict[int, list[int]] | None:
    """Return shapes for operands, by id, with small factors; None if operands contradict."""
    sizes = {
        name: n if n <= _LARGEST else _LARGEST // 2 + n % (_LARGEST // 2)
        for name, n in rule.sizes.items()
    }
    shapes = {}
    for x, dims in zip(rule.operands, rule.inputs, strict=True):
        if any(
            factors and math.prod(rule.sizes[f] for f in factors) != n
            for factors, n in zip(dims, x.shape, strict=True)
        ):
            return None
        shapes[id(x)] = [
            small if factors else n
            for factors, small, n in zip(dims, _shape(dims, sizes), x.shape, strict=True)
        ]
    return shapes


def _shape(dims: Sequence[Dim], sizes: dict[str, int]) -> list[int]:
    return [math.prod(sizes[f] for f in factors) for factors in dims]


def _run(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    shapes: dict[int, list[int]],
    device: str,
) -> Any:
    """Return the operator's result for zeros of these shapes; None if it raises."""

    def stand_in(x: Any) -> Any:
        return (
            torch.zeros(shapes.get(id(x), x.shape), dtype=x.dtype, device=device)
            if isinstance(x, Tensor) and x.is_meta
            else x
        )

    args, kwargs = pytree.tree_map(stand_in, (tuple(args), kwargs))
    try:
        with torch.no_grad():
            return func(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
