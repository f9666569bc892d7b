"""How the results of a mapped function come out: parts become `ShardedTensor`s."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...mesh.comm.call_site import DESCRIBERS
from ...mesh.comm.group import Group
from ...mesh.comm.null import NullGroup
from ...mesh.device_mesh import DeviceMesh
from ..layout.layout import Layout, dtype_name
from ..layout.spec import P
from ..ops.lineage import piece_of
from ..tensor.global_shape import shape_of_parts
from ..tensor.sharded_tensor import ShardedTensor
from .inputs import check_manual, fitting_spec
from .replicas import sampled_digest
from .signature import STATIC, flattened, rebuilt
from .types.types import ShardingTypeError, Tag


@dataclass(frozen=True)
class Exit:
    """How one result comes out.

    Attributes:
        path: how to name it.
        spec: how it lies over the manual axes; None for what is no tensor.
        shape: of this rank's part.
        layout: of the result.
    """

    path: str
    spec: P | None
    shape: torch.Size | None = None
    layout: Layout | None = None


def wrapped(name: str, out: Any, exits: Sequence[Exit], parts: Sequence[Any]) -> Any:
    """The results of a call whose signature is known.

    Raises: TypeError for results that are not like those of the call before.
    """
    if type(out) is Tensor and len(exits) == 1:
        return _wrapped_one(name, out, exits[0], _identities(parts))
    leaves, tree = flattened(out)
    if len(leaves) != len(exits):
        raise TypeError(f"{name} returned {len(leaves)} results, and {len(exits)} when it was called with this signature before")
    taken = _identities(parts)
    return rebuilt(tree, [_wrapped_one(name, x, way, taken) for x, way in zip(leaves, exits, strict=True)])


def made_with(lineage: int, out: Any) -> Any:
    """The results, known to have been made of what the function was called with."""
    if type(out) is ShardedTensor:
        out._lineage = lineage
    elif out is not None:
        for i, x in enumerate(out if type(out) in (tuple, list) else pytree.tree_leaves(out)):
            if type(x) is ShardedTensor:
                x._lineage = piece_of(lineage, i)
    return out


def _identities(parts: Sequence[Any]) -> frozenset[int]:
    """The tensors that went in: one that comes out again must be another object, with a gradient of its own."""
    return frozenset([id(p._local if type(p) is ShardedTensor else p) for p in parts])


def _wrapped_one(name: str, x: Any, way: Exit, taken: frozenset[int]) -> Any:
    layout = way.layout
    if layout is None or not isinstance(x, Tensor):
        check_kind(way.path, x, way.spec, False)
        return x
    if x.shape != way.shape or x.dtype is not layout.dtype:
        layout = _like_before(name, x, way, layout)
    if type(x) is ShardedTensor:
        x = x._local
    return ShardedTensor._make(x.view_as(x) if id(x) in taken else x, layout)


def _like_before(name: str, x: Tensor, way: Exit, layout: Layout) -> Layout:
    """The layout of a result of another shape or dtype than before.

    Raises: TypeError where its global shape is not known without asking other ranks.
    """
    if x.shape != way.shape:
        if any(way.spec.dims if way.spec is not None else ()):
            raise TypeError(
                f"{way.path} of {name} has the local shape {list(x.shape)}, and had {list(way.shape or ())} when it was called with this "
                "signature before: ranks would have to ask each other at every call. Return it padded to one shape, or make what its shape "
                "depends on a static argument"
            )
        layout = layout.replace(shape=x.shape)
    return layout.replace(dtype=x.dtype)


# -- the first time ----------------------------------------------------------------------------------------------------


def check_kind(path: str, x: Any, spec: Any, partly: bool) -> None:
    """Raises: TypeError where a result is not of the kind that its spec says."""
    if isinstance(x, Tensor) and spec in (None, STATIC):
        raise TypeError(f"{path} is a tensor, and its out_specs are None, which is for what is no tensor; write a P (P() if replicated)")
    if isinstance(x, ShardedTensor) and not partly:
        raise TypeError(f"{path} is a ShardedTensor, {x._layout}; a mapped function works on parts and returns parts")
    if partly and isinstance(x, Tensor) and not isinstance(x, ShardedTensor):
        raise TypeError(f"{path} is a plain tensor, and some axes are not manual: make it a ShardedTensor on the mesh of these")


def checked_spec(path: str, x: Any, spec: Any, mesh: DeviceMesh, names: Sequence[str], partly: bool) -> P | None:
    """The spec of a result over the manual axes, or None for what is no tensor.

    Raises: TypeError or ValueError where it does not fit.
    """
    check_kind(path, x, spec, partly)
    if not isinstance(x, Tensor):
        return None
    found = fitting_spec(path, spec, mesh, x.ndim)
    check_manual(path, found, names)
    return found


def check_type(path: str, spec: P, tag: Tag, names: Iterable[str]) -> None:
    """Raises: ShardingTypeError where a result is not of the type that its spec says."""
    split, pending = {axis for axes in spec.dims for axis in axes}, {axis for axis, _ in spec.unreduced}
    for axis in names:
        varies, pends = axis in tag.type.varying, axis in tag.type.pending
        if pends and axis not in pending:
            raise ShardingTypeError(
                f"{path} is pending over {axis!r}, each rank holding a share of a sum, and out_specs {spec} do not say so; psum or "
                f"psum_scatter it over {axis!r}, or write unreduced={{{axis!r}}}. It is pending{tag.since((axis,))}"
            )
        if varies and axis not in split | pending:
            raise ShardingTypeError(
                f"{path} varies over {axis!r}, and out_specs {spec} say that it is the same on every rank. It varies since "
                f"{tag.origins[axis]}. Make it the same (psum, pmean, all_gather over {axis!r}), or say how it lies: {axis!r} on one of "
                f"its dims, or unreduced={{{axis!r}}} if it is to be summed"
            )
        if axis in pending and not (varies or pends):
            raise ShardingTypeError(
                f"{path} is the same on every rank along {axis!r}, and out_specs {spec} would have {axis!r} sum it up; write "
                f"pcast(x, {axis!r}, to='unreduced') if the sum is to be this value"
            )


def first_exits(
    paths: Sequence[str], specs: Sequence[P | None], leaves: Sequence[Any], error: Exception | None, mesh: DeviceMesh, own: DeviceMesh,
    compare: bool,
) -> list[Exit]:  # fmt: skip
    """How the results of the first call with a signature come out: ranks tell each other the shapes of their parts.

    Args:
        error: what is wrong with them, which every rank then raises.
        compare: also compare the values of results that are replicated: numbers read from the shapes of uneven parts, from varying
            values or from outside may differ between ranks, and no type shows it.

    Communication: a small all_gather over the manual axes; none in a null world.
    """
    group, text = own.group(own.axis_names), None if error is None else f"{type(error).__name__}: {error}"
    by_rank = dict(zip(group.ranks, _exchanged(group, (text, [_described(x, compare) for x in leaves])), strict=True))
    everyone: dict[Any, Any] = {own.coordinate_of(r): each for r, each in by_rank.items()}
    _raise_for_all(error, {r: each[0] for r, each in by_rank.items()})
    _check_alike({r: [part is not None for part in each[1]] for r, each in by_rank.items()})
    found = []
    for i, (path, spec, x) in enumerate(zip(paths, specs, leaves, strict=True)):
        if spec is None:
            found.append(Exit(path, None))
            continue
        parts = {place: each[1][i] for place, each in everyone.items()}
        layout = _result_layout(path, spec, x, {place: part[:-1] for place, part in parts.items()}, mesh, own)
        _check_equal(path, spec, parts, own)
        found.append(Exit(path, spec, x.shape, layout))
    return found


def tell_error(name: str, error: Exception, own: DeviceMesh) -> None:
    """Tell the other ranks of an error inside the function, which may be this rank's alone where parts differ in shape. They hear of it
    in `first_exits`.

    Raises: the error.

    Communication: a small all_gather over the manual axes.
    """
    first_exits([f"shard_map({name}): f"], [], [], error, own, own, False)


def _exchanged(group: Group, told: Any) -> list[Any]:
    """What every rank tells. In a null world nobody is there to ask: all are like this one, and nothing is counted, so that what a
    program moves when its signatures are known can be read there."""
    return [told] * group.size if isinstance(group, NullGroup) else group.all_gather_object(told)


def _name(frame: dict[str, Any]) -> str:
    """The mapped function, for reports of communication."""
    return frame["paths"][0].partition(":")[0] if frame["paths"] else "shard_map"


DESCRIBERS[first_exits.__code__] = _name


def _described(x: Any, compare: bool) -> Any:
    """What other ranks need to know of a result: dtype, shape, and what its values are if they are to be compared."""
    return (dtype_name(x.dtype), *x.shape, (sampled_digest(x), x.requires_grad) if compare else None) if isinstance(x, Tensor) else None


def _raise_for_all(error: Exception | None, texts: dict[int, str | None]) -> None:
    """Raises: the error of this rank, or else that of another one."""
    if error is not None:
        raise error
    bad = next((rank for rank, text in texts.items() if text is not None), None)
    if bad is not None:
        raise ShardingTypeError(f"on rank {bad}: {texts[bad]}")


def _check_alike(tensors: dict[int, list[bool]]) -> None:
    """Raises: ShardingTypeError where ranks returned another number of results, or a tensor where others did not."""
    first, *others = tensors
    odd = next((rank for rank in others if tensors[rank] != tensors[first]), None)
    if odd is not None:
        told = ", ".join(f"rank {rank}: {_kinds(tensors[rank])}" for rank in (first, odd))
        raise ShardingTypeError(f"ranks returned different numbers or kinds of results ({told}); return the same tree on every rank")


def _kinds(tensors: list[bool]) -> str:
    return "[" + ", ".join("a tensor" if is_tensor else "no tensor" for is_tensor in tensors) + "]"


def _check_equal(path: str, spec: P, parts: dict[tuple[int, ...], Any], own: DeviceMesh) -> None:
    """Raises: ShardingTypeError where a rank's values are not those of another one that should hold the same."""
    named = [own.axis_index(axis) for axis in spec.axes]
    first: dict[Any, Any] = {}
    for place, part in parts.items():
        held = first.setdefault(tuple(place[i] for i in named), part[-1])
        if held != part[-1]:
            raise ShardingTypeError(
                f"{path}: by its type it is the same on every rank of {spec}, and at {place} it is not: it depends on numbers that differ "
                "between ranks (read from shapes of parts, from varying values, or from outside); compute it from what is the same on all"
            )


def _result_layout(
    path: str, spec: P, x: Tensor, parts: dict[tuple[int, ...], tuple[Any, ...]], mesh: DeviceMesh, own: DeviceMesh
) -> Layout:
    """The layout of a result.

    Args:
        path: how to name it.
        spec: how it lies over the manual axes.
        x: this rank's part.
        parts: by coordinate on the manual axes, dtype and shape of every rank's part.
        mesh: the mesh.
        own: the mesh of the manual axes.

    Raises: ValueError, on every rank, where the parts do not make up a tensor that is cut so.
    """
    try:
        whole = shape_of_parts(parts, spec, own)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(x, ShardedTensor):
        return Layout.of(mesh, spec, whole, x.dtype)
    inner = x._layout.spec
    dims = [(*axes, *more) for axes, more in zip(spec.padded(x.ndim).dims, inner.dims, strict=True)]
    return Layout.of(mesh, P(*dims, unreduced={**dict(spec.unreduced), **dict(inner.unreduced)}, sizes=dict(spec.sizes)), whole, x.dtype)
