"""`jacfwd`, `jacrev`, `hessian`: all derivatives of a function of trees.

From one batch of directions (or cotangents).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ....kernels.box import slices
from ...ops.torch_compile import keep_compiler_out, not_compiled
from ...tensor.sharded_tensor import ShardedTensor
from ...trees import flatten_without_none
from .forward import jvp
from .gradients import vjp
from .parts import Results, layout_with, replace_args, same_type
from .vmap import vmap

Argnums = int | Sequence[int]


def jacfwd(
    fun: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """jacfwd(f) -> a function that returns the Jacobian of f, by forward mode.

    By a batch of one direction per element of the argument.

    Args:
        fun: a function of trees of real tensors, which returns a tree (with `has_aux` a pair of
            that and anything).
        argnums: the argument or arguments to differentiate with respect to.

    Returns:
        A function of f's arguments. For each leaf `y` of the result a tree like the argument (for
        several `argnums` a tuple of trees) with a leaf of shape `[*y.shape, *x.shape]` for each
        leaf `x`. Dims of `y` are split as in the result, dims of `x` are not split.

    Raises: TypeError for an argument that is not made of real floating tensors.

    Communication: twice that of f, for the whole batch at once.

    Example:
        >>> sm.jacfwd(lambda x: x.sin())(x)
    """

    @not_compiled("it calls a function of the program outside of any graph", calls_program=True)
    @functools.wraps(fun)
    def jacobian(*args: Any, **kwargs: Any) -> Any:
        keep_compiler_out()
        arguments = _Arguments("jacfwd", argnums, args, lambda *xs: fun(*xs, **kwargs))
        basis = _basis(arguments.leaves)
        results: list[Results] = []  # the second of the pair

        def push(*tangents: Any) -> Any:
            _, out, *aux = jvp(arguments.call, arguments.leaves, tangents, has_aux)
            results[:] = map(Results.of, aux)
            return out, [each.tensors for each in results]

        columns, aux = vmap(push, 0, (-1, None))(*basis)
        derivatives = pytree.tree_map(
            lambda column: arguments.tree_of(_cut(column, -1, arguments.leaves)), columns
        )
        return (derivatives, results[0].rebuild(aux[0])) if has_aux else derivatives

    return jacobian


def jacrev(
    fun: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """jacrev(f) -> a function that returns the Jacobian of f, by reverse mode.

    By a batch of one cotangent per element of the result.

    Args and returns: as `jacfwd`, but dims of `x` are split as in the argument, and dims of `y` are
    not split.

    Raises: TypeError for an argument, or a result, that is not made of real floating tensors.

    Communication: that of f, and of its backward for the whole batch at once.
    """

    @not_compiled("it calls a function of the program outside of any graph", calls_program=True)
    @functools.wraps(fun)
    def jacobian(*args: Any, **kwargs: Any) -> Any:
        keep_compiler_out()
        arguments = _Arguments("jacrev", argnums, args, lambda *xs: fun(*xs, **kwargs))
        result, back, *aux = vjp(arguments.call, *arguments.leaves, has_aux=has_aux)
        outs, tree = flatten_without_none(result)
        _check_real("jacrev", "result", outs)
        rows = vmap(lambda *cotangents: back(tree.unflatten(cotangents)))(*_basis(outs))
        by_leaf = [_cut(row, 0, outs) for row in rows]
        derivatives = [arguments.tree_of(parts) for parts in zip(*by_leaf, strict=True)]
        return (tree.unflatten(derivatives), *aux) if has_aux else tree.unflatten(derivatives)

    return jacobian


def hessian(
    fun: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """hessian(f) -> a function that returns the second derivatives of f: `jacfwd(jacrev(f))`.

    For each leaf `y` of the result a tree of trees like the argument, with leaves of shape
    `[*y.shape, *x1.shape, *x2.shape]`.

    Communication: that of f and of its backward, twice, for all elements of result and argument at
    once.
    """
    return jacfwd(jacrev(fun, argnums, has_aux), argnums, has_aux)


class _Arguments:
    """The arguments of a function, some of which are to be differentiated.

    Attributes:
        leaves: the leaves of those.
        call: the function of the leaves.
    """

    def __init__(
        self, name: str, argnums: Argnums, args: Sequence[Any], fun: Callable[..., Any]
    ) -> None:
        self.is_one = isinstance(argnums, int)
        nums = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        self.leaves, self.tree = flatten_without_none([args[i] for i in nums])
        _check_real(name, "argument", self.leaves)

        self.call = lambda *leaves: fun(*replace_args(args, nums, self.tree.unflatten(leaves)))

    def tree_of(self, leaves: Sequence[Any]) -> Any:
        """Return the leaves as a tree like the differentiated argument or arguments."""
        branches = self.tree.unflatten(leaves)
        return branches[0] if self.is_one else tuple(branches)


def _check_real(name: str, what: str, leaves: Sequence[Any]) -> None:
    for i, x in enumerate(leaves):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            kind = f"{x.dtype} tensor" if isinstance(x, Tensor) else repr(x)
            raise TypeError(
                f"{name}: leaf {i} of the {what} is a {kind}; Jacobians are of real floating "
                "tensors"
            )


def _basis(leaves: Sequence[Any]) -> list[Any]:
    """Return for each leaf a batch of directions, one per element of all leaves.

    Unit ones in its own rows, zeros in the others.
    """
    total, first, basis = sum(x.numel() for x in leaves), 0, []
    for x in leaves:
        basis.append(same_type(_unit_rows(x, first, total), x))
        first += x.numel()
    return basis


def _unit_rows(x: Any, first: int, total: int) -> Any:
    if not isinstance(x, ShardedTensor):
        places = torch.arange(x.numel(), device=x.device).view(x.shape)
        return _one_hot(places, first, total, x.dtype)
    layout = layout_with(x._layout, 0, (), total)
    if x.mesh.coordinate is None:
        return ShardedTensor._make(torch.empty(0, dtype=x.dtype, device=x.device), layout)
    whole = x._layout.replace(x.spec.with_unreduced({}))
    places = torch.arange(x.numel(), device=x.device).view(x.shape)[slices(whole.box)]
    rows = _one_hot(places, first, total, x.dtype)
    sharded = ShardedTensor._make(rows, layout_with(whole, 0, (), total))
    return sharded.redistribute(layout.spec)


def _one_hot(places: Tensor, first: int, total: int, dtype: torch.dtype) -> Tensor:
    """Return rows of zeros with a one in each column, in the row of its place."""
    rows = torch.arange(total, device=places.device).view(-1, *[1] * places.ndim)
    return (rows == places + first).to(dtype)


def _cut(x: Any, dim: int, leaves: Sequence[Tensor]) -> list[Any]:
    """Split a batch dim into the parts that belong to the leaves.

    Each has the dims of its leaf in place of it.
    """
    first, parts = 0, []
    for leaf in leaves:
        part = x.narrow(dim, first, leaf.numel())
        first += leaf.numel()
        parts.append(part.squeeze(dim) if leaf.ndim == 0 else part.unflatten(dim, leaf.shape))
    return parts
