"""The state of a job at a commit, as a tree of leaves from which it can be recovered.

parameters, optimizer states, averages    the tensors themselves: a step writes them only after
                                          the vote
buffers, other tensors, numbers,          copies: forward may write them, and the step may be
states of random generators               given up

Copies are made at each commit; the tree, with a leaf for each parameter and each tensor of an
optimizer, only when it is asked for, which is after a loss.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.box import Box, box_size
from ..checkpoint.state import RandomState
from ..checkpoint.tree import Leaf, children, is_stateful, leaves, map_leaves, name_of
from ..layout.layout import Layout
from ..parallel.pipeline.pipeline import Pipeline
from ..parallel.pipeline.state import WholeModel
from ..redistribute.plan.cross_mesh import box_on
from ..tensor.sharded_tensor import ShardedTensor
from ..training.average import EMA
from .pipelines import (
    OwnEntries,
    OwnModel,
    OwnState,
    copied_state,
    own_optimizer,
    parameter_layouts,
    pipeline_of,
    pipelines_of,
)

_NONE: Mapping[str, Any] = MappingProxyType({})
_IMMUTABLE = (int, float, bool, str, type(None))


def snapshot(state: Any) -> Any:
    """Return a tree of the leaves of `state`, in which what forward writes is copied."""
    return Snapshot(state).tree()


class Snapshot:
    """Snapshot(state): copies of what forward may write; `tree()` has them and all other leaves.

    The tree is that of the moment of the copies until something else writes parameters, optimizer
    states or averages.

    Args:
        state: a tree of modules, optimizers and other objects with `state_dict`, tensors, numbers.
        before: an earlier snapshot of the same objects, which knows their buffers.

    Communication: none; of a pipeline without `before` one all_gather of small objects over its
        axis.
    """

    def __init__(self, state: Any, before: Snapshot | None = None) -> None:
        self._buffers: dict[int, _Buffers] = {} if before is None else before._buffers
        self._stages: dict[int, _StageBuffers] = {} if before is None else before._stages
        self._pipelines = pipelines_of(state) if before is None else before._pipelines
        self._tree: Any = None
        self._copied = map_leaves(state, lambda _, value: self._copy(value))

    @staticmethod
    def of_leaves(tree: Any) -> Snapshot:
        """Return a snapshot of a tree that has leaves alone, and is not copied."""
        result = Snapshot({})
        result._tree = tree
        return result

    def _copy(self, value: Any) -> Any:
        """Return a leaf of the state with copies of what forward may write."""
        if isinstance(value, Pipeline):
            stages = self._stages.get(id(value))
            if stages is None or stages.pipe is not value:
                stages = self._stages[id(value)] = _StageBuffers(value)
            return _CopiedPipeline(value.whole, *stages.copies(), stages.parameters)
        if isinstance(value, nn.Module):
            buffers = self._buffers.get(id(value))
            if buffers is None or buffers.module is not value:
                buffers = self._buffers[id(value)] = _Buffers(value)
            return _CopiedModule(value, buffers.copies())
        if isinstance(value, torch.optim.Optimizer):
            groups = [
                {key: _copied(item) for key, item in group.items() if key != "params"}
                for group in value.param_groups
            ]
            pipe = pipeline_of(value, self._pipelines) if self._pipelines else None
            return _CopiedOptimizer(value, groups, None if pipe is None else pipe.whole)
        if isinstance(value, EMA):
            return _Live(value)
        if isinstance(value, RandomState):  # its values are copies already
            return _Leaves(value.state_dict())
        return _Leaves(snapshot(value.state_dict())) if is_stateful(value) else _copied(value)

    def tree(self) -> Any:
        """Return the tree of leaves; the same object each time."""
        if self._tree is None:
            self._tree = map_leaves(
                self._copied, lambda _, leaf: leaf.tree() if isinstance(leaf, _Node) else leaf
            )
        return self._tree


class _Node(Leaf):
    """A place of a snapshot at which its tree has a tree of leaves."""

    def tree(self) -> Any:
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class _Leaves(_Node):
    """A tree of copies."""

    copies: Any

    def tree(self) -> Any:
        return self.copies


@dataclass(frozen=True, eq=False)
class _Live(_Node):
    """An object whose state forward does not write."""

    owner: Any

    def tree(self) -> Any:
        if isinstance(self.owner, EMA) and self.owner.pipe is not None:
            whole = self.owner.pipe.whole
            state = self.owner.own_state_dict()
            own = whole.entries_of(state["average"])
            return {**state, "average": OwnEntries(whole, own, of_optimizer=False)}
        return self.owner.state_dict()


@dataclass(frozen=True, eq=False)
class _CopiedModule(_Node):
    """A module, and copies of its buffers by name."""

    module: nn.Module
    copies: dict[str, Any]

    def tree(self) -> Any:
        return {**self.module.state_dict(), **self.copies}


@dataclass(frozen=True, eq=False)
class _CopiedOptimizer(_Node):
    """An optimizer, and copies of its groups without their parameters.

    Attributes:
        whole: the model of the pipeline whose parameters it has; None if they are a module's.
    """

    optimizer: torch.optim.Optimizer
    groups: list[dict[str, Any]]
    whole: WholeModel | None

    def tree(self) -> Any:
        if self.whole is not None:
            return own_optimizer(self.whole, self.optimizer, self.groups)
        tree = self.optimizer.state_dict()
        groups = [
            {**group, "params": whole_copy(own["params"])}
            for own, group in zip(tree["param_groups"], self.groups, strict=True)
        ]
        return {**tree, "param_groups": groups}


@dataclass(frozen=True, eq=False)
class _CopiedPipeline(_Node):
    """A pipeline, and copies of the buffers of this rank's stages and of the model's others."""

    whole: WholeModel
    copies: dict[str, Any]
    common: dict[str, Any]
    parameters: Mapping[str, Layout]

    def tree(self) -> Any:
        own = {**self.whole.own_state(), **self.copies}
        return OwnModel(self.whole, own, self.common, self.parameters)


class _StageBuffers:
    """The buffers of a pipeline, of this rank's stages and of what belongs to none.

    Attributes:
        pipe: whose they are.
        parameters: the layouts of all parameters of the whole model.

    Communication: one all_gather of small objects over the axis, unless all ranks know them.
    """

    def __init__(self, pipe: Pipeline) -> None:
        self.pipe = pipe
        self.parameters = parameter_layouts(pipe.whole)
        self._stages = [_Buffers(stage) for stage in pipe.stages.values()]
        self._model = _Buffers(pipe.model)

    def copies(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return copies by first name: of this rank's stages, and of the model's others."""
        own: dict[str, Any] = {}
        common: dict[str, Any] = {}
        for buffers in self._stages:
            for name, copied in buffers.copies().items():
                own.setdefault(self.pipe.whole.first_name(name), copied)
        for name, copied in self._model.copies().items():
            first = self.pipe.whole.first_name(name)
            if first not in own:
                common.setdefault(first, copied)
        return own, common


class _Buffers:
    """The buffers of a module and what else its state has besides parameters.

    They are listed once, by the modules that own them, since a walk through all modules takes
    longer than the copies. A buffer that forward registers later is a leaf that is not copied.

    Attributes:
        module: whose they are.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        state = module.state_dict(keep_vars=True)
        self._names = [name for name in state if name not in parameters]
        owners = {
            f"{prefix}.{name}" if prefix else name: (owner._buffers, name)
            for prefix, owner in module.named_modules(remove_duplicate=False)
            for name in owner._buffers
        }
        # where the state has the buffer itself, not what a hook makes of it
        self._owners: list[tuple[str, dict[str, Any], str]] = []
        if all(
            name in owners and owners[name][0][owners[name][1]] is state[name]
            for name in self._names
        ):
            self._owners = [(name, *owners[name]) for name in self._names]

    def copies(self) -> dict[str, Any]:
        """Return copies by name."""
        if len(self._owners) == len(self._names):
            return {name: _copied(buffers[own_name]) for name, buffers, own_name in self._owners}
        state = self.module.state_dict()
        return {name: whole_copy(state[name]) for name in self._names if name in state}


def whole_copy(tree: Any) -> Any:
    """Return a tree of leaves with a copy of each."""
    return map_leaves(tree, lambda _, value: _copied(value))


def _copied(value: Any) -> Any:
    if type(value) in _IMMUTABLE:
        return value
    if type(value) is tuple and all(type(item) in _IMMUTABLE for item in value):  # betas, for one
        return value
    if isinstance(value, OwnState):
        return copied_state(value, _copied)
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def optimizers_of(tree: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers in a tree of state, each once."""
    unique = {id(value): value for value in _objects(tree)}
    return [value for value in unique.values() if isinstance(value, torch.optim.Optimizer)]


def parameters_of(tree: Any) -> list[nn.Parameter]:
    """Return the parameters of the modules and of the own stages of pipelines in a tree."""
    modules = [value for value in _objects(tree) if isinstance(value, nn.Module | Pipeline)]
    return list(chain.from_iterable(module.parameters() for module in modules))


def _objects(tree: Any) -> Iterator[Any]:
    inner = None if is_stateful(tree) else children(tree)
    if inner is None:
        yield tree
        return
    for _, child in inner:
        yield from _objects(child)


def missing_parts(
    tree: Any, ranks: Collection[int], copies: Mapping[str, Mapping[Box, Sequence[int]]] = _NONE
) -> list[str]:
    """Return the parts of sharded tensors that none of these ranks of their world holds, as text.

    Args:
        tree: of leaves, as `snapshot` returns it.
        copies: which ranks have a copy of which box besides, by name.
    """
    missing: list[str] = []
    for path, leaf in leaves(tree):
        layouts: dict[str, Layout] = {}
        if isinstance(leaf, ShardedTensor):
            layouts = {name_of(path): leaf._layout}
        elif isinstance(leaf, OwnState):
            layouts = {name_of((*path, name)): layout for name, layout in leaf.layouts().items()}
        for name, layout in layouts.items():
            held = {box_on(layout, rank) for rank in ranks}
            copied = copies.get(name, {})
            held |= {box for box, holders in copied.items() if not set(holders).isdisjoint(ranks)}
            boxes = {box_on(layout, rank) for rank in layout.mesh.ranks.ravel().tolist()} - held
            missing += [f"{name}{list(box)}" for box in sorted(boxes) if box_size(box)]
    return missing
