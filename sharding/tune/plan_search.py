"""The plan of tensor parallelism that moves the fewest bytes, by a search over a trace.

    states      layouts of the values that are still needed, and what was chosen so far
    Enter       one state for each way of the layer: its weights are laid out, its input moves
    Call        the operator runs on parts without values: its own rule says what moves and how the
                results lie, and its backward is counted with it
    Exit        the outputs move as the way says
    End         a block's output lies as its input does, since the next block is like it
    then        states with the same layouts merge: only the cheapest goes on, and the cheapest of
                those with fewer elements on every rank

Bytes of a block count as often as the block repeats. The matrices that stay whole on every rank
have a limited number of elements, without which no weight would be split: nothing moves then.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...mesh.comm.report import comm_report
from ...mesh.device_mesh import DeviceMesh
from ..layout.layout import Layout
from ..layout.spec import P, Placement, Shard
from ..parallel.tensor.activations import along
from ..tensor.redistribute import redistribute
from ..tensor.sharded_tensor import ShardedTensor
from ..trees import flatten, tensors_in, unflatten
from .layer_options import Option, is_layer, is_norm, layer_options, parameter_options
from .traced import Begin, Call, End, Enter, Exit, Ref, Trace

_CANNOT = (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError)


class Moved(NamedTuple):
    """Bytes that a rank receives in forward and in backward, and the number of collectives."""

    forward: float = 0
    backward: float = 0
    launches: float = 0

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward

    def plus(self, other: Moved, factor: float = 1) -> Moved:
        """Return `self + factor * other`."""
        return Moved(
            self.forward + factor * other.forward,
            self.backward + factor * other.backward,
            self.launches + factor * other.launches,
        )


_NOTHING = Moved()


@dataclass(slots=True)
class State:
    """What was chosen up to an event.

    Attributes:
        layouts: of the values that are still needed; of constants there are none.
        chosen: path of a layer or parameter -> its way.
        moved: what moves.
        whole: elements of the matrices that are whole on every rank, and need not be.
        trail: (the trail before, path of a module, what moved there); None at the start.
    """

    layouts: dict[int, Layout] = field(default_factory=dict)
    chosen: dict[str, Option] = field(default_factory=dict)
    moved: Moved = _NOTHING
    whole: float = 0
    trail: Any = None

    @property
    def rank(self) -> tuple[float, float, float]:
        """The order of states: bytes, collectives, elements."""
        return (self.moved.total, self.moved.launches, self.whole)

    def with_layouts(self, layouts: dict[int, Layout]) -> State:
        """Return the state with other layouts."""
        return State(layouts, self.chosen, self.moved, self.whole, self.trail)

    def by_path(self) -> dict[str, Moved]:
        """Return what moved in each module."""
        moved: dict[str, Moved] = {}
        trail = self.trail
        while trail is not None:
            trail, path, more = trail
            moved[path] = moved.get(path, _NOTHING).plus(more)
        return moved


class PlanSearch:
    """The search for one model on one axis.

    Args:
        traced: the model's trace.
        model: the model that was traced.
        mesh: a mesh of this world, on "meta".
        axis: the axis.
        repeats: path of a module -> how often it is in the whole model.
        copies: path of a parameter -> how many such parameters the whole model has; one that blocks
            share counts once.
        sequence: whether activations may be split along dim 1, and those between blocks are.

    Communication: none; it is to run in a world without other ranks.
    """

    def __init__(
        self,
        traced: Trace,
        model: nn.Module,
        mesh: DeviceMesh,
        axis: str,
        repeats: Callable[[str], float],
        copies: Callable[[str], float],
        sequence: bool,
    ) -> None:
        self._trace = traced
        self._model = model
        self._mesh = mesh
        self._axis = axis
        self._repeats = repeats
        self._copies = copies
        self._sequence = sequence
        self._value_of = {
            value.parameter: number
            for number, value in enumerate(traced.values)
            if value.parameter is not None
        }
        self._names = {
            id(parameter): path for path, parameter in model.named_parameters()
        }  # a tied one has one path
        self._options: dict[str, list[Option]] = {}
        self._whole: dict[int, Layout] = {}
        self._calls: dict[Hashable, tuple[tuple[Layout, ...], Moved] | None] = {}
        self._moves: dict[Hashable, tuple[Layout, Moved] | None] = {}
        self._last_exit = {
            event.path: index for index, event in enumerate(traced.events) if type(event) is Exit
        }
        self._error: Exception | None = None

    def best(
        self, limit: float, width: int, without: tuple[str, Option] | None = None
    ) -> list[State]:
        """Return complete states, the one that moves the fewest bytes first.

        Args:
            limit: elements of matrices that may be whole on every rank.
            width: the number of states that go on from an event.
            without: a layer or parameter, and a way: its parameters must not lie like that.

        Returns:
            The states; none if no plan keeps to the limit.
        """
        states = [State()]
        for index, event in enumerate(self._trace.events):
            successors: list[State] = []
            for state in states:
                successors += self._step(state, event, without)
            allowed = [state for state in successors if state.whole <= limit]
            states = self._merge(allowed, index)[:width]
        return states

    def error(self, text: str) -> ValueError:
        """Return an error that ends with what the last operator that could not run said."""
        return ValueError(text if self._error is None else f"{text}; last: {self._error}")

    # -- events ------------------------------------------------------------------------------------

    def _step(
        self, state: State, event: Any, without: tuple[str, Option] | None
    ) -> Iterator[State]:
        if isinstance(event, Enter):
            for option in self._allowed(state, event.path, without):
                entered = self._enter(state, event, option)
                if entered is not None:
                    yield entered
        elif isinstance(event, Exit):
            left = self._leave(state, event)
            if left is not None:
                yield left
        elif isinstance(event, Begin):
            layout = self._layout(state, event.stream)
            splits = self._sequence and len(layout.shape) > 2
            if not splits or layout is self._target(self._whole_layout(event.stream), Shard(1)):
                yield state.with_layouts({**state.layouts, event.mark: layout})
        elif isinstance(event, End):
            if self._layout(state, event.stream) is self._layout(state, event.mark):
                yield state
        else:
            for decided in self._decide(state, event, without):
                called = self._call(decided, event)
                if called is not None:
                    yield called

    def _allowed(
        self, state: State, path: str, without: tuple[str, Option] | None
    ) -> Iterable[Option]:
        if path in state.chosen:
            return [state.chosen[path]]
        options = self._options_of(path)
        if without is not None and without[0] == path:
            return [option for option in options if option.parameters != without[1].parameters]
        return options

    def _options_of(self, path: str) -> list[Option]:
        if path not in self._options:
            number = self._value_of.get(path)
            if number is None:
                self._options[path] = layer_options(
                    path, self._model, self._mesh, self._axis, self._sequence
                )
            else:
                parameter = self._model.get_parameter(path)
                self._options[path] = parameter_options(parameter, self._mesh, self._axis)
        return self._options[path]

    def _enter(self, state: State, event: Enter, option: Option) -> State | None:
        """Lay out the parameters of a layer, and move its input."""
        own = self._model.get_submodule(event.path).named_parameters(recurse=False)
        wheres = {self._names[id(x)]: option.parameters.get(name) for name, x in own}
        entered = self._with_parameters(state, event.path, option, wheres)
        if entered is None:
            return None
        return self._move(entered, event.path, [event.outer], [event.inner], option.input)

    def _leave(self, state: State, event: Exit) -> State | None:
        """Move the outputs of a layer."""
        output = state.chosen[event.path].output
        return self._move(state, event.path, event.inner, event.outer, output)

    def _decide(
        self, state: State, event: Call, without: tuple[str, Option] | None
    ) -> Iterator[State]:
        """Lay out the parameters among the operands that no layer has laid out."""
        values = self._trace.values
        paths = [
            values[operand].parameter
            for operand in event.operands
            if values[operand].parameter is not None and operand not in state.layouts
        ]
        choices = [self._allowed(state, path, without) for path in paths if path is not None]
        for options in product(*choices):
            decided: State | None = state
            for path, option in zip(paths, options, strict=True):
                if decided is not None and path is not None:
                    wheres = {path: option.parameters.get("")}
                    decided = self._with_parameters(decided, path, option, wheres)
            if decided is not None:
                yield decided

    def _with_parameters(
        self,
        state: State,
        path: str,
        option: Option,
        wheres: Mapping[str, P | Placement | None],
    ) -> State | None:
        """Return the state with parameters laid out; None if one of them already lies otherwise."""
        layouts, whole, moved = dict(state.layouts), state.whole, _NOTHING
        for name, where in wheres.items():
            number = self._value_of[name]
            full = self._whole_layout(number)
            layout = full if where is None else self._target(full, where)
            if layout is None or layouts.setdefault(number, layout) is not layout:
                return None
            if number in state.layouts or layout is not full or len(full.shape) < 2:
                continue
            copies, size = self._copies(name), self._mesh.size(self._axis)
            if max(full.shape) >= size:
                whole += full.shape.numel() * copies
            if self._trace.values[number].needs_grad:
                # the gradient of a weight that every rank has is summed
                moved = moved.plus(Moved(0, 2 * (size - 1) / size * full.nbytes * copies, 0))
        chosen = {**state.chosen, path: option}
        return self._moving(State(layouts, chosen, state.moved, whole, state.trail), path, moved)

    def _moving(self, state: State, path: str, moved: Moved) -> State:
        if moved.total or moved.launches:
            state.moved = state.moved.plus(moved)
            state.trail = state.trail, path, moved
        return state

    def _move(
        self,
        state: State,
        path: str,
        sources: Sequence[int],
        targets: Sequence[int],
        where: P | Placement | None,
    ) -> State | None:
        """Return the state with values moved to a layout along the axis, as other values."""
        layouts, moved = dict(state.layouts), _NOTHING
        for source, target in zip(sources, targets, strict=True):
            layout = self._layout(state, source)
            if where is not None:
                result = self._moved(layout, where, self._trace.values[source].needs_grad)
                if result is None:
                    return None
                layout, more = result
                moved = moved.plus(more, self._repeats(path))
            layouts[target] = layout
        return self._moving(state.with_layouts(layouts), path, moved)

    def _call(self, state: State, event: Call) -> State | None:
        """Return the state after an operator; None if it cannot run on these layouts."""
        operands = tuple(self._layout(state, operand) for operand in event.operands)
        if all(layout.is_fully_replicated for layout in operands):
            results = tuple(self._whole_layout(number) for number in event.results)
            moved = _NOTHING
        else:
            key = (id(event), operands)
            if key not in self._calls:
                self._calls[key] = self._evaluate(event, operands)
            evaluated = self._calls[key]
            if evaluated is None:
                return None
            results, moved = evaluated
        layouts = {**state.layouts, **dict(zip(event.results, results, strict=True))}
        scaled = _NOTHING.plus(moved, self._repeats(event.path))
        return self._moving(state.with_layouts(layouts), event.path, scaled)

    # -- merging -----------------------------------------------------------------------------------

    def _merge(self, states: Iterable[State], index: int) -> list[State]:
        """Return the best of the states that agree on all that later events read."""
        last_use = self._trace.last_use
        groups: dict[Hashable, list[State]] = {}
        for state in sorted(states, key=lambda state: state.rank):
            state.layouts = {
                number: layout
                for number, layout in state.layouts.items()
                if last_use.get(number, -1) > index
            }
            entered = [
                (path, id(option.style))
                for path, option in state.chosen.items()
                if self._last_exit.get(path, -1) > index
            ]
            group = groups.setdefault((frozenset(state.layouts.items()), frozenset(entered)), [])
            if all(state.whole < better.whole for better in group):
                group.append(state)
        best = [state for group in groups.values() for state in group]
        return sorted(best, key=lambda state: state.rank)

    # -- layouts and costs -------------------------------------------------------------------------

    def _layout(self, state: State, number: int) -> Layout:
        layout = state.layouts.get(number)
        return self._whole_layout(number) if layout is None else layout

    def _whole_layout(self, number: int) -> Layout:
        if number not in self._whole:
            value = self._trace.values[number]
            self._whole[number] = Layout.of(self._mesh, P(), value.shape, value.dtype)
        return self._whole[number]

    def _target(self, layout: Layout, where: P | Placement) -> Layout | None:
        try:
            return layout.replace(along(layout, where, self._axis))
        except ValueError as error:
            self._error = error
            return None

    def _moved(
        self, layout: Layout, where: P | Placement, needs_grad: bool
    ) -> tuple[Layout, Moved] | None:
        target = self._target(layout, where)
        if target is None or target is layout:
            return None if target is None else (target, _NOTHING)
        key = (layout, target, needs_grad)
        if key not in self._moves:
            result = self._count(lambda x: redistribute(x, target.spec), [layout], [needs_grad])
            self._moves[key] = None if result is None else (target, result[1])
        return self._moves[key]

    def _evaluate(
        self, event: Call, layouts: Sequence[Layout]
    ) -> tuple[tuple[Layout, ...], Moved] | None:
        def run(*operands: Tensor) -> Any:
            by_number = dict(zip(event.operands, operands, strict=True))
            leaves = [by_number[x.value] if isinstance(x, Ref) else x for x in references]
            args, kwargs = unflatten(structure, leaves)
            return event.func(*args, **kwargs)

        references, structure = flatten((event.args, event.kwargs))

        needs_grad = [self._trace.values[operand].needs_grad for operand in event.operands]
        evaluated = self._count(run, layouts, needs_grad)
        if evaluated is None:
            return None
        results, moved = evaluated
        if len(results) != len(event.results):
            return None
        known = [
            self._whole_layout(number) if layout is None else layout
            for layout, number in zip(results, event.results, strict=True)
        ]
        return tuple(known), moved

    def _count(
        self, run: Callable[..., Any], layouts: Sequence[Layout], needs_grad: Sequence[bool]
    ) -> tuple[list[Layout | None], Moved] | None:
        """Run a function on parts without values; return the layouts of its results, and counts."""
        leaves: list[Tensor] = []
        operands: list[Tensor] = []
        for layout, needs in zip(layouts, needs_grad, strict=True):
            part = torch.empty(layout.local_shape, dtype=layout.dtype, device="meta")
            if needs:
                leaves.append(part.requires_grad_())
                part = part.clone()
            operands.append(ShardedTensor._make_guarded(part, layout, 0))
        try:
            with torch.enable_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with comm_report() as forward:
                    results = list(tensors_in((run(*operands),)))
                with comm_report() as backward:
                    _differentiate(results, leaves)
        except _CANNOT as error:
            self._error = error
            return None
        of_results = [x._layout if isinstance(x, ShardedTensor) else None for x in results]
        launches = forward.launches + backward.launches
        return of_results, Moved(forward.bytes_received, backward.bytes_received, launches)


def _differentiate(results: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    """Run the backward of results for leaves, all of them parts of this rank."""
    parts = [x._local if isinstance(x, ShardedTensor) else x for x in results]
    parts = [x for x in parts if x.requires_grad]
    if parts and leaves:
        grads = [torch.empty_like(x) for x in parts]
        torch.autograd.grad(parts, leaves, grads, allow_unused=True)


def has_options(module: nn.Module, sequence: bool) -> bool:
    """Return whether the calls of a module are events of the search."""
    return is_layer(module) and (sequence or not is_norm(module))
