"""`with_sharding_constraint`: lay out trees of tensors by specs that may be a prefix of the tree.

x      {"w": f32[8, 4], "layers": [f32[4], f32[4]]}
spec   {"w": P("dp"),   "layers": P()}                   one spec for everything under "layers"
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils import _pytree as pytree

from ..layout.spec import UNCONSTRAINED, Cut, P, Sharding
from .mesh_arguments import is_placement
from .redistribute import redistribute, redistribute_many
from .sharded_tensor import ShardedTensor


def with_sharding_constraint(x: Any, spec: Any) -> Any:
    """with_sharding_constraint(x, spec) -> x laid out as the spec says: `redistribute` by JAX's
    name, for trees of tensors.

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
    found = list(constrained_leaves(x, spec, "with_sharding_constraint"))
    moving = [(i, leaf, where) for i, (leaf, where) in enumerate(found) if leaf is not None]
    out = [leaf for leaf, _ in found]
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
    return pytree.tree_unflatten(out, pytree.tree_structure(x))


def constrained_leaves(x: Any, spec: Any, context: str) -> Iterator[tuple[Any, Any]]:
    """Yield every leaf of the tree with its spec, in order.

    Args:
        context: the name of the caller, for errors.

    Raises:
        TypeError, ValueError: see `with_sharding_constraint`.
    """
    for path, leaf, where in matched(x, spec, context):
        if not isinstance(leaf, ShardedTensor) and leaf is not None:
            raise TypeError(
                f"{context}: expected a ShardedTensor{path}, got {type(leaf).__name__}; place it "
                "on a mesh first, with device_put(t, mesh, P(...)) or "
                "ShardedTensor.from_local(part, mesh, P(...))"
            )
        yield leaf, where if leaf is None else leaf._layout.replace(_constrained(leaf, where)).spec


def _constrained(x: ShardedTensor, where: Any) -> Any:
    """Return the spec with each UNCONSTRAINED entry replaced by the axes that `x` has there, except
    those that the spec names.

    Raises:
        ValueError: the spec has more entries than the tensor has dims.
    """
    spec = where.spec if isinstance(where, Sharding) and where.mesh == x.mesh else where
    if not isinstance(spec, P) or UNCONSTRAINED not in spec.dims:
        return where
    spec, named, here = spec.padded(x.ndim), spec.axes, x.spec
    cuts = list(spec.cuts)
    for dim, entry in enumerate(spec.dims):
        if entry is UNCONSTRAINED:
            pieces = [
                [Cut((a,)) for a in cut.axes if a not in named]
                if set(cut.axes) & set(named)
                else [cut]
                for cut in here.cuts[dim]
            ]
            cuts[dim] = tuple(cut for piece in pieces for cut in piece)
    return P.of_cuts(cuts, dict(spec.unreduced))


def matched(tree: Any, spec: Any, context: str, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, leaf, spec) of every leaf of the tree; a spec applies to all below its place.

    Raises:
        TypeError: an invalid spec.
        ValueError: specs that do not fit the tree.
    """
    if is_placement(spec):
        for keys, leaf in pytree.tree_flatten_with_path(tree)[0]:
            yield _at(path + pytree.keystr(keys)), leaf, spec
        return
    children, shape = _children(tree)
    specs, spec_shape = _children(spec)
    if spec_shape.is_leaf():
        raise TypeError(
            f"{context}: expected P(...) or a list of placements{_at(path)}, got {spec!r}; for "
            "replicated write P()"
        )
    if shape != spec_shape:
        raise ValueError(
            f"{context}: the specs{_at(path)} are a {type(spec).__name__} of {len(specs)}, and the "
            f"values a {type(tree).__name__} of {len(children)}{_with_keys(children, specs)}; give "
            "specs of the same structure, or one P for all of them"
        )
    for (key, child), (_, one) in zip(children, specs, strict=True):
        yield from matched(child, one, context, path + key)


def _children(tree: Any) -> tuple[list[tuple[str, Any]], Any]:
    """Return the root's children, each with its key as text, and the structure of that level."""
    found, shape = pytree.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    return [(pytree.keystr(keys), child) for keys, child in found], shape


def _at(path: str) -> str:
    return f" at {path}" if path else ""


def _with_keys(children: list[tuple[str, Any]], specs: list[tuple[str, Any]]) -> str:
    there, given = [key for key, _ in children], [key for key, _ in specs]
    return "" if there == given else f" ({', '.join(given)} for {', '.join(there)})"
