"""The rule engine: from a rule and the layouts of its operands to the cheapest way of running the operator.

For every mesh axis by itself the engine lists what the rule allows on it (leave everything whole; split one factor;
let pending sums pass through), prices the movement of operands that each choice needs, and takes the cheapest. A choice
that moves nothing wins; ties go to the choice that keeps the largest operand where it is. Because axes are decided one
at a time, the work grows with the number of axes, not with the product of their choices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..layout import Layout
from ..plan import without_trivial_axes
from ..spec import P
from .notation import Dim, Rule

WHOLE, SPLIT, PENDING = "whole", "split", "pending"
_IMPOSSIBLE = float("inf")


class State(NamedTuple):
    """What one mesh axis does to one operand: nothing, split a factor (None: a dim that the rule cannot follow), or
    leave it pending with a kind."""

    what: str
    detail: str | None = None


REPLICATED = State(WHOLE)


@dataclass(frozen=True, slots=True)
class Choice:
    """What one axis does in the operator: nothing, split factor `detail`, or leave a linear group's sum pending.

    Attributes:
        what: WHOLE, SPLIT or PENDING.
        detail: the factor that is split, or the pending kind.
        group: the operands that are pending, for PENDING.
    """

    what: str
    detail: str | None = None
    group: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Assignment:
    """The outcome: the layout each operand must have, and the spec of each result."""

    targets: tuple[Layout, ...]
    outputs: tuple[P, ...]


class CannotKeep(ValueError):
    """An in-place operator would have to change the layout of the tensor that it writes."""


def assign(rule: Rule, layouts: Sequence[Layout], fixed: int | None = None) -> Assignment:
    """Choose how to run an operator.

    Args:
        rule: the operator's rule for these operands.
        layouts: the layout of each operand of the rule, all on one mesh.
        fixed: an operand that must stay as it is and is the result (the one written by an in-place operator).

    Raises:
        CannotKeep: no choice leaves the fixed operand as it is.

    Communication: none; the result says what has to move.
    """
    mesh = layouts[0].mesh
    states = {axis: [_state(rule, i, layout, axis) for i, layout in enumerate(layouts)] for axis in mesh.axis_names}
    choices = {axis: _choose(rule, layouts, states, axis, fixed) for axis in mesh.axis_names}
    order = _axis_order(layouts, fixed)
    while (excess := _unrepresentable(rule, mesh.size, choices, order)) is not None:
        choices[excess] = Choice(WHOLE)
    targets = [
        layout.replace(_operand_spec(rule, i, choices, order)) if _moves(rule, i, layout, states, choices) else layout
        for i, layout in enumerate(layouts)
    ]
    if fixed is not None:
        targets[fixed] = _kept(layouts[fixed], targets[fixed])
    return Assignment(tuple(targets), tuple(_spec(dims, choices, order, rule, output=True) for dims in rule.outputs))


def _kept(layout: Layout, target: Layout) -> Layout:
    """The layout of the operand that is written, if its target is the same boxes."""
    if without_trivial_axes(layout) is not without_trivial_axes(target):
        raise CannotKeep
    return layout


# -- what is -----------------------------------------------------------------------------------------------------------


def _state(rule: Rule, operand: int, layout: Layout, axis: str) -> State:
    if axis in layout.pending:
        return State(PENDING, layout.pending[axis])
    if axis not in layout.dim_of:
        return REPLICATED
    dim = layout.dim_of[axis]
    return State(SPLIT, _factors_split(rule, rule.inputs[operand][dim], layout, dim).get(axis))


def _factors_split(rule: Rule, factors: Dim, layout: Layout, dim: int) -> dict[str, str]:
    """Axis -> the factor that it splits, for the axes of one dim, as far as the split falls on factor boundaries."""
    size, found, at, parts = layout.mesh.size, {}, 0, 1
    for axis in layout.spec.dims[dim]:
        while at < len(factors) - 1 and parts == rule.sizes[factors[at]]:
            at, parts = at + 1, 1
        if not factors or factors[at] in rule.whole:
            break
        parts *= size(axis)
        if at < len(factors) - 1 and rule.sizes[factors[at]] % parts:
            break
        found[axis] = factors[at]
    return found


def _axis_order(layouts: Sequence[Layout], fixed: int | None) -> list[str]:
    """Axes in the order in which they split dims: the fixed operand's, then the largest operand's, then mesh order."""
    order: dict[str, None] = {}
    first = layouts[fixed] if fixed is not None else None
    for layout in sorted(layouts, key=lambda layout: (layout is not first, -layout.nbytes)):
        order.update(dict.fromkeys(axis for axes in layout.spec.dims for axis in axes))
    order.update(dict.fromkeys(layouts[0].mesh.axis_names))
    return list(order)


# -- what could be -----------------------------------------------------------------------------------------------------


def _choose(
    rule: Rule, layouts: Sequence[Layout], states: dict[str, list[State]], axis: str, fixed: int | None
) -> Choice:
    here = states[axis]
    candidates = list(_candidates(rule, layouts, here))
    if fixed is not None and layouts[fixed].mesh.size(axis) > 1:
        candidates = [c for c in candidates if _target(rule, fixed, c) == _outcome(rule, c) == here[fixed]]
    if not candidates:
        raise CannotKeep
    if len(candidates) == 1:
        return candidates[0]
    return min(candidates, key=lambda choice: _price(rule, layouts, states, axis, choice))


def _candidates(rule: Rule, layouts: Sequence[Layout], here: Sequence[State]) -> Iterator[Choice]:
    """Choices that leave at least one operand where it is, or everything whole."""
    yield Choice(WHOLE)
    for factor in dict.fromkeys(s.detail for s in here if s.what == SPLIT and s.detail is not None):
        yield Choice(SPLIT, factor)
    kinds = {s.detail for s in here if s.what == PENDING}
    if len(kinds) != 1:
        return
    (kind,) = kinds
    for group in rule.linear:
        pending = [i for i in group if i not in rule.additive]
        if all(here[i].what == PENDING for i in pending) and _passes(rule, kind, [layouts[i] for i in pending]):
            yield Choice(PENDING, kind, group)


def _passes(rule: Rule, kind: str | None, pending: Sequence[Layout]) -> bool:
    """Whether a linear operator may be applied to values pending with this kind; truth values do not add up."""
    return rule.transparent or (kind in ("sum", "avg") and all(x.dtype is not torch.bool for x in pending))


def _target(rule: Rule, operand: int, choice: Choice) -> State:
    """What the choice asks of one operand."""
    if choice.what == SPLIT:
        if any(choice.detail in dim for dim in rule.inputs[operand]):
            return State(SPLIT, choice.detail)
        return State(PENDING, rule.combine) if operand in rule.additive and _reduces(rule, choice) else REPLICATED
    if choice.what == PENDING and (operand in choice.group or operand in rule.additive):
        return State(PENDING, choice.detail)
    return REPLICATED


def _outcome(rule: Rule, choice: Choice) -> State:
    """What the choice makes of the (first) result."""
    if choice.what == SPLIT and _reduces(rule, choice):
        return State(PENDING, rule.combine)
    return State(choice.what, choice.detail)


def _reduces(rule: Rule, choice: Choice) -> bool:
    """Whether splitting this factor leaves the results pending."""
    return not any(choice.detail in dim for dims in rule.outputs for dim in dims)


def _price(
    rule: Rule, layouts: Sequence[Layout], states: dict[str, list[State]], axis: str, choice: Choice
) -> tuple[float, float]:
    """Bytes received per rank if the axis does this, then bytes of operands that do not stay where they are."""
    here, n = states[axis], layouts[0].mesh.size(axis)
    price = moved = 0.0
    for i, (state, layout) in enumerate(zip(here, layouts, strict=True)):
        target = _target(rule, i, choice)
        if state != target:
            nbytes = layout.largest_local_numel * layout.dtype.itemsize
            price += _move_price(state, target, n) * nbytes
            moved += max(nbytes, 1)
    becomes_pending = choice.what == SPLIT and _reduces(rule, choice)
    if moved and becomes_pending:
        price += 2 * (n - 1) / n * _output_bytes(rule, layouts, states, axis)
    return price, moved


def _move_price(state: State, target: State, n: int) -> float:
    """Bytes received per local byte, when an axis of `n` ranks goes from one state to another."""
    if state.what == WHOLE or n == 1:
        return 0
    if state.what == SPLIT:
        return {SPLIT: (n - 1) / n, WHOLE: n - 1, PENDING: 0}[target.what]
    if target.what == PENDING:
        return _IMPOSSIBLE
    return (n - 1) / n * (1 if target.what == SPLIT else 2)


def _output_bytes(rule: Rule, layouts: Sequence[Layout], states: dict[str, list[State]], axis: str) -> float:
    """About what one rank will hold of the first result, given how the other axes split its factors now."""
    factors = {f for dim in rule.outputs[0] for f in dim}
    numel = math.prod(rule.sizes.get(f, 1) for f in factors)
    for other, here in states.items():
        if other != axis and any(s.what == SPLIT and s.detail in factors for s in here):
            numel /= layouts[0].mesh.size(other)
    return numel * layouts[0].dtype.itemsize


# -- what will be ------------------------------------------------------------------------------------------------------


def _unrepresentable(rule: Rule, size, choices: dict[str, Choice], order: Sequence[str]) -> str | None:
    """An axis to leave whole, where a composite dim cannot be split as chosen: its parts would not be boxes."""
    split = _axes_by_factor(choices, order)
    for dims in (*rule.inputs, *rule.outputs):
        for factors in dims:
            for major, minor in ((factors[i], factors[i + 1 :]) for i in range(len(factors) - 1)):
                parts = math.prod(size(a) for a in split.get(major, ()))
                minor_axes = [a for f in minor for a in split.get(f, ())]
                if rule.sizes[major] % parts:
                    return split[major][-1]
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


def _moves(
    rule: Rule, operand: int, layout: Layout, states: dict[str, list[State]], choices: dict[str, Choice]
) -> bool:
    """Whether the operand must change its layout; axes that split one factor in another order count."""
    if any(states[axis][operand] != _target(rule, operand, choice) for axis, choice in choices.items()):
        return True
    return any(len(axes) > 1 for axes in layout.spec.dims)


def _operand_spec(rule: Rule, operand: int, choices: dict[str, Choice], order: Sequence[str]) -> P:
    pending = {}
    for axis, choice in choices.items():
        target = _target(rule, operand, choice)
        if target.what == PENDING and target.detail is not None:
            pending[axis] = target.detail
    return P(*_spec(rule.inputs[operand], choices, order, rule, output=False).dims, unreduced=pending)


def _spec(dims: Sequence[Dim], choices: dict[str, Choice], order: Sequence[str], rule: Rule, *, output: bool) -> P:
    split = _axes_by_factor(choices, order)
    entries = [tuple(axis for factor in factors for axis in split.get(factor, ())) for factors in dims]
    return P(*entries, unreduced=_pending_output(rule, choices, split, dims) if output else {})


def _pending_output(
    rule: Rule, choices: dict[str, Choice], split: dict[str, list[str]], dims: Sequence[Dim]
) -> dict[str, str]:
    present = {factor for factors in dims for factor in factors}
    pending = {axis: rule.combine for factor, axes in split.items() if factor not in present for axis in axes}
    pending.update({axis: c.detail or "sum" for axis, c in choices.items() if c.what == PENDING})
    return pending
