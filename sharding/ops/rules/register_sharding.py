"""Operators whose shardings are listed one by one: `register_sharding`, as torch has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from ...layout.layout import Layout
from ...layout.spec import P, Partial, Placement, Replicate, Shard
from ..strategy import OpStrategy, make_strategy, name_of
from .aten import public_names
from .decomposition_utils import layout_of
from .propagation import PENDING, REPLICATED, SPLIT, CannotKeep, State, axis_order, move_price
from .register_rule import operands_in
from .registry import DECOMPOSITIONS, HANDLERS, functions, writes_first_operand

Accepted = Sequence[tuple[Sequence[Any], Sequence[Any]]]
# what one axis does to the results, and to the operands
Choice = tuple[tuple[State, ...], tuple[State, ...]]


def register_sharding(op: Any) -> Callable[[Callable[..., Accepted]], Callable[..., Accepted]]:
    """register_sharding(op)(f): list the shardings that an operator accepts; they replace its rule.

    `f` is called with the operator's arguments, tensors replaced by meta tensors of the global
    shape (with `placements` and `mesh`), and returns pairs for one mesh axis: a placement for each
    result, and one for each tensor among the arguments (None for other arguments). For each axis by
    itself the pair is taken that moves the fewest bytes; ties go to the one that leaves most where
    it is, then to the first. A rule in einops notation (`register_rule`) says the same in one line
    where the operator has one, and keeps parts of given sizes.

    Args:
        op: a torch function, an operator of `torch.library`, or a list of those, before it is first
            called on a `ShardedTensor`. An overload of aten, `torch.ops.aten.gelu.default`, stands
            for the public functions and methods of its name; `f` then gets the arguments of the
            overload's schema.

    Raises:
        ValueError: an aten overload without public functions of its name; when the operator is
            called, pairs that do not fit its tensors, or none that can be reached.

    Communication: none; calling the operator, that of bringing its operands where the chosen pairs
    want them.

    Example:
        >>> @register_sharding(torch.ops.mine.scale)
        ... def shardings(x, factor):
        ...     split = [([Shard(d)], [Shard(d), None]) for d in range(x.ndim)]
        ...     return [([Replicate()], [Replicate(), None]), *split]
    """

    def register(accepted: Callable[..., Accepted]) -> Callable[..., Accepted]:
        for one in op if isinstance(op, list | tuple) else [op]:
            for func in _callables(one):
                HANDLERS.pop(func, None)
                DECOMPOSITIONS[func] = _maker(  # type: ignore[assignment]
                    func, accepted, one._schema if isinstance(one, OpOverload) else None
                )
        return accepted

    return register


# -- which functions, and how they are called ------------------------------------------------------


def _callables(op: Any) -> list[Callable[..., Any]]:
    """Return the functions that run this operator."""
    if not isinstance(op, OpOverload | OpOverloadPacket):
        return [op]
    packet = op.overloadpacket if isinstance(op, OpOverload) else op
    overloads = (
        [op] if isinstance(op, OpOverload) else [getattr(op, name) for name in op.overloads()]
    )
    if not str(packet).startswith("aten."):
        return [packet, *overloads]
    public = list(functions(*public_names(packet.__name__)))
    if not public:
        raise ValueError(
            f"register_sharding({op}): no public function of torch has this name, and shardings "
            "are registered for functions that programs call; pass the function, as in "
            "register_sharding(torch.softmax)"
        )
    return [packet, *overloads, *public]


def _by_schema(
    schema: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments by the names of an aten overload, without those it lacks."""
    kinds = {argument.name: argument for argument in schema.arguments}
    named = dict(zip(kinds, args, strict=False))
    named.update({"self" if name == "input" else name: value for name, value in kwargs.items()})
    for name, argument in kinds.items():
        flag = isinstance(argument.type, torch.BoolType) and not argument.has_default_value()
        if name not in named and (flag or argument.has_default_value()):
            named[name] = argument.default_value if argument.has_default_value() else False
    positional = [
        named.pop(name)
        for name, argument in kinds.items()
        if not argument.kwarg_only and name in named
    ]
    return positional, {name: value for name, value in named.items() if name in kinds}


# -- the strategy ----------------------------------------------------------------------------------


def _maker(
    func: Callable[..., Any], accepted: Callable[..., Accepted], schema: Any
) -> Callable[..., OpStrategy]:
    """Return a function that makes the strategy for the cheapest of the accepted shardings."""

    def make(*args: Any, **kwargs: Any) -> OpStrategy:
        positional, named = (args, kwargs) if schema is None else _by_schema(schema, args, kwargs)
        listed = list(operands_in((*positional, *named.values())))
        for x in listed:
            x.placements, x.mesh = layout_of(x).placements, layout_of(x).mesh  # type: ignore[attr-defined]
        with torch.no_grad():
            result = func(*args, **kwargs)
        results = [result] if isinstance(result, Tensor) else list(result)
        pairs = [_choice(func, pair, listed, results) for pair in accepted(*positional, **named)]
        return _strategy(
            func, pairs, listed, list(operands_in((*args, *kwargs.values()))), result, results
        )

    return make


def _choice(
    func: Callable[..., Any], pair: Any, operands: Sequence[Tensor], results: Sequence[Tensor]
) -> Choice:
    """Return one accepted pair as states.

    Raises:
        ValueError: not one placement for each tensor.
    """
    outs, ins = ([p for p in side if p is not None] for side in pair)
    if (len(outs), len(ins)) != (len(results), len(operands)):
        raise ValueError(
            f"register_sharding: {name_of(func)} has {len(results)} results and {len(operands)} "
            f"tensors among its arguments, and the pair {pair} has {len(outs)} and {len(ins)} "
            "placements; give one for each tensor, None for other arguments"
        )
    return tuple(map(_state, outs, results)), tuple(map(_state, ins, operands))


def _state(placement: Placement, x: Tensor) -> State:
    if (
        isinstance(placement, Shard)
        and placement.sizes is None
        and placement.order is None
        and -x.ndim <= placement.dim < x.ndim
    ):
        return State(SPLIT, str(placement.dim % x.ndim))
    if isinstance(placement, Partial):
        return State(PENDING, placement.reduce_op)
    if isinstance(placement, Replicate):
        return REPLICATED
    raise ValueError(
        f"register_sharding: expected Shard of one of {x.ndim} dims, Replicate or Partial, got "
        f"{placement!r}"
    )


def _strategy(
    func: Callable[..., Any],
    pairs: Sequence[Choice],
    listed: Sequence[Tensor],
    operands: Sequence[Tensor],
    result: Any,
    results: Sequence[Tensor],
) -> OpStrategy:
    layouts = [layout_of(x) for x in listed]
    in_place = writes_first_operand(func)
    out_bytes = sum(r.nbytes for r in results)
    chosen = {
        axis: _cheapest(func, pairs, layouts, axis, in_place, out_bytes)
        for axis in layouts[0].mesh.axis_names
    }
    order = axis_order(sorted(layouts, key=lambda layout: -layout.nbytes))
    outputs = [
        Layout.of(
            layouts[0].mesh, _spec(r.ndim, {a: chosen[a][0][i] for a in order}), r.shape, r.dtype
        )
        for i, r in enumerate(results)
    ]
    target_layouts = {
        id(x): layout.replace(_spec(x.ndim, {a: chosen[a][1][i] for a in order}))
        for i, (x, layout) in enumerate(zip(listed, layouts, strict=True))
    }
    sources, targets = [layout_of(x) for x in operands], [target_layouts[id(x)] for x in operands]
    if in_place and targets[0] is not sources[0]:
        raise _cannot_keep(func, sources[0])
    return make_strategy(
        func,
        func,
        sources,
        targets,
        outputs[0] if isinstance(result, Tensor) else outputs,
        result,
        in_place,
    )


def _cheapest(
    func: Callable[..., Any],
    pairs: Sequence[Choice],
    layouts: Sequence[Layout],
    axis: str,
    in_place: bool,
    out_bytes: int,
) -> Choice:
    """Return the cheapest pair for the axis."""
    states = [_now(layout, axis) for layout in layouts]
    n = layouts[0].mesh.size(axis)
    if in_place:
        pairs = [(outs, ins) for outs, ins in pairs if outs[0] == ins[0] == states[0]]
    prices = [_price(states, pair, layouts, n, out_bytes) for pair in pairs]
    if not prices or min(prices)[0] == float("inf"):
        raise (
            _cannot_keep(func, layouts[0])
            if in_place
            else ValueError(
                f"register_sharding: no accepted sharding of {name_of(func)} can be reached from "
                f"{', '.join(map(str, layouts))} on axis {axis!r}; accept Replicate() everywhere "
                "as well"
            )
        )
    return pairs[prices.index(min(prices))]


def _cannot_keep(func: Callable[..., Any], layout: Layout) -> CannotKeep:
    return CannotKeep(
        f"{name_of(func)} writes into {layout}, and no accepted sharding leaves that as it is; "
        "redistribute it first"
    )


def _now(layout: Layout, axis: str) -> State:
    if axis in layout.pending:
        return State(PENDING, layout.pending[axis])
    return State(SPLIT, str(layout.dim_of[axis])) if axis in layout.dim_of else REPLICATED


def _price(
    states: Sequence[State], pair: Choice, layouts: Sequence[Layout], n: int, out_bytes: int
) -> tuple[float, float]:
    """Return the bytes received per rank, then the bytes of operands that do not stay in place.

    A result that becomes pending must be reduced later, which counts unless nothing moves for it.
    """
    price = moved = 0.0
    outs, targets = pair
    for a, b, layout in zip(states, targets, layouts, strict=True):
        if a != b:
            nbytes = max(layout.largest_local_numel * layout.dtype.itemsize, 1)
            price, moved = price + move_price(a, b, n) * nbytes, moved + nbytes
    new = any(state.what == PENDING for state in outs) and not any(
        state.what == PENDING for state in states
    )
    return price + (2 * (n - 1) / n * out_bytes if new and moved else 0), moved


def _spec(ndim: int, states: dict[str, State]) -> P:
    """Return the spec of a tensor with these states of the axes, major to minor."""
    dims = [
        tuple(a for a, state in states.items() if state == State(SPLIT, str(d)))
        for d in range(ndim)
    ]
    return P(
        *dims,
        unreduced={
            a: state.detail or "sum" for a, state in states.items() if state.what == PENDING
        },
    )
