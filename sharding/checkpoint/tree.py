"""Trees of state: their leaves by name, their structure as plain data, and the same tree with other leaves.

    {"model": {"w": x}, "groups": [{"lr": 0.1}], "betas": (0.9, 0.99)}

    leaves      model.w: x    groups.0.lr: 0.1    betas: (0.9, 0.99)          as torch.distributed.checkpoint names them
    structure   {"dict": [["model", {"dict": [["w", "model.w"]]}], ["groups", {"list": [...]}], ["betas", "betas"]]}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..layout.layout import Layout

Path = tuple[Any, ...]
Structure = Any  # the name of a leaf, or {"dict": [[key, structure], ...]}, {"list": [structure, ...]}, {"tuple": [...]}


class Leaf:
    """What is never looked into."""


@dataclasses.dataclass
class PerRank(Leaf):
    """PerRank(value): a leaf of which every rank saves its own, such as the state of torch's random generator.

    It is stored by rank number. A rank of a larger world, for which none was saved, keeps the value of its `like`.

    Attributes:
        value: a tensor, number, string, or lists, tuples and dicts of these.

    Communication: none.

    Example:
        >>> sm.save({"noise": sm.PerRank(torch.get_rng_state())}, "checkpoints")
    """

    value: Any


class Followed(dict[Any, Any]):
    """A dict of which the file says what is in it; `layout_of(path in it, shape)` says how tensors lie that it has."""

    layout_of: Callable[[Path, Sequence[int]], Layout | None]

    def __init__(self, items: Mapping[Any, Any], layout_of: Callable[[Path, Sequence[int]], Layout | None]) -> None:
        super().__init__(items)
        self.layout_of = layout_of


def is_stateful(value: Any) -> bool:
    """Whether a leaf of the user's tree saves and loads itself."""
    return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def children(tree: Any) -> list[tuple[Any, Any]] | None:
    """`(key, child)` of a container; None for a leaf. Lists and tuples of plain values are leaves, as for torch."""
    if isinstance(tree, Leaf):
        return None
    if isinstance(tree, Mapping):
        return list(tree.items())
    if isinstance(tree, list | tuple):
        named = getattr(tree, "_fields", range(len(tree)))
        return list(zip(named, tree, strict=True)) if any(map(_is_inner, tree)) else None
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [(field.name, getattr(tree, field.name)) for field in dataclasses.fields(tree)]
    return None


def _is_inner(value: Any) -> bool:
    """Whether an entry makes its list a container."""
    return isinstance(value, Tensor | Layout | Leaf | Mapping) or is_stateful(value) or children(value) is not None


def leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every leaf with its path. What saves itself must have been opened by `opened`."""
    inner = children(tree)
    if inner is None:
        yield path, tree
        return
    for key, child in inner:
        yield from leaves(child, (*path, key))


def opened(tree: Any) -> Any:
    """The tree with the state in the place of objects that have one."""
    return mapped(tree, lambda _, value: opened(value.state_dict()) if is_stateful(value) else value)


def mapped(tree: Any, function: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """The tree with `function(path, leaf)` for each leaf."""
    inner = children(tree) if not is_stateful(tree) else None
    return function(path, tree) if inner is None else rebuilt(tree, [mapped(child, function, (*path, key)) for key, child in inner])


def rebuilt(tree: Any, items: list[Any]) -> Any:
    """A container like this one with other items."""
    if isinstance(tree, Mapping):
        return dict(zip(tree, items, strict=True))
    if isinstance(tree, list):
        return items
    if isinstance(tree, tuple):
        return tuple(items) if type(tree) is tuple else type(tree)(*items)
    return dataclasses.replace(tree, **{f.name: item for f, item in zip(dataclasses.fields(tree), items, strict=True)})


def items_of(tree: Any) -> list[Any]:
    """What a container that `rebuilt` made has, in order."""
    if isinstance(tree, Mapping):
        return list(tree.values())
    return list(tree) if isinstance(tree, list | tuple) else [getattr(tree, field.name) for field in dataclasses.fields(tree)]


def name_of(path: Path) -> str:
    """The name of a leaf: its path, joined by dots."""
    return ".".join(map(str, path))


def structure_of(tree: Any, path: Path = ()) -> Structure:
    """The structure as data for JSON.

    Raises:
        TypeError: a dict with keys that are neither strings nor integers.
    """
    inner = children(tree)
    if inner is None:
        return name_of(path)
    for key, _ in inner:
        if not isinstance(key, str | int) or isinstance(key, bool):
            raise TypeError(f"{name_of(path) or 'the tree'} has a key {key!r}: keys of a tree that is saved are strings or integers")
    items = [(key, structure_of(child, (*path, key))) for key, child in inner]
    if isinstance(tree, list | tuple) and not hasattr(tree, "_fields"):
        return {"list" if isinstance(tree, list) else "tuple": [item for _, item in items]}
    return {"dict": [list(item) for item in items]}


def torch_paths(structure: Structure, path: Path = ()) -> Iterator[tuple[str, Path]]:
    """Each leaf's name and path as torch's index has it, which tells dicts from lists by the kind of key: strings, integers."""
    if isinstance(structure, str):
        yield structure, path
    elif "dict" in structure:
        for key, item in structure["dict"]:
            yield from torch_paths(item, (*path, str(key)))
    else:
        for i, item in enumerate(next(iter(structure.values()))):
            yield from torch_paths(item, (*path, i))


def structure_from(paths: Mapping[str, Path]) -> Structure:
    """The structure that torch's own checkpoints tell: keys are strings, indices of lists are integers."""
    nested: dict[Any, Any] = {}
    for name, path in paths.items():
        at = nested
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = name
    return _as_structure(nested)


def _as_structure(nested: Any) -> Structure:
    if not isinstance(nested, dict):
        return nested
    if nested and all(type(key) is int for key in nested):
        return {"list": [_as_structure(nested[key]) for key in sorted(nested)]}
    return {"dict": [[key, _as_structure(item)] for key, item in nested.items()]}


def child_of(structure: Structure, key: Any) -> Structure:
    """A part of a structure; None where it has none of that name. Torch's own checkpoints have strings for integers."""
    if not isinstance(structure, dict):
        return None
    if "dict" in structure:
        found = dict(structure["dict"])
        return found.get(key, found.get(str(key)))
    items = next(iter(structure.values()))
    return items[key] if isinstance(key, int) and key < len(items) else None


def from_structure(structure: Structure, leaf: Callable[[str, Path], Any], path: Path = ()) -> Any:
    """The tree of a structure, with `leaf(name, path)` for each leaf."""
    if isinstance(structure, str):
        return leaf(structure, path)
    (kind, items), *_ = structure.items()
    if kind == "dict":
        return {key: from_structure(item, leaf, (*path, key)) for key, item in items}
    built = [from_structure(item, leaf, (*path, i)) for i, item in enumerate(items)]
    return built if kind == "list" else tuple(built)


def is_module(value: Any) -> bool:
    """Whether an object's own state, and not the file, says what is to be loaded."""
    return isinstance(value, nn.Module)
