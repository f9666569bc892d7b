"""Trees: nested tuples, lists and dicts, and what else is registered with torch's pytree.

tree      {"w": x, "layers": [y, z]}       leaves x, y, z; paths ['w'], ['layers'][0], ['layers'][1]
prefix    {"w": P("dp"), "layers": P()}    one value for a whole subtree: P("dp"), P(), P()

None is a leaf, as in torch, except in a field of a dataclass; `flatten_without_none` leaves it out,
as JAX does. Two kinds of trees are not torch's: the state that `checkpoint` saves, whose names and
containers are part of the format (`checkpoint/tree.py`), and what models take and return in
mappings and dataclasses that are not registered (`nested_tensors`, `map_nested`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

# -- leaves ----------------------------------------------------------------------------------------


class _Foreign(Exception):
    """A node of a tree that is not a plain tuple, list or dict."""


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a tree and its structure, which can be hashed.

    They are those of `pytree.tree_flatten`, six times as fast for plain tuples, lists and dicts.
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


def unflatten(structure: Any, leaves: Sequence[Any]) -> Any:
    """Return the tree with this structure, one of `flatten`, and these leaves."""
    if isinstance(structure, pytree.TreeSpec):
        return pytree.tree_unflatten(leaves, structure)
    return _rebuild(structure, iter(leaves))


def _rebuild(structure: Any, leaves: Iterator[Any]) -> Any:
    if structure is None:
        return next(leaves)
    kind, names, parts = structure
    branches = [next(leaves) if part is None else _rebuild(part, leaves) for part in parts]
    if kind is list:
        return branches
    return tuple(branches) if kind is tuple else dict(zip(names, branches, strict=True))


class _Leaf:
    def __repr__(self) -> str:
        return "*"


class TreeDef(NamedTuple):
    """The structure of a tree in which None is not a leaf.

    Attributes:
        structure: that of `flatten`, in which None is a leaf.
        count: the number of its leaves.
        places: the indices of the leaves that are not None.
    """

    structure: Any
    count: int
    places: tuple[int, ...]

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """Return the tree with these leaves, and None where it has None."""
        if len(leaves) == self.count:
            return unflatten(self.structure, leaves)
        every: list[Any] = [None] * self.count
        for place, leaf in zip(self.places, leaves, strict=True):
            every[place] = leaf
        return unflatten(self.structure, every)

    def __str__(self) -> str:
        """Return the tree with a star for each leaf."""
        return repr(self.unflatten([_Leaf()] * len(self.places)))


def flatten_without_none(tree: Any) -> tuple[list[Any], TreeDef]:
    """Return the leaves of a tree that are not None, and its structure."""
    leaves, structure = flatten(tree)
    places = tuple(i for i, leaf in enumerate(leaves) if leaf is not None)
    return [leaves[i] for i in places], TreeDef(structure, len(leaves), places)


def paths_of(tree: Any) -> list[str]:
    """Return the path of every leaf of a tree: `[0]['w']`."""
    if pytree.tree_is_leaf(tree):
        return [""]
    return [f"{key}{path}" for key, child in _entries(tree) for path in paths_of(child)]


def place_of(tree: Any, i: int) -> str:
    """Return the place of a leaf for a message: " at ['w'][0]"; "" for a tree that is a leaf."""
    path = paths_of(tree)[i]
    return f" at {path}" if path else ""


def _entries(node: Any) -> list[tuple[Any, Any]]:
    """Return the key and the child of each branch of a node, in the order of the leaves."""

    def is_child(x: Any) -> bool:
        return x is not node

    try:
        entries = pytree.tree_flatten_with_path(node, is_leaf=is_child)[0]
        return [(path[0], child) for path, child in entries]
    except ValueError:  # a class that is registered without keys
        children = pytree.tree_leaves(node, is_leaf=is_child)
        has_names = isinstance(node, Mapping) and len(node) == len(children)
        names: Iterable[Any] = node if has_names else range(len(children))
        return [(pytree.MappingKey(key), x) for key, x in zip(names, children, strict=True)]


def _structure_of(node: Any) -> Any:
    """Return the structure of a node alone, whose branches count as leaves."""
    return pytree.tree_structure(node, is_leaf=lambda x: x is not node)


# -- the arguments and results of operators --------------------------------------------------------
#
# Operators take tensors in lists, tuples and dicts and return tuples. What runs in every call of an
# operator on sharded tensors has loops of its own, which do several things in one pass: `locals_of`
# and `with_values` in `ops`.


def tensors_in(items: Iterable[Any]) -> Iterator[Any]:
    """Yield the tensors among arguments, also those in lists, tuples and dicts."""
    for item in items:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from tensors_in(item)
        elif isinstance(item, dict):
            yield from tensors_in(item.values())


def map_tensors(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """Return arguments with `function` applied to every tensor.

    Also to those in lists, tuples (also named ones, and torch's `return_types`) and plain dicts.
    """
    out: list[Any] = []
    for item in items:
        kind = type(item)
        if isinstance(item, Tensor):
            item = function(item)
        elif kind is list or kind is tuple:
            item = kind(map_tensors(function, item))
        elif kind is dict:
            item = dict(zip(item, map_tensors(function, item.values()), strict=True))
        elif isinstance(item, tuple) and pytree.is_namedtuple_class(kind):
            item = kind(*map_tensors(function, item))
        elif isinstance(item, tuple) and pytree.is_structseq_class(kind):
            item = kind(map_tensors(function, item))
        out.append(item)
    return out


# -- arguments and results of modules --------------------------------------------------------------


def nested_tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples, mappings and dataclasses, registered or not.

    Other objects, such as caches, are opaque.
    """
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from nested_tensors(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from nested_tensors(item)
    elif is_dataclass_instance(tree):
        for field in dataclasses.fields(tree):
            yield from nested_tensors(getattr(tree, field.name, None))


def map_nested(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return the tree with `function` applied to the tensors that `nested_tensors` yields.

    A container in which nothing changes is returned itself.
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, (list, tuple)):
        items = [map_nested(function, item) for item in tree]
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        if hasattr(tree, "_make"):
            return tree._make(items)  # type: ignore[attr-defined]
        return type(tree)(items)
    if isinstance(tree, Mapping):
        values: Mapping[str, Any] = tree
    elif is_dataclass_instance(tree):
        values = {field.name: getattr(tree, field.name, None) for field in dataclasses.fields(tree)}
    else:
        return tree
    mapped = {key: map_nested(function, old) for key, old in values.items()}
    changed = {key: new for key, new in mapped.items() if new is not values[key]}
    return _with_values(tree, changed) if changed else tree


def _with_values(container: Any, changed: Mapping[str, Any]) -> Any:
    """Return a mapping or dataclass with some values replaced; outputs of transformers are both."""
    if not isinstance(container, Mapping):
        return dataclasses.replace(container, **changed)
    values = {**container, **changed}
    if is_dataclass_instance(container):
        return type(container)(**values)
    return type(container)(values)  # type: ignore[call-arg]


def is_dataclass_instance(x: Any) -> bool:
    """Return whether an object is an instance of a dataclass, and not the class itself."""
    return dataclasses.is_dataclass(x) and not isinstance(x, type)


# -- prefixes --------------------------------------------------------------------------------------


class PrefixKind(NamedTuple):
    """What a prefix of a tree is made of: specs, shardings, axes.

    Lists and tuples, also named ones, stand for each other; dicts match by their keys, in any
    order; other nodes match nodes of the same class.

    Attributes:
        is_value: whether something is a value for a whole subtree, and not a container of values.
        expected: the values, for errors: "an int or None".
        is_partial: whether a dict may lack keys, for which it has None, and have others; it stands
            for any mapping.
    """

    is_value: Callable[[Any], bool]
    expected: str
    is_partial: bool = False


class _Mismatch(Exception):
    """A prefix does not match a tree.

    Attributes:
        kind: of the prefix.
        prefix, tree: where they differ.
        path: the keys that lead there, the innermost first.
    """

    def __init__(self, kind: PrefixKind, prefix: Any, tree: Any) -> None:
        self.kind, self.prefix, self.tree = kind, prefix, tree
        self.path: list[str] = []

    def error(self, name: str) -> Exception:
        """Return the error for the user.

        TypeError for what is no value and no container, else ValueError.
        """
        is_node = _is_container(self.prefix)
        expected, tree = self.kind.expected, _kind_text(self.tree)
        if not pytree.tree_is_leaf(self.tree):
            expected += ", or a tree of these like it,"
        text = (
            f"{name}{''.join(reversed(self.path))}: expected {expected} for {tree}; got "
            f"{_kind_text(self.prefix) if is_node else repr(self.prefix)}"
        )
        return ValueError(text) if is_node else TypeError(text)


def broadcast_prefix(name: str, prefix: Any, tree: Any, kind: PrefixKind) -> list[Any]:
    """Return the value of every leaf of a tree, in the order of its leaves.

    Args:
        name: what the prefix is, for errors: "shard_map(f): in_specs".
        prefix: a value for all leaves, or a tree of values for whole subtrees.
        tree: the tree.

    Raises:
        ValueError: the prefix and the tree differ: the path, what was expected and what is there.
        TypeError: a part of the prefix is neither a value nor a container; likewise.
    """
    values: list[Any] = []
    try:
        _broadcast(kind, prefix, tree, values)
    except _Mismatch as mismatch:
        raise mismatch.error(name) from None
    return values


def _broadcast(kind: PrefixKind, prefix: Any, tree: Any, values: list[Any]) -> None:
    if kind.is_value(prefix):
        count = 1 if isinstance(tree, Tensor) else len(flatten(tree)[0])
        values += [prefix] * count
        return
    for i, (part, branch) in enumerate(_branches(kind, prefix, tree)):
        try:
            _broadcast(kind, part, branch, values)
        except _Mismatch as mismatch:
            mismatch.path.append(_key_text(tree, i))
            raise


def map_prefix(
    name: str, function: Callable[[Any, Any], Any], prefix: Any, tree: Any, kind: PrefixKind
) -> Any:
    """Return the tree with `function(subtree, value)` for each subtree with a value.

    A value is one of the prefix; it stands for the whole subtree at its place.

    Args and errors: as for `broadcast_prefix`.
    """
    try:
        return _map_subtrees(kind, function, prefix, tree)
    except _Mismatch as mismatch:
        raise mismatch.error(name) from None


def _map_subtrees(
    kind: PrefixKind, function: Callable[[Any, Any], Any], prefix: Any, tree: Any
) -> Any:
    if kind.is_value(prefix):
        return function(tree, prefix)
    branches: list[Any] = []
    for i, (part, branch) in enumerate(_branches(kind, prefix, tree)):
        try:
            branches.append(_map_subtrees(kind, function, part, branch))
        except _Mismatch as mismatch:
            mismatch.path.append(_key_text(tree, i))
            raise
    if type(tree) is tuple or type(tree) is list:
        return type(tree)(branches)
    if type(tree) is dict or pytree.tree_is_leaf(tree):  # or a mapping that is not registered
        return dict(zip(tree, branches, strict=True))
    return pytree.tree_unflatten(branches, _structure_of(tree))


def _branches(kind: PrefixKind, prefix: Any, tree: Any) -> list[tuple[Any, Any]]:
    """Return the branches of two nodes in pairs, in the order of the tree's leaves.

    Raises:
        _Mismatch: the nodes differ.
    """
    if isinstance(prefix, (tuple, list)):
        if _is_sequence(tree) and len(prefix) == len(tree):
            return list(zip(prefix, tree, strict=True))
    elif isinstance(prefix, dict):
        if kind.is_partial and isinstance(tree, Mapping):
            return [(prefix.get(key), branch) for key, branch in _items(tree)]
        if _is_dict(tree) and prefix.keys() == tree.keys():
            return [(prefix[key], branch) for key, branch in _items(tree)]
    elif type(prefix) is type(tree) and not pytree.tree_is_leaf(tree):
        branches = _entries(tree)
        if all(isinstance(key, pytree.GetAttrKey) for key, _ in branches):
            # by name, since a field of a dataclass that is None is no branch
            return [(getattr(prefix, key.name), branch) for key, branch in branches]
        if _structure_of(prefix) == _structure_of(tree):
            pairs = zip(_entries(prefix), branches, strict=True)
            return [(part, branch) for (_, part), (_, branch) in pairs]
    raise _Mismatch(kind, prefix, tree)


def _items(tree: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """Return the keys and values of a mapping, in the order of its leaves."""
    if type(tree) is dict or pytree.tree_is_leaf(tree):
        return list(tree.items())
    return [(entry.key, child) for entry, child in _entries(tree)]


def _is_sequence(x: Any) -> bool:
    if type(x) is tuple or type(x) is list:
        return True
    return isinstance(x, (tuple, list)) and not pytree.tree_is_leaf(x)


def _is_dict(x: Any) -> bool:
    return type(x) is dict or (isinstance(x, dict) and not pytree.tree_is_leaf(x))


def _is_container(x: Any) -> bool:
    return isinstance(x, (tuple, list, dict)) or not pytree.tree_is_leaf(x)


def _key_text(node: Any, i: int) -> str:
    """Return the key of a branch as text: `[0]`, `['w']`, `.field`."""
    if pytree.tree_is_leaf(node):  # a mapping of a class that is not registered
        return f"[{list(node)[i]!r}]"
    return str(_entries(node)[i][0])


def _kind_text(x: Any) -> str:
    """Return the kind of a node or leaf, for a message: "a dict with keys ['w', 'b']"."""
    if x is None:
        return "None"
    name = type(x).__name__
    article = "an" if name[0] in "aeiouAEIOU" else "a"
    if isinstance(x, dict):
        keys = ", ".join(map(repr, list(x)[:10])) + (", ..." if len(x) > 10 else "")
        return f"{article} {name} with keys [{keys}]" if x else f"an empty {name}"
    if isinstance(x, (tuple, list)):
        return f"{article} {name} of {len(x)}" if x else f"an empty {name}"
    if not pytree.tree_is_leaf(x):
        return f"{article} {name} of {len(_entries(x))}"
    return f"{article} {name}"
