"""Results of a mapped function.

Turn local parts into `ShardedTensor`s, and check them when a signature is new.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...mesh.comm.agreement import gather_facts
from ...mesh.comm.call_site import DESCRIBERS
from ...mesh.comm.group import Group
from ...mesh.comm.null import NullGroup
from ...mesh.device_mesh import DeviceMesh
from ..layout.layout import Layout, dtype_name
from ..layout.spec import P
from ..lineage import piece_of
from ..tensor.global_shape import shape_of_parts
from ..tensor.part_shapes import by_coordinate
from ..tensor.sharded_tensor import ShardedTensor
from ..trees import flatten, unflatten
from .inputs import check_manual, fitting_spec
from .replicas import sampled_digest
from .signature import STATIC
from .types.types import ShardingTypeError, Tag

T = TypeVar("T")


@dataclass(frozen=True)
class OutputSpec:
    """The layout of one result.

    Attributes:
        path: its name in messages.
        spec: its spec over the manual axes; None for a result that is not a tensor.
        shape: the shape of this rank's part.
        layout: its layout.
    """

    path: str
    spec: P | None
    shape: torch.Size | None = None
    layout: Layout | None = None


def wrap_outputs(name: str, out: Any, outputs: Sequence[OutputSpec], parts: Sequence[Any]) -> Any:
    """Return the results of a call whose signature is known, as `ShardedTensor`s.

    Raises: TypeError for results that differ in number, kind or shape from the previous call's.
    """
    if type(out) is Tensor and len(outputs) == 1:
        return _wrap_output(name, out, outputs[0], _identities(parts))
    leaves, tree = flatten(out)
    if len(leaves) != len(outputs):
        raise TypeError(
            f"{name} returned {len(leaves)} results, and {len(outputs)} in the previous call with "
            "this signature"
        )
    taken, pairs = _identities(parts), zip(leaves, outputs, strict=True)
    return unflatten(tree, [_wrap_output(name, x, spec, taken) for x, spec in pairs])


def with_lineage(lineage: int, out: Any) -> Any:
    """Set the lineage of each sharded result and return the results."""
    if type(out) is ShardedTensor:
        out._lineage = lineage
    elif out is not None:
        for i, x in enumerate(out if type(out) in (tuple, list) else pytree.tree_leaves(out)):
            if type(x) is ShardedTensor:
                x._lineage = piece_of(lineage, i)
    return out


def _identities(parts: Sequence[Any]) -> frozenset[int]:
    """Return the ids of the tensors that went in.

    A result that is one of them must be a new object, with a separate gradient.
    """
    return frozenset([id(p._local if type(p) is ShardedTensor else p) for p in parts])


def _wrap_output(name: str, x: Any, out_spec: OutputSpec, taken: frozenset[int]) -> Any:
    layout = out_spec.layout
    if layout is None or not isinstance(x, Tensor):
        check_kind(out_spec.path, x, out_spec.spec, False)
        return x
    if x.shape != out_spec.shape or x.dtype is not layout.dtype:
        layout = _layout_of_new_shape(name, x, out_spec, layout)
    if type(x) is ShardedTensor:
        x = x._local
    return ShardedTensor._make(x.view_as(x) if id(x) in taken else x, layout)


def _layout_of_new_shape(name: str, x: Tensor, out_spec: OutputSpec, layout: Layout) -> Layout:
    """Return the layout of a result whose shape or dtype differs from the previous call's.

    Raises: TypeError if its global shape is not known without communication.
    """
    if x.shape != out_spec.shape:
        if any(out_spec.spec.dims if out_spec.spec is not None else ()):
            raise TypeError(
                f"{out_spec.path} of {name} has the local shape {list(x.shape)}, and had "
                f"{list(out_spec.shape or ())} in the previous call with this signature: ranks "
                "exchange shapes only once per signature. Pad it to one shape, or pass what its "
                "shape depends on as a static argument"
            )
        layout = layout.replace(shape=x.shape)
    return layout.replace(dtype=x.dtype)


# -- the first call --------------------------------------------------------------------------------


def check_kind(path: str, x: Any, spec: Any, partly: bool) -> None:
    """Raise TypeError if a result is not of the kind that its spec describes."""
    if isinstance(x, Tensor) and spec in (None, STATIC):
        raise TypeError(
            f"{path} is a tensor, and its out_specs are None, which is for other objects; write a "
            "P (P() if replicated)"
        )
    if isinstance(x, ShardedTensor) and not partly:
        raise TypeError(
            f"{path} is a ShardedTensor, {x._layout}; a mapped function returns local parts"
        )
    if partly and isinstance(x, Tensor) and not isinstance(x, ShardedTensor):
        raise TypeError(
            f"{path} is a plain tensor, and some axes are not manual: return a ShardedTensor on "
            "the mesh of those"
        )


def resolve_output_spec(
    path: str, x: Any, spec: Any, mesh: DeviceMesh, names: Sequence[str], partly: bool
) -> P | None:
    """Return the spec of a result over the manual axes, or None for a result that is not a tensor.

    Raises: TypeError or ValueError if it does not fit.
    """
    check_kind(path, x, spec, partly)
    if not isinstance(x, Tensor):
        return None
    spec = fitting_spec(path, spec, mesh, x.ndim)
    check_manual(path, spec, names)
    return spec


def check_type(path: str, spec: P, tag: Tag, names: Iterable[str]) -> None:
    """Raise ShardingTypeError if the type of a result contradicts its spec."""
    split = {axis for axes in spec.dims for axis in axes}
    pending = {axis for axis, _ in spec.unreduced}
    for axis in names:
        varies, pends = axis in tag.type.varying, axis in tag.type.pending
        if pends and axis not in pending:
            raise ShardingTypeError(
                f"{path} is pending over {axis!r}, each rank holding a share of a sum, and "
                f"out_specs {spec} do not say so; psum or psum_scatter it over {axis!r}, or write "
                f"unreduced={{{axis!r}}}. It is pending{tag.since((axis,))}"
            )
        if varies and axis not in split | pending:
            raise ShardingTypeError(
                f"{path} varies over {axis!r}, and out_specs {spec} say that it is the same on "
                f"every rank. It varies since {tag.origins[axis]}. Make it the same (psum, pmean, "
                f"all_gather over {axis!r}), or name {axis!r} in its spec: on one of its dims, or "
                f"as unreduced={{{axis!r}}} if it is to be summed"
            )
        if axis in pending and not (varies or pends):
            raise ShardingTypeError(
                f"{path} is the same on every rank along {axis!r}, and out_specs {spec} declare it "
                f"a sum over {axis!r}; write pcast(x, {axis!r}, to='unreduced') if the sum is to "
                "be this value"
            )


def infer_outputs(
    paths: Sequence[str],
    specs: Sequence[P | None],
    leaves: Sequence[Any],
    error: Exception | None,
    mesh: DeviceMesh,
    manual_mesh: DeviceMesh,
    compare: bool,
) -> list[OutputSpec]:
    """Return the layouts of the results of the first call with a signature.

    After an exchange of their shapes.

    Args:
        error: an error of this rank's results; then every rank raises.
        compare: also compare the values of replicated results: numbers read from the shapes of
            uneven parts, from varying values or from outside the function may differ between ranks
            without any effect on types.

    Communication: a small all_gather over the manual axes; none in a null world.
    """
    group = manual_mesh.group(manual_mesh.axis_names)
    text = None if error is None else f"{type(error).__name__}: {error}"
    by_rank = _gather_facts(group, (text, [_describe_result(x, compare) for x in leaves]))
    _raise_for_all(error, {rank: text for rank, (text, _) in by_rank.items()})
    _check_alike({rank: [x is not None for x in facts] for rank, (_, facts) in by_rank.items()})
    outputs = []
    for i, (path, spec, x) in enumerate(zip(paths, specs, leaves, strict=True)):
        if spec is None:
            outputs.append(OutputSpec(path, None))
            continue
        facts = by_coordinate(manual_mesh, {rank: each[1][i] for rank, each in by_rank.items()})
        parts = {place: fact[:-1] for place, fact in facts.items()}
        layout = _result_layout(path, spec, x, parts, mesh, manual_mesh)
        _check_equal(path, spec, facts, manual_mesh)
        outputs.append(OutputSpec(path, spec, x.shape, layout))
    return outputs


def share_error(name: str, error: Exception, manual_mesh: DeviceMesh) -> None:
    """Send an error inside the function to the other ranks, in `infer_outputs`.

    Where parts differ in shape, other ranks may have none.

    Raises: the error.

    Communication: a small all_gather over the manual axes.
    """
    infer_outputs([f"shard_map({name}): f"], [], [], error, manual_mesh, manual_mesh, False)


def _gather_facts(group: Group, facts: T) -> dict[int, T]:
    """Return the facts of every rank.

    A null world has no other ranks: each is taken to be like this one, and nothing is counted, so
    that a program's report there shows calls with known signatures.
    """
    if isinstance(group, NullGroup):
        return dict.fromkeys(group.ranks, facts)
    return gather_facts(group, facts)


# In reports of communication the call has the name of the mapped function.
DESCRIBERS[infer_outputs.__code__] = lambda frame: (
    frame["paths"][0].partition(":")[0] if frame["paths"] else "shard_map"
)


def _describe_result(x: Any, compare: bool) -> Any:
    """Return the facts about a result that other ranks need.

    Dtype, shape, and a digest of its values if they are to be compared.
    """
    if not isinstance(x, Tensor):
        return None
    values = (sampled_digest(x), x.requires_grad) if compare else None
    return dtype_name(x.dtype), *x.shape, values


def _raise_for_all(error: Exception | None, texts: dict[int, str | None]) -> None:
    """Raise the error of this rank, or else that of another one."""
    if error is not None:
        raise error
    bad = next((rank for rank, text in texts.items() if text is not None), None)
    if bad is not None:
        raise ShardingTypeError(f"on rank {bad}: {texts[bad]}")


def _check_alike(tensors: dict[int, list[bool]]) -> None:
    """Raise ShardingTypeError if ranks returned different kinds or numbers of results.

    One kind are tensors, the other any other object.
    """
    first, *others = tensors
    other = next((rank for rank in others if tensors[rank] != tensors[first]), None)
    if other is not None:
        texts = []
        for rank in (first, other):
            kinds = ["a tensor" if is_tensor else "no tensor" for is_tensor in tensors[rank]]
            texts.append(f"rank {rank}: [{', '.join(kinds)}]")
        message = ", ".join(texts)
        raise ShardingTypeError(
            f"ranks returned different numbers or kinds of results ({message}); return the same "
            "tree on every rank"
        )


def _check_equal(
    path: str, spec: P, parts: dict[tuple[int, ...], Any], manual_mesh: DeviceMesh
) -> None:
    """Raise ShardingTypeError if the values of ranks that should be equal differ."""
    named = [manual_mesh.axis_index(axis) for axis in spec.axes]
    first: dict[Any, Any] = {}
    for place, part in parts.items():
        if first.setdefault(tuple(place[i] for i in named), part[-1]) != part[-1]:
            raise ShardingTypeError(
                f"{path}: by its type it is the same on every rank of {spec}, and at {place} it "
                "differs: it depends on numbers that differ between ranks (read from shapes of "
                "parts, from varying values, or from outside); compute it from values that are the "
                "same"
            )


def _result_layout(
    path: str,
    spec: P,
    x: Tensor,
    parts: dict[tuple[int, ...], tuple[Any, ...]],
    mesh: DeviceMesh,
    manual_mesh: DeviceMesh,
) -> Layout:
    """Return the layout of a result.

    Args:
        path: its name in messages.
        spec: its spec over the manual axes.
        x: this rank's part.
        parts: dtype and shape of every rank's part, by coordinate on the manual axes.
        mesh: the mesh.
        manual_mesh: the mesh of the manual axes.

    Raises: ValueError, on every rank, if the parts do not make up a tensor with this spec.
    """
    try:
        whole = shape_of_parts(parts, spec, manual_mesh)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(x, ShardedTensor):
        return Layout.of(mesh, spec, whole, x.dtype)
    inner = x._layout.spec
    dims = [(*axes, *more) for axes, more in zip(spec.padded(x.ndim).dims, inner.dims, strict=True)]
    unreduced = {**dict(spec.unreduced), **dict(inner.unreduced)}
    both = P(*dims, unreduced=unreduced, sizes=dict(spec.sizes))
    return Layout.of(mesh, both, whole, x.dtype)
