"""Hypothesis strategies: meshes, shapes and layouts with uneven, ragged, empty, reordered and
pending parts.
"""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import strategies as st

import shardmesh as sm

AXES = ("a", "b", "c", "d")
MESH_SHAPES = [
    (1,),
    (2,),
    (3,),
    (4,),
    (8,),
    (2, 2),
    (1, 3),
    (3, 2),
    (2, 4),
    (2, 2, 2),
    (2, 1, 3),
    (2, 1, 2, 2),
]
SIZES = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 12])

mesh_shapes = st.sampled_from(MESH_SHAPES)


@st.composite
def shapes(draw: st.DrawFn, max_dims: int = 4) -> tuple[int, ...]:
    """Draw global shapes of at most 600 elements."""
    shape = tuple(draw(SIZES) for _ in range(draw(st.integers(0, max_dims))))
    return shape if math.prod(shape) <= 600 else shape[:1]


@st.composite
def specs(
    draw: st.DrawFn, names: tuple[str, ...], ndim: int, kinds: tuple[str, ...] = ("sum",)
) -> sm.P:
    """Draw any spec on these axes: each axis shards a dim, is pending, or is unused; axes of a dim
    in any order.
    """
    dims: list[list[str]] = [[] for _ in range(ndim)]
    pending = []
    kind = draw(st.sampled_from(kinds)) if kinds else None
    for axis in draw(st.permutations(names)):
        what = draw(st.integers(-2 if kind else -1, ndim - 1))
        if what >= 0:
            dims[what].append(axis)
        elif what == -2:
            pending.append(axis)
    return sm.P(*map(tuple, dims), unreduced=dict.fromkeys(pending, kind) if kind else ())


@st.composite
def lengths(draw: st.DrawFn, total: int, parts: int) -> tuple[int, ...]:
    """Draw this many parts of any lengths with sum `total`."""
    cuts = sorted(draw(st.lists(st.integers(0, total), min_size=parts - 1, max_size=parts - 1)))
    return tuple(stop - start for start, stop in pairwise([0, *cuts, total]))


@st.composite
def ragged_specs(
    draw: st.DrawFn,
    mesh: sm.AbstractMesh,
    shape: tuple[int, ...],
    kinds: tuple[str, ...] = ("sum",),
) -> sm.P:
    """Draw any spec on this mesh; some dims are split into parts of any lengths, by one axis or by
    several jointly.
    """
    spec = draw(specs(mesh.axis_names, len(shape), kinds))
    sizes = {}
    for axes, size in zip(spec.dims, shape, strict=True):
        if joint := axes[: draw(st.integers(0, len(axes)))]:
            sizes[joint] = draw(lengths(size, mesh.size(joint)))
    return sm.P(*spec.dims, unreduced=dict(spec.unreduced), sizes=sizes)


@st.composite
def moves(
    draw: st.DrawFn, kinds: tuple[str, ...] = ("sum",)
) -> tuple[tuple[int, ...], tuple[int, ...], sm.P, sm.P]:
    """Draw a mesh shape, a tensor shape and two specs."""
    mesh_shape, shape = draw(mesh_shapes), draw(shapes())
    names = AXES[: len(mesh_shape)]
    return (
        mesh_shape,
        shape,
        draw(specs(names, len(shape), kinds)),
        draw(specs(names, len(shape), kinds)),
    )


@st.composite
def ragged_moves(
    draw: st.DrawFn, kinds: tuple[str, ...] = ("sum",)
) -> tuple[tuple[int, ...], tuple[int, ...], sm.P, sm.P]:
    """Draw a mesh shape, a tensor shape and two specs that may be ragged."""
    mesh_shape, shape = draw(mesh_shapes), draw(shapes())
    mesh = sm.AbstractMesh(mesh_shape, AXES[: len(mesh_shape)])
    return (
        mesh_shape,
        shape,
        draw(ragged_specs(mesh, shape, kinds)),
        draw(ragged_specs(mesh, shape, kinds)),
    )
