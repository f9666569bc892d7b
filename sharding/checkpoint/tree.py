"""Trees of state: leaves by name, the structure as plain data, mapping over leaves, tied weights.

{"model": {"w": x}, "groups": [{"lr": 0.1}], "betas": (0.9, 0.99)}

leaves      model.w: x    groups.0.lr: 0.1    betas: (0.9, 0.99), named as by torch's checkpoint
structure   {"dict": [["model", {"dict": [["w", "model.w"]]}],
                      ["groups", {"list": [...]}], ["betas", "betas"]]}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from ..layout.layout import Layout
from ..trees import is_dataclass_instance

Path = tuple[Any, ...]
# the name of a leaf, or {"dict": [[key, structure], ...]}, {"list": [structure, ...]}, {"tuple":
# [...]}
Structure = Any


class Leaf:
    """The base of classes that are leaves, not containers."""


@dataclasses.dataclass
class PerRank(Leaf):
    """PerRank(value): a leaf that each rank saves separately, such as torch's random state.

    It is stored by rank number. In a larger world, ranks beyond the saved ones keep the value of
    their `like`.

    Attributes:
        value: a tensor, number, string, or lists, tuples and dicts of these.

    Communication: none.

    Example:
        >>> noise = sm.checkpoint.PerRank(torch.get_rng_state())
        >>> sm.checkpoint.save({"noise": noise}, "checkpoints")
    """

    value: Any


class WholeModel(Protocol):
    """The whole model of which each rank has a part; all methods are called by every rank.

    Attributes:
        tied_names: for each further name of a tied parameter its first one.
    """

    tied_names: dict[str, str]

    def parameters(self) -> dict[str, Tensor]:
        """Return all parameters by name, as in the state."""
        ...

    def tree(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return trees by parameter of the whole model from those of this rank's parameters."""
        ...

    def own_tree(self, whole: Mapping[str, Any]) -> dict[str, Any]:
        """Return what this rank's parameters need of the trees of the whole model."""
        ...

    def groups(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the parameter groups of all ranks' optimizers, by name of parameter."""
        ...


@runtime_checkable
class PartialModel(Protocol):
    """A model of which each rank has some parameters, such as a pipeline.

    Its state is that of the whole model on every rank.
    """

    whole: Any  # a WholeModel

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


class LayoutOf(Protocol):
    """The layout of a tensor of a `StoredDict`; None for one that is whole and plain."""

    def __call__(
        self, path: Path, shape: Sequence[int], is_sharded: bool = False
    ) -> Layout | None: ...


class StoredDict(dict[Any, Any]):
    """A dict of a checkpoint's leaves; `layout_of` gives the layouts of its tensors."""

    layout_of: LayoutOf

    def __init__(self, items: Mapping[Any, Any], layout_of: LayoutOf) -> None:
        super().__init__(items)
        self.layout_of = layout_of


def is_stateful(value: Any) -> bool:
    """Return whether an object has `state_dict` and `load_state_dict`."""
    return not isinstance(value, type) and all(
        callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")
    )


def children(tree: Any) -> list[tuple[Any, Any]] | None:
    """Return the `(key, child)` pairs of a container, None for a leaf.

    Lists and tuples of plain values are leaves, as in torch.
    """
    if isinstance(tree, Leaf):
        return None
    if isinstance(tree, Mapping):
        return list(tree.items())
    if isinstance(tree, list | tuple):
        named = getattr(tree, "_fields", range(len(tree)))
        return list(zip(named, tree, strict=True)) if any(map(_is_inner, tree)) else None
    if is_dataclass_instance(tree):
        return [(field.name, getattr(tree, field.name)) for field in dataclasses.fields(tree)]
    return None


def _is_inner(value: Any) -> bool:
    """Return whether an entry makes its list a container."""
    return (
        isinstance(value, Tensor | Layout | Leaf | Mapping)
        or is_stateful(value)
        or children(value) is not None
    )


def leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every leaf with its path, after `without_stateful` has replaced stateful objects."""
    inner = children(tree)
    if inner is None:
        yield path, tree
        return
    for key, child in inner:
        yield from leaves(child, (*path, key))


def without_stateful(tree: Any) -> Any:
    """Return the tree with stateful objects replaced by their state."""
    return map_leaves(
        tree, lambda _, value: without_stateful(value.state_dict()) if is_stateful(value) else value
    )


def map_leaves(tree: Any, function: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """Return the tree with `function(path, leaf)` for each leaf."""
    inner = children(tree) if not is_stateful(tree) else None
    return (
        function(path, tree)
        if inner is None
        else rebuild_container(
            tree, [map_leaves(child, function, (*path, key)) for key, child in inner]
        )
    )


def rebuild_container(tree: Any, items: list[Any]) -> Any:
    """Return a container like this one with other items."""
    if isinstance(tree, Mapping):
        return dict(zip(tree, items, strict=True))
    if isinstance(tree, list):
        return items
    if isinstance(tree, tuple):
        return tuple(items) if type(tree) is tuple else type(tree)(*items)
    return dataclasses.replace(
        tree, **{f.name: item for f, item in zip(dataclasses.fields(tree), items, strict=True)}
    )


def items_of(tree: Any) -> list[Any]:
    """Return the items of a container made by `rebuild_container`, in order."""
    if isinstance(tree, Mapping):
        return list(tree.values())
    return (
        list(tree)
        if isinstance(tree, list | tuple)
        else [getattr(tree, field.name) for field in dataclasses.fields(tree)]
    )


def name_of(path: Path) -> str:
    """Return the name of a leaf: its path, joined by dots."""
    return ".".join(map(str, path))


def structure_of(tree: Any, path: Path = ()) -> Structure:
    """Return the structure as data for JSON.

    Raises:
        TypeError: a dict with keys that are neither strings nor integers.
    """
    inner = children(tree)
    if inner is None:
        return name_of(path)
    for key, _ in inner:
        if not isinstance(key, str | int) or isinstance(key, bool):
            raise TypeError(
                f"{name_of(path) or 'the tree'} has a key {key!r}: keys of a saved tree must be "
                "strings or integers"
            )
    items = [(key, structure_of(child, (*path, key))) for key, child in inner]
    if isinstance(tree, list | tuple) and not hasattr(tree, "_fields"):
        return {"list" if isinstance(tree, list) else "tuple": [item for _, item in items]}
    return {"dict": [list(item) for item in items]}


def torch_paths(structure: Structure, path: Path = ()) -> Iterator[tuple[str, Path]]:
    """Yield each leaf's name and path as in torch's index: keys are strings, indices integers."""
    if isinstance(structure, str):
        yield structure, path
    elif "dict" in structure:
        for key, item in structure["dict"]:
            yield from torch_paths(item, (*path, str(key)))
    else:
        for i, item in enumerate(next(iter(structure.values()))):
            yield from torch_paths(item, (*path, i))


def structure_from(paths: Mapping[str, Path]) -> Structure:
    """Return torch's own checkpoints' structure: dicts' keys are strings, lists' integers."""
    nested: dict[Any, Any] = {}
    for name, path in paths.items():
        at: Any = nested
        for key in path[:-1]:
            at = at.setdefault(key, {})
            if not isinstance(at, dict):
                raise ValueError("a path leads through a leaf")
        if path[-1] in at:
            raise ValueError("two leaves have one path, or one leads through the other")
        at[path[-1]] = name
    return _as_structure(nested)


def _as_structure(nested: Any) -> Structure:
    if not isinstance(nested, dict):
        return nested
    if nested and all(type(key) is int for key in nested):
        return {"list": [_as_structure(nested[key]) for key in sorted(nested)]}
    return {"dict": [[key, _as_structure(item)] for key, item in nested.items()]}


def child_of(structure: Structure, key: Any) -> Structure:
    """Return the part of a structure under a key, None if there is none.

    Torch's own checkpoints have strings for integers.
    """
    if not isinstance(structure, dict):
        return None
    if "dict" in structure:
        entries = dict(structure["dict"])
        return entries.get(key, entries.get(str(key)))
    items = next(iter(structure.values()))
    return items[key] if isinstance(key, int) and key < len(items) else None


def from_structure(structure: Structure, leaf: Callable[[str, Path], Any], path: Path = ()) -> Any:
    """Return the tree of a structure, with `leaf(name, path)` for each leaf."""
    if isinstance(structure, str):
        return leaf(structure, path)
    (kind, items), *_ = structure.items()
    if kind == "dict":
        return {key: from_structure(item, leaf, (*path, key)) for key, item in items}
    built = [from_structure(item, leaf, (*path, i)) for i, item in enumerate(items)]
    return built if kind == "list" else tuple(built)


def ties(tree: Any, of_leaves: bool = False) -> dict[str, str]:
    """Return, for each name of a module's tensor that has an earlier name too, that earlier name.

        {"embed.weight": w, "head.weight": w}   ->   {"head.weight": "embed.weight"}

    Parameters and buffers of modules are compared by identity, so ranks without elements of a
    tensor get the same result; so are, with `of_leaves`, tensors that are leaves of the tree, as
    `state_dict` has the tied weights of a module.
    """
    first: dict[int, str] = {}
    earlier_names: dict[str, str] = {}
    for name, tensor in _tensors(tree, (), of_leaves):
        first_name = first.setdefault(id(tensor), name)
        if first_name != name:
            earlier_names[name] = first_name
    for path, model in _partial_models(tree, ()):
        for name, first_name in model.whole.tied_names.items():
            earlier_names[name_of((*path, name))] = name_of((*path, first_name))
    return earlier_names


def _partial_models(tree: Any, path: Path) -> Iterator[tuple[Path, PartialModel]]:
    """Yield the partial models in a tree with their paths."""
    if isinstance(tree, PartialModel) and not isinstance(tree, nn.Module):
        yield path, tree
    elif not is_stateful(tree):
        for key, child in children(tree) or ():
            yield from _partial_models(child, (*path, key))


def _tensors(tree: Any, path: Path, of_leaves: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of the modules in a tree by name.

    In the order of its state; with `of_leaves` also the tensors that are leaves.
    """
    if isinstance(tree, nn.Module):
        saved = tree.state_dict(keep_vars=True)
        named = chain(
            tree.named_parameters(remove_duplicate=False),
            tree.named_buffers(remove_duplicate=False),
        )
        tensors = dict(named)
        yield from ((name_of((*path, name)), tensors[name]) for name in saved if name in tensors)
    elif isinstance(tree, Tensor):
        if of_leaves:
            yield name_of(path), tree
    elif not is_stateful(tree):
        for key, child in children(tree) or ():
            yield from _tensors(child, (*path, key), of_leaves)
