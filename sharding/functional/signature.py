"""The signature of a call of a mapped function: its arguments, specs for them, and cache keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from ..layout.spec import P, Placement, Sharding
from ..tensor.sharded_tensor import ShardedTensor
from ..trees import PrefixKind, broadcast_prefix, flatten, paths_of
from .keys import Key


class _Static:
    """The spec of a static argument, which is passed unchanged."""

    def __repr__(self) -> str:
        return "None"


STATIC = _Static()


def _is_spec(x: Any) -> bool:
    """Return whether this is the spec of one leaf.

    A `P`, a placement for each axis, or None; or a sharding, which `specs_for` refuses.
    """
    return (
        x is None
        or isinstance(x, (P, Sharding))
        or (isinstance(x, (list, tuple)) and bool(x) and all(isinstance(p, Placement) for p in x))
    )


_SPECS = PrefixKind(_is_spec, "P(...), one placement per mesh axis, or None for what is no tensor")


def specs_for(name: str, specs: Any, tree: Any) -> list[Any]:
    """Return the spec of every leaf of a tree, from specs for leaves or whole branches.

    Args:
        name: what the specs are, for errors.

    Raises:
        ValueError: the two trees do not match.
        TypeError: something that is not a spec; a sharding, which has a mesh of its own.
    """
    leaf_specs = broadcast_prefix(name, specs, tree, _SPECS)
    for i, spec in enumerate(leaf_specs):
        if isinstance(spec, Sharding):
            raise TypeError(
                f"{name}{paths_of(tree)[i]}: {spec!r} is a sharding, and a mapped function has one "
                f"mesh; write its spec, {spec.spec}"
            )
    return [STATIC if spec is None else spec for spec in leaf_specs]


def specs_of_arguments(name: str, specs: Any, args: Sequence[Any]) -> list[Any]:
    """Return the spec of every leaf of the arguments of a call.

    Raises: as `specs_for`.
    """
    if isinstance(specs, (tuple, list)) and not _is_spec(specs) and len(specs) != len(args):
        entries = "1 entry" if len(specs) == 1 else f"{len(specs)} entries"
        arguments = "1 argument" if len(args) == 1 else f"{len(args)} arguments"
        raise ValueError(
            f"{name} has {entries} and the function got {arguments}: write one P for each"
        )
    return specs_for(name, specs, args)


def leaves_of(args: Sequence[Any]) -> tuple[Sequence[Any], Any]:
    """Return the leaves of the arguments and their tree.

    The tree is None if each argument is a leaf.
    """
    if any(
        (not isinstance(x, Tensor) and type(x) in pytree.SUPPORTED_NODES) or isinstance(x, tuple)
        for x in args
    ):
        return flatten(tuple(args))
    return args, None


def position(path: str) -> str:
    """Return the path of a leaf of the arguments, for a message: `0['w']`."""
    number, _, rest = path.removeprefix("[").partition("]")
    return number + rest


def key_of(leaf: Any) -> Any:
    """Return what of a leaf belongs to the signature of a call."""
    if isinstance(leaf, ShardedTensor):
        return leaf._layout
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype
    if isinstance(leaf, Key):
        return Key, leaf.varying  # not the seed: a new key at every step is the same call
    try:
        hash(leaf)
    except TypeError:
        return type(leaf)
    return type(leaf), leaf
