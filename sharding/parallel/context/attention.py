"""Context parallelism: attention over a sequence that is split over an axis of the mesh.

    method         forward moves                   backward moves            a rank holds at a time
    "ring"         keys and values, n - 1 hops     the same, and gradients   two blocks of them
    "all_gather"   keys and values, once           their gradients, once     all keys and values
    "all_to_all"   a share of q, k, v and output   their gradients           its heads, whole length

"ring" hides its hops behind the computation and needs the least memory; "all_to_all" (Jacobs et al.
2023, "DeepSpeed Ulysses") moves the least, 4/n of the parts, and needs as many heads of keys as
ranks; "all_gather" (Llama 3) is the simplest, good for few key heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ....mesh.comm.current_world import current_world
from ....mesh.comm.first_use import first_block
from ....mesh.context import given_or_current
from ....mesh.device_mesh import DeviceMesh
from ...layout.bounded_cache import LayoutCache
from ...layout.layout import Layout
from ...lineage import comm_context, mixed, seed_of
from ...ops.implicit_comm import implicit_comm
from ...ops.rules.decomposition_utils import from_parts, splitting_axes
from ...ops.rules.registry import handler
from ...tensor.autograd.local_part import known_local
from ...tensor.convert import autocast_dtype, from_part, to_local
from ...tensor.part_shapes import lengths_along
from ...tensor.sharded_tensor import ShardedTensor
from ..redistribute_operands import redistribute_operands
from .strategies import AttentionOptions, AttentionStrategy, choose_attention_strategy

METHODS = ("ring", "all_gather", "all_to_all")
_SEED = seed_of("context_parallel_attention")
Axis = str | tuple[str, ...]


def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    axis: Axis = "cp",
    is_causal: bool = False,
    scale: float | None = None,
    method: str = "ring",
    balanced: bool = False,
    mesh: DeviceMesh | None = None,
) -> Tensor:
    """context_parallel_attention(q: S(l), k: S(s), v: S(s)) -> S(l).

    `F.scaled_dot_product_attention` of sequences split over an axis.

        rank 0   q0 k0 v0   ->   softmax(q0 [k0 k1]') [v0 v1]     each query attends to the keys of
        rank 1   q1 k1 v1   ->   softmax(q1 [k0 k1]') [v0 v1]     all ranks

    Differentiable; "ring" and "all_gather" once, "all_to_all" as often as torch's own attention.

    Args:
        query: [... h l e]. Other dims may be split over other axes: batch and heads are not moved.
        key, value: [... g s e] and [... g s f]; g divides h, and query heads are groups of the
            key's, as with `enable_gqa`.
        axis: the axis, or axes, major to minor, that split l and s, evenly or not.
        is_causal: each query attends to the keys up to its own position.
        scale: of scores; by default 1 / sqrt(e).
        method: "ring", "all_gather" or "all_to_all": see the table of this module.
        balanced: the sequences are in the order of `balance_sequence`; a causal mask uses the
            original positions. All ranks then have the same work; otherwise the last one has twice
            the mean.
        mesh: for plain tensors, which are this rank's parts of the sequence (of any lengths): the
            mesh with the axis; by default the current one. The result is plain, and gradients are
            those of the sum of all ranks' losses.

    Returns:
        [... h l f], laid out as the query.

    Raises:
        TypeError: plain tensors mixed with sharded ones.
        ValueError: on every rank, before any communication: shapes that do not match, sequences not
            split over the axis alone, sizes that are not those of a balanced sequence, fewer key
            heads than ranks for "all_to_all".

    Communication: by this rank, of n: "ring": n - 1 permutes with the keys and values of all
        others; backward again, and n - 1 with gradients of all blocks but one. "all_gather": one
        all_gather of keys and values; backward one reduce_scatter. "all_to_all": one all_to_all of
        q, k and v, and one of the output; the same backward. Before that, a redistribution of keys
        and values if their batch or heads are not split as the query's. For plain tensors two small
        all_gathers of shapes.

    Example:
        >>> layout = {"device_mesh": mesh, "placements": P("dp", "tp", "cp")}
        >>> q, k, v = (sm.randn(2, 8, 4096, 64, **layout) for _ in range(3))
        >>> out = sm.parallel.context_parallel_attention(q, k, v, is_causal=True)
    """
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    if method not in METHODS:
        raise ValueError(
            f"context_parallel_attention: method={method!r}; write one of "
            f"{', '.join(map(repr, METHODS))}"
        )
    options = AttentionOptions(axes, is_causal, scale, method, balanced)
    sharded = [isinstance(x, ShardedTensor) for x in (query, key, value)]
    if all(sharded):
        return _attention(query, key, value, options)
    if any(sharded):
        raise TypeError(
            "context_parallel_attention: query, key and value must all be ShardedTensors, or all "
            f"this rank's plain parts; got {[type(x).__name__ for x in (query, key, value)]}"
        )
    return _of_plain(query, key, value, options, given_or_current(mesh))


def _of_plain(
    query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, mesh: DeviceMesh
) -> Tensor:
    """Run on the slice of the mesh with these axes only.

    Nothing is known of plain tensors along other axes.
    """
    axis_mesh, dim = mesh[options.axes], query.ndim - 2
    queries, keys = (
        lengths_along(axis_mesh, axis_mesh.axis_names, x.shape[dim]) for x in (query, key)
    )
    q = from_part(query, axis_mesh, dim, queries)
    k, v = (from_part(x, axis_mesh, dim, keys) for x in (key, value))
    return to_local(_attention(q, k, v, options))


def _attention(query: Any, key: Any, value: Any, options: AttentionOptions) -> ShardedTensor:
    query, key, value = _autocast(query, key, value)
    strategy = _strategy(query._layout, key._layout, value._layout, options)
    mesh = query.mesh
    lineage = mixed(_SEED, (query, key, value))
    with comm_context(mesh.world, lineage):
        operands = redistribute_operands([query, key, value], strategy.targets)
        for x in operands:
            known_local(x)
        out = from_parts(strategy.computed, strategy.run, *operands)
        out._lineage = lineage
        return out.redistribute(strategy.result.spec)


def _autocast(*tensors: Any) -> tuple[Any, ...]:
    """Cast to the dtype that autocast uses for attention."""
    dtype = autocast_dtype(tensors[0].device)
    return tensors if dtype is None else tuple(x.to(dtype) for x in tensors)


_strategies: LayoutCache[tuple[Any, ...], AttentionStrategy] = LayoutCache()


def _strategy(q: Layout, k: Layout, v: Layout, options: AttentionOptions) -> AttentionStrategy:
    key = k, v, options
    strategy = _strategies.get(q, key)
    if strategy is None:
        strategy = _strategies.keep(q, key, choose_attention_strategy(q, k, v, options))
    return strategy


# -- for unchanged models --------------------------------------------------------------------------


@dataclass(frozen=True)
class _ContextParallelBlock:
    """The arguments of an active `context_parallel` block."""

    axes: tuple[str, ...]
    method: str
    balanced: bool


@contextmanager
def context_parallel(
    axis: Axis = "cp", *, method: str = "ring", balanced: bool = False
) -> Iterator[None]:
    """with context_parallel("cp"): run attention of sequences split over the axis.

    `F.scaled_dot_product_attention` is then `context_parallel_attention`.

    A model that calls torch's attention needs no change. Attention whose queries or keys are not
    split over the axis is computed as usual. Activation checkpointing recomputes attention as its
    forward ran it, also if backward is called after the block.

    Args:
        axis, method, balanced: see `context_parallel_attention`.

    Raises:
        ValueError: an unknown method. Later, from attention: what `context_parallel_attention`
            raises; a mask or dropout with sequences split over the axis; a causal mask on a
            balanced sequence that is not split over it.

    Communication: none by itself.

    Example:
        >>> with sm.parallel.context_parallel("cp", balanced=True):
        ...     loss = model(tokens, labels)
        ...     loss.backward()
    """
    if method not in METHODS:
        raise ValueError(
            f"context_parallel: method={method!r}; write one of {', '.join(map(repr, METHODS))}"
        )
    first_block.begin()
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    with current_world().attending(_ContextParallelBlock(axes, method, balanced)):
        yield


@handler("scaled_dot_product_attention")
def _in_block(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Run context-parallel attention inside a block; NotImplemented leaves the call to the rule."""
    block: _ContextParallelBlock | None = current_world().attention
    if block is None or not all(isinstance(x, ShardedTensor) for x in (query, key, value)):
        return NotImplemented
    _check_axes(block, query)
    grouped = query.ndim > 2 and query.shape[-3] != key.shape[-3]
    if not (_is_split(query, block.axes) and _is_split(key, block.axes)) or (
        grouped and not enable_gqa
    ):
        _check_order_known(block, query, key, is_causal)
        return NotImplemented
    if attn_mask is not None or dropout_p:
        raise ValueError(
            f"scaled_dot_product_attention inside context_parallel({block.axes}): "
            f"{_mask_or_dropout_text(attn_mask, dropout_p)} for queries {query._layout}; keys of "
            "other ranks are processed in blocks, with is_causal or no mask, without dropout; "
            "leave it out, or call this attention outside the block, where keys and values are "
            "gathered"
        )
    options = AttentionOptions(block.axes, is_causal, scale, block.method, block.balanced)
    with implicit_comm("allow"):  # the block asks for it
        return _attention(query, key, value, options)


def _mask_or_dropout_text(attn_mask: Any, dropout_p: float) -> str:
    return (
        f"dropout_p={dropout_p}"
        if attn_mask is None
        else f"attn_mask of shape {list(attn_mask.shape)}"
    )


def _is_split(x: ShardedTensor, axes: tuple[str, ...]) -> bool:
    return x.ndim > 2 and bool(set(splitting_axes(x._layout, x.ndim - 2)) & set(axes))


def _check_axes(block: _ContextParallelBlock, x: ShardedTensor) -> None:
    unknown = [a for a in block.axes if a not in x.mesh.axis_names]
    if unknown:
        raise ValueError(
            f"context_parallel({block.axes}): attention of {x._layout}, whose mesh has no axis "
            f"{unknown[0]!r}; use one of {x.mesh.axis_names}"
        )


def _check_order_known(
    block: _ContextParallelBlock, query: ShardedTensor, key: ShardedTensor, is_causal: bool
) -> None:
    if block.balanced and is_causal and query.mesh.size(block.axes) > 1:
        raise ValueError(
            f"scaled_dot_product_attention inside context_parallel({block.axes}, balanced=True): "
            f"is_causal for {query._layout} and {key._layout}, which are not both split over "
            f"{block.axes}, so their order is unknown; balance both, or call it outside the block"
        )
