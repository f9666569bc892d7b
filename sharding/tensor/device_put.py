"""`device_put`: lay out tensors, arrays, numbers and trees of them by shardings or a tree of them.

x           {"w": f32[8, 4], "layers": [f32[4], f32[4]]}
shardings   {"w": P("dp"),   "layers": P()}                 one for everything under "layers"
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from ..layout.layout import Layout
from ..trees import broadcast_prefix, flatten, paths_of, unflatten
from . import from_dtensor
from .convert import as_tensor
from .convert import device_put as put
from .mesh_arguments import SPECS, is_placement, mesh_and_spec


def device_put(x: Any, mesh: Any = None, spec: Any = None, *, src_data_rank: int | None = 0) -> Any:
    """device_put(x, mesh, P(...)) or device_put(x, sharding) -> x as `ShardedTensor`s.

    Leaves that are sharded already are redistributed.

    With a mesh set, `device_put(x, P(...))`. If a leaf requires grad (on every rank), the result is
    part of its graph: every rank's leaf gets the whole gradient, which can be differentiated again.
    `distribute_tensor` makes a leaf instead.

    Args:
        x: a tensor, a NumPy array or a number, which is copied with the dtype that `torch.tensor`
            gives it; or a tree of them (tuples, lists, dicts, classes registered with torch's
            pytree), in which None stays.
        mesh: a mesh; or a `NamedSharding`, or a tree of those that is a prefix of the tree of `x`.
        spec: a `P` or list of placements, or a prefix tree of them; None for replicated.
        src_data_rank: as in `distribute_tensor`.

    Raises:
        TypeError: a leaf of `x` is not one of these, or no mesh is given or set.
        ValueError: shardings that do not fit the tree or a tensor; before anything moves.
        RuntimeError: as `distribute_tensor`.

    Communication: for each leaf as `distribute_tensor` or `redistribute`; backward: the
    redistribution of its gradient to all ranks.

    Example:
        >>> sm.grad(lambda w: sm.device_put(w, mesh, P("dp")).square().sum())(torch.ones(4))
        tensor([2., 2., 2., 2.])
        >>> params = sm.device_put({"w": torch.ones(8, 4), "b": 0.0},
        ...     {"w": NamedSharding(mesh, P("dp")), "b": NamedSharding(mesh, P())})
    """
    name = "spec"
    if _is_tree(mesh):
        if spec is not None:
            raise TypeError(
                f"device_put got a tree of shardings {mesh!r} as the mesh, and specs {spec!r}: "
                "give either shardings, or a mesh and specs"
            )
        mesh, spec, name = None, mesh, "shardings"
    if x is None or not (_is_tree(x) or _is_tree(spec)):
        return None if x is None else put(x, mesh, spec, src_data_rank=src_data_rank)
    if is_placement(mesh):
        mesh, spec = mesh_and_spec(mesh, spec)
    leaves, structure = flatten(x)
    specs = [None] * len(leaves)
    if spec is not None:
        specs = broadcast_prefix(f"device_put: {name}", spec, x, SPECS)
    tensors: list[Any] = []
    for path, leaf, where in zip(paths_of(x), leaves, specs, strict=True):
        tensors.append(None if leaf is None else as_tensor(leaf, path=f" at {path}"))
        if leaf is not None and not from_dtensor.is_dtensor(leaf):
            _check_fits(tensors[-1], mesh, where, path)
    placed = [
        None if tensor is None else put(tensor, mesh, where, src_data_rank=src_data_rank)
        for tensor, where in zip(tensors, specs, strict=True)
    ]
    return unflatten(structure, placed)


def _is_tree(x: Any) -> bool:
    """Return True if this is a container other than placements and the leaves of pytree."""
    return not (isinstance(x, Tensor) or is_placement(x) or pytree.tree_is_leaf(x))


def _check_fits(leaf: Tensor, mesh: Any, where: Any, path: str) -> None:
    """Raise the ValueError or TypeError of a sharding that does not fit the leaf at this path."""
    try:
        Layout.of(*mesh_and_spec(mesh, where, leaf), leaf.shape, leaf.dtype)
    except (TypeError, ValueError) as error:
        raise type(error)(f"device_put: {path}: {error}") from error
