"""What a unit returns: tensors in tuples, lists, dicts, dataclasses and registered classes.

A stage that does not run a unit returns the same tree with other tensors. So everything else in it
must be constant: None, numbers, strings.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ....trees import flatten, is_dataclass_instance, unflatten

_CONSTANTS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.Size,
)


@dataclass(frozen=True)
class _Tensor:
    """The place of a tensor."""


@dataclass(frozen=True)
class _Fields:
    """A dataclass that is not registered with torch's pytree, as the tree of its attributes."""

    cls: type
    tree: ValueTree


@dataclass(frozen=True)
class ValueTree:
    """The structure of a value, and its leaves that are not tensors.

    Attributes:
        structure: that of `trees.flatten`.
        leaves: for each leaf a constant, or what stands for a tensor or a dataclass.
    """

    structure: Any
    leaves: tuple[Any, ...]

    def with_tensors(self, tensors: Iterable[Tensor]) -> Any:
        """Return the value with these tensors."""
        return self._fill(iter(tensors))

    def _fill(self, tensors: Iterator[Tensor]) -> Any:
        leaves: list[Any] = []
        for leaf in self.leaves:
            if isinstance(leaf, _Tensor):
                leaves.append(next(tensors))
            elif isinstance(leaf, _Fields):
                instance = object.__new__(leaf.cls)
                for name, field in leaf.tree._fill(tensors).items():
                    object.__setattr__(instance, name, field)
                leaves.append(instance)
            else:
                leaves.append(leaf)
        return unflatten(self.structure, leaves)


def split_value(value: Any) -> tuple[list[Tensor], ValueTree]:
    """Return the tensors of a value, in the order of its leaves, and its tree.

    Raises:
        TypeError: an object in it is neither a tensor nor a constant; the text is its class.
    """
    leaves, structure = flatten(value)
    tensors: list[Tensor] = []
    described: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
            described.append(_Tensor())
        elif is_dataclass_instance(leaf):
            inner, tree = split_value(dict(vars(leaf)))
            tensors += inner
            described.append(_Fields(type(leaf), tree))
        elif isinstance(leaf, _CONSTANTS):
            described.append(leaf)
        else:
            raise TypeError(f"{type(leaf).__module__}.{type(leaf).__qualname__}")
    return tensors, ValueTree(structure, tuple(described))


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of any value; of objects that are no containers, none."""
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor)]


def leaves_of(value: Any) -> list[Any]:
    """Return the leaves of any value, None among them, and those of dataclasses in it.

    A leaf has the same place whether others are None: torch leaves out fields of registered
    dataclasses that are.
    """
    leaves: list[Any] = []
    for leaf in pytree.tree_leaves(value, is_leaf=is_dataclass_instance):
        if is_dataclass_instance(leaf):
            names = dict.fromkeys([*(x.name for x in fields(leaf)), *getattr(leaf, "__dict__", ())])
            leaves += leaves_of([getattr(leaf, name, None) for name in names])
        else:
            leaves.append(leaf)
    return leaves
