"""Arguments of a mapped function.

The layout that each must have, and the part of it that the function receives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...mesh.comm.call_site import DESCRIBERS, OperatorCall
from ...mesh.device_mesh import DeviceMesh
from ..autograd.engine_hooks import innermost, is_transformed, untransformed
from ..autograd.named_axes import current_axis_env
from ..autograd.transforms import refuse_foreign
from ..layout.layout import Layout
from ..layout.spec import P, as_spec
from ..redistribute.autograd import redistribute_local, redistribute_locals
from ..tensor.autograd.local_part import known_local
from ..tensor.convert import from_local
from ..tensor.sharded_tensor import ShardedTensor
from .keys import Key
from .signature import STATIC
from .types.types import REPLICATED, ShardingTypeError, Type


@dataclass(frozen=True)
class InputSpec:
    """The layout of one argument.

    Attributes:
        path: its name in messages.
        src: its layout; None for a static argument.
        dst: the layout that it must have.
        auto_layout: the layout of this rank's part on the axes that stay global; None if there are
            none.
        type: its type inside.
    """

    path: str
    src: Layout | None = None
    dst: Layout | None = None
    auto_layout: Layout | None = None
    type: Type = REPLICATED

    @property
    def passes_through(self) -> bool:
        """Whether the local tensor is passed unchanged."""
        return self.src is not None and self.src is self.dst and self.auto_layout is None

    @property
    def uneven(self) -> bool:
        """Whether the ranks' parts differ in shape."""
        dst = self.dst
        if dst is None:
            return False
        cut = zip(dst.shape, dst.spec.dims, strict=True)
        return bool(dst.spec.sizes) or any(n % dst.mesh.size(axes) for n, axes in cut if axes)


def make_input_spec(
    path: str,
    leaf: Any,
    spec: Any,
    mesh: DeviceMesh,
    names: Sequence[str],
    auto_mesh: DeviceMesh | None,
) -> InputSpec:
    """Return the input spec of a leaf for a spec of the manual axes.

    If that is None, the leaf keeps its layout.

    Raises:
        TypeError: a sharded tensor passed as static.
        ValueError: a tensor on another mesh, or a spec that does not fit.
    """
    if not isinstance(leaf, Tensor) or spec is STATIC:
        if isinstance(leaf, ShardedTensor):
            raise TypeError(
                f"{path} is sharded, {leaf._layout}, and its spec is None, which is for static "
                "arguments; write a P"
            )
        _check_no_parts(path, leaf, spec)
        return InputSpec(path)
    is_sharded = isinstance(leaf, ShardedTensor)
    src = leaf._layout if is_sharded else Layout.of(mesh, P(), leaf.shape, leaf.dtype)
    if src.mesh is not mesh:
        raise ValueError(
            f"{path} is on {src.mesh}, and the function is mapped over {mesh}; redistribute it "
            "there first"
        )
    if spec is None:
        manual = restrict_to_axes(src.spec, names)
    else:
        manual = fitting_spec(path, spec, mesh, len(src.shape))
    check_manual(path, manual, names)
    _check_sums(path, manual)
    with _error_with_path(path):
        dst = src.replace(_with_global(manual, src.spec, names))
    part = None if auto_mesh is None else inner_layout(dst, manual, names, auto_mesh)
    varying = frozenset(axis for axes in manual.dims for axis in axes)
    pending = frozenset(axis for axis, _ in manual.unreduced)
    return InputSpec(path, src, dst, part, Type.of(varying, pending))


def fitting_spec(path: str, spec: Any, mesh: DeviceMesh, ndim: int) -> P:
    """Return the spec as a `P` with an entry for each dim.

    Raises: ValueError, with the path, if it does not fit the mesh or the tensor.
    """
    with _error_with_path(path):
        return as_spec(spec, mesh.axis_names, ndim)


@contextmanager
def _error_with_path(path: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _check_no_parts(path: str, leaf: Any, spec: Any) -> None:
    """Raise TypeError for an object, such as an array or a dataclass, whose spec would split it."""
    cut = isinstance(spec, P) and spec.axes
    if cut and not isinstance(leaf, (Tensor, Key, str, int, float, complex, type(None))):
        raise TypeError(
            f"{path} is a {type(leaf).__name__}, neither a tensor nor a tree of tensors that torch "
            f"knows, and {spec} would split it; pass its tensors, or give it the spec None to pass "
            "it unchanged"
        )


def restrict_to_axes(spec: P, names: Sequence[str]) -> P:
    """Return the part of a spec that names these axes."""
    if set(spec.axes) <= set(names):
        return spec
    pending = {axis: kind for axis, kind in spec.unreduced if axis in names}
    return P(*[[axis for axis in axes if axis in names] for axes in spec.dims], unreduced=pending)


def check_manual(path: str, spec: P, names: Sequence[str]) -> None:
    """Raise ValueError if a spec names an axis that is not manual."""
    other = [axis for axis in spec.axes if axis not in names]
    if other:
        raise ValueError(
            f"{path}: {spec} names {other[0]!r}, and the manual axes are {list(names)}; specs name "
            "manual axes only"
        )


def _check_sums(path: str, spec: P) -> None:
    other = [(axis, kind) for axis, kind in spec.unreduced if kind != "sum"]
    if other:
        axis, kind = other[0]
        raise ValueError(
            f"{path}: a {kind} is pending over {axis!r}, and a mapped function accepts pending "
            "sums only; reduce it first"
        )


def _with_global(manual: P, spec: P, names: Sequence[str]) -> P:
    """Return the spec with the manual axes of `manual`, and the other axes of `spec`.

    The manual axes split first.
    """
    if set(spec.axes) <= set(names):
        return manual
    rest = [[axis for axis in axes if axis not in names] for axes in spec.dims]
    pending = {axis: kind for axis, kind in spec.unreduced if axis not in names}
    pending |= dict(manual.unreduced)
    dims = [(*axes, *more) for axes, more in zip(manual.padded(len(rest)).dims, rest, strict=True)]
    return P(*dims, unreduced=pending, sizes=dict(manual.sizes))


def inner_layout(dst: Layout, manual: P, names: Sequence[str], auto_mesh: DeviceMesh) -> Layout:
    """Return the layout of this rank's part over the manual axes on the mesh of the others."""
    part = dst.replace(manual.with_unreduced({})).local_shape
    rest = restrict_to_axes(dst.spec, [axis for axis in dst.mesh.axis_names if axis not in names])
    return Layout.of(auto_mesh, rest, part, dst.dtype)


# -- local parts -----------------------------------------------------------------------------------


def local_parts(leaves: Sequence[Any], inputs: Sequence[InputSpec]) -> list[Any]:
    """Return the local tensors of leaves that are all passed unchanged."""
    return [
        (leaf._local if leaf._local.requires_grad else known_local(leaf))
        if type(leaf) is ShardedTensor
        else _local(leaf, arg)
        for leaf, arg in zip(leaves, inputs, strict=True)
    ]


def prepare_inputs(name: str, leaves: Sequence[Any], inputs: Sequence[InputSpec]) -> list[Any]:
    """Return what the function receives for each leaf.

    Communication: that of redistributing leaves, in buckets.
    """
    parts = [_local(leaf, arg) for leaf, arg in zip(leaves, inputs, strict=True)]
    moving = [i for i, arg in enumerate(inputs) if arg.src is not arg.dst]
    if moving:
        moved = _redistribute_parts(name, [parts[i] for i in moving], [inputs[i] for i in moving])
        for i, part in zip(moving, moved, strict=True):
            parts[i] = part
    return [
        part if x.auto_layout is None else ShardedTensor._make(part, x.auto_layout)
        for part, x in zip(parts, inputs, strict=True)
    ]


def check_transform(name: str, leaves: Sequence[Any]) -> None:
    """Raise RuntimeError inside a transform of torch.func.

    One that is around the mapped function, or has wrapped its arguments.
    """
    if current_axis_env() is None:
        refuse_foreign(f"shard_map({name})")
    for x in leaves:
        if isinstance(x, Tensor):
            while is_transformed(x):
                x = untransformed(x)
                if isinstance(x, ShardedTensor):
                    raise RuntimeError(
                        f"shard_map({name}): a transform of torch.func has wrapped a ShardedTensor "
                        "and does not see its local tensor; use sm.vmap, sm.grad or sm.jvp instead"
                    )


def _local(leaf: Any, arg: InputSpec) -> Any:
    if arg.src is None:
        return leaf
    if isinstance(leaf, ShardedTensor):
        return known_local(leaf)
    return known_local(from_local(leaf, arg.src.mesh, P(), shape=leaf.shape))  # type: ignore[arg-type]


def _redistribute_parts(name: str, parts: list[Tensor], inputs: list[InputSpec]) -> list[Tensor]:
    pairs: Any = [(arg.src, arg.dst) for arg in inputs]
    if len(pairs) == 1:
        return [redistribute_local(parts[0], *pairs[0])]
    return redistribute_locals(parts, pairs)


def alias(part: Any) -> Any:
    """Return the part as a new object, so that a tag can be set on it."""
    if isinstance(part, ShardedTensor):
        return ShardedTensor._make(part._local, part._layout)
    return part.view_as(part) if isinstance(part, Tensor) else part


class InputMutationCheck:
    """Find out whether a function has written to its arguments.

    Attributes:
        tags: the tags of the arguments before the call.
        versions: autograd versions of parts that share memory with an argument of which other ranks
            have copies.
    """

    def __init__(
        self, leaves: Sequence[Any], parts: Sequence[Any], inputs: Sequence[InputSpec]
    ) -> None:
        self.parts, self.inputs = parts, inputs
        self.tags: Sequence[Any] = ()
        self.versions = [_version(*each) for each in zip(leaves, parts, inputs, strict=True)]

    def error(self, checker: Any) -> ShardingTypeError | None:
        """Return the error of a function that wrote a varying value to a replicated argument.

        None if it did not. Writing to a part of an argument counts, too.
        """
        for tag, version, part, arg in zip(
            self.tags, self.versions, self.parts, self.inputs, strict=True
        ):
            written = version is not None and checker.written.get(_local_of(part)) is not None
            if written or (version is not None and _version_of(part) != version):
                spec = None if arg.dst is None else arg.dst.spec
                return ShardingTypeError(
                    f"{arg.path} is the same on every rank, {arg.src}; its part {spec} was written "
                    "to in place, so that copies of it now differ between ranks: write to a clone "
                    f"of it, or pass a ShardedTensor with the spec {spec}"
                )
            if tag is None:
                continue
            now = checker.tag_of(part)
            old = tag.type.varying | tag.type.pending
            odd = sorted((now.type.varying | now.type.pending) - old)
            if odd:
                return ShardingTypeError(
                    f"{arg.path} is the same on every rank along {odd[0]!r}, and a value that is "
                    f"not was written to it, since {now.origins[odd[0]]}; write to a clone of it"
                )
        return None


def _local_of(x: Any) -> Tensor:
    return innermost(x._local if isinstance(x, ShardedTensor) else x)


def _version_of(x: Any) -> int:
    local = _local_of(x)
    return -1 if local.is_inference() else local._version  # inference tensors have no version


def _version(leaf: Any, part: Any, arg: InputSpec) -> int | None:
    """Return the autograd version of a part that shares memory with a replicated argument.

    Of such an argument more ranks have copies. None for other parts.
    """
    src, dst = arg.src, arg.dst
    if src is None or dst is None or src.replicated_axes == dst.replicated_axes:
        return None
    shares = _local_of(part).untyped_storage()._cdata == _local_of(leaf).untyped_storage()._cdata
    return _version_of(part) if shares else None


def _describe(frame: dict[str, Any]) -> OperatorCall:
    """Describe the arguments that must be redistributed, for `sm.ops.implicit_comm` and reports."""
    inputs: list[InputSpec] = frame["inputs"]
    advice = ", ".join(f"{arg.path} to {arg.dst.spec}" for arg in inputs if arg.dst is not None)
    return OperatorCall(
        f"shard_map({frame['name']})",
        ", ".join(str(arg.src) for arg in inputs),
        f"Redistribute {advice} before the call",
    )


DESCRIBERS[_redistribute_parts.__code__] = _describe
