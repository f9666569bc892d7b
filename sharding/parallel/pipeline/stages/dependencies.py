"""Which outputs of units each stage needs, from the recording of a forward.

    stage 0                 │ stage 1               │ stage 2
    embed ──► layers.0 ─────┼──► layers.1 ──────────┼──► layers.2 ──► head
      └─────────────────────┼── add ──► mask ───────┼─────▲              what is between units is
                            │                       │                    computed on each stage
    carried into stage 1:  layers.0, embed     into stage 2:  layers.1, embed

Operators outside of units are followed tensor by tensor: what comes out depends on what goes in.
Views share memory, so a write makes all tensors of that memory depend on it. What a unit reads,
whether it was passed to it or not, is what its stage needs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .recording import Enter, Event, Exit, Operator, Recording, TensorKey, TensorMeta
from .units import ModuleTree, Place
from .values import ValueTree


class Boundary(NamedTuple):
    """Where a stage begins: a call of a module.

    Attributes:
        path: the module.
        occurrence: which of its calls, from 0.
    """

    path: str
    occurrence: int = 0


class Output(NamedTuple):
    """A tensor among the results of units: the number of the call, and that of the tensor."""

    call: int
    index: int


@dataclass(eq=False)
class UnitCall:
    """A call of a unit, or of a container with which a stage begins.

    Attributes:
        path: the module.
        stage: the stage that runs the call.
        is_container: whether its forward is run by all later stages as well.
        tree: the result without its tensors, and a text for what cannot be made elsewhere.
        metas: the tensors of the result.
        arguments: by the number of a tensor of the result, the leaf of the arguments which it is.
        copies: by the number of a tensor of the result, that of an earlier one which it is.
        written: the tensors of the result that are written after the call.
    """

    path: str
    stage: int
    is_container: bool
    tree: ValueTree | str = ""
    metas: Sequence[TensorMeta] = ()
    arguments: dict[int, int] = field(default_factory=dict)
    copies: dict[int, int] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Dependencies:
    """What the stages of a model need from each other, for inputs of one signature.

    Attributes:
        calls: the calls of units, in order.
        carried: for each stage, the outputs of earlier stages' units that it or a later one needs.
        places: parameters and buffers that are used outside of the units that own them, and the
            stages that need them; none for values that nothing needs.
        device: of the inputs.
    """

    calls: Sequence[UnitCall]
    carried: Sequence[Sequence[Output]]
    places: Mapping[Place, Collection[int]]
    device: torch.device


# -- calls -----------------------------------------------------------------------------------------


def outer_calls(recording: Recording, tree: ModuleTree) -> Iterator[tuple[Enter, int]]:
    """Yield the calls of modules that no call of a unit is around.

    Each comes with the floating-point operations in it; those of containers have 0.
    """
    inside: Enter | None = None
    flops = 0
    for event in recording.events:
        if isinstance(event, Operator):
            flops += event.flops
        elif isinstance(event, Exit):
            if event.enter is inside:
                inside = None
                yield event.enter, flops
        elif inside is None:
            if event.path in tree.containers:
                yield event, 0
            else:
                inside, flops = event, 0


def units_to_open(recording: Recording, tree: ModuleTree) -> set[str]:
    """Return the units and leaves that must be containers.

    They are those inside of which the forward calls modules from outside.
    """
    known = {*tree.units, *tree.leaves}
    opened: set[str] = set()
    for enter, _ in outer_calls(recording, tree):
        opened |= {path for path in known if enter.path.startswith(f"{path}.")}
    return opened


def unit_calls(
    recording: Recording, tree: ModuleTree, boundaries: Sequence[Boundary]
) -> dict[Event, UnitCall]:
    """Return the calls of units, with their stages, by the events with which they begin.

    Raises:
        ValueError: a boundary is never called, or before an earlier one; a stage has no unit.
    """
    drawing = _drawing_calls(recording, tree)
    calls: dict[Event, UnitCall] = {}
    counts: dict[str, int] = {}
    stage = 0
    inside: Enter | None = None
    for event in recording.events:
        if isinstance(event, Exit) and event.enter is inside:
            inside = None
        if not isinstance(event, Enter) or inside is not None:
            continue
        path = event.path
        occurrence = counts[path] = counts.get(path, -1) + 1
        is_boundary = Boundary(path, occurrence) in boundaries
        if is_boundary:
            expected = boundaries[stage] if stage < len(boundaries) else None
            if expected != (path, occurrence):
                raise ValueError(
                    f"split: stage {boundaries.index(Boundary(path, occurrence)) + 1} begins with "
                    f"{path!r}, which is called before {expected and expected.path!r}, where stage "
                    f"{stage + 1} begins; list modules in the order of their calls"
                )
            stage += 1
        is_container = path in tree.containers
        if is_container and is_boundary:
            calls[event] = UnitCall(path, stage, True)
        elif path in tree.units or event in drawing:
            calls[event] = UnitCall(path, stage, False)
        if not is_container:
            inside = event
    for path, _ in boundaries[stage:]:
        raise ValueError(
            f"split: stage {stage + 1} begins with {path!r}, which the forward never calls for "
            "these inputs; name a module that it calls"
        )
    for number in range(len(boundaries) + 1):
        if not any(call.stage == number and not call.is_container for call in calls.values()):
            following = f", before {boundaries[number].path!r}" if number < len(boundaries) else ""
            raise ValueError(
                f"split: no module with parameters is called in stage {number}{following}; move "
                "the boundary, or use fewer stages"
            )
    return calls


def _drawing_calls(recording: Recording, tree: ModuleTree) -> set[Event]:
    """Return the beginnings of calls of leaves that draw random numbers."""
    drawing: set[Event] = set()
    leaf: Enter | None = None
    for event in recording.events:
        if isinstance(event, Enter) and leaf is None and event.path in tree.leaves:
            leaf = event
        elif isinstance(event, Exit) and event.enter is leaf:
            leaf = None
        elif isinstance(event, Operator) and event.draws and leaf is not None:
            drawing.add(leaf)
    return drawing


# -- values ----------------------------------------------------------------------------------------


class _Hidden(NamedTuple):
    """A tensor that a call of a unit made and did not return."""

    call: int


class _Written(NamedTuple):
    """What a call of a unit wrote into memory that is not its own."""

    call: int


class _Drawn(NamedTuple):
    """Random numbers drawn outside of modules."""

    operator: str
    number: int


class _Place(NamedTuple):
    """A parameter or buffer."""

    place: Place


Source = Output | _Hidden | _Written | _Drawn | _Place
Sources = frozenset[Source]
_NONE: Sources = frozenset()


class _Memory:
    """What tensors depend on, each by itself, and all tensors of one memory together.

    Parameters and buffers depend on nothing but themselves: each stage has its own.
    """

    def __init__(self, recording: Recording) -> None:
        self._places, self._place_storages = recording.places, recording.place_storages
        self._tensors: dict[int, Sources] = {}
        self._storages: dict[int, Sources] = {}
        self._members: dict[int, set[int]] = {}

    def sources(self, keys: Collection[TensorKey]) -> Sources:
        return _NONE.union(*(self._sources(key) for key in keys))

    def _sources(self, key: TensorKey) -> Sources:
        place = self._places.get(key.tensor)
        if place is not None:
            return frozenset({_Place(place)})
        sources = self._tensors.get(key.tensor)
        return self._storages.get(key.storage, _NONE) if sources is None else sources

    def set(self, key: TensorKey, sources: Sources) -> None:
        """Set what a tensor depends on; other tensors of its memory may share it."""
        self._tensors[key.tensor] = sources
        self._members.setdefault(key.storage, set()).add(key.tensor)
        self._storages[key.storage] = self._storages.get(key.storage, _NONE) | sources

    def know(self, key: TensorKey) -> None:
        """Note what a tensor depends on now: not on what takes views of it later.

        A write to its memory makes it depend on that.
        """
        if key.tensor not in self._tensors and key.tensor not in self._places:
            self.set(key, self._sources(key))

    def write(self, storage: int, sources: Sources) -> None:
        """Make all tensors of a memory depend on what it held before and on what was written."""
        if storage in self._place_storages:
            return
        for tensor in self._members.pop(storage, ()):
            self._tensors.pop(tensor, None)
        self._storages[storage] = self._storages.get(storage, _NONE) | sources

    def reset(self, storage: int) -> None:
        """Forget what the memory depends on, except through tensors that are known."""
        self._storages.pop(storage, None)


class _Follower:
    """Follows the events of a recording.

    Attributes:
        needs: for each stage, what it needs.
        places: the parameters and buffers that operators outside of their units read.
    """

    def __init__(
        self,
        recording: Recording,
        calls: Mapping[Event, UnitCall],
        own_places: Mapping[str, Collection[Place]],
        stages: int,
    ) -> None:
        self._recording, self._own_places = recording, own_places
        self._calls = list(calls.values())
        self._number_of = {event: number for number, event in enumerate(calls)}
        self._memory = _Memory(recording)
        self._outputs_in: dict[int, list[Output]] = {}
        self._allocated_by: dict[int, int] = {}  # the call of a unit for each memory, else -1
        self._number = -1  # of the call of a unit that is running
        self._made: set[int] = set()  # tensors that it has made
        self.needs: list[set[Source]] = [set() for _ in range(stages)]
        self.places: set[Place] = set()

    def follow(self) -> None:
        running: Event | None = None
        for i, event in enumerate(self._recording.events):
            if isinstance(event, Operator):
                self._operator(event, i)
            elif isinstance(event, Exit):
                if event.enter is running:
                    self._exit(event)
                    running, self._number = None, -1
            elif running is None and event in self._number_of:
                number = self._number_of[event]
                if not self._calls[number].is_container:
                    running, self._number, self._made = event, number, set()
        self.needs[-1] |= self._memory.sources(self._recording.result)

    def _operator(self, event: Operator, i: int) -> None:
        sources = self._memory.sources(event.inputs)
        added: Sources = _NONE
        if self._number >= 0:
            added = frozenset({_Hidden(self._number)})
            sources = self._note_needs(sources)
        elif event.draws:
            added = frozenset({_Drawn(event.name, i)})
        self.places |= {x.place for x in sources if isinstance(x, _Place)}
        for key in event.inputs:
            self._memory.know(key)
            self._allocated_by.setdefault(key.storage, -1)
        for storage in event.written:
            self._write(storage, sources | added)
        for key in event.outputs:
            self._allocated_by.setdefault(key.storage, self._number)
            if key.storage not in event.written:
                self._memory.set(key, sources | added)
                self._made.add(key.tensor)

    def _note_needs(self, sources: Sources) -> Sources:
        """Note that the running unit reads this; return it without what is the unit's own."""
        call = self._calls[self._number]
        own = self._own_places[call.path]
        sources = frozenset(
            x
            for x in sources
            if x != _Hidden(self._number) and not (isinstance(x, _Place) and x.place in own)
        )
        self.needs[call.stage] |= sources
        return sources

    def _write(self, storage: int, sources: Sources) -> None:
        for output in self._outputs_in.get(storage, ()):
            self._calls[output.call].written.add(output.index)
            if self._allocated_by[storage] != output.call:  # memory of an argument, or of another
                sources |= {_Written(output.call)}
        if self._number >= 0 and self._allocated_by[storage] != self._number:
            sources |= {_Written(self._number)}
        self._memory.write(storage, sources)

    def _exit(self, event: Exit) -> None:
        number, call = self._number, self._calls[self._number]
        call.tree, call.metas = event.tree, event.metas
        self._note_needs(self._memory.sources(event.tensors))
        old = {key.tensor: self._memory.sources([key]) for key in event.tensors}
        for key in event.tensors:
            if self._allocated_by.setdefault(key.storage, number) == number:
                self._memory.reset(key.storage)
        numbers = [key.tensor for key in event.tensors]
        for index, key in enumerate(event.tensors):
            if key in event.enter.arguments:  # the argument itself, and as it was
                call.arguments[index] = event.enter.arguments.index(key)
            elif numbers.index(key.tensor) < index:
                call.copies[index] = numbers.index(key.tensor)
            else:
                output = Output(number, index)
                is_new = key.tensor in self._made or self._allocated_by[key.storage] == number
                before = _NONE if is_new else old[key.tensor] - {_Hidden(number)}
                self._memory.set(key, before | {output})
                self._outputs_in.setdefault(key.storage, []).append(output)


def dependencies(
    recording: Recording,
    calls: Mapping[Event, UnitCall],
    own_places: Mapping[str, Collection[Place]],
    stages: int,
) -> Dependencies:
    """Return what stages need from each other.

    Args:
        recording: of the forward.
        calls: of units, by the events with which they begin.
        own_places: for each unit and leaf, the first places of its parameters and buffers.
        stages: the number of stages.

    Raises:
        ValueError: a stage needs what no unit returns: a tensor that a unit leaves behind or writes
            into an argument, or random numbers that two stages would draw.
        TypeError: a unit returns an object that is neither a tensor nor a constant.
    """
    follower = _Follower(recording, calls, own_places, stages)
    follower.follow()
    listed = list(calls.values())
    for call in listed:
        if isinstance(call.tree, str) and call.stage < stages - 1 and not call.is_container:
            raise TypeError(
                f"unit {call.path!r} returns a {call.tree}; later stages make what it returns from "
                "its tensors, so the rest must be None, numbers or texts. Pass use_cache=False, or "
                "move the boundary to before the unit"
            )
    _check_needs(follower.needs, listed)
    needs = [{x for x in stage if isinstance(x, Output)} for stage in follower.needs]
    carried: list[list[Output]] = []
    for stage in range(stages):
        later = set().union(*needs[stage:])
        carried.append(sorted(x for x in later if listed[x.call].stage < stage))
    places = {
        place: {t for t in range(stages) if _Place(place) in follower.needs[t]}
        for place in sorted(follower.places)
    }
    return Dependencies(listed, carried, places, recording.device)


def _check_needs(needs: Sequence[Collection[Source]], calls: Sequence[UnitCall]) -> None:
    drawn: dict[_Drawn, int] = {}
    for stage, sources in enumerate(needs):
        for source in sorted(sources, key=repr):
            if isinstance(source, _Hidden) and calls[source.call].stage != stage:
                raise ValueError(
                    f"stage {stage} needs a tensor that unit {calls[source.call].path!r} of stage "
                    f"{calls[source.call].stage} computes and does not return, such as one in an "
                    "attribute or a cache; return it from the unit's forward"
                )
            if isinstance(source, _Written) and calls[source.call].stage != stage:
                raise ValueError(
                    f"stage {stage} needs what unit {calls[source.call].path!r} of stage "
                    f"{calls[source.call].stage} writes into its argument in place; return a new "
                    "tensor"
                )
            if isinstance(source, _Drawn) and drawn.setdefault(source, stage) != stage:
                raise ValueError(
                    f"stages {drawn[source]} and {stage} both need random numbers of "
                    f"{source.operator}, which is called outside of units; each would draw its "
                    "own. Call it in a module, such as nn.Dropout in place of F.dropout"
                )
