"""Which stages hold which units, parameters and buffers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from .dependencies import Boundary, Dependencies
from .units import ModuleTree, Place, join, places_of


@dataclass(frozen=True)
class Ownership:
    """Which stages hold what.

    Attributes:
        units: for each unit, the stages that call it.
        places: for each parameter and each unit's buffer that is used outside of units, by its
            first place, the stages that use it.
        tensors: the stages that hold a parameter or a unit's buffer, by its first place.
        tied: the stages of each parameter that two or more hold, by its name.
    """

    units: Mapping[str, Collection[int]]
    places: Mapping[Place, Collection[int]]
    tensors: Mapping[Place, Collection[int]]
    tied: Mapping[str, tuple[int, ...]]


def first_places(model: nn.Module) -> dict[int, Place]:
    """Return the first place of each parameter and buffer, by id."""
    first: dict[int, Place] = {}
    for place, x in places_of(model):
        first.setdefault(id(x), place)
    return first


def own_places(tree: ModuleTree, first: Mapping[int, Place]) -> dict[str, set[Place]]:
    """Return the first places of the parameters and buffers of each unit and leaf."""
    return {
        path: {first[id(x)] for _, x in places_of(module)}
        for path, module in (*tree.units.items(), *tree.leaves.items())
    }


def ownership_by_calls(
    tree: ModuleTree, dependencies: Dependencies, first: Mapping[int, Place]
) -> Ownership:
    """Return what each stage holds by the calls of a recorded forward.

    A unit that it never calls belongs to the stage of the one before it, if nobody else holds its
    parameters.
    """
    units: dict[str, set[int]] = {path: set() for path in tree.units}
    for call in dependencies.calls:
        if call.path in units:
            units[call.path].add(call.stage)
    # Buffers of containers and leaves are not among them: every stage has these.
    of_containers = {place for place, _ in _container_parameters(tree, first)}
    of_units = set(_stages_by_place(tree, units, {}, first))
    places = {
        place: set(used_by)
        for place, used_by in dependencies.places.items()
        if place in of_units | of_containers
    }
    for place in of_containers:
        places[place] = places.get(place) or {0}
    held = _stages_by_place(tree, units, places, first)
    previous = {0}
    for path, module in tree.units.items():
        if not units[path] and any(not held.get(first[id(x)]) for x in module.parameters()):
            units[path] = set(previous)
        previous = {max(units[path])} if units[path] else previous
    return _ownership(tree, units, places, first)


def ownership_by_order(
    tree: ModuleTree, boundaries: Sequence[Boundary], stages: int, first: Mapping[int, Place]
) -> Ownership:
    """Return what each stage holds if units are called in the order of registration.

    Any stage may use the parameters of containers.

    Raises:
        ValueError: boundaries in another order; a stage has no unit.
    """
    starts = {boundary.path: i + 1 for i, boundary in enumerate(boundaries)}
    units: dict[str, set[int]] = {}
    stage = 0
    for path in tree.order:
        if path in starts:
            if starts[path] != stage + 1:
                raise ValueError(
                    f"split: {path!r}, with which stage {starts[path]} begins, is registered "
                    f"before {boundaries[stage].path!r}, with which stage {stage + 1} begins. "
                    "Without an example, units count as called in the order in which they are "
                    "registered; pass example=(args, kwargs) if the forward calls them in another"
                )
            stage += 1
        if path in tree.units:
            units[path] = {stage}
    for number in range(stages):
        if {number} not in units.values():
            raise ValueError(
                f"split: stage {number} has no module with parameters; move the boundary, or use "
                "fewer stages"
            )
    places = {place: set(range(stages)) for place, _ in _container_parameters(tree, first)}
    return _ownership(tree, units, places, first)


def _container_parameters(
    tree: ModuleTree, first: Mapping[int, Place]
) -> list[tuple[Place, nn.Parameter]]:
    parameters: list[tuple[Place, nn.Parameter]] = []
    for container in tree.containers.values():
        for x in container._parameters.values():
            if x is not None:
                parameters.append((first[id(x)], x))
    return parameters


def _stages_by_place(
    tree: ModuleTree,
    units: Mapping[str, Collection[int]],
    places: Mapping[Place, Collection[int]],
    first: Mapping[int, Place],
) -> dict[Place, set[int]]:
    held: dict[Place, set[int]] = {place: set(used_by) for place, used_by in places.items()}
    for path, module in tree.units.items():
        for _, x in places_of(module):
            held.setdefault(first[id(x)], set()).update(units[path])
    return held


def _ownership(
    tree: ModuleTree,
    units: Mapping[str, Collection[int]],
    places: Mapping[Place, Collection[int]],
    first: Mapping[int, Place],
) -> Ownership:
    parameters = {first[id(x)] for x in tree.containers[""].parameters()}
    held = _stages_by_place(tree, units, places, first)
    shared = {place for place in parameters if len(held.get(place, ())) > 1}
    tied = {join(*place): tuple(sorted(held[place])) for place in held if place in shared}
    return Ownership(units, places, held, tied)
