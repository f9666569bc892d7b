"""Directional derivatives: `jvp` and `linearize`.

`jvp` works in forward mode; `linearize` runs a function once for many directions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ....mesh.comm.thread_context import thread_context
from ...autograd.engine_hooks import forward_mode, innermost, transforms_active
from ...autograd.transforms import on_own_level
from ...tensor.autograd import backward
from ...tensor.redistribute import redistribute
from ...tensor.sharded_tensor import ShardedTensor
from ...trees import flatten_without_none
from ..mapped_env import current_mapped_env
from .gradients import check_floating
from .parts import Results, same_type, with_part
from .pullback import detach_tree, differentiating, fresh_leaves


def jvp(
    f: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], has_aux: bool = False
) -> tuple[Any, ...]:
    """jvp(f, primals, tangents) -> (f(*primals), the derivative of f along the tangents).

    In forward mode.

    Every operator computes the tangent together with the value. A collective is linear, so it moves
    the tangent as it moves the value. No graph is kept for a backward pass. May be nested, batched
    by `sm.vmap`, and applied to `sm.grad(f)`.

    Args:
        f: a function of trees of tensors, which returns a tree (with `has_aux` a pair of that and
            anything).
        primals: its arguments.
        tangents: a tree like them; one whose layout differs from its primal's is redistributed.

    Returns:
        Two trees like the result of `f` (and the second of the pair); each tangent has the layout,
        or type, of its result.

    Raises: TypeError for primals that are not made of floating tensors; ValueError for tangents of
    another tree or shape.

    If an operator has no forward derivative in torch (an `autograd.Function` without `jvp`), f runs
    once more, by `sm.linearize`; inside `sm.vmap` that is torch's error.

    Communication: twice that of f.

    Example:
        >>> out, tangent = sm.jvp(model, (params, x), (direction, sm.zeros_like(x)))
    """
    leaves, directions, tree = _directions("jvp", primals, tangents)
    try:
        return _in_forward_mode(f, leaves, directions, tree, has_aux)
    except RuntimeError as error:
        if transforms_active() or not any(text in str(error) for text in _NO_FORWARD_DERIVATIVE):
            raise
    out, f_jvp, *aux = linearize(f, *primals, has_aux=has_aux)
    return (out, f_jvp(*tangents), *aux)


# In torch's messages.
_NO_FORWARD_DERIVATIVE = ("setup_context staticmethod", "forward AD", "forward mode AD")


def _in_forward_mode(
    f: Any, leaves: list[Any], directions: list[Any], tree: Any, has_aux: bool
) -> tuple[Any, ...]:
    results: list[Results] = []

    def inside(*duals: Tensor) -> tuple[Tensor, ...]:
        fresh = [
            same_type(with_part(x, dual), x, d)
            for x, dual, d in zip(leaves, duals, directions, strict=True)
        ]
        out = f(*tree.unflatten(fresh))
        out, *more = out if has_aux else (out,)
        results[:] = [Results.of(pytree.tree_map(backward.summable, out)), *map(Results.of, more)]
        if not results[0].at:
            raise TypeError(f"jvp: the function returned {out!r}, which contains no tensor")
        return sum((each.parts for each in results), ())

    with forward_mode():
        parts = tuple(map(_in_own_memory, Results.of(leaves).parts))
        derivatives: Any = torch.func.jvp(
            partial(on_own_level, inside), parts, Results.of(directions).parts
        )
    (values, tangents), (out, *more) = derivatives, results
    count = len(out.at)
    aux = [each.with_parts(values[count:]) for each in more]
    return (out.with_parts(values[:count]), out.with_parts(tangents[:count]), *aux)


def _in_own_memory(part: Tensor) -> Tensor:
    """Return the part, copied if elements share memory, as in an expanded tensor.

    torch gives the tangent the same strides.
    """
    overlaps = torch._debug_has_internal_overlap(innermost(part)) == 1
    return part.clone(memory_format=torch.contiguous_format) if overlaps else part


def _directions(
    name: str, primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[list[Any], list[Any], Any]:
    """Return the leaves of the primals, a tangent in the layout of each, and their tree."""
    leaves, tree = flatten_without_none(list(primals))
    check_floating(name, leaves)
    leaves = [backward.summable(x) for x in leaves]
    tangent_leaves, tangent_tree = flatten_without_none(list(tangents))
    if tangent_tree != tree:
        raise ValueError(
            f"{name}: tangents {tangent_tree} for primals {tree}; pass a tree like that of the "
            "primals"
        )
    return leaves, [_alike(name, *each) for each in zip(leaves, tangent_leaves, strict=True)], tree


def _alike(name: str, x: Any, tangent: Any) -> Tensor:
    """Return a tangent in the layout of its primal."""
    shape = getattr(tangent, "shape", None)
    if shape != x.shape:
        raise ValueError(
            f"{name}: a tangent of shape {None if shape is None else list(shape)} for a primal of "
            f"shape {list(x.shape)}"
        )
    if not isinstance(x, ShardedTensor):
        if isinstance(tangent, ShardedTensor):
            raise TypeError(
                f"{name}: the tangent is {tangent._layout}, and its primal is a plain tensor; pass "
                "tangent.full_tensor()"
            )
        return tangent.to(x.dtype)
    if not isinstance(tangent, ShardedTensor):
        tangent = backward.distribute_like(tangent, x)
    return redistribute(tangent.to(x.dtype), x.mesh, x.spec)  # type: ignore[arg-type]


def linearize(f: Callable[..., Any], *primals: Any, has_aux: bool = False) -> tuple[Any, ...]:
    """linearize(f, *primals) -> (f(*primals), f_jvp), a value and a linear function.

    f_jvp(*tangents) is the derivative of f along them.

    f runs once; every call of `f_jvp` is one backward pass through the gradient of f, as a function
    of the cotangent.

    Args:
        f: a function of trees of tensors, which returns a tree (with `has_aux` a pair of that and
            anything).
        primals: its arguments.

    Returns:
        The result, a function of trees like the primals that returns one like the result, and with
        `has_aux` the second of the pair.

    Raises: TypeError for primals that are not made of floating tensors; ValueError for tangents of
    another tree or shape.

    Communication: that of f and of its backward; `f_jvp`: that of the backward of that.
    """
    leaves, tree = flatten_without_none(list(primals))
    check_floating("linearize", leaves)
    if transforms_active():  # which keep no graph
        value = f(*primals)
        result, *aux = value if has_aux else (value,)
        first = (lambda *xs: f(*xs)[0]) if has_aux else f
        return (result, lambda *tangents: jvp(first, primals, tangents)[1], *aux)
    with thread_context.setting(**differentiating(primals)), torch.enable_grad():
        fresh, nested = fresh_leaves(leaves), thread_context.grad_is_nested
        value = f(*tree.unflatten(fresh))
        result, *aux = value if has_aux else (value,)
        linear = _Linear(result, fresh)
        result = result if nested else detach_tree(result)

    def f_jvp(*tangents: Any) -> Any:
        _, directions, _ = _directions("linearize", primals, tangents)
        return linear(directions, nested)

    return (result, f_jvp, *aux)


class _Linear:
    """The derivative of computed results as a function of the direction.

    It is the gradient, with respect to the cotangent, of the gradient, which is linear in the
    cotangent.
    """

    _options: Any = {"allow_unused": True, "materialize_grads": True}  # noqa: RUF012

    def __init__(self, result: Any, inputs: Sequence[Tensor]) -> None:
        outs, self._tree = flatten_without_none(result)
        self._zeros = [torch.zeros_like(out) if isinstance(out, Tensor) else out for out in outs]
        self._linked = [
            i for i, out in enumerate(outs) if isinstance(out, Tensor) and out.requires_grad
        ]
        linked = [outs[i] for i in self._linked]
        self._cotangents = [torch.zeros_like(out).requires_grad_() for out in linked]
        env = current_mapped_env()
        if env is not None and env.checker is not None:
            for cotangent, out in zip(self._cotangents, linked, strict=True):
                tag = env.checker.grad_tag(env.checker.tag_of(out).type)
                env.checker.set_tag(cotangent, tag)
        gradients: Sequence[Tensor] = ()
        if linked:
            gradients = backward.grad(
                linked, inputs, self._cotangents, create_graph=True, **self._options
            )
        self._gradients = [(i, g) for i, g in enumerate(gradients) if g.requires_grad]

    def __call__(self, directions: Sequence[Tensor], nested: bool) -> Any:
        out = list(self._zeros)
        if self._gradients:
            derivatives = backward.grad(
                [g for _, g in self._gradients],
                self._cotangents,
                [directions[i] for i, _ in self._gradients],
                create_graph=nested,
                retain_graph=True,
                **self._options,
            )
            for i, derivative in zip(self._linked, derivatives, strict=True):
                out[i] = derivative if nested else derivative.detach()
        return self._tree.unflatten(out)
