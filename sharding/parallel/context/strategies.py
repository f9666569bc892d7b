"""Strategies of context-parallel attention: layouts of q, k and v, and the local computation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....kernels.transfer.host_copies import to_device
from ...layout.layout import Layout, distinct_mesh_names
from ...layout.shard_holders import intervals
from ...layout.spec import Cut, P
from ...ops.rules.decomposition_utils import even_sizes, part_sizes, splitting_axes, with_dim
from ...ops.rules.nn.attention import attention_local
from .load_balance import Block, Runs, balanced_runs, balanced_sizes, causal_blocks, contiguous
from .ring import Ring

HEADS, SEQUENCE, WIDTH = -3, -2, -1
Run = Callable[[Tensor, Tensor, Tensor], Tensor]


class AttentionOptions(NamedTuple):
    """The options of `context_parallel_attention`."""

    axes: tuple[str, ...]
    is_causal: bool
    scale: float | None
    method: str
    balanced: bool


@dataclass(frozen=True)
class AttentionStrategy:
    """How to compute one attention.

    Attributes:
        targets: the layouts that query, key and value need.
        computed: the layout of the result of `run`.
        result: the layout to return, that of the query.
        run: the computation on this rank's parts.
    """

    targets: tuple[Layout, Layout, Layout]
    computed: Layout
    result: Layout
    run: Run


def choose_attention_strategy(
    q: Layout, k: Layout, v: Layout, options: AttentionOptions
) -> AttentionStrategy:
    """Return the strategy for operands with these layouts.

    Raises:
        ValueError: see `context_parallel_attention`.
    """
    _check_shapes(q, k, v)
    for layout in (q, k, v):
        _check_sequence(layout, options)
    q = _with_cuts(q, q.spec.cuts[:WIDTH])
    k = _with_cuts(k, [*q.spec.cuts[:HEADS], _key_head_cuts(q, k), k.spec.cuts[SEQUENCE]])
    v = _with_cuts(v, k.spec.cuts[:WIDTH])
    out = with_dim(q, len(q.shape) - 1, (), v.shape[WIDTH])
    return {"ring": _ring, "all_gather": _all_gather, "all_to_all": _all_to_all}[options.method](
        q, k, v, out, options
    )


def _with_cuts(layout: Layout, cuts: Sequence[Sequence[Cut]]) -> Layout:
    """Return the layout with these cuts, nothing pending, and whole features."""
    return layout.replace(P.of_cuts([*cuts, ()], {}))


def _key_head_cuts(q: Layout, k: Layout) -> Sequence[Cut]:
    """Return the cuts of key heads, if each rank then has those of its query heads; else none."""
    if q.spec.dims[HEADS] != k.spec.dims[HEADS]:
        return ()
    group = _group(q, k)
    dim = len(q.shape) + HEADS
    fit = all(
        queries.start == queries.stop
        or (keys.start * group <= queries.start and queries.stop <= keys.stop * group)
        for queries, keys in zip(intervals(q, dim), intervals(k, dim), strict=True)
    )
    return k.spec.cuts[HEADS] if fit else ()


def _group(q: Layout, k: Layout) -> int:
    return q.shape[HEADS] // max(1, k.shape[HEADS])


def _scale(q: Layout, options: AttentionOptions) -> float:
    return 1 / math.sqrt(max(1, q.shape[-1])) if options.scale is None else options.scale


# -- ring and all_gather ---------------------------------------------------------------------------


def _ring(
    q: Layout, k: Layout, v: Layout, out: Layout, options: AttentionOptions
) -> AttentionStrategy:
    mesh: Any = q.mesh
    runs = _runs(q, options), _runs(k, options)
    if mesh.coordinate is None or not splitting_axes(k, len(k.shape) + SEQUENCE):
        return _with_all_keys(q, k, v, out, options)
    group = mesh.group(options.axes)
    ranks = _in_order(mesh, options.axes)
    position = ranks.index(mesh.world.rank)
    count = len(ranks)
    blocks = tuple(
        _blocks(runs[0][position], runs[1][(position - hop) % count], options)
        for hop in range(count)
    )
    keys = tuple(part_sizes(k, len(k.shape) + SEQUENCE))
    ring = Ring(
        mesh,
        group,
        tuple(map(group.ranks.index, ranks)),
        position,
        keys,
        blocks,
        _scale(q, options),
    )
    return AttentionStrategy((q, k, v), out, out, _with_heads(ring, q, k))


def _all_gather(
    q: Layout, k: Layout, v: Layout, out: Layout, options: AttentionOptions
) -> AttentionStrategy:
    whole_k, whole_v = (with_dim(x, len(x.shape) + SEQUENCE, (), x.shape[SEQUENCE]) for x in (k, v))
    return _with_all_keys(q, whole_k, whole_v, out, options, _runs(k, options))


def _with_all_keys(
    q: Layout,
    k: Layout,
    v: Layout,
    out: Layout,
    options: AttentionOptions,
    of_keys: Sequence[Runs] | None = None,
) -> AttentionStrategy:
    """Return the strategy in which each rank has all keys, in the order of `of_keys`."""
    mesh: Any = q.mesh
    if mesh.coordinate is None:
        return AttentionStrategy((q, k, v), out, out, _outside_mesh)
    ranks = _in_order(mesh, options.axes)
    of_keys = _runs(k, options) if of_keys is None else of_keys
    own_runs = _runs(q, options)[
        ranks.index(mesh.world.rank) if splitting_axes(q, len(q.shape) + SEQUENCE) else 0
    ]
    blocks = (_blocks(own_runs, tuple(run for runs in of_keys for run in runs), options),)
    ring = Ring(mesh, None, (0,), 0, (k.shape[SEQUENCE],), blocks, _scale(q, options))
    return AttentionStrategy((q, k, v), out, out, _with_heads(ring, q, k))


def _outside_mesh(*_: Tensor) -> Tensor:
    raise RuntimeError("attention was run on a rank outside the mesh")


def _in_order(mesh: Any, axes: tuple[str, ...]) -> list[int]:
    """Return the ranks along these axes, including this one, by position."""
    return [int(rank) for rank in mesh[axes].ranks.flatten()]


def _runs(layout: Layout, options: AttentionOptions) -> list[Runs]:
    """Return the positions that each rank holds."""
    sizes = part_sizes(layout, len(layout.shape) + SEQUENCE)
    if not (options.balanced and options.is_causal):
        return contiguous(sizes)
    return list(balanced_runs(layout.shape[SEQUENCE], len(sizes)))


def _blocks(queries: Runs, keys: Runs, options: AttentionOptions) -> Sequence[Block]:
    if options.is_causal:
        return causal_blocks(queries, keys)
    rows, cols = (sum(stop - start for start, stop in runs) for runs in (queries, keys))
    return (Block(0, rows, 0, cols, False),) if rows and cols else ()


def _with_heads(ring: Ring, q: Layout, k: Layout) -> Run:
    """Select the key heads of this rank's query heads: all, a range, or one for each query head."""
    (a, b), (first, last) = q.box[HEADS], k.box[HEADS]
    group = _group(q, k)
    start, stop = (a // group, -(-b // group)) if a < b else (first, first)
    if (start, stop) == (first, last) and (b - a) == group * (stop - start):
        return ring
    if stop - start <= 1 or (a % group == 0 and b % group == 0):
        return lambda q, k, v: ring(
            q, *[x.narrow(HEADS, start - first, stop - start) for x in (k, v)]
        )
    heads = [head // group - first for head in range(a, b)]
    return lambda q, k, v: ring(
        q, *[x.index_select(HEADS, to_device(heads, torch.int64, x.device)) for x in (k, v)]
    )


# -- all_to_all ------------------------------------------------------------------------------------


def _all_to_all(
    q: Layout, k: Layout, v: Layout, out: Layout, options: AttentionOptions
) -> AttentionStrategy:
    """Return the strategy in which every rank has a share of the heads with the whole sequence."""
    group = _group(q, k)
    shares = _shares(q, k, options)
    axes = (*q.spec.dims[HEADS], *options.axes)
    targets = []
    for x, times in ((q, group), (k, 1), (v, 1), (out, group)):
        by_heads = Cut(axes, tuple([n * times for n in shares]))
        targets.append(_with_cuts(x, [*x.spec.cuts[:HEADS], [by_heads], ()]))
    attend = partial(_attend_whole, _runs(q, options), _runs(k, options), options, group)
    return AttentionStrategy((targets[0], targets[1], targets[2]), targets[3], out, attend)


def _shares(q: Layout, k: Layout, options: AttentionOptions) -> list[int]:
    """Return each rank's number of key heads: those of ranks that share a sequence, split evenly.

    Raises:
        ValueError: a rank would get none.
    """
    ranks = q.mesh.size(options.axes)
    axes = q.spec.dims[HEADS]
    known = (
        part_sizes(k, len(k.shape) + HEADS)
        if k.spec.dims[HEADS] == axes
        else even_sizes(k.shape[HEADS], q.mesh.size(axes) if axes else 1)
    )
    if min(known) < ranks and k.shape[HEADS]:
        over = f" (split over {axes})" if axes else ""
        raise ValueError(
            f"context_parallel_attention, method='all_to_all': {min(known)} of the "
            f"{k.shape[HEADS]} key heads{over} are too few for the {ranks} ranks of "
            f"{options.axes}; use method='ring' or 'all_gather', which split no heads, or at least "
            f"{ranks} heads"
        )
    return [n for heads in known for n in even_sizes(heads, ranks)]


def _attend_whole(
    of_q: Sequence[Runs],
    of_k: Sequence[Runs],
    options: AttentionOptions,
    group: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Tensor:
    """Run torch's attention on the whole sequence in its original order."""
    if not (options.balanced and options.is_causal):
        return attention_local(
            q, k, v, None, 0.0, options.is_causal, scale=options.scale, enable_gqa=group > 1
        )
    q_places, k_places = _positions(of_q, q), _positions(of_k, k)
    q, k, v = (
        x.index_select(SEQUENCE, at.argsort())
        for x, at in ((q, q_places), (k, k_places), (v, k_places))
    )
    out = attention_local(q, k, v, None, 0.0, True, scale=options.scale, enable_gqa=group > 1)
    return out.index_select(SEQUENCE, q_places)


def _positions(of_ranks: Sequence[Runs], x: Tensor) -> Tensor:
    """Return the original position of each row of the sequence."""
    return torch.cat(
        [torch.arange(start, stop, device=x.device) for runs in of_ranks for start, stop in runs]
    )


# -- checks ----------------------------------------------------------------------------------------


def _check_shapes(q: Layout, k: Layout, v: Layout) -> None:
    for other in (k, v):
        if other.mesh is not q.mesh:
            query_mesh, other_mesh = distinct_mesh_names(q.mesh, other.mesh)
            raise ValueError(
                f"context_parallel_attention: query, key and value are on two meshes, {query_mesh} "
                f"and {other_mesh}; move them to one mesh first"
            )
    why = _shape_error(q, k, v)
    if why:
        raise ValueError(f"context_parallel_attention: {why}; got query {q}, key {k}, value {v}")


def _shape_error(q: Layout, k: Layout, v: Layout) -> str:
    shapes = q.shape, k.shape, v.shape
    if min(map(len, shapes)) < 3 or len({len(shape) for shape in shapes}) > 1:
        return (
            "query, key and value must be [... heads positions features], with the same number of "
            "dims, at least 3"
        )
    if len({layout.dtype for layout in (q, k, v)}) > 1 or not q.dtype.is_floating_point:
        return (
            "query, key and value must have the same floating dtype; convert them with .to(dtype)"
        )
    if len({shape[:HEADS] for shape in shapes}) > 1:
        return (
            "dims before the heads must be the same, and they are "
            f"{[list(shape[:HEADS]) for shape in shapes]}; expand them first"
        )
    if q.shape[WIDTH] != k.shape[WIDTH] or k.shape[:WIDTH] != v.shape[:WIDTH]:
        return (
            "query and key must have the same number of features, key and value the same heads and "
            "positions"
        )
    heads, groups = q.shape[HEADS], k.shape[HEADS]
    if heads != groups and (not groups or heads % groups):
        return (
            f"the number of query heads, {heads}, must be a multiple of the number of key heads, "
            f"{groups}"
        )
    return ""


def _check_sequence(layout: Layout, options: AttentionOptions) -> None:
    """Raise unless the axes split the sequence, with `balanced` into parts of the right sizes."""
    mesh = layout.mesh
    dim = len(layout.shape) + SEQUENCE
    prefix = "context_parallel_attention: "
    unknown = [a for a in options.axes if a not in mesh.axis_names]
    if unknown or not options.axes:
        raise ValueError(
            f"{prefix}axis={options.axes!r} for {layout}; use one of {mesh.axis_names}"
        )
    if splitting_axes(layout, dim) != tuple(a for a in options.axes if mesh.size(a) > 1):
        axes = set(options.axes)
        target_cuts = [
            [cut for cut in cuts if axes.isdisjoint(cut.axes)] for cuts in layout.spec.cuts
        ]
        target_cuts[dim] = [Cut((a,)) for a in options.axes]
        raise ValueError(
            f"{prefix}the sequence, dim {dim} of {layout}, must be split over {options.axes} and "
            f"no other axis; redistribute it to {P.of_cuts(target_cuts, {})} first"
        )
    if options.balanced and options.is_causal:
        sizes = tuple(part_sizes(layout, dim))
        target_sizes = balanced_sizes(layout.shape[dim], mesh.size(options.axes))
        if sizes != target_sizes:
            raise ValueError(
                f"{prefix}balanced=True for {layout}, whose parts of the sequence have {sizes} "
                f"positions, but balanced parts have {target_sizes}; make it with "
                f"sm.parallel.balance_sequence(x, {dim}, {options.axes}), or leave balanced=True "
                "out"
            )
