"""`grad`, `value_and_grad`, `vjp` over trees of tensors.

On `ShardedTensor`s outside of mapped functions, on local parts inside.

Each gradient has the layout (inside: the type) of its argument. Pending gradients are reduced once,
at the end, in one bucket per set of axes and dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

from torch import Tensor
from torch.utils import checkpoint as torch_checkpoint

from ....mesh.comm.call_site import DESCRIBERS
from ....mesh.comm.thread_context import thread_context
from ...autograd.named_axes import (
    AxisEnv,
    CapturedTensors,
    current_axis_env,
    current_captures,
)
from ...ops.torch_compile import keep_compiler_out, not_compiled
from ...tensor.random import replay_random
from ...trees import flatten_without_none
from .parts import replace_args
from .pullback import Pullback, detach_tree, differentiating


def value_and_grad(
    f: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """value_and_grad(f) -> a function that returns the value of f and its gradient.

    The gradient is with respect to an argument.

    Args:
        f: a function that returns a scalar, or with `has_aux` a pair of a scalar and anything.
        argnums: the argument or arguments: any trees of tensors; None in a tree stays None.
        has_aux: whether f returns a pair, which is then the value.

    Returns:
        A function of f's arguments. The gradient is a tree like the argument (for several `argnums`
        a tuple of trees), each leaf with the layout of the argument's (replicated where that is
        pending). If an argument requires grad, the result can be differentiated again, by `grad` or
        `backward`, and keeps what that needs; otherwise it is detached.

    Raises:
        TypeError: an argument that is not made of floating tensors; a loss that is not a scalar;
            inside a mapped function (`ShardingTypeError`) a loss that varies or is pending.
        RuntimeError: inside a mapped function with check=False, where types are not known.

    Communication: that of f and of its backward; at the end one reduction per set of axes and dtype
    for replicated arguments.

    Example:
        >>> loss, grads = sm.value_and_grad(loss_fn)(params, batch)
    """

    @not_compiled("it calls a function of the program outside of any graph", calls_program=True)
    @functools.wraps(f)
    def evaluated(*args: Any, **kwargs: Any) -> Any:
        keep_compiler_out()
        return _evaluate(f, argnums, has_aux, args, kwargs)

    return evaluated


def _evaluate(
    f: Callable[..., Any],
    argnums: int | Sequence[int],
    has_aux: bool,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    nums = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    leaves, tree = flatten_without_none([args[i] for i in nums])
    check_floating("value_and_grad", leaves)

    def run(fresh: list[Tensor]) -> Any:
        value = f(*replace_args(args, nums, tree.unflatten(fresh)), **kwargs)
        return [_checked_loss(value[0] if has_aux else value)], value

    with thread_context.setting(**differentiating((args, kwargs))):
        pullback = Pullback(run, leaves, is_loss=True)
        branches = tree.unflatten(pullback())
    return pullback.value, branches[0] if isinstance(argnums, int) else tuple(branches)


DESCRIBERS[_evaluate.__code__] = lambda frame: "value_and_grad"


def grad(
    f: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """grad(f) -> a function that returns the gradient of f.

    `value_and_grad` without the value (with `has_aux`: gradient, aux).

    Communication: as `value_and_grad`.
    """
    both = value_and_grad(f, argnums, has_aux)

    @not_compiled("it calls a function of the program outside of any graph", calls_program=True)
    @functools.wraps(f)
    def evaluated(*args: Any, **kwargs: Any) -> Any:
        keep_compiler_out()
        value, gradient = both(*args, **kwargs)
        return (gradient, value[1]) if has_aux else gradient

    return evaluated


def vjp(f: Callable[..., Any], *primals: Any, has_aux: bool = False) -> tuple[Any, ...]:
    """vjp(f, *primals) -> (f(*primals), back), where back(cotangents) returns gradients.

    One for each primal.

    Args:
        f: a function of trees of tensors, which returns a tree (with `has_aux` a pair of that and
            anything). None in a tree stays None.
        primals: its arguments.

    Returns:
        The result, a function that takes a tree like the result (each cotangent with the layout, or
        of the type, of its result) and can be called any number of times, and with `has_aux` the
        second of the pair.

    Raises: TypeError for primals that are not made of floating tensors.

    Communication: that of f; `back`: as `value_and_grad`.
    """
    leaves, tree = flatten_without_none(list(primals))
    check_floating("vjp", leaves)
    numbers: list[int] = []  # of the results that are differentiated

    def run(fresh: list[Tensor]) -> Any:
        value = f(*tree.unflatten(fresh))
        outs, _ = flatten_without_none(value[0] if has_aux else value)
        numbers[:] = [i for i, x in enumerate(outs) if isinstance(x, Tensor) and _is_floating(x)]
        return [outs[i] for i in numbers], value

    fields = differentiating(primals)
    with thread_context.setting(**fields):
        pullback = Pullback(run, leaves)
    result, *aux = pullback.value if has_aux else (pullback.value,)
    out_tree = flatten_without_none(result)[1]

    def back(cotangents: Any) -> tuple[Any, ...]:
        leaves, given_tree = flatten_without_none(cotangents)
        if given_tree != out_tree:
            raise ValueError(
                f"vjp: cotangents {given_tree} for results {out_tree}; pass a tree like that of "
                "the results"
            )
        with thread_context.setting(**fields):  # recomputation runs as the forward did
            return tuple(tree.unflatten(pullback([leaves[i] for i in numbers])))

    return (result, back, *aux)


def stop_gradient(x: Any) -> Any:
    """stop_gradient(x) -> the same values, detached; any tree. Communication: none."""
    return detach_tree(x)


def remat(f: Callable[..., Any]) -> Callable[..., Any]:
    """remat(f) -> f that recomputes its intermediate values in backward instead of keeping them.

    By `torch.utils.checkpoint`.

    Collectives inside run again too, over the same axes; random numbers are the same.

    Communication: that of f, once more in backward.

    Example:
        >>> y = sm.remat(block)(params, x)
    """

    @not_compiled("it calls a function of the program outside of any graph", calls_program=True)
    @functools.wraps(f)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        keep_compiler_out()
        return torch_checkpoint.checkpoint(
            f, *args, use_reentrant=False, context_fn=_contexts, **kwargs
        )

    return recomputed


def _contexts() -> tuple[Any, Any]:
    """Return the contexts of a piece for its first run and for recomputation."""
    env, captures, (_, replay) = current_axis_env(), current_captures(), replay_random()
    return nullcontext(), _ReplayContexts(replay, nullcontext() if env is None else env, captures)


class _ReplayContexts:
    """The contexts of a recomputed piece, as one that can be entered repeatedly."""

    def __init__(self, replay: Any, env: Any, captures: CapturedTensors | None) -> None:
        self.replay, self.env, self.captures = replay, env, captures
        self.stacks: list[ExitStack] = []

    def __enter__(self) -> None:
        stack = ExitStack()
        stack.enter_context(self.replay)
        stack.enter_context(self.env.as_current() if isinstance(self.env, AxisEnv) else self.env)
        if self.captures is not None:
            stack.enter_context(self.captures.replaying())
        self.stacks.append(stack)

    def __exit__(self, *error: Any) -> None:
        self.stacks.pop().__exit__(*error)


# --------------------------------------------------------------------------------------------------


def _is_floating(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def check_floating(name: str, leaves: Sequence[Any]) -> None:
    for i, x in enumerate(leaves):
        if not isinstance(x, Tensor) or not _is_floating(x):
            kind = f"{x.dtype} tensor" if isinstance(x, Tensor) else repr(x)
            raise TypeError(
                f"{name}: leaf {i} of the arguments to differentiate is a {kind}; only floating "
                "tensors have gradients"
            )


def _checked_loss(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"{list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise TypeError(
            f"the function to differentiate must return a scalar tensor, and it returned {what}; "
            "use .sum() or .mean()"
        )
    return loss
