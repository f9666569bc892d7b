"""How the arguments of a mapped function go in: which layout each must have, and the part of it that the function sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...mesh.comm.call_site import DESCRIBERS, OperatorCall
from ...mesh.device_mesh import DeviceMesh
from ..layout.layout import Layout
from ..layout.spec import P, as_spec
from ..ops import dispatch
from ..redistribute.autograd import redistribute_local, redistribute_locals
from ..tensor.autograd.engine_hooks import innermost, is_transformed, untransformed
from ..tensor.convert import from_local
from ..tensor.sharded_tensor import ShardedTensor
from ..tensor.transforms import refuse_foreign
from .keys import Key
from .named_axes import current_mapping
from .signature import STATIC
from .types.types import REPLICATED, ShardingTypeError, Type


@dataclass(frozen=True)
class Entrance:
    """How one argument goes in.

    Attributes:
        path: how to name it.
        src: how it lies; None for what is passed as it is.
        dst: how it must lie.
        inner: how this rank's part lies on the axes that stay global; None where there are none.
        type: its type inside.
    """

    path: str
    src: Layout | None = None
    dst: Layout | None = None
    inner: Layout | None = None
    type: Type = REPLICATED

    @property
    def plain(self) -> bool:
        """Whether the part goes in as it is."""
        return self.src is not None and self.src is self.dst and self.inner is None

    @property
    def uneven(self) -> bool:
        """Whether the ranks' parts differ in shape."""
        dst = self.dst
        if dst is None:
            return False
        cut = zip(dst.shape, dst.spec.dims, strict=True)
        return bool(dst.spec.sizes) or any(n % dst.mesh.size(axes) for n, axes in cut if axes)


def entrance(path: str, leaf: Any, spec: Any, mesh: DeviceMesh, names: Sequence[str], inner: DeviceMesh | None) -> Entrance:
    """How a leaf goes in under a spec of the manual axes; `spec` is None where it is to be taken as it lies.

    Raises:
        TypeError: a sharded tensor passed as static.
        ValueError: a tensor on another mesh, or a spec that does not fit.
    """
    if not isinstance(leaf, Tensor) or spec is STATIC:
        if isinstance(leaf, ShardedTensor):
            raise TypeError(f"{path} is sharded, {leaf._layout}, and its spec is None, which is for what is passed as it is; write a P")
        _check_no_parts(path, leaf, spec)
        return Entrance(path)
    src = leaf._layout if isinstance(leaf, ShardedTensor) else Layout.of(mesh, P(), leaf.shape, leaf.dtype)
    if src.mesh is not mesh:
        raise ValueError(f"{path} lies on {src.mesh}, and the function is mapped over {mesh}; redistribute it there first")
    manual = only_axes(src.spec, names) if spec is None else fitting_spec(path, spec, mesh, len(src.shape))
    check_manual(path, manual, names)
    _check_sums(path, manual)
    with _named(path):
        dst = src.replace(_with_global(manual, src.spec, names))
    part = None if inner is None else inner_layout(dst, manual, names, inner)
    varying = frozenset(axis for axes in manual.dims for axis in axes)
    return Entrance(path, src, dst, part, Type.of(varying, frozenset(axis for axis, _ in manual.unreduced)))


def fitting_spec(path: str, spec: Any, mesh: DeviceMesh, ndim: int) -> P:
    """The spec as a `P` with an entry for each dim. Raises: ValueError where it fits neither mesh nor tensor, with the path of that."""
    with _named(path):
        return as_spec(spec, mesh.axis_names, ndim)


@contextmanager
def _named(path: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _check_no_parts(path: str, leaf: Any, spec: Any) -> None:
    """Raises: TypeError for an object, such as an array or a dataclass, whose spec cuts it."""
    cut = isinstance(spec, P) and spec.axes
    if cut and not isinstance(leaf, (Tensor, Key, str, int, float, complex, type(None))):
        raise TypeError(
            f"{path} is a {type(leaf).__name__}, neither a tensor nor a tree of tensors that torch knows, and {spec} would cut it; "
            "pass its tensors, or give None as its spec to pass it as it is"
        )


def only_axes(spec: P, names: Sequence[str]) -> P:
    """What a spec says of these axes."""
    if set(spec.axes) <= set(names):
        return spec
    pending = {axis: kind for axis, kind in spec.unreduced if axis in names}
    return P(*[[axis for axis in axes if axis in names] for axes in spec.dims], unreduced=pending)


def check_manual(path: str, spec: P, names: Sequence[str]) -> None:
    """Raises: ValueError where a spec names an axis that is not manual."""
    other = [axis for axis in spec.axes if axis not in names]
    if other:
        raise ValueError(f"{path}: {spec} names {other[0]!r}, and the manual axes are {list(names)}; specs name manual axes only")


def _check_sums(path: str, spec: P) -> None:
    other = [(axis, kind) for axis, kind in spec.unreduced if kind != "sum"]
    if other:
        axis, kind = other[0]
        raise ValueError(f"{path}: a {kind} is pending over {axis!r}, and a mapped function takes pending sums only; reduce it first")


def _with_global(manual: P, given: P, names: Sequence[str]) -> P:
    """The spec whose manual axes lie as the one says and the others as the other: manual axes cut first."""
    if set(given.axes) <= set(names):
        return manual
    rest = [[axis for axis in axes if axis not in names] for axes in given.dims]
    pending = {axis: kind for axis, kind in given.unreduced if axis not in names} | dict(manual.unreduced)
    dims = [(*axes, *more) for axes, more in zip(manual.padded(len(rest)).dims, rest, strict=True)]
    return P(*dims, unreduced=pending, sizes=dict(manual.sizes))


def inner_layout(dst: Layout, manual: P, names: Sequence[str], inner: DeviceMesh) -> Layout:
    """How this rank's part over the manual axes lies on the mesh of the others."""
    part = dst.replace(manual.with_unreduced({})).local_shape
    rest = only_axes(dst.spec, [axis for axis in dst.mesh.axis_names if axis not in names])
    return Layout.of(inner, rest, part, dst.dtype)


# -- going in ----------------------------------------------------------------------------------------------------------


def as_they_lie(leaves: Sequence[Any], ways: Sequence[Entrance]) -> list[Any]:
    """What the function sees of leaves that all go in as they are."""
    return [
        (leaf._local if leaf._local.requires_grad else dispatch.known_local(leaf)) if type(leaf) is ShardedTensor else _local(leaf, way)
        for leaf, way in zip(leaves, ways, strict=True)
    ]


def enter(name: str, leaves: Sequence[Any], ways: Sequence[Entrance]) -> list[Any]:
    """What the function sees of each leaf.

    Communication: that of redistributing leaves, in buckets.
    """
    parts = [_local(leaf, way) for leaf, way in zip(leaves, ways, strict=True)]
    moving = [i for i, way in enumerate(ways) if way.src is not way.dst]
    if moving:
        for i, part in zip(moving, _redistributed(name, [parts[i] for i in moving], [ways[i] for i in moving]), strict=True):
            parts[i] = part
    return [part if way.inner is None else ShardedTensor._make(part, way.inner) for part, way in zip(parts, ways, strict=True)]


def check_transform(name: str, leaves: Sequence[Any]) -> None:
    """Raises: RuntimeError inside a transform of torch's own that is around the mapped function, or has taken its arguments apart."""
    if current_mapping() is None:
        refuse_foreign(f"shard_map({name})")
    for x in leaves:
        if isinstance(x, Tensor):
            while is_transformed(x):
                x = untransformed(x)
                if isinstance(x, ShardedTensor):
                    raise RuntimeError(
                        f"shard_map({name}): a transform of torch.func has wrapped a ShardedTensor, whose part it does not see; use that "
                        "of this library: sm.vmap, sm.grad, sm.jvp"
                    )


def _local(leaf: Any, way: Entrance) -> Any:
    if way.src is None:
        return leaf
    if isinstance(leaf, ShardedTensor):
        return dispatch.known_local(leaf)
    return dispatch.known_local(from_local(leaf, way.src.mesh, P(), shape=leaf.shape))  # type: ignore[arg-type]


def _redistributed(name: str, parts: list[Tensor], ways: list[Entrance]) -> list[Tensor]:
    pairs: Any = [(way.src, way.dst) for way in ways]
    if len(pairs) == 1:
        return [redistribute_local(parts[0], *pairs[0])]
    return redistribute_locals(parts, pairs)


def aliased(part: Any) -> Any:
    """The same part as another object, which types can be noted on."""
    if not isinstance(part, Tensor):
        return part
    return ShardedTensor._make(part._local, part._layout) if isinstance(part, ShardedTensor) else part.view_as(part)


class Watched:
    """The arguments of a call whose types are followed, to see whether the function writes to them.

    Attributes:
        tags: what was known of them as they went in.
        versions: of parts that lie in memory which other ranks have copies of, and which they are not to write to.
    """

    def __init__(self, leaves: Sequence[Any], parts: Sequence[Any], ways: Sequence[Entrance]) -> None:
        self.parts, self.ways = parts, ways
        self.tags: Sequence[Any] = ()
        self.versions = [_version(*each) for each in zip(leaves, parts, ways, strict=True)]

    def written(self, checker: Any) -> ShardingTypeError | None:
        """The error of a function that has written what varies into an argument that is replicated, or into a part of such a one."""
        for tag, version, part, way in zip(self.tags, self.versions, self.parts, self.ways, strict=True):
            if version is not None and (_version_of(part) != version or checker.has_written(_local_of(part))):
                spec = None if way.dst is None else way.dst.spec
                return ShardingTypeError(
                    f"{way.path} is the same on every rank, {way.src}; its part {spec} was written to in place, and every rank has written "
                    f"another part of its copy: write to a clone of it, or pass a ShardedTensor that lies as {spec}"
                )
            if tag is None:
                continue
            now = checker.of(part)
            odd = sorted((now.type.varying | now.type.pending) - tag.type.varying - tag.type.pending)
            if odd:
                return ShardingTypeError(
                    f"{way.path} is the same on every rank along {odd[0]!r}, and was written to with what is not, since "
                    f"{now.origins[odd[0]]}; write to a clone of it"
                )
        return None


def _local_of(x: Any) -> Tensor:
    return innermost(x._local if isinstance(x, ShardedTensor) else x)


def _version_of(x: Any) -> int:
    local = _local_of(x)
    return -1 if local.is_inference() else local._version  # those of inference mode do not count


def _version(leaf: Any, part: Any, way: Entrance) -> int | None:
    """How often a part has been written to that lies in the memory of an argument with more copies than the part has."""
    src, dst = way.src, way.dst
    if src is None or dst is None or src.replicated_axes == dst.replicated_axes:
        return None
    shares = _local_of(part).untyped_storage()._cdata == _local_of(leaf).untyped_storage()._cdata
    return _version_of(part) if shares else None


def _describe(frame: dict[str, Any]) -> OperatorCall:
    """The arguments that do not lie as a mapped function wants them, for `sm.implicit` and reports."""
    ways: list[Entrance] = frame["ways"]
    advice = ", ".join(f"{way.path} to {way.dst.spec}" for way in ways if way.dst is not None)
    return OperatorCall(f"shard_map({frame['name']})", ", ".join(str(way.src) for way in ways), f"Redistribute {advice} before the call")


DESCRIBERS[_redistributed.__code__] = _describe
