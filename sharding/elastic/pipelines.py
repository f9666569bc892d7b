"""The state of pipelines in an elastic job, of which each rank has that of its own stages.

    a snapshot       rank 0, stage 0   {embed: its part}    rank 1, stage 1   {head: its part}
                     nothing is sent
    after a loss     the ranks that are left tell each other which tensors they have
                     rank 0            {embed: its part, head: a layout, of which it holds nothing}

So a step costs no communication. In a snapshot there is an `OwnState` in the place of a pipeline,
and in those of the states and groups of its optimizers; `whole_tree` replaces them by the leaves of
the whole model, from which state is recovered like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.optim import Optimizer

from ...mesh.comm.agreement import gather_facts
from ...mesh.comm.group import Group
from ...mesh.comm.thread_context import thread_context
from ..checkpoint.state import (
    load_optimizer_state_dict,
    optimizer_state_dict,
    parameters_of,
    without_wrappers,
)
from ..checkpoint.tree import Leaf, children, is_stateful, leaves, map_leaves, name_of
from ..layout.layout import Layout
from ..parallel.pipeline.pipeline import Pipeline
from ..parallel.pipeline.state import WholeModel
from ..tensor.sharded_tensor import ShardedTensor

Path = tuple[Any, ...]


# -- what a rank has -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class OwnState(Leaf):
    """What a rank has of the state of a whole model.

    Attributes:
        whole: the whole model of the pipeline.
        own: entries by name, trees of tensors and values; or the groups of an optimizer.
    """

    whole: WholeModel
    own: Any

    def told(self) -> Any:
        """Return what other ranks need to know of it. Communication: none."""
        return self.whole.tensors.describe(self.own)

    def completed(self, told: Mapping[int, Any]) -> Any:
        """Return the state of the whole model. Communication: none.

        Args:
            told: by ranks of all stages; the same on every rank.
        """
        raise NotImplementedError

    def layouts(self) -> dict[str, Layout]:
        """Return the layouts of tensors by name, as far as this rank knows them."""
        return {
            name_of(path): self.whole.tensors.layout_of(leaf)
            for path, leaf in leaves(self.own)
            if isinstance(leaf, ShardedTensor)
        }


@dataclass(frozen=True, eq=False)
class OwnModel(OwnState):
    """The state of a rank's stages, by first name.

    Attributes:
        common: the state of the model that belongs to no stage, or to others.
        parameters: the layouts of all parameters of the whole model.
    """

    common: dict[str, Any]
    parameters: Mapping[str, Layout]

    def completed(self, told: Mapping[int, Any]) -> Any:
        return self.whole.state_told(self.own, self.common, told)

    def layouts(self) -> dict[str, Layout]:
        return {**self.parameters, **super().layouts()}


@dataclass(frozen=True, eq=False)
class OwnEntries(OwnState):
    """Trees by parameter of a rank's stages, such as the states of an optimizer, or averages.

    Attributes:
        of_optimizer: whether names have no parts that wrappers add, as in the state of optimizers.
    """

    of_optimizer: bool

    def completed(self, told: Mapping[int, Any]) -> Any:
        whole = self.whole.tree_told(self.own, told)
        if not self.of_optimizer:
            return whole
        return {without_wrappers(name): entry for name, entry in whole.items()}


@dataclass(frozen=True, eq=False)
class OwnGroups(OwnState):
    """The groups of a rank's optimizer, with names for parameters."""

    def told(self) -> Any:
        return self.own

    def completed(self, told: Mapping[int, Any]) -> Any:
        return [
            {**group, "params": [without_wrappers(name) for name in group["params"]]}
            for group in self.whole.groups_told(told)
        ]

    def layouts(self) -> dict[str, Layout]:
        return {}


def own_optimizer(whole: WholeModel, optimizer: Optimizer, groups: list[dict[str, Any]]) -> Any:
    """Return what a rank has of the state of an optimizer over parameters of a pipeline.

    Args:
        groups: the settings of its groups.

    Communication: none.
    """
    names = {id(parameter): name for name, parameter in whole.named_parameters()}
    numbered = [names[id(parameter)] for parameter in parameters_of(optimizer)]
    state = optimizer.state_dict()
    own = {numbered[number]: dict(values) for number, values in state["state"].items()}
    named = [
        {**settings, "params": [numbered[number] for number in group["params"]]}
        for settings, group in zip(groups, state["param_groups"], strict=True)
    ]
    return {
        "state": OwnEntries(whole, whole.entries_of(own), of_optimizer=True),
        "param_groups": OwnGroups(whole, named),
    }


def parameter_layouts(whole: WholeModel) -> dict[str, Layout]:
    """Return the layouts of all parameters of the whole model.

    Communication: one all_gather of small objects over the axis, unless all ranks know them.
    """
    return {name: parameter._layout for name, parameter in whole.parameters().items()}


def copied_state(state: OwnState, copied: Callable[[Any], Any]) -> OwnState:
    """Return the state with a copy of each leaf."""
    state = replace(state, own=map_leaves(state.own, lambda _, leaf: copied(leaf)))
    if isinstance(state, OwnModel):
        common = {name: copied(leaf) for name, leaf in state.common.items()}
        state = replace(state, common=common)
    return state


# -- the whole -------------------------------------------------------------------------------------


def own_states(tree: Any) -> Iterator[tuple[Path, OwnState]]:
    """Yield what a tree of leaves has of whole models, and where."""
    for path, leaf in leaves(tree):
        if isinstance(leaf, OwnState):
            yield path, leaf


def whole_tree(tree: Any, group: Group, number: int | None) -> Any:
    """whole_tree(tree, group, number) -> the tree with the state of whole models.

    Every rank of the group calls it. Of stages of which no rank has a tree, nothing is in it.

    Args:
        tree: of leaves; of any kind on ranks that have no part of it.
        number: of this rank in the world of the tree; None if it has no part of it.

    Communication: one all_gather of small objects over the group.
    """
    own: dict[Path, OwnState] = {} if number is None else dict(own_states(tree))
    worlds = {state.whole.tensors.mesh.world for state in own.values()}
    facts: dict[Path, Any] = {}
    for world in worlds:  # one; meshes of its stages are made in it
        with thread_context.setting(world=world):
            facts = {path: state.told() for path, state in own.items()}
    told: dict[Path, dict[int, Any]] = {}
    for other, other_facts in gather_facts(group, (number, facts)).values():
        if other is None:
            continue
        for path, fact in other_facts.items():
            told.setdefault(path, {})[other] = fact
    whole: dict[Path, Any] = {}
    for world in worlds:
        with thread_context.setting(world=world):
            for path, state in own.items():
                of_all = dict(sorted(told[path].items()))
                whole[path] = state.completed(of_all)
    if not whole:
        return tree
    return map_leaves(tree, lambda path, leaf: whole.get(path, leaf))


def pipelines_of(tree: Any) -> list[Pipeline]:
    """Return the pipelines in a tree of state."""
    if isinstance(tree, Pipeline):
        return [tree]
    pipelines: list[Pipeline] = []
    for _, child in () if is_stateful(tree) else children(tree) or ():
        pipelines += pipelines_of(child)
    return pipelines


def pipeline_of(optimizer: Optimizer, pipelines: list[Pipeline]) -> Pipeline | None:
    """Return the pipeline of whose parameters an optimizer has some; None if there is none."""
    numbers = {id(parameter) for parameter in parameters_of(optimizer)}
    for pipe in pipelines:
        if any(id(parameter) in numbers for parameter in pipe.parameters()):
            return pipe
    return None


def named(tree: Any) -> Any:
    """Return the tree with the states of optimizers of pipelines by the names of parameters.

    It can be saved, and load what was saved or recovered: see `load_named`.

    Communication: of each optimizer of a pipeline up to three all_gathers of small objects.
    """
    pipelines = pipelines_of(tree)
    if not pipelines:
        return tree

    def named_leaf(_: Path, value: Any) -> Any:
        pipe = pipeline_of(value, pipelines) if isinstance(value, Optimizer) else None
        return value if pipe is None else optimizer_state_dict(pipe, value)

    return map_leaves(tree, named_leaf)


def load_named(tree: Any, loaded: Any) -> Any:
    """Return the tree with what was loaded into `named(tree)`; its objects are in it.

    Communication: of each optimizer of a pipeline one all_gather of small objects.
    """
    pipelines = pipelines_of(tree)
    if not pipelines:
        return loaded

    def loaded_leaf(path: Path, value: Any) -> Any:
        pipe = pipeline_of(value, pipelines) if isinstance(value, Optimizer) else None
        at = loaded
        for key in path:
            at = dict(children(at) or ())[key]
        if pipe is None:
            return at
        load_optimizer_state_dict(pipe, at, value)
        return value

    return map_leaves(tree, loaded_leaf)
