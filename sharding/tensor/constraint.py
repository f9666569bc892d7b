"""`with_sharding_constraint`: lay out trees of tensors by specs that may be a prefix of the tree.

x      {"w": f32[8, 4], "layers": [f32[4], f32[4]]}
spec   {"w": P("dp"),   "layers": P()}                   one spec for everything under "layers"
"""

from __future__ import annotations

from typing import Any

from ..layout.spec import UNCONSTRAINED, Cut, P, Sharding
from ..trees import broadcast_prefix, flatten, place_of, unflatten
from .mesh_arguments import SPECS
from .redistribute import redistribute, redistribute_many
from .sharded_tensor import ShardedTensor


def with_sharding_constraint(x: Any, spec: Any) -> Any:
    """with_sharding_constraint(x, spec) -> x laid out as the spec says.

    `redistribute` by JAX's name, for trees of tensors.

    It communicates at once, and explicitly: `sm.ops.implicit_comm("forbid")` allows it.
    Differentiable.

    Args:
        x: a `ShardedTensor`, or a tree (tuples, lists, dicts, named tuples, classes registered with
            torch's pytree) of them. None in it stays.
        spec: a `P`, a `NamedSharding` or a list of placements, for all tensors; or a tree of them
            that is a prefix of the tree of `x`. A dim whose entry is `P.UNCONSTRAINED` keeps its
            axes, except those that the spec names elsewhere.

    Returns:
        The tree with every tensor on its own mesh, laid out as the spec says; tensors that are
        already so are the same objects.

    Raises:
        TypeError: a plain tensor or another leaf that is not a tensor, or an invalid spec.
        ValueError: specs that do not fit the tree or a tensor, a sharding on another mesh than the
            tensor's.

    Communication: the plans'; several tensors share collectives, as in `redistribute_many`.

    Example:
        >>> y = sm.with_sharding_constraint(x, P("dp"))
    """
    name = "with_sharding_constraint"
    leaves, structure = flatten(x)
    specs = broadcast_prefix(f"{name}: spec", spec, x, SPECS)
    moving = []
    for i, (leaf, where) in enumerate(zip(leaves, specs, strict=True)):
        if leaf is None:
            continue
        if not isinstance(leaf, ShardedTensor):
            raise TypeError(
                f"{name}: expected a ShardedTensor{place_of(x, i)}, got {type(leaf).__name__}; "
                "place it on a mesh first, with device_put(t, mesh, P(...)) or "
                "ShardedTensor.from_local(part, mesh, P(...))"
            )
        target = leaf._layout.replace(_constrained_spec(leaf, where)).spec
        moving.append((i, leaf, target))
    out = list(leaves)
    if len(moving) == 1:
        laid = [redistribute(moving[0][1], moving[0][2])]
    else:
        moving = [m for m in moving if m[2] is not m[1].spec]
        laid = (
            redistribute_many([leaf for _, leaf, _ in moving], [where for *_, where in moving])
            if moving
            else []
        )
    for (i, *_), tensor in zip(moving, laid, strict=True):
        out[i] = tensor
    return unflatten(structure, out)


def _constrained_spec(x: ShardedTensor, where: Any) -> Any:
    """Return the spec with the axes of `x` in place of each UNCONSTRAINED entry.

    Except those that the spec names.

    Raises:
        ValueError: the spec has more entries than the tensor has dims.
    """
    spec = where.spec if isinstance(where, Sharding) and where.mesh == x.mesh else where
    if not isinstance(spec, P) or UNCONSTRAINED not in spec.dims:
        return where
    spec, named, current = spec.padded(x.ndim), spec.axes, x.spec
    cuts = list(spec.cuts)
    for dim, entry in enumerate(spec.dims):
        if entry is UNCONSTRAINED:
            pieces = [
                [Cut((a,)) for a in cut.axes if a not in named]
                if set(cut.axes) & set(named)
                else [cut]
                for cut in current.cuts[dim]
            ]
            cuts[dim] = tuple(cut for piece in pieces for cut in piece)
    return P.of_cuts(cuts, dict(spec.unreduced))
