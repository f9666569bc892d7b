"""Run a function once and compute its gradients for any number of seeds.

`grad`, `vjp` and their kin are made of it.

    outside of transforms     autograd: the leaves are copies that require grad
    inside of one             `torch.func.vjp`, which can be batched and carry tangents: a tensor
                              cannot be made to require grad there

Inside a mapped function the seed depends on the type of the result. A replicated loss seeds 1/n on
each of n ranks, so that the pending gradient of a replicated value adds up to the gradient. Tracked
calls know the types; later calls with the same signature read them from the log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ....mesh.comm.thread_context import thread_context
from ...autograd.engine_hooks import transforms_active
from ...autograd.transforms import on_own_level
from ...tensor.autograd import backward
from ...tensor.sharded_tensor import ShardedTensor
from ..collectives.collectives import psum
from ..collectives.linear_maps import KeepFirstMap
from ..mapped_env import MappedEnv, current_mapped_env
from ..types.type_checker import untracked
from ..types.types import ShardingTypeError, Tag, Type
from .parts import Results, with_part

Run = Callable[[list[Tensor]], tuple[Sequence[Tensor], Any]]


class Pullback:
    """A function that has run once, and its gradients.

    Both are computed inside of `thread_context.setting(**differentiating(args))`.

    Args:
        run: takes tensors in place of the leaves, and returns the outputs to differentiate and the
            value, any tree.
        leaves: the tensors to differentiate with respect to.
        is_loss: whether the only output is a scalar, which must be replicated inside a mapped
            function.

    Attributes:
        outs: the outputs to differentiate.
        value: the value, detached unless it is to be differentiated again.
    """

    def __init__(self, run: Run, leaves: list[Tensor], is_loss: bool = False) -> None:
        self._leaves = leaves
        self._types: GradTypes | None = None
        self._back: Callable[[tuple[Tensor, ...]], Any] | None = None  # that of a transform
        self.outs: list[Tensor] = []
        self.value: Any = None

        def run_with_types(fresh: list[Tensor]) -> tuple[Sequence[Tensor], Any]:
            outs, value = run(fresh)
            if (env := current_mapped_env()) is not None:
                self._types = _grad_types(env, outs, fresh, is_loss)
            return outs, value

        if transforms_active():
            self._run_inside(run_with_types)
            return
        with torch.enable_grad():
            self._leaves = fresh_leaves(leaves)
            outs, value = run_with_types(self._leaves)
            self.outs = list(outs)
            self.value = value if thread_context.grad_is_nested else detach_tree(value)

    def _run_inside(self, run: Run) -> None:
        """Run inside a transform."""
        results: list[Results] = []

        def inside(*parts: Tensor) -> Any:
            outs, value = run([with_part(x, p) for x, p in zip(self._leaves, parts, strict=True)])
            results[:] = Results.of([backward.summable(out) for out in outs]), Results.of(value)
            return results[0].parts, results[1].parts

        parts = Results.of(self._leaves).parts
        outs, self._back, values = torch.func.vjp(  # type: ignore[misc]
            partial(on_own_level, inside), *parts, has_aux=True
        )
        self.outs, self.value = results[0].with_parts(outs), results[1].with_parts(values)

    def __call__(self, cotangents: Sequence[Any] | None = None) -> list[Tensor]:
        """Return the gradients of the leaves, in their layouts.

        Args:
            cotangents: for each of `outs`; None for the default seed of a scalar, which frees the
                graph.
        """
        env, types = current_mapped_env(), self._types
        if env is None:
            return self._gradients(cotangents or [None] * len(self.outs), cotangents is not None)
        if types is None:
            types = _grad_types(env, self.outs, self._leaves, cotangents is None)
        with untracked():
            seeds = _seeds(env, types, self.outs, cotangents)
            gradients = self._gradients(seeds, cotangents is not None)
        return _reduce_gradients(env, types, gradients)

    def _gradients(self, seeds: Sequence[Any], retain_graph: bool) -> list[Tensor]:
        if self._back is not None:
            starts = [_start(out, seed) for out, seed in zip(self.outs, seeds, strict=True)]
            return list(backward.reduce_to_inputs(self._leaves, self._back(tuple(starts))))
        pairs = zip(self.outs, seeds, strict=True)
        linked = [(out, seed) for out, seed in pairs if out.requires_grad]
        if not linked:
            return [torch.zeros_like(x) for x in self._leaves]
        gradients = backward.grad(
            [out for out, _ in linked],
            self._leaves,
            [seed for _, seed in linked],
            retain_graph=retain_graph or None,
            create_graph=thread_context.grad_is_nested,
            allow_unused=True,
            materialize_grads=True,
        )
        return list(gradients)


def _start(out: Any, seed: Any) -> Tensor:
    start = backward._seed(out, seed)
    return torch.ones_like(out) if start is None else start


# -- leaves ----------------------------------------------------------------------------------------


def differentiating(args: Any) -> dict[str, Any]:
    """Return the fields of the thread's context for differentiating a function of these arguments.

    Gradients are to be differentiated again inside of another such function, and if an argument
    requires grad.
    """
    depth = thread_context.grad_depth
    needs_grad = any(isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves(args))
    is_nested = torch.is_grad_enabled() and (needs_grad or depth > 0)
    return {"grad_is_nested": is_nested, "grad_depth": depth + 1}


def fresh_leaves(leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves as new tensors that require grad.

    Where results are to be differentiated again, they stay part of the graph.
    """
    is_nested = thread_context.grad_is_nested
    return [
        _copy_with_type(x, _alias_in_graph if is_nested and x.requires_grad else _fresh)
        for x in leaves
    ]


def detach_tree(tree: Any) -> Any:
    return pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, tree)


def _copy_with_type(x: Tensor, copy: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a new tensor with the same values and type.

    Its gradient is reduced as that type says.
    """
    env = current_mapped_env()
    if env is None or env.checker is None:
        return copy(x)
    x = env.checker.replace_capture(x)
    tag = env.checker.tag_of(x)
    with untracked():
        fresh = copy(x)
        env.checker.set_tag(fresh, tag)
    return fresh


def _alias_in_graph(x: Tensor) -> Tensor:
    """Return the tensor as a new one of the same graph."""
    if isinstance(x, ShardedTensor):
        return ShardedTensor._make(x._local.view_as(x._local), x._layout)
    return x.view_as(x)


def _fresh(x: Tensor) -> Tensor:
    if isinstance(x, ShardedTensor):
        local = x._local.detach().requires_grad_()
        return ShardedTensor._make_guarded(local, x._layout, x._lineage)
    # No leaf, so that `distribute_tensor`, which would cut the graph, refuses it.
    return x.detach().requires_grad_().view_as(x)


# -- types -----------------------------------------------------------------------------------------


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


def _grad_types(
    env: MappedEnv, outs: Sequence[Tensor], inputs: Sequence[Tensor], is_loss: bool
) -> GradTypes:
    """Return the types of results and inputs, from the checker or from the log.

    Raises:
        ShardingTypeError: a loss that is not replicated.
        RuntimeError: types that are not known.
    """
    if env.checker is None:
        return _logged_types(env, len(outs), len(inputs))
    tags = [env.checker.tag_of(out) for out in outs]
    types = tuple(env.checker.tag_of(x).type for x in inputs)
    if is_loss:
        _check_loss_type(tags[0], types)
    outs_replicated = tuple(_replicated_axes(env, tag.type) for tag in tags)
    record = GradTypes(
        outs_replicated, tuple(_replicated_axes(env, type_) for type_ in types), types
    )
    if env.recording:
        env.type_log.append(record)
    return record


def _replicated_axes(env: MappedEnv, type_: Type) -> tuple[str, ...]:
    return tuple(a for a in env.names if a not in type_.varying and a not in type_.pending)


def _logged_types(env: MappedEnv, *counts: int) -> GradTypes:
    if env.cursor < len(env.type_log):
        record = env.type_log[env.cursor]
        env.cursor += 1
        if isinstance(record, GradTypes) and (len(record.outs), len(record.inputs)) == counts:
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


def _seeds(
    env: MappedEnv, types: GradTypes, outs: Sequence[Tensor], cotangents: Sequence[Any] | None
) -> list[Any]:
    """Return the seeds of backward on this rank: shares of those that are replicated."""
    if cotangents is None:
        return [_seed(out, 1 / env.size(axes)) for out, axes in zip(outs, types.outs, strict=True)]
    pairs = zip(cotangents, types.outs, strict=True)
    return [KeepFirstMap(env.axes(axes))(g) if axes else g for g, axes in pairs]


def _seed(loss: Tensor, share: float) -> Any:
    if not isinstance(loss, ShardedTensor):
        return torch.full_like(loss, share)
    return ShardedTensor._make(backward.seed(loss, None) * share, loss._layout.dual)


def _reduce_gradients(env: MappedEnv, types: GradTypes, gradients: list[Tensor]) -> list[Tensor]:
    """Return the gradients with those that are pending over manual axes summed, in buckets."""
    if env.checker is not None:
        for g, type_ in zip(gradients, types.types, strict=True):
            env.checker.set_tag(g, env.checker.grad_tag(type_, frozenset(env.names)))
    for axes in filter(None, dict.fromkeys(types.inputs)):
        numbers = [i for i, replicated in enumerate(types.inputs) if replicated == axes]
        totals = psum([gradients[i] for i in numbers], axes)
        for i, total in zip(numbers, totals, strict=True):
            gradients[i] = total
    return gradients
