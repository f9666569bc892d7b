"""`custom_vjp`: a function with a custom gradient, by JAX's names.

    @sm.custom_vjp
    def log1pexp(x): ...                                          the function

    log1pexp.defvjp(lambda x: (log1pexp(x), x),                   forward, and what backward needs
                    lambda x, g: (g * (1 - 1 / (1 + x.exp())),))  backward: a gradient per argument

Outside of mapped functions arguments are trees of plain tensors and `ShardedTensor`s; inside, of
local parts, and types are tracked through `bwd` as through the backward of any custom function
(`types/custom_functions.py`). Second derivatives are those of `fwd` and `bwd`: if the first are to
be differentiated, `fwd` runs again, with gradients, to compute what `bwd` needs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...autograd import engine_hooks
from ...layout.spec import P
from ...ops.torch_compile import keep_compiler_out, not_compiled
from ...redistribute.autograd import redistribute_local
from ...tensor.autograd.local_part import known_local, part_of
from ...tensor.convert import from_local
from ...tensor.random import replay_random
from ...tensor.sharded_tensor import ShardedTensor
from ...trees import paths_of
from ..collectives.apply import current_checker
from ..collectives.linear_maps import KeepFirstMap, apply
from ..mapped_env import MappedEnv, current_mapped_env


class custom_vjp:
    """custom_vjp(f) -> f with a custom gradient, set by `f.defvjp(fwd, bwd)`.

    Any function of trees, inside and outside of `shard_map`.

    Args:
        fun: the function. It runs where no gradient is needed.
        nondiff_argnums: positions of arguments that are not differentiated: functions, index
            tensors, any object.
        nondiff_argnames: the same by name.

    Raises:
        AttributeError: in a call before `defvjp`.
        TypeError, ValueError: in backward, if `bwd` does not return a gradient for each argument;
            names the function and the argument.
        ShardingTypeError: inside a mapped function, if a gradient has the wrong type: see `defvjp`.
        NotImplementedError: inside a transform of torch.func.

    Communication: that of `fun`, or of `fwd` and `bwd`.

    Example:
        >>> @sm.custom_vjp
        ... def clipped(x):
        ...     return x
        >>> clipped.defvjp(lambda x: (x, None), lambda _, g: (g.clamp(-1, 1),))
        >>> sm.grad(lambda x: (clipped(x) ** 3).sum())(torch.tensor([0.5, 2.0]))
        tensor([0.7500, 1.0000])
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        nondiff_argnums: Sequence[int] = (),
        nondiff_argnames: Sequence[str] = (),
    ) -> None:
        functools.update_wrapper(self, fun)
        self.fun, self.fwd, self.bwd = fun, None, None
        self.signature = _signature(fun)
        self.names = [] if self.signature is None else list(self.signature.parameters)
        unknown = [name for name in nondiff_argnames if name not in self.names]
        if unknown:
            raise ValueError(
                f"custom_vjp({self.name}): nondiff_argnames has {unknown[0]!r}, and the arguments "
                f"are {self.names}"
            )
        numbers = (nondiff_argnums,) if isinstance(nondiff_argnums, int) else nondiff_argnums
        self.nondiff = sorted({*numbers, *(self.names.index(name) for name in nondiff_argnames)})

    @property
    def name(self) -> str:
        return getattr(self.fun, "__name__", type(self.fun).__name__)

    def defvjp(
        self, fwd: Callable[..., tuple[Any, Any]], bwd: Callable[..., Sequence[Any]]
    ) -> None:
        """Set the functions that differentiate this one.

        Args:
            fwd: takes the function's arguments, and returns its result and what `bwd` needs, any
                tree.
            bwd: takes the arguments without gradient, what `fwd` returned for it, and the gradient
                of the result, and returns a tuple with a gradient for each argument: a tree like
                it, or None for zero. A `ShardedTensor` in it may have any layout. Inside a mapped
                function the gradient of the result has the dual type (varying <-> varying,
                replicated <-> pending), and that of an argument must have the type dual to it. For
                a replicated argument that is this rank's share; a replicated gradient, which JAX
                requires, is taken as the whole gradient.
        """
        self.fwd, self.bwd = fwd, bwd

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    @not_compiled("it calls a function of the program outside of any graph", calls_program=True)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        keep_compiler_out()
        if self.fwd is None or self.bwd is None:
            raise AttributeError(
                f"custom_vjp({self.name}) was called before {self.name}.defvjp(fwd, bwd), which "
                "sets its gradient"
            )
        arguments = self._by_position(args, kwargs)
        differentiated = [x for i, x in enumerate(arguments) if i not in self.nondiff]
        leaves = pytree.tree_leaves(differentiated)
        needs_grad = any(isinstance(x, Tensor) and x.requires_grad for x in leaves)
        if not needs_grad or not torch.is_grad_enabled():
            return self.fun(*arguments)
        if engine_hooks.transforms_active():
            raise NotImplementedError(
                f"custom_vjp({self.name}) inside a transform of torch.func; use sm.grad, sm.vjp or "
                "sm.jvp"
            )
        return _CustomVJPCall(self, arguments, differentiated).run()

    def _by_position(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[Any]:
        """Return all arguments by position, as `fwd` takes them."""
        left = kwargs
        if self.signature is not None:
            bound = self.signature.bind(*args, **kwargs)
            bound.apply_defaults()
            args, left = bound.args, bound.kwargs
        if left:
            name = next(iter(left))
            raise TypeError(
                f"custom_vjp({self.name}): {name!r} can only be passed by name, and fwd takes all "
                "arguments by position"
            )
        return args


def _signature(fun: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(fun)
    except ValueError:  # of a builtin
        return None


class ReplicatedGrads:
    """Which gradients of a custom function are replicated, as a tracked call has seen.

    The call is one of the mapped function around it.

    Attributes:
        axes: by tensor, the axes along which its gradient is replicated and must be turned into a
            share.
    """

    def __init__(self) -> None:
        self.axes: dict[int, tuple[str, ...]] = {}


class _Tree:
    """A tree whose tensors are elsewhere, as local parts.

    The arguments, the result, or what `bwd` needs.

    Attributes:
        leaves: the leaves, with None for tensors.
        at: the indices of those.
        layouts: the layouts of sharded ones, None for plain ones.
        tags: the tags of sharded ones, in a tracked call; parts have tags of their own.
        metas: shape, dtype and device of the parts.
    """

    def __init__(self, value: Any, checker: Any = None) -> None:
        leaves, self.tree = pytree.tree_flatten(value)
        self.at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        tensors = [leaves[i] for i in self.at]
        self.leaves = [None if isinstance(x, Tensor) else x for x in leaves]
        self.layouts = [x._layout if isinstance(x, ShardedTensor) else None for x in tensors]
        self.tags = [
            None if checker is None or layout is None else checker.tag_of(x)
            for x, layout in zip(tensors, self.layouts, strict=True)
        ]
        self.parts: Sequence[Tensor] = [part_of(x) for x in tensors]
        self.metas = [_TensorMeta(x.shape, x.dtype, x.device) for x in self.parts]

    def take_parts(self) -> Sequence[Tensor]:
        """Return the parts and drop them: an autograd node would keep its own operands."""
        parts, self.parts = self.parts, ()
        return parts

    def rebuild(self, parts: Sequence[Tensor], checker: Any = None, dual: bool = False) -> Any:
        """Return the tree with these parts, in the layouts of its tensors or in the dual ones."""
        leaves = list(self.leaves)
        for i, layout, tag, part in zip(self.at, self.layouts, self.tags, parts, strict=True):
            if layout is not None and dual:
                layout = layout.dual.replace(dtype=part.dtype)
            leaves[i] = part if layout is None else ShardedTensor._make(part, layout)
            if tag is not None and checker is not None:
                checker.set_tag(leaves[i], tag)
        return pytree.tree_unflatten(leaves, self.tree)


class _CustomVJPCall:
    """One call of a custom function.

    Attributes:
        args: the arguments, with None for those that are differentiated.
        inputs, result: the trees of these, and of what the function returns.
        env, replicated_grads: of the mapped function around it.
    """

    def __init__(self, custom: custom_vjp, args: Sequence[Any], differentiated: list[Any]) -> None:
        self.custom = custom
        self.args = [x if i in custom.nondiff else None for i, x in enumerate(args)]
        self.inputs = _Tree(differentiated, current_checker())
        self.result: Any = None
        self.env = current_mapped_env()
        self.replicated_grads = None if self.env is None else _replicated_grads(self.env)
        self.replay = replay_random()[1]

    def run(self) -> Any:
        outs = _CustomVJP.apply(self, *self.inputs.take_parts())
        outs = (outs,) if isinstance(outs, Tensor) else outs
        return self.result.rebuild(outs, current_checker())

    # -- forward -----------------------------------------------------------------------------------

    def forward(self, parts: Sequence[Tensor]) -> tuple[Any, Any]:
        """Return the result of `fwd` and what `bwd` needs."""
        branches = iter(self.inputs.rebuild(parts, current_checker()))
        nondiff = self.custom.nondiff
        args = [x if i in nondiff else next(branches) for i, x in enumerate(self.args)]
        pair = self.custom.fwd(*args)  # type: ignore[misc]
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(
                f"custom_vjp({self.custom.name}): fwd returned {_describe(pair)}; return a pair of "
                "the result and what bwd needs"
            )
        return pair[0], pair[1]

    # -- backward ----------------------------------------------------------------------------------

    def backward(self, residuals: Any, cotangents: Sequence[Tensor]) -> list[Any]:
        """Return the gradients of the tensors."""
        custom = self.custom
        nondiff = [self.args[i] for i in custom.nondiff]
        cotangents_tree = self.result.rebuild(cotangents, dual=True)
        gradients = custom.bwd(*nondiff, residuals, cotangents_tree)  # type: ignore[misc]
        branches = self._branches()
        if not isinstance(gradients, (tuple, list)) or len(gradients) != len(branches):
            raise TypeError(
                f"{self.bwd_location()} returned {_describe(gradients)}, and {custom.name} has "
                f"{len(branches)} arguments to differentiate "
                f"({', '.join(name for name, _ in branches)}); return a tuple with a gradient for "
                "each, None for zero"
            )
        grads: list[Any] = [None] * len(self.inputs.leaves)
        for (name, branch), gradient in zip(branches, gradients, strict=True):
            self._spread(name, branch, gradient, grads)
        return [
            None if grads[j] is None else self._as_share(i, self._check_gradient(i, grads[j]))
            for i, j in enumerate(self.inputs.at)
        ]

    def _branches(self) -> list[tuple[str, Any]]:
        """Return the name of each argument to differentiate, and its tree.

        The tree has the indices of its leaves.
        """
        names = self.custom.names
        numbers = [i for i in range(len(self.args)) if i not in self.custom.nondiff]
        trees = pytree.tree_unflatten([*range(len(self.inputs.leaves))], self.inputs.tree)
        return [
            (names[i] if i < len(names) else str(i), tree)
            for i, tree in zip(numbers, trees, strict=True)
        ]

    def argument_name(self, i: int) -> str:
        """Return the name of a tensor among the arguments."""
        index = self.inputs.at[i]
        for name, branch in self._branches():
            members = pytree.tree_leaves(branch)
            if index in members:
                return repr(name) + paths_of(branch)[members.index(index)]
        return str(i)

    def bwd_location(self) -> str:
        """Return the line and name of `bwd`, for messages."""
        code = getattr(inspect.unwrap(self.custom.bwd), "__code__", None)  # type: ignore[arg-type]
        place = "" if code is None else f"{code.co_filename}:{code.co_firstlineno}: "
        return f"{place}bwd of custom_vjp({self.custom.name})"

    def _spread(self, name: str, branch: Any, gradient: Any, grads: list[Any]) -> None:
        """Put the leaves of an argument's gradient at the indices of the argument's leaves."""
        if gradient is None:
            return
        members, tree = pytree.tree_flatten(branch)
        leaves, gradient_tree = pytree.tree_flatten(gradient)
        if gradient_tree != tree:
            what = f"{self.bwd_location()} gives argument {name!r}"
            raise TypeError(
                f"{what} a gradient that is not a tree like it, {_describe(gradient)}; return one, "
                "or None for zero"
            )
        for j, g in zip(members, leaves, strict=True):
            grads[j] = g

    def _check_gradient(self, i: int, g: Any) -> Tensor:
        """Return the gradient of a tensor for autograd: of a sharded one, in the dual layout.

        Raises: TypeError or ValueError if it is not a gradient of that tensor.
        """
        layout, meta = self.inputs.layouts[i], self.inputs.metas[i]
        shape = meta.shape if layout is None else layout.shape
        if isinstance(g, (int, float)) and not shape:
            g = torch.tensor(g, dtype=meta.dtype, device=meta.device)
        is_foreign = layout is None and isinstance(g, ShardedTensor)
        if not isinstance(g, Tensor) or g.shape != shape or is_foreign:
            raise self._no_gradient(i, g, shape)
        if layout is None:
            return g
        if not isinstance(g, ShardedTensor):
            g = from_local(g, layout.mesh, P(), shape=g.shape)  # type: ignore[arg-type]
        return redistribute_local(known_local(g), g._layout, layout.dual.replace(dtype=g.dtype))

    def _no_gradient(self, i: int, g: Any, shape: torch.Size) -> Exception:
        """Return the error for an object that cannot be the gradient of a tensor of this shape."""
        what = f"{self.bwd_location()} gives argument {self.argument_name(i)}"
        if not isinstance(g, Tensor):
            return TypeError(
                f"{what} {_describe(g)} as its gradient; return a tensor, or None for zero"
            )
        if g.shape != shape:
            return ValueError(
                f"{what}, of shape {list(shape)}, a gradient of shape {list(g.shape)}"
            )
        layout = g._layout  # type: ignore[attr-defined]
        return TypeError(
            f"{what}, a plain tensor, a gradient that is a ShardedTensor, {layout}; return "
            "g.full_tensor()"
        )

    def _as_share(self, i: int, g: Tensor) -> Tensor:
        """Return a gradient that is replicated as a share of it."""
        axes = () if self.replicated_grads is None else self.replicated_grads.axes.get(i, ())
        return self.as_share(g, axes) if axes else g

    def as_share(self, g: Tensor, axes: tuple[str, ...]) -> Tensor:
        """Return this rank's share of a gradient that is replicated over these axes.

        The first rank's is all of it, others' are zero.
        """
        env: Any = self.env
        return apply(g, KeepFirstMap(env.axes(axes)))


class _TensorMeta(NamedTuple):
    """Shape, dtype and device of a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


class _CustomVJP(torch.autograd.Function):
    """The autograd node of a call."""

    is_type_checked = True

    @staticmethod
    def forward(ctx: Any, call: _CustomVJPCall, *tensors: Tensor) -> Any:
        ctx.call, ctx.count = call, len(tensors)
        result, residuals = call.forward(tensors)
        call.result, ctx.residuals = _Tree(result, current_checker()), _Tree(residuals)
        saved = list(tensors)
        ctx.places = []  # of the residuals among the saved tensors
        for x in ctx.residuals.take_parts():
            place = next((i for i, y in enumerate(tensors) if y is x), len(saved))
            ctx.places.append(place)
            if place == len(saved):
                saved.append(x)
        # Second derivatives: a saved tensor that is no argument was made without gradients.
        ctx.recomputes = len(saved) > len(tensors)
        results = call.result.take_parts()
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(
            *[x for x in results if not (x.is_floating_point() or x.is_complex())]
        )
        ctx.set_materialize_grads(False)
        return tuple(
            [x.view_as(x) if any(x is y for y in results[:i]) else x for i, x in enumerate(results)]
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        call, saved = ctx.call, ctx.saved_tensors
        pairs = zip(grads, call.result.metas, strict=True)
        cotangents = [meta.zeros() if g is None else g for g, meta in pairs]
        if ctx.recomputes and torch.is_grad_enabled():
            with call.replay, nullcontext() if call.env is None else call.env.as_current():
                _, residuals = call.forward(saved[: ctx.count])
        else:
            residuals = ctx.residuals.rebuild([saved[i] for i in ctx.places])
        return None, *call.backward(residuals, cotangents)


def _replicated_grads(env: MappedEnv) -> ReplicatedGrads | None:
    """Return the `ReplicatedGrads` of the tracked call of the mapped function.

    None if nothing was tracked.
    """
    if engine_hooks.current_backward() >= 0:
        return None
    if env.checker is not None:
        replicated_grads = ReplicatedGrads()
        if env.recording:
            env.type_log.append(replicated_grads)
        return replicated_grads
    record = env.type_log[env.cursor] if env.cursor < len(env.type_log) else None
    if not isinstance(record, ReplicatedGrads):
        return None
    env.cursor += 1
    return record


def _describe(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"a tensor of shape {list(x.shape)}"
    return f"a {type(x).__name__} of {len(x)}" if isinstance(x, (tuple, list, dict)) else repr(x)
