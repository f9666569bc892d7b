"""The signature of a call of a mapped function: trees of arguments, specs for them, and
cache keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from ..layout.spec import P, Placement, Sharding
from ..tensor.sharded_tensor import ShardedTensor
from .keys import Key


class _Static:
    """The spec of a static argument, which is passed unchanged."""

    def __repr__(self) -> str:
        return "None"


STATIC = _Static()


def is_spec(x: Any) -> bool:
    """Return whether this is the spec of one leaf: a `P`, a placement for each axis, or None."""
    return (
        x is None
        or isinstance(x, P)
        or (isinstance(x, (list, tuple)) and bool(x) and all(isinstance(p, Placement) for p in x))
    )


def specs_for(what: str, specs: Any, tree: Any) -> list[Any]:
    """Return the spec of every leaf of a tree, from specs for leaves or whole branches.

    Raises: ValueError if the two trees do not match, naming the branch.
    """
    leaf_specs: list[Any] = []
    _spread(what, specs, tree, "", leaf_specs)
    return leaf_specs


def _spread(what: str, specs: Any, tree: Any, path: str, leaf_specs: list[Any]) -> None:
    if is_spec(specs):
        leaf_specs += [STATIC if specs is None else specs] * len(pytree.tree_leaves(tree))
    elif isinstance(specs, dict):
        _spread_dict(what, specs, tree, path, leaf_specs)
    elif isinstance(specs, (list, tuple)):
        if not isinstance(tree, (list, tuple)) or len(specs) != len(tree):
            raise _no_match(what, specs, tree, path)
        for i, (one, branch) in enumerate(zip(specs, tree, strict=True)):
            _spread(what, one, branch, f"{path}[{i}]", leaf_specs)
    elif isinstance(specs, Sharding):
        raise TypeError(
            f"{what}{path}: {specs!r} is a sharding, and a mapped function has one mesh; write its "
            f"spec, {specs.spec}"
        )
    else:
        raise ValueError(
            f"{what}{path}: {specs!r} is not a spec; write a P, one placement per axis, None, or a "
            "tree of them"
        )


def _spread_dict(
    what: str, specs: dict[Any, Any], tree: Any, path: str, leaf_specs: list[Any]
) -> None:
    if not isinstance(tree, dict) or specs.keys() != tree.keys():
        raise _no_match(what, specs, tree, path)
    for name, branch in tree.items():
        _spread(what, specs[name], branch, f"{path}[{name!r}]", leaf_specs)


def _no_match(what: str, specs: Any, tree: Any, path: str) -> ValueError:
    mismatch = (
        f"{len(specs)} for {len(tree)}"
        if isinstance(tree, (list, tuple))
        else f"a {type(specs).__name__} for a {type(tree).__name__}"
    )
    if isinstance(specs, dict) and isinstance(tree, dict):
        mismatch = f"keys {sorted(map(str, specs))} for keys {sorted(map(str, tree))}"
    return ValueError(
        f"{what}{path} do not match what they describe: {mismatch}; give a spec for each branch, "
        "or one for all of it"
    )


def leaves_of(args: Sequence[Any]) -> tuple[Sequence[Any], Any]:
    """Return the leaves of the arguments and their tree, which is None if each argument is
    a leaf.
    """
    if any(
        (not isinstance(x, Tensor) and type(x) in pytree.SUPPORTED_NODES) or isinstance(x, tuple)
        for x in args
    ):
        return flatten_tree(tuple(args))
    return args, None


class _Foreign(Exception):
    """A node of a tree that is not a plain tuple, list or dict."""


def flatten_tree(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a tree and its structure, as `pytree.tree_flatten`; six times as fast
    for plain tuples, lists and dicts.
    """
    leaves: list[Any] = []
    try:
        return leaves, _flatten_into(tree, leaves)
    except _Foreign:
        return pytree.tree_flatten(tree)


def _flatten_into(x: Any, leaves: list[Any]) -> Any:
    kind = type(x)
    if kind is dict:
        return dict, tuple(x), tuple([_flatten_into(v, leaves) for v in x.values()])
    if kind is tuple or kind is list:
        return kind, None, tuple([_flatten_into(v, leaves) for v in x])
    if not isinstance(x, Tensor) and (kind in pytree.SUPPORTED_NODES or isinstance(x, tuple)):
        raise _Foreign
    leaves.append(x)
    return None


def unflatten_tree(shape: Any, leaves: Sequence[Any]) -> Any:
    """Return the tree with this structure and these leaves."""
    return (
        pytree.tree_unflatten(leaves, shape)
        if isinstance(shape, pytree.TreeSpec)
        else _built(shape, iter(leaves))
    )


def _built(shape: Any, leaves: Any) -> Any:
    if shape is None:
        return next(leaves)
    kind, names, parts = shape
    branches = [next(leaves) if part is None else _built(part, leaves) for part in parts]
    return (
        branches
        if kind is list
        else tuple(branches)
        if kind is tuple
        else dict(zip(names, branches, strict=True))
    )


def paths_of(tree: Any) -> list[str]:
    """Return the name of every leaf of a tree: `[0]['w']`."""
    return [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(tree)[0]]


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
