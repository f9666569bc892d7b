"""Sharding propagation: the cheapest way of running an operator.

It follows from a rule and the layouts of the operands.

For each mesh axis separately it lists what the rule allows (leave everything whole; split one
factor; let pending sums pass through), computes the communication that each choice needs, and takes
the cheapest. A choice that moves nothing wins; ties go to the choice that keeps the largest operand
in place. Since axes are decided one at a time, the work grows with the number of axes, not with the
product of their choices.

    State     what one operand is on one axis, and what a choice needs it to be
    Choice    what an operator does on one axis; all axes' choices say how each factor is cut
    Splits    those cuts, from which the specs of operands and results follow

Parts of given sizes (ragged operands) are kept where a factor is a dim by itself in every operand
and result; the largest operand split on it determines the cut. Otherwise the factor is cut evenly,
and ragged operands are moved first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...layout.bounded_cache import keep
from ...layout.layout import Layout, MeshLayouts
from ...layout.spec import Cut, P
from ...redistribute.plan import without_trivial_axes
from .notation import Dim, Rule

WHOLE, SPLIT, PENDING = "whole", "split", "pending"
_IMPOSSIBLE = float("inf")


class State(NamedTuple):
    """The state of one operand on one mesh axis.

    Attributes:
        what: WHOLE, SPLIT or PENDING.
        detail: for SPLIT the factor, None where the rule cannot follow how the dim is split; for
            PENDING the kind.
    """

    what: str
    detail: str | None = None


REPLICATED = State(WHOLE)


@dataclass(frozen=True, slots=True)
class Choice:
    """The choice for one axis.

    Attributes:
        what: WHOLE, leave everything whole; SPLIT, split a factor in all operands that have it;
            PENDING, let the pending values of a linear group pass through.
        detail: for SPLIT the factor, for PENDING the kind.
        group: for PENDING the operands that are pending.
    """

    what: str
    detail: str | None = None
    group: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Assignment:
    """The outcome: the layout each operand must have, and the spec of each result."""

    targets: tuple[Layout, ...]
    outputs: tuple[P, ...]


@dataclass(frozen=True, slots=True)
class Splits:
    """How the factors of a rule are cut.

    Attributes:
        axes: factor -> the axes that split it, major to minor.
        sized: factor -> its outermost cut, where that is one into parts of given sizes.
    """

    axes: dict[str, list[str]]
    sized: dict[str, Cut]

    def spec(self, dims: Sequence[Dim], unreduced: dict[str, str]) -> P:
        """Return the spec of an operand or result with these dims."""
        entries = [
            tuple(axis for factor in factors for axis in self.axes.get(factor, ()))
            for factors in dims
        ]
        if not self.sized:
            return P(*entries, unreduced=unreduced)
        cuts = [self.sized[f] for factors in dims for f in factors if f in self.sized]
        return P(*entries, unreduced=unreduced, sizes={cut.axes: cut.sizes or () for cut in cuts})


class CannotKeep(ValueError):
    """An in-place operator would have to change the layout of the tensor that it writes."""


def assign(rule: Rule, layouts: Sequence[Layout], fixed: int | None = None) -> Assignment:
    """Choose how to run an operator.

    Args:
        rule: the operator's rule for these operands.
        layouts: the layout of each operand of the rule, all on one mesh.
        fixed: an operand that must keep its layout and is the result (the one written by an
            in-place operator).

    Raises:
        CannotKeep: every choice changes the layout of the fixed operand.

    Communication: none; the result says what has to move.
    """
    unmoved = MeshLayouts.of(layouts[0].mesh).unmoved
    key = _key_without_shapes(rule, layouts, fixed)
    outputs = unmoved.get(key) if key else None
    if outputs is not None:
        return Assignment(tuple(layouts), outputs)
    assignment = _assign_axes(rule, layouts, fixed)
    if key and all(
        target is layout for target, layout in zip(assignment.targets, layouts, strict=True)
    ):
        keep(unmoved, key, assignment.outputs)
    return assignment


def _key_without_shapes(rule: Rule, layouts: Sequence[Layout], fixed: int | None) -> Any:
    """Return the cache key of a choice that moves nothing; None if the choice depends on sizes.

    It does not if dims are made of one factor and cut evenly, so it is made once for all shapes.
    """
    if any(len(factors) > 1 for dims in (*rule.inputs, *rule.outputs) for factors in dims):
        return None
    if any(layout.spec.sizes for layout in layouts):
        return None
    operands = tuple(
        [(x.spec, x.dtype is torch.bool, tuple([min(n, 2) for n in x.shape])) for x in layouts]
    )
    options = rule.whole, rule.combine, rule.linear, rule.additive, rule.transparent, fixed
    return operands, rule.inputs, rule.outputs, options


def _assign_axes(rule: Rule, layouts: Sequence[Layout], fixed: int | None) -> Assignment:
    mesh = layouts[0].mesh
    # what each axis does, decided one by one
    states = {
        axis: [_state(rule, i, layout, axis) for i, layout in enumerate(layouts)]
        for axis in mesh.axis_names
    }
    choices = {axis: _choose(rule, layouts, states, axis, fixed) for axis in mesh.axis_names}

    # how the axes together cut each factor, in the order of the largest operand, or the fixed one
    by_weight = sorted(range(len(layouts)), key=lambda i: (i != fixed, -layouts[i].nbytes))
    order = axis_order([layouts[i] for i in by_weight])
    while (axis := _axis_without_boxes(rule, mesh.size, choices, order)) is not None:
        choices[axis] = Choice(WHOLE)
    axes = _axes_by_factor(choices, order)
    splits = Splits(axes, _sized_factors(rule, layouts, by_weight, axes))

    # what that means for operands and results
    targets = [
        layout.replace(splits.spec(rule.inputs[i], _pending_operand(rule, i, choices)))
        if _may_move(rule, i, layout, states, choices, splits)
        else layout
        for i, layout in enumerate(layouts)
    ]
    if fixed is not None:
        # The operand that is written keeps its layout: the target must have the same boxes.
        written = layouts[fixed]
        if without_trivial_axes(written) is not without_trivial_axes(targets[fixed]):
            raise CannotKeep
        targets[fixed] = written
    outputs = (
        splits.spec(dims, _pending_output(rule, choices, axes, dims)) for dims in rule.outputs
    )
    return Assignment(tuple(targets), tuple(outputs))


# -- current state ---------------------------------------------------------------------------------


def _state(rule: Rule, operand: int, layout: Layout, axis: str) -> State:
    if axis in layout.pending:
        return State(PENDING, layout.pending[axis])
    if axis not in layout.dim_of:
        return REPLICATED
    dim = layout.dim_of[axis]
    return State(SPLIT, _factors_split(rule, rule.inputs[operand][dim], layout, dim).get(axis))


def _factors_split(rule: Rule, factors: Dim, layout: Layout, dim: int) -> dict[str, str]:
    """Return axis -> the factor that it splits, for axes of a dim that split at boundaries.

    The axes split the factors major to minor: once a factor is cut into single elements, the next
    axis splits the next factor. An axis that would cut across the boundary, and those after it,
    are not in the result.
    """
    size = layout.mesh.size
    factor_of: dict[str, str] = {}
    place = 0  # of the factor that is being split
    parts = 1  # into which it is split so far
    for axis in layout.spec.dims[dim]:
        while place < len(factors) - 1 and parts == rule.sizes[factors[place]]:
            place += 1
            parts = 1
        if not factors or factors[place] in rule.whole:
            break
        parts *= size(axis)
        if place < len(factors) - 1 and rule.sizes[factors[place]] % parts:
            break
        factor_of[axis] = factors[place]
    return factor_of


def axis_order(by_weight: Sequence[Layout]) -> list[str]:
    """Return the axes in the order in which they split dims, of the first operand first."""
    order: dict[str, None] = {}
    for layout in by_weight:
        order.update(dict.fromkeys(axis for axes in layout.spec.dims for axis in axes))
    order.update(dict.fromkeys(by_weight[0].mesh.axis_names))
    return list(order)


# -- candidates ------------------------------------------------------------------------------------


def _choose(
    rule: Rule,
    layouts: Sequence[Layout],
    states: dict[str, list[State]],
    axis: str,
    fixed: int | None,
) -> Choice:
    axis_states = states[axis]
    candidates = list(_candidates(rule, layouts, axis_states))
    if fixed is not None and layouts[fixed].mesh.size(axis) > 1:
        candidates = [
            c
            for c in candidates
            if _target(rule, fixed, c) == _outcome(rule, c) == axis_states[fixed]
        ]
    if not candidates:
        raise CannotKeep
    if len(candidates) == 1:
        return candidates[0]
    return min(candidates, key=lambda choice: _price(rule, layouts, states, axis, choice))


def _candidates(
    rule: Rule, layouts: Sequence[Layout], axis_states: Sequence[State]
) -> Iterator[Choice]:
    """Yield the choices that leave at least one operand in place, or everything whole."""
    yield Choice(WHOLE)
    for factor in dict.fromkeys(
        s.detail for s in axis_states if s.what == SPLIT and s.detail is not None
    ):
        yield Choice(SPLIT, factor)
    kinds = {s.detail for s in axis_states if s.what == PENDING}
    if len(kinds) != 1:
        return
    (kind,) = kinds
    for group in rule.linear:
        pending = [i for i in group if i not in rule.additive]
        states = {axis_states[i].what for i in pending}
        members = [layouts[i] for i in pending]
        are_joined = states == {PENDING, WHOLE} and joined_pending(members)
        if (are_joined or states <= {PENDING}) and _may_be_pending(rule, kind, members):
            yield Choice(PENDING, kind, group)


def joined_pending(layouts: Sequence[Layout]) -> dict[str, str]:
    """Return the axes over which the result of a linear operator of pending operands is pending.

    Each operand is pending over some axes, which need not be the same.

        x pending over a, y over a and b: x + y is pending over a and b, and x is first kept on one
                                          rank of b, which moves nothing
        x pending over a, y replicated:   x + y is replicated: the one reduction would have to be
                                          made later anyway

    Returns:
        axis -> kind; empty if an operand is not pending at all, or they are pending with several
        kinds.
    """
    pending = [
        {axis: kind for axis, kind in x.pending.items() if x.mesh.size(axis) > 1} for x in layouts
    ]
    union = {axis: kind for each in pending for axis, kind in each.items()}
    one_kind = len({kind for each in pending for kind in each.values()}) == 1
    return union if one_kind and all(pending) else {}


def _may_be_pending(rule: Rule, kind: str | None, pending: Sequence[Layout]) -> bool:
    """Return whether a linear operator may have values pending with this kind; bools do not add."""
    return rule.transparent or (
        kind in ("sum", "avg") and all(x.dtype is not torch.bool for x in pending)
    )


def _target(rule: Rule, operand: int, choice: Choice) -> State:
    """Return the state that the choice needs of one operand."""
    if choice.what == SPLIT:
        if any(choice.detail in dim for dim in rule.inputs[operand]):
            return State(SPLIT, choice.detail)
        return (
            State(PENDING, rule.combine)
            if operand in rule.additive and _reduces(rule, choice)
            else REPLICATED
        )
    if choice.what == PENDING and (operand in choice.group or operand in rule.additive):
        return State(PENDING, choice.detail)
    return REPLICATED


def _outcome(rule: Rule, choice: Choice) -> State:
    """Return the state of the (first) result under the choice."""
    if choice.what == SPLIT and _reduces(rule, choice):
        return State(PENDING, rule.combine)
    return State(choice.what, choice.detail)


def _reduces(rule: Rule, choice: Choice) -> bool:
    """Return whether splitting this factor leaves the results pending."""
    return not any(choice.detail in dim for dims in rule.outputs for dim in dims)


def _price(
    rule: Rule, layouts: Sequence[Layout], states: dict[str, list[State]], axis: str, choice: Choice
) -> tuple[float, float]:
    """Return the bytes received per rank, then the bytes of operands that do not stay in place."""
    axis_states, n = states[axis], layouts[0].mesh.size(axis)
    price = moved = 0.0
    for i, (state, layout) in enumerate(zip(axis_states, layouts, strict=True)):
        target = _target(rule, i, choice)
        # a whole bias becomes pending at no cost
        if state != target and not (i in rule.additive and state.what == WHOLE):
            nbytes = layout.largest_local_numel * layout.dtype.itemsize
            price += move_price(state, target, n) * nbytes
            moved += max(nbytes, 1)
    becomes_pending = choice.what == SPLIT and _reduces(rule, choice)
    if moved and becomes_pending:
        price += 2 * (n - 1) / n * _output_bytes(rule, layouts, states, axis)
    return price, moved


def move_price(state: State, target: State, n: int) -> float:
    """Return the bytes received per local byte where an axis of `n` ranks changes its state."""
    if state.what == WHOLE or n == 1:
        return 0
    if state.what == SPLIT:
        return {SPLIT: (n - 1) / n, WHOLE: n - 1, PENDING: 0}[target.what]
    if target.what == PENDING:
        return _IMPOSSIBLE
    return (n - 1) / n * (1 if target.what == SPLIT else 2)


def _output_bytes(
    rule: Rule, layouts: Sequence[Layout], states: dict[str, list[State]], axis: str
) -> float:
    """Estimate the size of a rank's part of the first result, given the splits by other axes."""
    factors = {f for dim in rule.outputs[0] for f in dim}
    numel = math.prod(rule.sizes.get(f, 1) for f in factors)
    for other, axis_states in states.items():
        if other != axis and any(s.what == SPLIT and s.detail in factors for s in axis_states):
            numel /= layouts[0].mesh.size(other)
    return numel * layouts[0].dtype.itemsize


# -- result ----------------------------------------------------------------------------------------


def _axis_without_boxes(
    rule: Rule, size: Callable[[str], int], choices: dict[str, Choice], order: Sequence[str]
) -> str | None:
    """Return an axis to leave whole where parts of a composite dim would not be boxes.

    A major factor must be cut into equal parts, and into single elements before a minor one is cut.
    """
    split = _axes_by_factor(choices, order)
    for dims in (*rule.inputs, *rule.outputs):
        for factors in dims:
            for i, major in enumerate(factors[:-1]):
                parts = math.prod(size(axis) for axis in split.get(major, ()))
                if rule.sizes[major] % parts:
                    return split[major][-1]
                minor_axes = [axis for f in factors[i + 1 :] for axis in split.get(f, ())]
                if minor_axes and parts != rule.sizes[major]:
                    return minor_axes[-1]
    return None


def _axes_by_factor(choices: dict[str, Choice], order: Sequence[str]) -> dict[str, list[str]]:
    split: dict[str, list[str]] = {}
    for axis in order:
        choice = choices[axis]
        if choice.what == SPLIT and choice.detail is not None:
            split.setdefault(choice.detail, []).append(axis)
    return split


def _sized_factors(
    rule: Rule, layouts: Sequence[Layout], by_weight: Sequence[int], split: dict[str, list[str]]
) -> dict[str, Cut]:
    """Return factor -> its cut into parts of given sizes, of the largest operand that it splits."""
    if not any(layout.spec.sizes for layout in layouts):
        return {}
    outermost: dict[str, Cut] = {}
    for i in reversed(by_weight):  # the largest last, so that its cuts stay
        outermost.update(_outer_cuts(rule.inputs[i], layouts[i], split))
    alone = factors_alone(rule)
    return {f: cut for f, cut in outermost.items() if cut.sizes is not None and f in alone}


def factors_alone(rule: Rule) -> set[str]:
    """Return the factors that may be split and are a dim by themselves wherever they appear."""
    shared = {
        f
        for dims in (*rule.inputs, *rule.outputs)
        for factors in dims
        if len(factors) > 1
        for f in factors
    }
    return {f for dims in rule.inputs for factors in dims for f in factors} - shared - rule.whole


def _outer_cuts(
    dims: Sequence[Dim], layout: Layout, split: dict[str, list[str]]
) -> Iterator[tuple[str, Cut]]:
    """Yield the outermost cut of each dim of one factor, if its axes split that factor first."""
    size = layout.mesh.size
    for factors, cuts in zip(dims, without_trivial_axes(layout).spec.cuts, strict=True):
        axes = split.get(factors[0], []) if len(factors) == 1 and cuts else []
        first = [axis for axis in axes if size(axis) > 1][: len(cuts[0].axes)] if axes else []
        if first and tuple(first) == cuts[0].axes:
            yield factors[0], Cut(tuple(axes[: axes.index(first[-1]) + 1]), cuts[0].sizes)


def _may_move(
    rule: Rule,
    operand: int,
    layout: Layout,
    states: dict[str, list[State]],
    choices: dict[str, Choice],
    splits: Splits,
) -> bool:
    """Return whether the target of an operand may differ from its layout.

    It does where a state changes on some axis; the order of several axes of a dim and given sizes
    may differ although no state does.
    """
    if any(
        states[axis][operand] != _target(rule, operand, choice) for axis, choice in choices.items()
    ):
        return True
    return bool(splits.sized or layout.spec.sizes) or any(
        len(axes) > 1 for axes in layout.spec.dims
    )


def _pending_operand(rule: Rule, operand: int, choices: dict[str, Choice]) -> dict[str, str]:
    pending = {}
    for axis, choice in choices.items():
        target = _target(rule, operand, choice)
        if target.what == PENDING and target.detail is not None:
            pending[axis] = target.detail
    return pending


def _pending_output(
    rule: Rule, choices: dict[str, Choice], split: dict[str, list[str]], dims: Sequence[Dim]
) -> dict[str, str]:
    present = {factor for factors in dims for factor in factors}
    pending = {
        axis: rule.combine
        for factor, axes in split.items()
        if factor not in present
        for axis in axes
    }
    pending.update({axis: c.detail or "sum" for axis, c in choices.items() if c.what == PENDING})
    return pending
