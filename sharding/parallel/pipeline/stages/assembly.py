"""Making the stages of a rank out of a model: which modules they get, and what becomes of the rest.

unit of one stage here                  the module itself
unit that shares tensors with           a copy in each stage: the first stage has the model's
another stage of this rank              tensors, the others have copies of those that are shared
unit of no stage here                   stays in the model, with its tensors on "meta"
tensor used outside of its unit         in the stage at its place, and put into the model's
                                        modules when the stage runs
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .ownership import Ownership
from .run import SharedTensor
from .stage import RunStage, Stage, fill_stage
from .units import ModuleTree, Place, join, places_of


@dataclass(frozen=True)
class AssembledStage:
    """A stage with what its runs need.

    Attributes:
        stage: the module.
        units: its units, by the paths that they have in the model.
        shared: the tensors that it uses outside of units, or in another stage's unit.
    """

    stage: Stage
    units: Mapping[str, nn.Module]
    shared: Sequence[SharedTensor]


def make_stages(
    tree: ModuleTree,
    ownership: Ownership,
    first: Mapping[int, Place],
    own_stages: Sequence[int],
    run: RunStage,
) -> dict[int, AssembledStage]:
    """Return the stages that a rank holds, and move what they do not use to "meta".

    Args:
        tree: the model's modules.
        ownership: what each stage holds.
        first: the first place of each tensor, by id.
        own_stages: the numbers of the stages, in order.
        run: runs a stage, given its number, carried tensors, arguments and keyword arguments.
    """
    model = tree.containers[""]
    held = {
        place: [stage for stage in own_stages if stage in stages]
        for place, stages in ownership.tensors.items()
    }
    originals: set[nn.Module] = set()  # units that are in a stage themselves
    assembled: dict[int, AssembledStage] = {}
    for index in own_stages:
        memo: dict[int, Any] = {}
        for _, x in places_of(model):
            if held.get(first[id(x)], [index])[:1] == [index]:
                memo[id(x)] = x  # not copied: this is the first stage that holds it
        units: dict[str, nn.Module] = {}
        for path, stages in ownership.units.items():
            if index in stages:
                unit = tree.units[path]
                if all(len(held.get(first[id(x)], ())) < 2 for _, x in places_of(unit)):
                    originals.add(unit)
                    units[path] = unit
                else:
                    units[path] = copy.deepcopy(unit, memo)
        stage = Stage(index, model, partial(run, index))
        shared = _fill(stage, tree, ownership, first, units, memo)
        stage.model_names = _model_names(stage, tree, units, first)
        assembled[index] = AssembledStage(stage, units, shared)
    _free(tree, originals)
    return assembled


def _fill(
    stage: Stage,
    tree: ModuleTree,
    ownership: Ownership,
    first: Mapping[int, Place],
    units: Mapping[str, nn.Module],
    memo: dict[int, Any],
) -> list[SharedTensor]:
    """Register the units of a stage, and what it uses outside of them; return the latter."""
    model = tree.containers[""]
    in_units: dict[Place, tuple[nn.Module, str]] = {}
    for path, unit in units.items():
        for (inner, name), x in places_of(tree.units[path]):
            in_units.setdefault(first[id(x)], (unit.get_submodule(inner), name))
    targets: dict[Place, list[tuple[nn.Module, str]]] = {}
    tensors: dict[Place, Tensor] = {}
    for (path, name), x in places_of(model):
        tensors.setdefault(first[id(x)], x)
        targets.setdefault(first[id(x)], []).append((model.get_submodule(path), name))
    outside = {
        place: copy.deepcopy(tensors[place], memo)
        for place, stages in ownership.places.items()
        if stage.index in stages and place not in in_units
    }
    homes = fill_stage(stage, tree, units, outside)
    shared: list[SharedTensor] = []
    for place in ownership.places:
        home, name = in_units.get(place, (homes.get(place), place[1]))
        shared.append(SharedTensor(home, name, targets[place], _meta(tensors[place])))
    return shared


def _model_names(
    stage: Stage, tree: ModuleTree, units: Mapping[str, nn.Module], first: Mapping[int, Place]
) -> dict[str, str]:
    """Return the model's name of each parameter and buffer of the stage."""
    firsts = {place: first[id(x)] for place, x in places_of(tree.containers[""])}
    return {join(*place): join(*firsts.get(place, place)) for place, _ in places_of(stage)}


def _free(tree: ModuleTree, originals: Collection[nn.Module]) -> None:
    """Move the tensors of units that are in no stage themselves to "meta".

    Parameters of containers are moved too: stages put them back when they run.
    """
    in_use: set[nn.Module] = set()
    for unit in originals:
        in_use |= set(unit.modules())
    on_meta: dict[int, Any] = {}
    for unit in tree.units.values():
        for module in set(unit.modules()) - in_use:
            for table in (module._parameters, module._buffers):
                for name, x in table.items():
                    if x is not None:
                        table[name] = on_meta.setdefault(id(x), _meta(x))
    for container in tree.containers.values():
        for name, x in container._parameters.items():
            if x is not None:
                container._parameters[name] = on_meta.setdefault(id(x), _meta(x))


def _meta(x: Tensor) -> Tensor:
    meta = torch.empty_like(x.detach(), device="meta")
    return nn.Parameter(meta, x.requires_grad) if isinstance(x, nn.Parameter) else meta
