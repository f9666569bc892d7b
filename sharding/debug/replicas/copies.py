"""What a rank holds of a tree, leaf by leaf, and which ranks should hold the same of it."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ...layout.layout import Layout
from ...layout.spec import P
from ...tensor.sharded_tensor import ShardedTensor

# What stands for itself in text; the text of other objects may have an address in it.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """One leaf of a tree as this rank holds it.

    Attributes:
        path: how to name the leaf; "" for a tree that is one.
        kind: what it is, the same text on every rank: a layout, "tensor", "float".
        value: this rank's part, a plain tensor; or what is no tensor.
        holders: global ranks that should hold the same, ascending, this one among them; none where this rank holds nothing.
        start: where this rank's part begins in the whole tensor, per dim; none where it is the whole.
    """

    path: str
    kind: str
    value: Any
    holders: tuple[int, ...]
    start: tuple[int, ...] = ()

    @property
    def can_be_compared(self) -> bool:
        return isinstance(self.value, (Tensor, *_PLAIN))


def copies_of(leaves: Sequence[tuple[str, Any]], ranks: tuple[int, ...]) -> list[Copy]:
    """Named leaves as far as these global ranks should hold the same: what is no tensor first, since a setting that differs makes
    tensors differ, and then in the order of their names.
    """
    of_layout = _Holders(frozenset(ranks))
    copies = [_copy(path, leaf, ranks, of_layout) for path, leaf in leaves]
    return sorted(copies, key=lambda copy: (isinstance(copy.value, Tensor), copy.path))


def mesh_over(leaves: Sequence[tuple[str, Any]]) -> Any:
    """The mesh that has all ranks on which leaves lie, if one of theirs does; else None."""
    meshes = {leaf._layout.mesh for _, leaf in leaves if isinstance(leaf, ShardedTensor)}
    ranks = {mesh: frozenset(mesh.ranks.reshape(-1).tolist()) for mesh in meshes}
    everyone = frozenset().union(*ranks.values())
    return next((mesh for mesh, found in ranks.items() if found == everyone), None)


class _Holders(dict[Layout, "tuple[int, ...]"]):
    """The ranks that hold the same as this one in a layout; found once for each."""

    def __init__(self, ranks: Collection[int]) -> None:
        self.ranks = ranks

    def __missing__(self, layout: Layout) -> tuple[int, ...]:
        self[layout] = found = tuple(rank for rank in holders_over(layout.mesh, layout.spec) if rank in self.ranks)
        return found


def holders_over(mesh: Any, spec: P) -> tuple[int, ...]:
    """The ranks of a mesh that hold the same as this one, ascending; none outside the mesh. Contributions to what is pending are
    not the same."""
    if mesh.coordinate is None:
        return ()
    named = set(spec.axes)
    place = tuple(at if axis in named else slice(None) for axis, at in zip(mesh.axis_names, mesh.coordinate, strict=True))
    return tuple(sorted(np.asarray(mesh.ranks[place]).reshape(-1).tolist()))


def _copy(path: str, leaf: Any, everyone: tuple[int, ...], of_layout: _Holders) -> Copy:
    if isinstance(leaf, ShardedTensor):
        layout = leaf._layout
        return Copy(path, str(layout), leaf._local, of_layout[layout], tuple(start for start, _ in layout.box))
    if isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind in "biufc":
        leaf = torch.from_numpy(np.array(leaf))
    return Copy(path, "tensor" if isinstance(leaf, Tensor) else type(leaf).__name__, leaf, everyone)


# -- naming ------------------------------------------------------------------------------------------------------------


def leaves_of(trees: Sequence[Any]) -> list[tuple[str, Any]]:
    """The name and value of every leaf of trees.

    A module stands for its parameters and buffers, an optimizer for its state and its settings; the state of a parameter has the
    name of the parameter where its module is in one of the trees.
    """
    names = _parameter_names(trees)
    return [leaf for tree in trees for leaf in _leaves("", tree, names)]


def _leaves(path: str, tree: Any, names: dict[int, str]) -> Iterator[tuple[str, Any]]:
    """The name and value of every leaf; `names` are those of parameters, by identity."""
    for keys, leaf in pytree.tree_flatten_with_path(tree)[0]:
        name = path + pytree.keystr(keys)
        if isinstance(leaf, nn.Module):
            yield from _module_leaves(name, leaf)
        elif isinstance(leaf, Optimizer):
            yield from _optimizer_leaves(name, leaf, names)
        else:
            yield name, leaf


def _module_leaves(path: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for found in (module.named_parameters(), module.named_buffers()):
        for name, x in found:
            yield f"{path}.{name}".removeprefix("."), x


def _parameter_names(trees: Sequence[Any]) -> dict[int, str]:
    found = [each for tree in trees for each in pytree.tree_flatten_with_path(tree)[0]]
    modules = [(pytree.keystr(keys), leaf) for keys, leaf in found if isinstance(leaf, nn.Module)]
    return {id(x): name for path, module in modules for name, x in _module_leaves(path, module)}


def _optimizer_leaves(path: str, optimizer: Optimizer, names: dict[int, str]) -> Iterator[tuple[str, Any]]:
    for i, group in enumerate(optimizer.param_groups):
        here = f"{path}.param_groups[{i}]".removeprefix(".")
        for key, value in group.items():
            if key != "params":
                yield from _leaves(f"{here}[{key!r}]", value, names)
        for j, parameter in enumerate(group["params"]):
            name = names.get(id(parameter))
            if name is None:  # of no module here
                name = f"{here}['params'][{j}]"
                yield name, parameter
            for key, value in optimizer.state.get(parameter, {}).items():
                yield from _leaves(f"{key} of {name}", value, names)
