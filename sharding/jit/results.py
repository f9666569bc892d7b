"""What a function returns as a tree, with the objects that it has made.

A model of transformers returns a cache, which it makes in each call: an instance of a class that is
registered with no tree. A later call returns another one, with the outputs of its graph.

    DynamicCache(layers=[DynamicLayer(keys=k, values=v, is_initialized=True)])
    leaves    k, v, True
    tree      the classes, the names of their attributes

That an instance is new is told by what it holds: something that the recording has computed. Another
one may be older than the call, kept where no snapshot looks, and would be stale in later calls: it
stays a leaf.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..trees import flatten, unflatten
from .state.holders import PLAIN


class Returned(NamedTuple):
    """What a call has returned.

    Attributes:
        leaves: its leaves.
        structure: how later calls make the same of their own leaves.
        instances: those that the call has made, in the order of `ResultTree`.
    """

    leaves: list[Any]
    structure: Any
    instances: list[Any]

    def map(self, f: Callable[[Any], Any]) -> Returned:
        """Return it with the results of a function in place of the leaves."""
        return self._replace(leaves=list(map(f, self.leaves)))

    def build(self) -> Any:
        """Return the result with these leaves; its instances are those that the call has made."""
        if isinstance(self.structure, ResultTree):
            return self.structure.build(iter(self.leaves), iter(self.instances))
        return unflatten(self.structure, self.leaves)


class ResultTree(NamedTuple):
    """The structure of a result.

    Attributes:
        tree: that of `flatten`.
        objects: for each of its leaves how an instance is made, None for a leaf of the result.
    """

    tree: Any
    objects: tuple[_Instance | None, ...]

    def build(self, leaves: Iterator[Any], instances: Iterator[Any] | None = None) -> Any:
        """Return the result with these leaves.

        Args:
            instances: those that get the attributes, the outer ones first; new ones by default.
        """
        parts = [next(leaves) if x is None else x.build(leaves, instances) for x in self.objects]
        return unflatten(self.tree, parts)


class _Instance(NamedTuple):
    """An instance: its class and the structure of its attributes."""

    kind: type
    attributes: ResultTree

    def build(self, leaves: Iterator[Any], instances: Iterator[Any] | None) -> Any:
        instance = object.__new__(self.kind) if instances is None else next(instances)
        vars(instance).update(self.attributes.build(leaves, instances))
        return instance


def flatten_result(
    result: Any, is_known: Callable[[Any], bool], is_computed: Callable[[Any], bool]
) -> Returned:
    """Return what a recorded call has returned, with its leaves and its structure.

    Args:
        is_known: whether an object is known to be older than the call.
        is_computed: whether a leaf was computed in the call.
    """
    flattening = _Flattening(is_known, is_computed)
    flattening.has_shared([result])
    leaves, structure, instances = flattening.run(result)
    return Returned(leaves, structure if any(structure.objects) else structure.tree, instances)


class _Flattening:
    """Flattens a result; see `flatten_result`."""

    def __init__(self, is_known: Callable[[Any], bool], is_computed: Callable[[Any], bool]) -> None:
        self._is_known, self._is_computed = is_known, is_computed
        self._seen: set[int] = set()  # instances and containers

    def run(self, result: Any) -> tuple[list[Any], ResultTree, list[Any]]:
        """Return the leaves of a tree, its structure and its instances."""
        parts, tree = flatten(result)
        leaves: list[Any] = []
        objects: list[_Instance | None] = []
        instances: list[Any] = []
        for x in parts:
            opened = self._open(x)
            if opened is None:
                leaves.append(x)
                objects.append(None)
            else:
                inner, attributes, within = opened
                leaves += inner
                objects.append(_Instance(type(x), attributes))
                instances += [x, *within]
        return leaves, ResultTree(tree, tuple(objects)), instances

    def _open(self, x: Any) -> tuple[list[Any], ResultTree, list[Any]] | None:
        """Return the parts of an instance that the call has made, None if this is none.

        One that is there twice, or holds a container that is, stays a leaf: it would become two.
        """
        if not is_instance(x) or self._is_known(x) or id(x) in self._seen:
            return None
        self._seen.add(id(x))
        if self.has_shared(vars(x).values()):
            return None
        opened = self.run(vars(x))
        return opened if any(map(self._is_computed, opened[0])) else None

    def has_shared(self, values: Iterable[Any]) -> bool:
        """Return whether containers in these are also in another place; note them."""
        is_shared = False
        todo = list(values)
        while todo:
            x = todo.pop()
            if isinstance(x, (list, dict, deque)) and not self._is_known(x):
                if id(x) in self._seen:
                    is_shared = True
                    continue
                self._seen.add(id(x))
            if isinstance(x, (list, deque, tuple)):
                todo += x
            elif isinstance(x, dict):
                todo += x.values()
        return is_shared


def unflatten_result(structure: Any, leaves: Sequence[Any]) -> Any:
    """Return the result with this structure, one of `flatten_result`, and these leaves."""
    if isinstance(structure, ResultTree):
        return structure.build(iter(leaves))
    return unflatten(structure, leaves)


def tensors_in(result: Any) -> Iterator[Tensor]:
    """Yield the tensors of a result, also those of instances."""
    seen: set[int] = set()
    todo = [result]
    while todo:
        x = todo.pop()
        if isinstance(x, Tensor):
            yield x
        elif id(x) not in seen:
            seen.add(id(x))
            parts, _ = flatten(x)
            todo += parts if len(parts) != 1 or parts[0] is not x else ()
            todo += vars(x).values() if is_instance(x) else ()


def is_instance(x: Any) -> bool:
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
