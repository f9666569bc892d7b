"""What a function returns as a tree, with the objects that it has made.

A model of transformers returns a cache, which it makes in each call: an instance of a class that is
registered with no tree. A later call returns another one, with the outputs of its graph.

    DynamicCache(layers=[DynamicLayer(keys=k, values=v, is_initialized=True)])
    leaves    k, v, True
    tree      the classes, the names of their attributes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..trees import flatten, unflatten
from .state.holders import PLAIN


class ResultTree(NamedTuple):
    """The structure of a result.

    Attributes:
        tree: that of `flatten`.
        objects: for each of its leaves how an instance is made, None for a leaf of the result.
    """

    tree: Any
    objects: tuple[_Instance | None, ...]

    def build(self, leaves: Iterator[Any]) -> Any:
        """Return the result with these leaves."""
        parts = [next(leaves) if x is None else x.build(leaves) for x in self.objects]
        return unflatten(self.tree, parts)


class _Instance(NamedTuple):
    """An instance: its class and the structure of its attributes."""

    kind: type
    attributes: ResultTree

    def build(self, leaves: Iterator[Any]) -> Any:
        instance = object.__new__(self.kind)
        vars(instance).update(self.attributes.build(leaves))
        return instance


def flatten_result(result: Any, is_known: Callable[[Any], bool]) -> tuple[list[Any], Any]:
    """Return the leaves of a result and its structure.

    Args:
        is_known: whether an object is older than the call.
    """
    leaves, structure = _flatten(result, is_known, set())
    return leaves, structure if any(structure.objects) else structure.tree


def _flatten(
    result: Any, is_known: Callable[[Any], bool], seen: set[int]
) -> tuple[list[Any], ResultTree]:
    parts, tree = flatten(result)
    leaves: list[Any] = []
    objects: list[_Instance | None] = []
    for x in parts:
        if _is_instance(x) and not is_known(x) and id(x) not in seen:
            seen.add(id(x))  # one that is there twice stays a leaf, and is refused
            inner, attributes = _flatten(vars(x), is_known, seen)
            leaves += inner
            objects.append(_Instance(type(x), attributes))
        else:
            leaves.append(x)
            objects.append(None)
    return leaves, ResultTree(tree, tuple(objects))


def unflatten_result(structure: Any, leaves: Sequence[Any]) -> Any:
    """Return the result with this structure, one of `flatten_result`, and these leaves."""
    if isinstance(structure, ResultTree):
        return structure.build(iter(leaves))
    return unflatten(structure, leaves)


def _is_instance(x: Any) -> bool:
    """Return whether an object consists of its attributes, so that it can be made of others."""
    if isinstance(x, (Tensor, nn.Module, type, *PLAIN)) or callable(x):
        return False
    kind = type(x)
    return (
        kind.__new__ is object.__new__
        and "__dict__" in dir(x)
        and not any(getattr(base, "__slots__", ()) for base in kind.__mro__)
        and kind.__module__ != "builtins"
    )
