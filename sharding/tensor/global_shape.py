"""The global shape of a tensor from the local shapes of all ranks.

Ranks exchange the shapes of their parts, and skip the exchange while nothing changes. A rank only
sees changes of its own part, so it can skip only if parts were equal: if all parts were equal the
previous time on this line, and mine is unchanged, then either no part has changed, or some rank
exchanges shapes now, alone, and its collective does not match those of the others. That is an error
(docs/debugging.md), not a wrong shape. Uneven parts are exchanged at every call, since some may
change while others do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...kernels.box import box_shape
from ...mesh.comm.call_site import call_path
from ...mesh.comm.group import Group
from ...mesh.comm.recording.recorder import CommTag
from ...mesh.device_mesh import DeviceMesh
from ..layout.bounded_cache import keep
from ..layout.layout import Layout
from ..layout.spec import P, SpecLike, as_spec
from .part_shapes import (
    PartShape,
    are_of_one_kind,
    by_coordinate,
    joined_parts,
    part_shapes,
    parts_text,
)

_TAG = CommTag(
    "shapes of parts (equal parts that become unequal need from_local(shape=) or "
    'shape_check="always")'
)


class _KnownShapes:
    """The shapes that a group has exchanged.

    Attributes:
        known: by signature, the shape of each part (None if the spec states the sizes of all) and
            the global shape, None if the next call must exchange again.
        calls: number of calls; the same on all ranks, whether they exchanged shapes or not.
    """

    def __init__(self) -> None:
        self.known: dict[Any, tuple[tuple[int, ...] | None, tuple[int, ...] | None]] = {}
        self.calls = 0


def global_shape(
    local: Tensor, mesh: DeviceMesh, placements: SpecLike, check: bool | str = True
) -> tuple[int, ...]:
    """Return the global shape: the sum of all local shapes, or what the placements' sizes state.

    Args:
        check: when ranks exchange shapes, as `from_local` says.

    Raises:
        ValueError: on every rank that exchanges shapes, if the parts are not those that the
            placements say.

    Communication: a small all_gather of shapes over the axes that split something, if they are
    exchanged.
    """
    spec = as_spec(placements, mesh.axis_names, local.ndim)
    stated = _shape_with_sizes(spec, local.shape)
    # Raises for wrong placements before any communication.
    Layout.of(mesh, spec, stated, local.dtype)
    split = tuple(axis for axes in spec.dims for axis in axes if mesh.size(axis) > 1)
    if not split:
        return stated
    if check is False or mesh.coordinate is None:
        return _shape_with_sizes(
            spec,
            [
                n * mesh.size(axes) if axes else n
                for n, axes in zip(local.shape, spec.dims, strict=True)
            ],
        )
    group = mesh.group(split)
    shapes: _KnownShapes = group.agreed.setdefault(_KnownShapes, _KnownShapes())
    shapes.calls += 1
    other_dims = tuple(n for n, axes in zip(local.shape, spec.dims, strict=True) if not axes)
    signature = None if check == "always" else (call_path(), spec, local.dtype, other_dims)
    part, shape = shapes.known.get(signature, (None, None))
    if shape is not None and part in (None, local.shape):
        return shape
    parts = by_coordinate(mesh, _exchange_shapes(group, shapes.calls, local))
    shape = shape_of_parts(parts, spec, mesh)
    if signature is not None:
        sizes = {axes[0] for axes, _ in spec.sizes}
        if all(axes[0] in sizes for axes in spec.dims if axes):
            known: Any = None, shape
        else:
            known = local.shape, shape if len(set(parts.values())) == 1 else None
        keep(shapes.known, signature, known)
    return shape


def _exchange_shapes(group: Group, call: int, local: Tensor) -> dict[int, PartShape]:
    """Exchange the dtype and shape of each rank's part.

    Raises:
        RuntimeError: on every rank, if ranks exchange them for different calls.
    """
    parts = part_shapes(group, local, call, tag=_TAG)
    if len({number for number, *_ in parts.values()}) > 1:
        by_rank = ", ".join(
            f"rank {r}: call {number}, {d}{shape}" for r, (number, d, *shape) in parts.items()
        )
        raise RuntimeError(
            f"ranks exchange shapes for different calls of from_local ({by_rank}): in an earlier "
            f"call equal parts changed on some ranks "
            'and not on others; pass shape=, or shape_check="always" if parts are only sometimes '
            "equal"
        )
    return {rank: tuple(part) for rank, (_, *part) in parts.items()}


def shape_of_parts(
    parts: dict[tuple[int, ...], tuple[Any, ...]], spec: P, mesh: DeviceMesh
) -> tuple[int, ...]:
    """Return the global shape of the tensor that these parts make up, or that the sizes state.

    Args:
        parts: coordinate -> dtype and shape of a part, at least for all ranks along the axes that
            split something.
        spec: with an entry for each dim.
        mesh: the mesh.

    Raises:
        ValueError: the parts are not those of the spec.
    """
    by_rank = parts_text({int(mesh.ranks[c]): part for c, part in parts.items()})
    if not are_of_one_kind(parts):
        raise ValueError(f"the local tensors differ in dtype or number of dims ({by_rank})")
    everyone: Any = {place: tuple(shape) for place, (_, *shape) in parts.items()}
    ndim = len(next(iter(everyone.values())))
    shape = _shape_with_sizes(
        spec, [_sum_of_parts(everyone, mesh, spec, dim) for dim in range(ndim)]
    )
    layout = Layout.of(mesh, spec, shape)
    if not describes(layout, everyone):
        boxes = [list(box_shape(layout.box_at(coordinate))) for coordinate in everyone]
        raise ValueError(
            f"the local tensors ({by_rank}) add up to {list(shape)}, but {layout.spec} cuts that "
            f"into {boxes}: {_better_sizes(layout, everyone)}pass parts of these shapes"
        )
    return shape


def _shape_with_sizes(spec: P, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape with the length of each dim that has sizes replaced by their sum."""
    known = {axes[0]: sum(sizes) for axes, sizes in spec.sizes}
    return tuple(
        known.get(axes[0], n) if axes else n for axes, n in zip(spec.dims, shape, strict=True)
    )


def describes(layout: Layout, shapes: dict[tuple[int, ...], tuple[int, ...]]) -> bool:
    """Return True if the boxes at these coordinates have these shapes."""
    return all(
        box_shape(layout.box_at(coordinate)) == shape for coordinate, shape in shapes.items()
    )


def _better_sizes(layout: Layout, shapes: dict[tuple[int, ...], tuple[int, ...]]) -> str:
    """Return advice for the error: sizes under which these would be the parts, if there are any."""
    if layout.spec.sizes:
        return ""
    sizes, shape = joined_parts(layout.mesh, layout.spec.dims, shapes)
    ragged = layout.replace(
        P(*layout.spec.dims, unreduced=layout.pending, sizes=sizes), shape=shape
    )
    if not describes(ragged, shapes):
        return "parts are cut as torch.chunk cuts, equal ones first; "
    return (
        "parts are cut as torch.chunk cuts, equal ones first, unless Shard(dim, sizes=...) says "
        f"how long each is; write {list(ragged.placements)}, or "
    )


def _sum_of_parts(shapes: dict[Any, tuple[int, ...]], mesh: DeviceMesh, spec: P, dim: int) -> int:
    """Return the global size of one dim.

    The sum over the axes that split it, at the first coordinate of all other axes.
    """
    split_axes = {mesh.axis_index(a) for a in spec.dims[dim]}
    first = next(iter(shapes))
    return sum(
        s[dim]
        for c, s in shapes.items()
        if all(i in split_axes or c[i] == b for i, b in enumerate(first))
    )
