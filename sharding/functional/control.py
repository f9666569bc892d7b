"""Control flow by JAX's names and signatures: `cond`, `switch`, `while_loop`, `fori_loop`, `scan`.

Programs here run operator by operator, so Python's `if` and `for` do the same; these functions are
for code ported from JAX. Each is a Python branch or loop, with two additions: if `vmap` has batched
the predicate, both sides run and each example takes its own, and a step of `scan` may be recomputed
in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..autograd.engine_hooks import innermost, is_batched
from ..tensor.sharded_tensor import local_of
from .transforms import gradients


def cond(
    pred: Any, true_fun: Callable[..., Any], false_fun: Callable[..., Any], *operands: Any
) -> Any:
    """cond(pred, true_fun, false_fun, *operands) -> the result of one of the functions.

    true_fun(*operands) if pred else false_fun(*operands).

    Args:
        pred: a scalar tensor or a number. Under `vmap`, if it depends on the example, both
            functions run, and each example takes the result that was chosen for it.

    Raises: TypeError for a predicate that is not a scalar; under `vmap`, for results that are not
    alike.

    Communication: that of the function that runs. Inside a mapped function, with a varying
        predicate ranks may take different branches; a collective in a branch that only some of them
        take is an error that names both calls.

    Example:
        >>> sm.cond(x.sum() > 0, lambda x: x, lambda x: -x, x)
    """
    if is_batched(local_of(pred)):
        return _where("cond", pred, true_fun(*operands), false_fun(*operands))
    return true_fun(*operands) if _truth("cond", pred) else false_fun(*operands)


def switch(index: Any, branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
    """switch(index, branches, *operands) -> branches[index](*operands).

    The index is clamped to the range.

    Args:
        index: a scalar integer tensor or a number. Under `vmap`, if it depends on the example, all
            branches run, as in `cond`.

    Raises: ValueError without branches; TypeError for an index that is not an integer scalar.

    Communication: that of the branch that runs.
    """
    if not branches:
        raise ValueError("switch: pass at least one branch")
    if isinstance(index, Tensor) and (
        index.is_floating_point() or index.is_complex() or index.numel() != 1
    ):
        raise TypeError(
            f"switch: the index must be an integer scalar, and it is a {index.dtype} tensor of "
            f"shape {list(index.shape)}"
        )
    if is_batched(local_of(index)):
        out = branches[0](*operands)
        for i, branch in enumerate(branches[1:], 1):
            out = _where("switch", index >= i, branch(*operands), out)
        return out
    return branches[min(max(int(index), 0), len(branches) - 1)](*operands)


def while_loop(
    cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any], init_val: Any
) -> Any:
    """while_loop(cond_fun, body_fun, init_val) -> the first value for which cond_fun is false.

    Each step is value = body_fun(value).

    Under `vmap`, if the predicate depends on the example, the loop runs until it is false for all
    examples; finished ones keep their values.

    Raises: TypeError for a predicate that is not a scalar, or a body whose result is not like its
    argument (tree, shapes, dtypes).

    Communication: that of both functions, each time.
    """
    value = init_val
    while True:
        pred = cond_fun(value)
        part = local_of(pred)
        batched = is_batched(part)
        # A batch goes on while the predicate holds for any example.
        goes_on = bool(innermost(part).any()) if batched else _truth("while_loop", pred)
        if not goes_on:
            return value
        new = body_fun(value)
        _check_alike("while_loop", value, new)
        value = _where("while_loop", pred, new, value) if batched else new


def fori_loop(
    lower: Any,
    upper: Any,
    body_fun: Callable[[int, Any], Any],
    init_val: Any,
    *,
    unroll: Any = None,
) -> Any:
    """fori_loop(lower, upper, body_fun, init_val) -> the last value of a loop.

    Each step is value = body_fun(i, value), with i from lower to upper - 1.

    Args:
        lower, upper: numbers, or integer scalar tensors that do not depend on the example of a
            `vmap`.
        unroll: not used.

    Raises: TypeError for a body whose result is not like its argument.

    Communication: that of the body, each time.
    """
    value = init_val
    for i in range(int(lower), int(upper)):
        new = body_fun(i, value)
        _check_alike("fori_loop", value, new)
        value = new
    return value


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: Any = 1,
    *,
    remat: bool = False,
) -> tuple[Any, Any]:
    """scan(f, init, xs) -> (carry, ys): compute carry, y = f(carry, x) for each x in turn.

    The xs are taken along dim 0; the ys are stacked along a new dim 0.

    Args:
        f: takes the carry and a tree like `xs` without the first dim.
        init: the first carry, any tree.
        xs: a tree of tensors of one length; None to pass None, with `length`.
        length: number of steps; required without `xs`.
        reverse: whether to go from the last to the first; ys are stacked in the order of xs.
        unroll: not used.
        remat: whether to recompute the intermediate values of a step in backward, as `sm.remat`.

    Raises: ValueError for lengths that differ, or none; TypeError for an `f` that does not return a
    pair, or a carry unlike the last one.

    Communication: that of `f` at every step, and of slicing xs if dim 0 is split. With no steps `f`
    runs once on zeros, for shapes.

    Example:
        >>> carry, ys = sm.scan(lambda c, x: (c + x, c * x), torch.zeros(3), torch.ones(5, 3))
    """
    leaves, tree = pytree.tree_flatten(xs)
    count = _length(leaves, length)
    step = gradients.remat(f) if remat else f
    carry, ys = init, []
    for i in reversed(range(count)) if reverse else range(count):
        carry, y = _step(
            step, carry, pytree.tree_unflatten([x if x is None else x[i] for x in leaves], tree)
        )
        ys.append(y)
    if reverse:
        ys.reverse()
    if not ys:
        nothing = [x if x is None else x.new_zeros(x.shape[1:]) for x in leaves]
        _, y = _step(f, init, pytree.tree_unflatten(nothing, tree))
        return carry, pytree.tree_map(
            lambda leaf: torch.stack([leaf])[:0] if isinstance(leaf, Tensor) else leaf, y
        )
    return carry, pytree.tree_map(_stack, *ys)


def _step(f: Callable[[Any, Any], Any], carry: Any, x: Any) -> tuple[Any, Any]:
    out = f(carry, x)
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise TypeError(
            "scan: the function must return a pair (carry, y), and it returned "
            f"{type(out).__name__}"
        )
    _check_alike("scan", carry, out[0])
    return out[0], out[1]


def _stack(*ys: Any) -> Any:
    if ys[0] is None:
        return None
    return torch.stack([y if isinstance(y, Tensor) else torch.as_tensor(y) for y in ys])


def _length(leaves: Sequence[Any], length: int | None) -> int:
    for x in leaves:
        if x is not None and (not isinstance(x, Tensor) or not x.ndim):
            raise ValueError(
                f"scan: xs contains {x!r}, which has no dim to scan over; put it into the carry, "
                "or close over it"
            )
    lengths = {x.shape[0] for x in leaves if x is not None} | (
        set() if length is None else {int(length)}
    )
    if len(lengths) != 1:
        listing = (
            f"lengths {sorted(lengths)} of xs and length={length}; they must be one"
            if lengths
            else "give xs or length="
        )
        raise ValueError(f"scan: {listing}")
    return lengths.pop()


# -- predicates ------------------------------------------------------------------------------------


def _truth(name: str, pred: Any) -> bool:
    if isinstance(pred, Tensor) and pred.numel() != 1:
        raise TypeError(
            f"{name}: the predicate must be a scalar, and it is a tensor of shape "
            f"{list(pred.shape)}"
        )
    return bool(pred)


def _where(name: str, pred: Any, chosen: Any, other: Any) -> Any:
    """Return for each example the one or the other value."""
    _check_alike(name, chosen, other)
    pred = pred if pred.dtype is torch.bool else pred != 0
    return pytree.tree_map(
        lambda a, b: torch.where(pred, a, b) if isinstance(a, Tensor) else a, chosen, other
    )


def _check_alike(name: str, one: Any, other: Any) -> None:
    """Raise TypeError for trees, shapes or dtypes that differ."""
    leaves, tree = pytree.tree_flatten(one)
    others, other_tree = pytree.tree_flatten(other)
    if tree != other_tree:
        raise TypeError(
            f"{name}: the two values must have the same tree, and have {tree} and {other_tree}"
        )
    for i, (x, y) in enumerate(zip(leaves, others, strict=True)):
        listing = [
            f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"
            if isinstance(t, Tensor)
            else "a number"
            for t in (x, y)
        ]
        if isinstance(x, Tensor) and listing[0] != listing[1]:
            raise TypeError(
                f"{name}: leaf {i} of the two values must be alike, and is {listing[0]} and "
                f"{listing[1]}; cast or reshape it"
            )
