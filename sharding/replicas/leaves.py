"""The leaves of a tree on this rank, and which ranks should hold the same values."""

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

from ..layout.layout import Layout
from ..layout.spec import P

# Types whose repr determines the value; that of other objects may contain an address.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaLeaf:
    """One leaf of a tree on this rank.

    Attributes:
        path: the name of the leaf; "" if it is the whole tree.
        kind: the same text on every rank: a layout, "tensor", "float".
        value: this rank's part as a plain tensor, or the leaf itself if it is not a tensor.
        holders: global ranks that should hold the same, ascending, including this one; empty if
            this rank holds nothing.
        start: where this rank's part begins in the global tensor, per dim; empty if it is the
            whole.
    """

    path: str
    kind: str
    value: Any
    holders: tuple[int, ...]
    start: tuple[int, ...] = ()

    @property
    def can_be_compared(self) -> bool:
        return isinstance(self.value, (Tensor, *_PLAIN))


def replica_leaves(leaves: Sequence[tuple[str, Any]], ranks: tuple[int, ...]) -> list[ReplicaLeaf]:
    """Return named leaves, compared among these global ranks, sorted by name.

    Leaves that are not tensors are first, since a setting that differs makes tensors differ.
    """
    holders_of = _HoldersOf(frozenset(ranks))
    replicas = [_replica_leaf(path, leaf, ranks, holders_of) for path, leaf in leaves]
    return sorted(replicas, key=lambda leaf: (isinstance(leaf.value, Tensor), leaf.path))


def mesh_over(leaves: Sequence[tuple[str, Any]]) -> Any:
    """Return the mesh of a leaf whose ranks include those of all leaves; None if there is none."""
    meshes = {layout.mesh for _, leaf in leaves if (layout := _layout_of(leaf)) is not None}
    ranks = {mesh: frozenset(mesh.ranks.reshape(-1).tolist()) for mesh in meshes}
    everyone = frozenset().union(*ranks.values())
    return next((mesh for mesh, members in ranks.items() if members == everyone), None)


def _layout_of(leaf: Any) -> Layout | None:
    """Return the layout of a sharded tensor, a class of a higher layer; None for other leaves."""
    return getattr(leaf, "_layout", None) if isinstance(leaf, Tensor) else None


class _HoldersOf(dict[Layout, "tuple[int, ...]"]):
    """Layout -> the ranks that hold the same part as this one, computed once for each layout."""

    def __init__(self, ranks: Collection[int]) -> None:
        self.ranks = ranks

    def __missing__(self, layout: Layout) -> tuple[int, ...]:
        self[layout] = holders = tuple(
            rank for rank in replica_ranks(layout.mesh, layout.spec) if rank in self.ranks
        )
        return holders


def replica_ranks(mesh: Any, spec: P) -> tuple[int, ...]:
    """Return the ranks of a mesh with the same values as this one, ascending; none outside it.

    Contributions to a pending value are not the same.
    """
    if mesh.coordinate is None:
        return ()
    named = set(spec.axes)
    index = tuple(
        at if axis in named else slice(None)
        for axis, at in zip(mesh.axis_names, mesh.coordinate, strict=True)
    )
    return tuple(sorted(np.asarray(mesh.ranks[index]).reshape(-1).tolist()))


def _replica_leaf(
    path: str, leaf: Any, everyone: tuple[int, ...], holders_of: _HoldersOf
) -> ReplicaLeaf:
    layout = _layout_of(leaf)
    if layout is not None:
        return ReplicaLeaf(
            path,
            str(layout),
            leaf._local,
            holders_of[layout],
            tuple(start for start, _ in layout.box),
        )
    if isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind in "biufc":
        leaf = torch.from_numpy(np.array(leaf))
    return ReplicaLeaf(
        path, "tensor" if isinstance(leaf, Tensor) else type(leaf).__name__, leaf, everyone
    )


# -- naming ----------------------------------------------------------------------------------------


def leaves_of(trees: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return the name and value of every leaf of some trees.

    A module stands for its parameters and buffers, an optimizer for its state and its settings. The
    state of a parameter has the name of the parameter if its module is in one of the trees.
    """
    names: dict[int, str] = {}
    for tree in trees:
        for keys, leaf in pytree.tree_flatten_with_path(tree)[0]:
            if isinstance(leaf, nn.Module):
                named = _module_leaves(pytree.keystr(keys), leaf)
                names.update((id(x), name) for name, x in named)
    return [leaf for tree in trees for leaf in _leaves("", tree, names)]


def _leaves(path: str, tree: Any, names: dict[int, str]) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of every leaf; `names` are those of parameters, by id."""
    for keys, leaf in pytree.tree_flatten_with_path(tree)[0]:
        name = path + pytree.keystr(keys)
        if isinstance(leaf, nn.Module):
            yield from _module_leaves(name, leaf)
        elif isinstance(leaf, Optimizer):
            yield from _optimizer_leaves(name, leaf, names)
        else:
            yield name, leaf


def _module_leaves(path: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for named_tensors in (module.named_parameters(), module.named_buffers()):
        for name, x in named_tensors:
            yield f"{path}.{name}".removeprefix("."), x


def _optimizer_leaves(
    path: str, optimizer: Optimizer, names: dict[int, str]
) -> Iterator[tuple[str, Any]]:
    for i, group in enumerate(optimizer.param_groups):
        prefix = f"{path}.param_groups[{i}]".removeprefix(".")
        for key, value in group.items():
            if key != "params":
                yield from _leaves(f"{prefix}[{key!r}]", value, names)
        for j, parameter in enumerate(group["params"]):
            name = names.get(id(parameter))
            if name is None:  # its module is not in the trees
                name = f"{prefix}['params'][{j}]"
                yield name, parameter
            for key, value in optimizer.state.get(parameter, {}).items():
                yield from _leaves(f"{key} of {name}", value, names)
