"""The state of a job at a commit, as a tree of leaves from which it can be recovered.

parameters, optimizer states, averages    the tensors themselves: a step writes them only after
                                          the vote
buffers, other tensors, numbers,          copies: forward may write them, and the step may be
states of random generators               given up
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.box import Box, box_size
from ..checkpoint.state import RandomState
from ..checkpoint.tree import (
    PartialModel,
    children,
    is_stateful,
    leaves,
    map_leaves,
    name_of,
)
from ..layout.layout import Layout
from ..redistribute.plan.cross_mesh import box_on
from ..tensor.sharded_tensor import ShardedTensor
from ..training.average import EMA


def snapshot(state: Any) -> Any:
    """Return a tree of the leaves of `state`, in which what forward writes is copied."""

    def leaf(_: Any, value: Any) -> Any:
        if isinstance(value, nn.Module):
            return _module_tree(value)
        if isinstance(value, torch.optim.Optimizer):
            tree = value.state_dict()
            return {**tree, "param_groups": whole_copy(tree["param_groups"])}
        if isinstance(value, EMA | RandomState):  # the latter's are copies already
            return value.state_dict()
        return snapshot(value.state_dict()) if is_stateful(value) else _copied(value)

    return map_leaves(state, leaf)


def _module_tree(module: nn.Module) -> dict[str, Any]:
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return {
        name: value if name in parameters else whole_copy(value)
        for name, value in module.state_dict().items()
    }


def whole_copy(tree: Any) -> Any:
    """Return a tree of leaves with a copy of each."""
    return map_leaves(tree, lambda _, value: _copied(value))


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def optimizers_of(tree: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers in a tree of state, each once."""
    unique = {id(value): value for value in _objects(tree)}
    return [value for value in unique.values() if isinstance(value, torch.optim.Optimizer)]


def parameters_of(tree: Any) -> list[nn.Parameter]:
    """Return the parameters of the modules in a tree of state."""
    modules = [value for value in _objects(tree) if isinstance(value, nn.Module)]
    return list(chain.from_iterable(module.parameters() for module in modules))


def _objects(tree: Any) -> Iterator[Any]:
    inner = None if is_stateful(tree) else children(tree)
    if inner is None:
        yield tree
        return
    for _, child in inner:
        yield from _objects(child)


def refuse_pipelines(tree: Any) -> None:
    """Raise ValueError for a model of which each rank has some parameters only."""
    for value in _objects(tree):
        if isinstance(value, PartialModel) and not isinstance(value, nn.Module):
            raise ValueError(
                "an elastic job keeps the state of each committed step, and that of a pipeline is "
                "gathered from all of its stages: train pipelines without it, from checkpoints"
            )


def missing_parts(tree: Any, ranks: Collection[int]) -> list[str]:
    """Return the parts of sharded tensors that none of these ranks of their world holds, as text.

    Args:
        tree: of leaves, as `snapshot` returns it.
    """
    missing: list[str] = []
    for path, leaf in leaves(tree):
        if not isinstance(leaf, ShardedTensor):
            continue
        layout = leaf._layout
        held = {box_on(layout, rank) for rank in ranks}
        boxes = _boxes(layout) - held
        missing += [f"{name_of(path)}{list(box)}" for box in sorted(boxes) if box_size(box)]
    return missing


def _boxes(layout: Layout) -> set[Box]:
    return {box_on(layout, rank) for rank in layout.mesh.ranks.ravel().tolist()}
