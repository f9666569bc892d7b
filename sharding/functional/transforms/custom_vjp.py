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
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...autograd import engine_hooks
from ...autograd.named_axes import AxisEnv, current_axis_env
from ...layout.layout import Layout
from ...layout.spec import P
from ...ops.torch_compile import keep_compiler_out, not_compiled
from ...redistribute.autograd import redistribute_local
from ...tensor.autograd.local_part import known_local, part_of
from ...tensor.convert import from_local
from ...tensor.random import replay_random
from ...tensor.sharded_tensor import ShardedTensor
from ..collectives.apply import current_checker
from ..collectives.linear_maps import KeepFirstMap, apply
from ..signature import paths_of


class custom_vjp:
    """custom_vjp(f) -> f with a custom gradient, set by `f.defvjp(fwd, bwd)`: any function of
    trees, inside and outside of `shard_map`.

    Args:
        fun: the function. It runs where no gradient is needed.
        nondiff_argnums: the arguments without gradient, such as functions and tensor_indices; any
            objects.
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
        given = (nondiff_argnums,) if isinstance(nondiff_argnums, int) else nondiff_argnums
        self.nondiff = sorted({*given, *(self.names.index(name) for name in nondiff_argnames)})

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
        given = self._by_position(args, kwargs)
        leaves, tree = pytree.tree_flatten(
            [x for i, x in enumerate(given) if i not in self.nondiff]
        )
        if not torch.is_grad_enabled() or not any(
            isinstance(x, Tensor) and x.requires_grad for x in leaves
        ):
            return self.fun(*given)
        if engine_hooks.transforms_active():
            raise NotImplementedError(
                f"custom_vjp({self.name}) inside a transform of torch.func; use sm.grad, sm.vjp or "
                "sm.jvp"
            )
        return _CustomVJPCall(self, given, leaves, tree).run()

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


@dataclass
class ReplicatedGrads:
    """What a tracked call of a mapped function has found out about the gradients of a custom
    function in it.

    Attributes:
        axes: by tensor, the axes along which its gradient is replicated and must be turned into a
            share.
    """

    axes: dict[int, tuple[str, ...]] = field(default_factory=dict)


class _CustomVJPCall:
    """One call of a custom function.

    Attributes:
        args, leaves, tree: the arguments, with None for those that are differentiated; the leaves
            of these, without tensors; their tree.
        tensor_indices, layouts: of the tensors among the leaves: their indices, and the layouts of
            sharded ones.
        env, replicated_grads: of the mapped function around it.
        tags: the tags of sharded tensors, in a tracked call.
        out_tree, outs, out_indices, out_layouts, out_tags: the same of the result.
    """

    def __init__(
        self, custom: custom_vjp, args: Sequence[Any], leaves: Sequence[Any], tree: Any
    ) -> None:
        self.custom, self.leaves, self.tree = custom, list(leaves), tree
        self.args = [x if i in custom.nondiff else None for i, x in enumerate(args)]
        self.tensor_indices = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        self.layouts = [_layout(leaves[i]) for i in self.tensor_indices]
        self.env = current_axis_env()
        self.replicated_grads = None if self.env is None else _replicated_grads(self.env)
        self.replay = replay_random()[1]
        self.tags: dict[int, Any] = {}
        self.metas: list[_TensorMeta] = []
        self.outs: list[Any] = []
        self.out_tree: Any = None
        self.out_indices: list[int] = []
        self.out_layouts: list[Layout | None] = []
        self.out_tags: list[Any] = []

    def run(self) -> Any:
        tensors = [self.leaves[i] for i in self.tensor_indices]
        checker = current_checker()
        self.tags = (
            {}
            if checker is None
            else {
                i: checker.tag_of(x) for i, x in enumerate(tensors) if isinstance(x, ShardedTensor)
            }
        )
        for i, j in enumerate(
            self.tensor_indices
        ):  # not kept: the node would keep its own arguments
            self.leaves[j] = i
        outs = _CustomVJP.apply(self, *map(part_of, tensors))
        outs = (outs,) if isinstance(outs, Tensor) else outs
        found = list(self.outs)
        for i, layout, tag, x in zip(
            self.out_indices, self.out_layouts, self.out_tags, outs, strict=True
        ):
            found[i] = x if layout is None else ShardedTensor._make(x, layout)
            if tag is not None and checker is not None:
                checker.set_tag(found[i], tag)
        return pytree.tree_unflatten(found, self.out_tree)

    # -- forward -----------------------------------------------------------------------------------

    def arguments(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Return the function's arguments, from its tensors."""
        leaves, checker = list(self.leaves), current_checker()
        for i, (j, layout) in enumerate(zip(self.tensor_indices, self.layouts, strict=True)):
            leaves[j] = tensors[i] if layout is None else ShardedTensor._make(tensors[i], layout)
            if checker is not None and i in self.tags:
                checker.set_tag(leaves[j], self.tags[i])
        branches = iter(pytree.tree_unflatten(leaves, self.tree))
        return [x if i in self.custom.nondiff else next(branches) for i, x in enumerate(self.args)]

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Any, Any]:
        pair = self.custom.fwd(*self.arguments(tensors))  # type: ignore[misc]
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            name, given = self.custom.name, _describe(pair)
            raise TypeError(
                f"custom_vjp({name}): fwd returned {given}; return a pair of the result and what "
                "bwd needs"
            )
        return pair[0], pair[1]

    # -- backward ----------------------------------------------------------------------------------

    def backward(self, residuals: Any, cotangents: Sequence[Tensor]) -> list[Any]:
        """Return the gradients of the tensors."""
        custom, given = self.custom, list(self.outs)
        for i, layout, g in zip(self.out_indices, self.out_layouts, cotangents, strict=True):
            given[i] = (
                g if layout is None else ShardedTensor._make(g, layout.dual.replace(dtype=g.dtype))
            )
        nondiff = [self.args[i] for i in custom.nondiff]
        found = custom.bwd(*nondiff, residuals, pytree.tree_unflatten(given, self.out_tree))  # type: ignore[misc]
        branches = self._branches()
        if not isinstance(found, (tuple, list)) or len(found) != len(branches):
            raise TypeError(
                f"{self.bwd_location()} returned {_describe(found)}, and {custom.name} has "
                f"{len(branches)} arguments to differentiate "
                f"({', '.join(name for name, _ in branches)}); return a tuple with a gradient for "
                "each, None for zero"
            )
        grads: list[Any] = [None] * len(self.leaves)
        for (name, branch), gradient in zip(branches, found, strict=True):
            self._spread(name, branch, gradient, grads)
        return [
            None if grads[j] is None else self._shared(i, self._checked(i, grads[j], layout))
            for i, (j, layout) in enumerate(zip(self.tensor_indices, self.layouts, strict=True))
        ]

    def _branches(self) -> list[tuple[str, Any]]:
        """Return the name of each argument to differentiate, and its tree with the indices of its
        leaves.
        """
        known, places = (
            self.custom.names,
            [i for i in range(len(self.args)) if i not in self.custom.nondiff],
        )
        trees = pytree.tree_unflatten([*range(len(self.leaves))], self.tree)
        return [
            (known[i] if i < len(known) else str(i), tree)
            for i, tree in zip(places, trees, strict=True)
        ]

    def argument_name(self, i: int) -> str:
        """Return the name of a tensor among the arguments."""
        index = self.tensor_indices[i]
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
        leaves, given = pytree.tree_flatten(gradient)
        if given != tree:
            what = f"{self.bwd_location()} gives argument {name!r}"
            raise TypeError(
                f"{what} a gradient that is not a tree like it, {_describe(gradient)}; return one, "
                "or None for zero"
            )
        for j, g in zip(members, leaves, strict=True):
            grads[j] = g

    def _checked(self, i: int, g: Any, layout: Layout | None) -> Tensor:
        """Return the gradient of a tensor for autograd: of a sharded one, in the dual layout.

        Raises: TypeError or ValueError if it is not a gradient of that tensor.
        """
        shape = self.metas[i].shape if layout is None else layout.shape
        if isinstance(g, (int, float)) and not shape:
            g = torch.tensor(g, dtype=self.metas[i].dtype, device=self.metas[i].device)
        if (
            not isinstance(g, Tensor)
            or g.shape != shape
            or (layout is None and isinstance(g, ShardedTensor))
        ):
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
        return TypeError(
            f"{what}, a plain tensor, a gradient that is a ShardedTensor, {g._layout}; return "  # type: ignore[attr-defined]
            "g.full_tensor()"
        )

    def _shared(self, i: int, g: Tensor) -> Tensor:
        """Return a gradient that is replicated as a share of it."""
        axes = () if self.replicated_grads is None else self.replicated_grads.axes.get(i, ())
        return self.as_share(g, axes) if axes else g

    def as_share(self, g: Tensor, axes: tuple[str, ...]) -> Tensor:
        """Return this rank's share of a gradient that is replicated over these axes: the first
        rank's is all of it, others' are zero.
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
        call.metas = [_TensorMeta(x.shape, x.dtype, x.device) for x in tensors]
        result, residuals = call.forward(tensors)
        outs, call.out_tree = pytree.tree_flatten(result)
        kept, ctx.kept_tree = pytree.tree_flatten(residuals)
        ctx.kept, ctx.kept_layouts, saved, own = list(kept), {}, list(tensors), False
        for i, x in enumerate(kept):
            if isinstance(x, Tensor):
                local, ctx.kept_layouts[i] = part_of(x), _layout(x)
                ctx.kept[i] = next((k for k, y in enumerate(tensors) if y is local), len(saved))
                own = own or ctx.kept[i] == len(saved)
                saved += [local] if ctx.kept[i] == len(saved) else []
        ctx.recomputes = (
            own  # second derivatives: a saved tensor that is no argument was made without gradients
        )
        call.out_indices = [i for i, x in enumerate(outs) if isinstance(x, Tensor)]
        call.out_layouts = [_layout(outs[i]) for i in call.out_indices]
        checker = current_checker()
        call.out_tags = [
            checker.tag_of(outs[i]) if checker is not None and layout is not None else None
            for i, layout in zip(call.out_indices, call.out_layouts, strict=True)
        ]
        results = [part_of(outs[i]) for i in call.out_indices]
        call.outs = [None if i in call.out_indices else x for i, x in enumerate(outs)]
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(
            *[x for x in results if not (x.is_floating_point() or x.is_complex())]
        )
        ctx.set_materialize_grads(False)
        ctx.metas = [_TensorMeta(x.shape, x.dtype, x.device) for x in results]
        return tuple(
            [x.view_as(x) if any(x is y for y in results[:i]) else x for i, x in enumerate(results)]
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        call, saved = ctx.call, ctx.saved_tensors
        given = [like.zeros() if g is None else g for g, like in zip(grads, ctx.metas, strict=True)]
        if ctx.recomputes and torch.is_grad_enabled():
            with call.replay, nullcontext() if call.env is None else call.env.entered():
                _, residuals = call.forward(saved[: ctx.count])
        else:
            leaves = list(ctx.kept)
            for i, layout in ctx.kept_layouts.items():
                leaves[i] = (
                    saved[leaves[i]]
                    if layout is None
                    else ShardedTensor._make(saved[leaves[i]], layout)
                )
            residuals = pytree.tree_unflatten(leaves, ctx.kept_tree)
        return None, *call.backward(residuals, given)


def _replicated_grads(env: AxisEnv) -> ReplicatedGrads | None:
    """Return the findings of the tracked call of the mapped function; None if nothing was
    tracked.
    """
    if engine_hooks.current_backward() >= 0:
        return None
    if env.checker is not None:
        replicated_grads = ReplicatedGrads()
        if env.recording:
            env.type_log.append(replicated_grads)
        return replicated_grads
    found = env.type_log[env.cursor] if env.cursor < len(env.type_log) else None
    env.cursor += isinstance(found, ReplicatedGrads)
    return found if isinstance(found, ReplicatedGrads) else None


def _layout(x: Any) -> Layout | None:
    return x._layout if isinstance(x, ShardedTensor) else None


def _describe(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"a tensor of shape {list(x.shape)}"
    return f"a {type(x).__name__} of {len(x)}" if isinstance(x, (tuple, list, dict)) else repr(x)
