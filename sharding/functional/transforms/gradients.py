"""`grad`, `value_and_grad`, `vjp` over trees of tensors: on `ShardedTensor`s outside of mapped
functions, on local parts inside.

Each gradient has the layout (inside: the type) of its argument. Pending gradients are reduced once,
at the end, in one bucket per set of axes and dtype.

Inside a mapped function the seed of backward depends on the type of the loss. A replicated loss
seeds 1/n on each of n ranks, so that the pending gradient of a replicated value adds up to the
gradient. Tracked calls know the types; later calls with the same signature read them from the log.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as torch_checkpoint

from ....mesh.comm.call_site import DESCRIBERS
from ....mesh.comm.thread_context import thread_context
from ...autograd.engine_hooks import transforms_active
from ...autograd.named_axes import AxisEnv, current_axis_env, current_captures
from ...ops.torch_compile import keep_compiler_out, not_compiled
from ...tensor.autograd import backward
from ...tensor.random import replay_random
from ...tensor.sharded_tensor import ShardedTensor
from ..captures import Captures, ReplayCaptures
from ..collectives.collectives import psum
from ..collectives.linear_maps import KeepFirstMap
from ..trees import flatten_without_none
from ..types.type_checker import untracked
from ..types.types import ShardingTypeError, Tag, Type
from .parts import replace_args
from .pullback import Pullback


def value_and_grad(
    f: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """value_and_grad(f) -> a function that returns (f(...), the gradient of f with respect to an
    argument).

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
        return _evaluated(f, argnums, has_aux, args, kwargs)

    return evaluated


def _evaluated(
    f: Callable[..., Any],
    argnums: int | Sequence[int],
    has_aux: bool,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    nums = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    leaves, tree = flatten_without_none([args[i] for i in nums])
    check_floating("value_and_grad", leaves)
    if transforms_active():
        return _evaluated_inside(f, nums, isinstance(argnums, int), has_aux, args, kwargs)
    with differentiated(leaves, (args, kwargs)) as fresh:
        value = f(*replace_args(args, nums, tree.unflatten(fresh)), **kwargs)
        found = _gradients([_checked_loss(value[0] if has_aux else value)], fresh, None)
        done = pytree.tree_map(detach_unless_nested, value)
    branches = tree.unflatten(found)
    return done, branches[0] if isinstance(argnums, int) else tuple(branches)


def _evaluated_inside(
    f: Any,
    nums: Sequence[int],
    is_one: bool,
    has_aux: bool,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Evaluate inside a transform."""
    leaves, tree = flatten_without_none([args[i] for i in nums])
    env, records = current_axis_env(), []

    def run(fresh: list[Tensor]) -> Any:
        value = f(*replace_args(args, nums, tree.unflatten(fresh)), **kwargs)
        loss = _checked_loss(value[0] if has_aux else value)
        records.append(None if env is None else _grad_types(env, [loss], fresh, is_loss=True))
        return [loss], value

    pulled = Pullback(run, leaves)
    branches = tree.unflatten(_pulled(pulled, env, records[0], None))
    return pulled.value, branches[0] if is_one else tuple(branches)


def _pulled(
    pulled: Pullback, env: AxisEnv | None, record: GradTypes | None, given: Sequence[Any] | None
) -> list[Tensor]:
    if env is None or record is None:
        return pulled([None] * len(pulled.outs) if given is None else given)
    with untracked():
        seeds = _seeds(env, record, pulled.outs, given)
    return _reduced(env, record, pulled(seeds))


DESCRIBERS[_evaluated_inside.__code__] = lambda frame: "value_and_grad"
DESCRIBERS[_evaluated.__code__] = lambda frame: "value_and_grad"


def grad(
    f: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """grad(f) -> a function that returns the gradient of f: `value_and_grad` without the value
    (with `has_aux`: gradient, aux).

    Communication: as `value_and_grad`.
    """
    both = value_and_grad(f, argnums, has_aux)

    @not_compiled("it calls a function of the program outside of any graph", calls_program=True)
    @functools.wraps(f)
    def evaluated(*args: Any, **kwargs: Any) -> Any:
        keep_compiler_out()
        value, found = both(*args, **kwargs)
        return (found, value[1]) if has_aux else found

    return evaluated


def vjp(f: Callable[..., Any], *primals: Any, has_aux: bool = False) -> tuple[Any, ...]:
    """vjp(f, *primals) -> (f(*primals), back), where back(cotangents) returns the gradient for each
    primal.

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
    env = current_axis_env()
    if transforms_active():
        return _vjp_inside(f, leaves, tree, has_aux)
    with differentiated(leaves, primals) as fresh:
        value = f(*tree.unflatten(fresh))
        result, *aux = value if has_aux else (value,)
        results, out_tree = flatten_without_none(result)
        numbers = [i for i, out in enumerate(results) if isinstance(out, Tensor)]
        outs = [results[i] for i in numbers]
        record = None if env is None else _grad_types(env, outs, fresh)
        nested, done = thread_context.grad_is_nested, pytree.tree_map(detach_unless_nested, result)

    def back(cotangents: Any) -> tuple[Any, ...]:
        given = _like_tree(cotangents, out_tree)
        before, thread_context.grad_is_nested = thread_context.grad_is_nested, nested
        thread_context.grad_depth += 1  # recomputation runs as the forward did
        try:
            found = _gradients(outs, fresh, [given[i] for i in numbers], record)
        finally:
            thread_context.grad_depth -= 1
            thread_context.grad_is_nested = before
        return tuple(tree.unflatten(found))

    return (done, back, *aux)


def _like_tree(cotangents: Any, tree: Any) -> list[Any]:
    given, given_tree = flatten_without_none(cotangents)
    if given_tree != tree:
        raise ValueError(
            f"vjp: cotangents {given_tree} for results {tree}; pass a tree like that of the results"
        )
    return given


def _vjp_inside(
    f: Callable[..., Any], leaves: list[Any], tree: Any, has_aux: bool
) -> tuple[Any, ...]:
    """Differentiate inside a transform."""
    env, records, at = current_axis_env(), [], []

    def run(fresh: list[Tensor]) -> Any:
        value = f(*tree.unflatten(fresh))
        outs, _ = flatten_without_none(value[0] if has_aux else value)
        at[:] = [
            i
            for i, x in enumerate(outs)
            if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())
        ]
        records.append(None if env is None else _grad_types(env, [outs[i] for i in at], fresh))
        return [outs[i] for i in at], value

    pulled = Pullback(run, leaves)
    result, *aux = pulled.value if has_aux else (pulled.value,)
    out_tree = flatten_without_none(result)[1]

    def back(cotangents: Any) -> tuple[Any, ...]:
        given = _like_tree(cotangents, out_tree)
        return tuple(tree.unflatten(_pulled(pulled, env, records[0], [given[i] for i in at])))

    return (result, back, *aux)


def stop_gradient(x: Any) -> Any:
    """stop_gradient(x) -> the same values, detached; any tree. Communication: none."""
    return pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, x)


def remat(f: Callable[..., Any]) -> Callable[..., Any]:
    """remat(f) -> f that recomputes its intermediate values in backward instead of keeping them:
    `torch.utils.checkpoint`.

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

    def __init__(self, replay: Any, env: Any, captures: Captures | None) -> None:
        self.replay, self.env, self.captures = replay, env, captures
        self.stacks: list[ExitStack] = []

    def __enter__(self) -> None:
        stack = ExitStack()
        stack.enter_context(self.replay)
        stack.enter_context(self.env.entered() if isinstance(self.env, AxisEnv) else self.env)
        if self.captures is not None:
            stack.enter_context(ReplayCaptures(self.captures))
        self.stacks.append(stack)

    def __exit__(self, *error: Any) -> None:
        self.stacks.pop().__exit__(*error)


# -- leaves ----------------------------------------------------------------------------------------


def check_floating(name: str, leaves: Sequence[Any]) -> None:
    for i, x in enumerate(leaves):
        if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
            kind = f"{x.dtype} tensor" if isinstance(x, Tensor) else repr(x)
            raise TypeError(
                f"{name}: leaf {i} of the arguments to differentiate is a {kind}; only floating "
                "tensors have gradients"
            )


@contextmanager
def differentiated(leaves: Sequence[Tensor], args: Any) -> Iterator[list[Tensor]]:
    """Yield the leaves as new tensors that require grad. Inside another function that is being
    differentiated, and if something in the arguments requires grad, they stay part of its graph."""
    before = thread_context.grad_is_nested
    given = any(isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves(args))
    thread_context.grad_is_nested = torch.is_grad_enabled() and (
        given or thread_context.grad_depth > 0
    )
    thread_context.grad_depth += 1
    try:
        with torch.enable_grad():
            yield [
                _copy_with_type(
                    x, _attached if thread_context.grad_is_nested and x.requires_grad else _fresh
                )
                for x in leaves
            ]
    finally:
        thread_context.grad_depth -= 1
        thread_context.grad_is_nested = before


def _copy_with_type(x: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a new tensor with the same values and type; its gradient is reduced as that
    type says.
    """
    env = current_axis_env()
    if env is None or env.checker is None:
        return make(x)
    x = env.checker.replace_capture(x)
    tag = env.checker.tag_of(x)
    with untracked():
        fresh = make(x)
        env.checker.set_tag(fresh, tag)
    return fresh


def _attached(x: Tensor) -> Tensor:
    """Return the tensor as a new one of the same graph."""
    return (
        ShardedTensor._make(x._local.view_as(x._local), x._layout)
        if isinstance(x, ShardedTensor)
        else x.view_as(x)
    )


def _fresh(x: Tensor) -> Tensor:
    if isinstance(x, ShardedTensor):
        return ShardedTensor._make_guarded(
            x._local.detach().requires_grad_(), x._layout, x._lineage
        )
    return (
        x.detach().requires_grad_().view_as(x)
    )  # no leaf, so that `distribute_tensor`, which would cut the graph, refuses it


def detach_unless_nested(x: Any) -> Any:
    """Return a result, detached unless an outer `grad` differentiates it."""
    return x.detach() if isinstance(x, Tensor) and not thread_context.grad_is_nested else x


def is_nested() -> bool:
    """Return whether results are to be differentiated again."""
    return thread_context.grad_is_nested


def _checked_loss(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"{list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise TypeError(
            f"the function to differentiate must return a scalar tensor, and it returned {what}; "
            "use .sum() or .mean()"
        )
    return loss


# -- gradients -------------------------------------------------------------------------------------


class GradTypes(NamedTuple):
    """The types that gradients inside a mapped function depend on.

    Attributes:
        outs: for each result, the manual axes on which it is replicated.
        inputs: for each input, those on which it is replicated.
        types: the types of the inputs, in a tracked call.
    """

    outs: tuple[tuple[str, ...], ...]
    inputs: tuple[tuple[str, ...], ...]
    types: tuple[Type, ...]


def _gradients(
    outs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    given: Sequence[Any] | None,
    record: GradTypes | None = None,
) -> list[Tensor]:
    """Return the gradients of the inputs, in their layouts: of a scalar, or for given cotangents in
    the layouts of the results.
    """
    env = current_axis_env()
    record = (
        _grad_types(env, outs, inputs, given is None)
        if record is None and env is not None
        else record
    )
    with untracked() if env is not None else nullcontext():
        seeds = given if record is None or env is None else _seeds(env, record, outs, given)
        connected = [
            (out, seed)
            for out, seed in zip(outs, seeds or [None] * len(outs), strict=True)
            if out.requires_grad
        ]
        if not connected:
            return [torch.zeros_like(x) for x in inputs]
        found = backward.grad(
            [out for out, _ in connected],
            inputs,
            [seed for _, seed in connected],
            retain_graph=True if given is not None else None,
            create_graph=thread_context.grad_is_nested,
            allow_unused=True,
            materialize_grads=True,
        )
    return list(found) if record is None or env is None else _reduced(env, record, found)


def _seeds(
    env: AxisEnv, record: GradTypes, outs: Sequence[Tensor], given: Sequence[Any] | None
) -> list[Any]:
    """Return the seeds of backward on this rank."""
    if given is None:
        return [_seed(out, 1 / env.size(axes)) for out, axes in zip(outs, record.outs, strict=True)]
    return [
        KeepFirstMap(env.axes(axes))(g) if axes else g
        for g, axes in zip(given, record.outs, strict=True)
    ]


def _seed(loss: Tensor, share: float) -> Any:
    if not isinstance(loss, ShardedTensor):
        return torch.full_like(loss, share)
    return ShardedTensor._make(backward.seed(loss, None) * share, loss._layout.dual)


def _reduced(env: AxisEnv, record: GradTypes, found: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients with those that are pending over manual axes summed, in buckets."""
    out = list(found)
    if env.checker is not None:
        for g, type_ in zip(out, record.types, strict=True):
            env.checker.set_tag(g, env.checker.grad_tag(type_, frozenset(env.names)))
    for axes in dict.fromkeys(record.inputs):
        mine = [i for i, own in enumerate(record.inputs) if own == axes]
        if axes:
            for i, total in zip(mine, psum([out[i] for i in mine], axes), strict=True):
                out[i] = total
    return out


def _grad_types(
    env: AxisEnv, outs: Sequence[Tensor], inputs: Sequence[Tensor], is_loss: bool = False
) -> GradTypes:
    """Return the types of results and inputs, from the checker or from the log.

    Raises:
        ShardingTypeError: a loss that is not replicated.
        RuntimeError: types that are not known.
    """
    if env.checker is None:
        return _logged_types(env, outs, inputs)
    tags = [env.checker.tag_of(out) for out in outs]
    types = [tag.type for tag in tags]
    if is_loss:
        _check_loss_type(tags[0], [env.checker.tag_of(x).type for x in inputs])
    given = tuple(env.checker.tag_of(x).type for x in inputs)
    record = GradTypes(
        tuple(_replicated(env, t) for t in types), tuple(_replicated(env, t) for t in given), given
    )
    if env.recording:
        env.type_log.append(record)
    return record


def _replicated(env: AxisEnv, type_: Type) -> tuple[str, ...]:
    return tuple(a for a in env.names if a not in type_.varying and a not in type_.pending)


def _logged_types(env: AxisEnv, outs: Sequence[Any], inputs: Sequence[Any]) -> GradTypes:
    if env.cursor < len(env.type_log):
        record = env.type_log[env.cursor]
        env.cursor += 1
        if isinstance(record, GradTypes) and (len(record.outs), len(record.inputs)) == (
            len(outs),
            len(inputs),
        ):
            return record
    raise RuntimeError(
        "grad inside a mapped function: the types of its loss and inputs are not known. "
        "check=False does not track types; otherwise this call was not made in the first call with "
        "this signature: use shard_map(check='always')"
    )


def _check_loss_type(tag: Tag, inputs: Sequence[Type]) -> None:
    type_ = tag.type
    axes = sorted(type_.varying | type_.pending)
    names = repr(axes[0]) if len(axes) == 1 else repr(tuple(axes))
    if type_.varying:
        own = all(type_.varying <= x.varying for x in inputs)
        which = (
            "; then the gradient of a varying value, as the arguments are, is that of each rank's "
            "own loss"
            if own
            else ""
        )
        raise ShardingTypeError(
            f"grad inside a mapped function: the loss {type_}{tag.since(type_.varying)}, so that "
            f"every rank has its own; which is meant? pmean(loss, {names}) for their mean, "
            f"psum(loss, {names}) for their sum{which}"
        )
    if type_.pending:
        raise ShardingTypeError(
            f"grad inside a mapped function: the loss {type_}{tag.since(type_.pending)}; "
            f"psum(loss, {names}) first"
        )
