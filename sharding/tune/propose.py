"""`propose_plan`: a plan of tensor parallelism for a model that has none."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import torch
from torch import nn

from ...mesh.abstract_mesh import AbstractMesh
from ...mesh.comm.null import null_world
from ...mesh.device_mesh import init_device_mesh
from ...mesh.text import table_lines
from ..abstract.eval_shape import eval_shape
from ..layout.layout import Layout
from ..layout.spec import P
from ..parallel.tensor.activations import along
from ..parallel.tensor.plan import parallelize
from ..trees import map_tensors, tensors_in
from .counts import CountedWithoutValues, OperatorCounts
from .description import Loss, call, default_loss
from .plan_search import Moved, PlanSearch, State, has_options
from .repeated import BlockList, block_lists, shorten
from .traced import trace

_WIDTH, _WIDTH_OF_REASONS = 160, 48  # states that go on from an event
_FINALISTS = 3  # plans that are evaluated exactly
_LIMITS = (1.0, 4.0, 20.0)  # times `whole`, until a plan keeps to it


@dataclass(frozen=True)
class LayerChoice:
    """A row of a `ProposedPlan`.

    Attributes:
        path: of a layer or a parameter, or of a module in which activations move; with "*" for the
            index of a block.
        style: its style; None for one without an entry.
        repeats: how often it is in the model.
        forward, backward: bytes that a rank receives there in a step, all repetitions together.
        reason: what the plan costs more if the layer's weights lie otherwise.
    """

    path: str
    style: Any
    repeats: int
    forward: float
    backward: float
    reason: str


class ProposedPlan(Mapping[str, Any]):
    """A plan, as `parallelize` takes it: patterns of paths -> styles. `print` explains it.

    Attributes:
        layers: for each entry, and for modules in which other activations move, bytes and a reason.
        bytes_received: what a rank receives in a step, by `eval_shape` of the parallelized model.
        launches: the number of its collectives.
        elements: of the parameters that rank 0 holds; `of` those of the model.
        size, axis: of the axis.
    """

    def __init__(
        self,
        plan: Mapping[str, Any],
        layers: tuple[LayerChoice, ...],
        bytes_received: float,
        launches: float,
        elements: tuple[int, int],
        size: int,
        axis: str,
    ) -> None:
        self._plan = dict(plan)
        self.layers = layers
        self.bytes_received = bytes_received
        self.launches = launches
        self.elements, self.of = elements
        self.size, self.axis = size, axis

    def __getitem__(self, pattern: str) -> Any:
        return self._plan[pattern]

    def __iter__(self) -> Iterator[str]:
        return iter(self._plan)

    def __len__(self) -> int:
        return len(self._plan)

    def __repr__(self) -> str:
        return f"ProposedPlan({self._plan!r})"

    @property
    def program(self) -> str:
        """The plan as a dict of a program, with names of `shardmesh.parallel`."""
        entries = [
            f'    "{pattern}": {style!r},'.replace("'", '"') for pattern, style in self.items()
        ]
        return "\n".join(["{", *entries, "}"])

    def __str__(self) -> str:
        share = self.elements / self.of
        title = (
            f"{self.axis}={self.size}: a rank receives {self.bytes_received:,.0f} bytes a step in "
            f"{self.launches:,.0f} collectives and holds {share:.0%} of the parameters"
        )
        rows = [
            (
                choice.path,
                "" if choice.style is None else repr(choice.style),
                f"{choice.forward:,.0f}",
                f"{choice.backward:,.0f}",
                choice.reason,
            )
            for choice in self.layers
        ]
        header = ("layer", "style", "forward", "backward", "otherwise")
        return "\n".join([title, *table_lines([header, *rows])])


def propose_plan(
    model: nn.Module,
    batch: Any,
    size: int,
    *,
    axis: str = "tp",
    sequence_parallel: bool = False,
    loss: Loss | None = None,
    whole: float = 0.05,
) -> ProposedPlan:
    """propose_plan(model, batch, size) -> ProposedPlan: choose layers' styles by what they move.

    Runs the model once without values, and searches the graph of its operators: each layer may be
    split by outputs (`colwise`), by inputs (`rowwise`) or not, other matrices along any dim. What
    an operator moves then, in forward and backward, is what the library's rule for it says. The
    plans that move the fewest bytes are evaluated as a whole by `eval_shape`. Of blocks that repeat
    one of each kind is searched.

    Args:
        model: any module; it does not change. It runs as after `eval()`.
        batch: its input on one data rank: a tensor, or a tuple or dict of tensors. Values are not
            read.
        size: the number of ranks of the axis.
        axis: its name in the mesh.
        sequence_parallel: split activations between blocks along dim 1, which moves about as many
            bytes, in more collectives, and takes less memory.
        loss: a function of output and batch that returns the loss; by default the loss that the
            model returns, else the cross entropy of logits for the batch's first tensor, or the
            mean of another output.
        whole: the share of the model's elements in matrices that may stay whole on every rank.

    Raises:
        ValueError: fewer than two ranks; a model that reads values, or whose operators cannot run;
            none of the best plans runs as a whole.

    Communication: none.

    Example:
        >>> plan = sm.propose_plan(model, ids, 8)
        >>> print(plan)
        >>> sm.parallel.parallelize(model, mesh, plan)
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 2:
        raise ValueError(f"propose_plan(size={size!r}): a whole number of ranks from 2")
    if next(iter(tensors_in((batch,))), None) is None:
        raise ValueError(
            f"propose_plan: the batch is {batch!r}; pass a tensor, or a tuple or dict of tensors"
        )
    proposal = _Proposal(model, batch, size, axis, sequence_parallel, loss or default_loss)
    return proposal.best(whole)


class _Proposal:
    """The search and the evaluation for one model."""

    def __init__(
        self, model: nn.Module, batch: Any, size: int, axis: str, sequence: bool, loss: Loss
    ) -> None:
        self._model = model
        self._size = size
        self._axis = axis
        self._sequence = sequence
        self._loss = loss
        own = dict(batch) if isinstance(batch, Mapping) else batch
        self._batch = map_tensors(lambda x: torch.empty_like(x, device="meta"), (own,))[0]
        self._lists = block_lists(model)
        self._kinds = {blocks.path: list(range(len(blocks.kinds))) for blocks in self._lists}
        self._short = self._with_blocks(self._kinds)
        self._elements = sum(x.numel() for x in model.parameters())

    def best(self, whole: float) -> ProposedPlan:
        """Return the plan that moves the fewest bytes."""
        with null_world(self._size, 0):
            mesh = init_device_mesh("meta", (self._size,), axis_names=(self._axis,))
            blocks = [
                block for x in self._lists for block in self._short.get_submodule(x.path).children()
            ]
            traced = trace(
                self._short,
                self._batch,
                self._loss,
                lambda module: has_options(module, self._sequence),
                blocks,
            )
            search = PlanSearch(
                traced,
                self._short,
                mesh,
                self._axis,
                self._repeats,
                lambda path: len(self._originals(path)),
                self._sequence,
            )
            limit, states = self._within_limit(search, whole)
            evaluated = self._evaluated(self._distinct(states))
            moved, state = min(evaluated, key=lambda item: (item[0].total, item[0].launches))
            rows = self._rows(state, lambda path: _reason(search, state, path, limit))
        positions = {blocks.path: self._original_kinds(blocks) for blocks in self._lists}
        return ProposedPlan(
            self._patterns(self._entries(state, positions)),
            tuple(rows),
            moved.total,
            moved.launches,
            (self._held(state), self._elements),
            self._size,
            self._axis,
        )

    # -- the search --------------------------------------------------------------------------------

    def _within_limit(self, search: PlanSearch, whole: float) -> tuple[float, list[State]]:
        """Return complete states, and the elements that they may leave whole."""
        for factor in _LIMITS:
            limit = factor * whole * self._elements
            states = search.best(limit, _WIDTH)
            if states:
                return limit, states
        raise search.error(
            f"propose_plan: no plan for {type(self._model).__name__} on {self._size} ranks leaves "
            f"at most {100 * _LIMITS[-1] * whole:.0f}% of its elements whole on every rank"
        )

    def _distinct(self, states: list[State]) -> list[State]:
        """Return the first states with different plans."""
        plans: dict[Any, State] = {}
        for state in states:
            styles = [(path, repr(option)) for path, option in sorted(state.chosen.items())]
            plans.setdefault(tuple(styles), state)
        return list(plans.values())[:_FINALISTS]

    # -- blocks that repeat ------------------------------------------------------------------------

    def _with_blocks(self, kinds: Mapping[str, list[int]]) -> nn.Module:
        """Return a copy of the model on "meta" with these kinds of blocks."""
        indices = {
            blocks.path: [blocks.kinds[kind][0] for kind in kinds[blocks.path]]
            for blocks in self._lists
        }
        return _on_meta(shorten(self._model, indices)).eval()

    def _place(self, path: str) -> tuple[BlockList, int, str] | None:
        """Return the list, the kind and the path inside the block of a path of the short model."""
        for blocks in self._lists:
            if path.startswith(f"{blocks.path}."):
                index, _, inside = path.removeprefix(f"{blocks.path}.").partition(".")
                return blocks, int(index), inside
        return None

    def _repeats(self, path: str) -> int:
        """Return how often a module of the short model is in the whole one."""
        place = self._place(path)
        return 1 if place is None else len(place[0].kinds[place[1]])

    def _originals(self, path: str) -> set[int]:
        """Return the ids of the model's parameters for which one of the short model stands."""
        place = self._place(path)
        if place is None:
            return {id(self._model.get_parameter(path))}
        blocks, kind, inside = place
        return {
            id(self._model.get_parameter(f"{blocks.path}.{index}.{inside}"))
            for index in blocks.kinds[kind]
        }

    def _original_kinds(self, blocks: BlockList) -> list[int]:
        return [blocks.kind_of(index) for index in range(blocks.count)]

    def _entries(self, state: State, positions: Mapping[str, list[int]]) -> dict[str, Any]:
        """Return the plan, path by path, of a model whose lists have these kinds of blocks."""
        entries: dict[str, Any] = {}
        for path, option in state.chosen.items():
            if option.style is None:
                continue
            place = self._place(path)
            if place is None:
                entries[path] = option.style
                continue
            blocks, kind, inside = place
            for position, other in enumerate(positions[blocks.path]):
                if other == kind:
                    entries[f"{blocks.path}.{position}.{inside}".rstrip(".")] = option.style
        return entries

    def _patterns(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries with "*" for the index of a block, where all blocks agree.

        As "*" matches dots too, a pattern may match what another one does: "layer.*.output.dense"
        and "layer.*.attention.output.dense". The one that matches less is left out.
        """
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        paths = [*dict(self._model.named_modules()), *parameters]
        matched: dict[str, frozenset[str]] = {}
        for path, style in entries.items():
            place = self._place(path)
            pattern = path if place is None else f"{place[0].path}.*.{place[2]}".rstrip(".")
            if pattern in matched:
                continue
            others = frozenset(other for other in paths if fnmatchcase(other, pattern))
            agrees = all(other in entries and entries[other] == style for other in others)
            nests = all(others <= x or x <= others or not others & x for x in matched.values())
            if agrees and nests:
                matched[pattern] = others
            else:
                matched[path] = frozenset((path,))
        return {
            pattern: entries[min(others)]
            for pattern, others in matched.items()
            if not any(others < more for more in matched.values())
        }

    # -- what a plan costs -------------------------------------------------------------------------

    def _evaluated(self, states: list[State]) -> list[tuple[Moved, State]]:
        """Return what plans move in the whole model; those that cannot run are left out.

        Raises:
            ValueError: none can run.
        """
        evaluated: list[tuple[Moved, State]] = []
        errors: list[Exception] = []
        for state in states:
            try:
                evaluated.append((self._exact(state), state))
            except (RuntimeError, NotImplementedError, ValueError) as error:
                errors.append(error)
        if not evaluated:
            raise ValueError(
                f"propose_plan: {type(self._model).__name__} runs on {self._size} ranks with none "
                f"of the {len(states)} plans that move the fewest bytes; last: {errors[-1]}"
            ) from errors[-1]
        return evaluated

    def _exact(self, state: State) -> Moved:
        """Return what the plan moves in the whole model, by `eval_shape`.

        A block of a kind costs what a second one of it adds.
        """
        one = self._evaluate(state, self._kinds)
        total = one
        for blocks in self._lists:
            for kind, indices in enumerate(blocks.kinds):
                if len(indices) > 1:
                    more = {**self._kinds, blocks.path: [*self._kinds[blocks.path], kind]}
                    two = self._evaluate(state, more)
                    total = total.plus(two.plus(one, -1), len(indices) - 1)
        return total

    def _evaluate(self, state: State, kinds: Mapping[str, list[int]]) -> Moved:
        plan = self._entries(state, kinds)

        def step(module: nn.Module, batch: Any) -> None:
            parallelize(module, plan=plan, src_data_rank=None)
            with CountedWithoutValues(OperatorCounts([])):
                value = self._loss(call(module, batch), batch)
                if value.requires_grad:
                    value.backward()

        mesh = AbstractMesh((self._size,), (self._axis,))
        layouts = map_tensors(lambda x: Layout.of(mesh, P(), x.shape, x.dtype), (self._batch,))
        report = eval_shape(step, self._with_blocks(kinds), layouts[0], mesh=mesh).report
        return Moved(report.bytes_received, 0, report.launches)

    def _held(self, state: State) -> int:
        """Return the elements of the parameters that rank 0 holds."""
        mesh = AbstractMesh((self._size,), (self._axis,))
        held = self._elements
        counted: set[int] = set()  # a tied parameter counts once, also if blocks share it
        for path, option in state.chosen.items():
            for name, where in option.parameters.items():
                parameter_path = f"{path}.{name}".rstrip(".")
                originals = self._originals(parameter_path) - counted
                counted |= originals
                parameter = self._short.get_parameter(parameter_path)
                whole = Layout.of(mesh, P(), parameter.shape, parameter.dtype)
                part = whole.replace(along(whole, where, self._axis)).largest_local_shape
                held -= (parameter.numel() - prod(part)) * len(originals)
        return held

    def _rows(self, state: State, reason_of: Callable[[str], str]) -> list[LayerChoice]:
        """Return a row for each layer; blocks of several kinds share those in which they agree."""
        moved = state.by_path()
        rows: dict[tuple[str, str], LayerChoice] = {}
        for path in dict.fromkeys([*state.chosen, *moved]):
            option = state.chosen.get(path)
            style = None if option is None else option.style
            if style is None and path not in moved:
                continue
            place = self._place(path)
            name = path or "the model"
            if place is not None:
                name = f"{place[0].path}.*.{place[2]}".rstrip(".")
            use, repeats = moved.get(path, Moved()), self._repeats(path)
            row = rows.get((name, repr(style)))
            if row is None:
                reason = "" if style is None else reason_of(path)
                row = LayerChoice(name, style, 0, 0, 0, reason)
            rows[name, repr(style)] = replace(
                row,
                repeats=row.repeats + repeats,
                forward=row.forward + use.forward,
                backward=row.backward + use.backward,
            )
        return list(rows.values())


def _on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of a model on "meta", whose tied parameters stay tied."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
        )
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)


def _reason(search: PlanSearch, state: State, path: str, limit: float) -> str:
    """Return what the best plan moves more in which these weights lie otherwise."""
    others = search.best(limit, _WIDTH_OF_REASONS, (path, state.chosen[path]))
    if not others:
        return "too many elements would be whole"
    other = others[0]
    more = other.moved.total - state.moved.total
    calls = other.moved.launches - state.moved.launches
    text = f"{other.chosen[path]}: {more:+,.0f} bytes"
    return text if more or not calls else f"{text}, {calls:+,.0f} collectives"
