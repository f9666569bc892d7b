"""`call`: an operator whose result is wanted in a layout that is named, where JAX has `out_sharding=`.

An operator alone leaves its result as it comes: `x @ w` with a split inner dim is pending. Knowing how the result shall lie, there
is a choice: run the operator on its operands as they lie and move the result, or move operands first.

    x f32[m, k] @ P(None, "tp")      w f32[k, n] @ P("tp")      out_sharding=P("tp")

        as they lie     local product, reduce_scatter of the result         m n elements' share
        operands first  x to P("tp") by exchange, w gathered                m k + k n elements' share, nothing after

Both are priced with the plans' own bytes, for each mesh axis in turn; the fewest bytes win, then the fewest collectives, then the
smallest local operands. The choice is kept for calls with the same layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ...mesh.comm.call_site import DESCRIBERS
from ..layout.bounded_cache import keep
from ..layout.layout import Layout
from ..layout.spec import P
from ..redistribute.plan import plan
from ..redistribute.plan.traffic import most_received
from ..tensor.constraint import matched, with_sharding_constraint
from ..tensor.redistribute import redistribute_many
from ..tensor.sharded_tensor import ShardedTensor
from . import dispatch, plain_operands, strategy
from .rules.notation import Rule
from .rules.propagation import assign, axis_order
from .rules.registry import HANDLERS, writes_first_operand

Choices = tuple[str | None, ...]  # for each axis of more than one rank: KEEP, the factor that it splits, or None for whole
KEEP = "(as it lies)"  # no factor's name


def call(func: Callable[..., Any], *args: Any, out_sharding: Any, **kwargs: Any) -> Any:
    """call(func, *args, out_sharding=P(...)) -> func(*args), laid out as out_sharding says, in the cheapest way known.

    Communication inside is asked for: `sm.implicit("forbid")` has nothing against it, and reports name it by the operator.
    Differentiable.

    Args:
        func: a function of torch: `torch.matmul`, `torch.einsum`, `torch.nn.functional.linear`, `torch.reshape`, ... A function of
            yours works too; its result is then laid out after it has run.
        args, kwargs: what it takes; among them a `ShardedTensor`.
        out_sharding: a `P` or list of placements for the result; for several results one for all, or a tree of them.

    Raises:
        TypeError: no `ShardedTensor` among the arguments, or a result that is no tensor.
        ValueError: a spec that does not fit the result, an operator that writes in place or into `out=`; what `func` raises.

    Communication: that of `redistribute` of operands, of the operator on them, and of `redistribute` of the result. Where a summed
        dim is split: a reduce_scatter into the split asked for.

    Example:
        >>> y = sm.call(torch.matmul, x, w, out_sharding=P("dp", "tp"))
    """
    _check_call(func, args, kwargs)
    given, kwargs = plain_operands.replicated(func, args, kwargs)
    args = tuple(given)
    key: list[Any] = [call, func, repr(out_sharding)]
    operands: list[Any] = []
    for name, item in (("", list(args)), *kwargs.items()):
        key.append(name)
        dispatch.locals_of([item], key, operands, func)
    targets = _known_targets(func, args, kwargs, operands, out_sharding, tuple(key))
    moved, options = strategy.with_values(args, kwargs, _moved(operands, targets))
    return with_sharding_constraint(func(*moved, **options), out_sharding)


DESCRIBERS[call.__code__] = lambda frame: strategy.name_of(frame["func"])  # what is asked for goes by the operator's name


def _check_call(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    name = strategy.name_of(func)
    if not any(isinstance(x, ShardedTensor) for x in plain_operands.tensors_in((*args, *kwargs.values()))):
        raise TypeError(
            f"call({name}, ...): no ShardedTensor among the arguments, whose mesh the result would lie on; place one first with "
            "device_put(t, mesh, P(...))"
        )
    if writes_first_operand(func) or kwargs.get("inplace") is True or kwargs.get("out") is not None:
        raise ValueError(f"call({name}, ...): it writes into a tensor that has a layout; use its form that returns a new one")


def _moved(operands: Sequence[ShardedTensor], targets: Sequence[Layout]) -> list[ShardedTensor]:
    moving = [i for i, (x, target) in enumerate(zip(operands, targets, strict=True)) if x._layout is not target]
    moved = redistribute_many([operands[i] for i in moving], [targets[i].spec for i in moving]) if moving else []
    found = dict(zip(moving, moved, strict=True))
    return [found.get(i, x) for i, x in enumerate(operands)]


# -- the choice --------------------------------------------------------------------------------------------------------


def _known_targets(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], operands: Sequence[Any], out: Any, key: tuple[Any, ...]
) -> tuple[Layout, ...]:
    """`_targets`, kept with the first operand's layout."""
    known = operands[0]._layout.decisions
    try:
        found = known.get(key)
    except TypeError:  # an argument that cannot be hashed
        found = None
    if found is None:
        found = _targets(func, args, kwargs, operands, out)
        with suppress(TypeError):
            keep(known, key, found)
    return found


def _targets(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], operands: Sequence[Any], out: Any
) -> tuple[Layout, ...]:
    """The layouts that the operands shall have before the operator runs.

    Raises:
        ValueError: the result cannot lie so.
    """
    layouts = [x._layout for x in operands]
    strategy.check_one_mesh(func, layouts)
    metas = [strategy.operand_meta(layout) for layout in layouts]
    named = dict(zip(kwargs, strategy.meta_numbers(kwargs.values()), strict=True))
    args, kwargs = strategy.with_values(strategy.meta_numbers(args), named, metas)
    made = None
    if func not in HANDLERS and strategy.form_for(func, args, kwargs) is None:
        made = strategy.rule_for(func, args, kwargs, metas)
    wanted = _wanted(func, strategy.meta_result(func, made, args, kwargs), layouts[0], out)
    if made is None or not wanted:
        return tuple(layouts)
    order = [next(i for i, meta in enumerate(metas) if meta is x) for x in made.operands]
    best = _Search(made, [layouts[i] for i in order], wanted).best()
    for i, layout in zip(order, best, strict=True):
        layouts[i] = layout
    return tuple(layout.replace(layout.spec) for layout in layouts)


def _wanted(func: Callable[..., Any], result: Any, like: Layout, out: Any) -> list[Layout]:
    """The wanted layout of each result; none where the operator does not tell its shapes.

    Raises:
        TypeError: a result that is no tensor.
        ValueError: a spec that does not fit.
    """
    if result is None:
        return []
    name = strategy.name_of(func)
    found = list(matched(result, out, f"call({name}, ...)"))
    for path, leaf, _ in found:
        if not isinstance(leaf, Tensor):
            raise TypeError(f"call({name}, ...): the result{path} is {leaf!r}, which lies nowhere; call {name} itself")
    return [Layout.of(like.mesh, where, leaf.shape, leaf.dtype) for _, leaf, where in found]


@dataclass
class _Search:
    """Which factor each mesh axis shall split, if operands are moved before the operator runs.

    Attributes:
        rule: the operator's.
        layouts: how its operands lie, in the order of the rule.
        wanted: how the results shall lie.
        prices: choices -> what they cost.
    """

    rule: Rule
    layouts: list[Layout]
    wanted: list[Layout]
    prices: dict[Choices, tuple[float, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        mesh = self.layouts[0].mesh
        self.axes = [axis for axis in mesh.axis_names if mesh.size(axis) > 1]
        self.order = axis_order([*self.wanted, *sorted(self.layouts, key=lambda layout: -layout.nbytes)])
        self.free = _factors_alone(self.rule)

    def best(self) -> list[Layout]:
        """Improves two beginnings axis by axis, moving no operand and moving all towards the result; the better one."""
        as_they_lie: Choices = (KEEP,) * len(self.axes)
        towards: Choices = tuple(next(iter(self._factors_of_result(axis)), KEEP) for axis in self.axes)
        found = [self._improved(choices) for choices in dict.fromkeys((as_they_lie, towards))]
        return self.operands(min(found, key=self.price))

    def _improved(self, choices: Choices) -> Choices:
        for _ in range(2):
            for i, axis in enumerate(self.axes):
                others = [(*choices[:i], option, *choices[i + 1 :]) for option in self._options(axis)]
                choices = min([choices, *others], key=self.price)
        return choices

    def _options(self, axis: str) -> dict[str | None, None]:
        operands = (_split(dims, layout, axis) for dims, layout in zip(self.rule.inputs, self.layouts, strict=True))
        factors = [f for f in operands if f in self.free]
        return dict.fromkeys([KEEP, None, *self._factors_of_result(axis), *factors])

    def _factors_of_result(self, axis: str) -> Iterator[str]:
        """The factors that the axis splits in a result, as far as operands have them."""
        several = len(self.rule.outputs) == len(self.wanted)
        for i, layout in enumerate(self.wanted):
            factor = _split(self.rule.outputs[i if several else 0], layout, axis)
            if factor in self.free:
                yield factor

    def price(self, choices: Choices) -> tuple[float, ...]:
        """Bytes that the busiest rank receives, collectives, and elements of the largest local operands."""
        if choices not in self.prices:
            self.prices[choices] = self._priced(self.operands(choices))
        return self.prices[choices]

    def _priced(self, operands: Sequence[Layout]) -> tuple[float, ...]:
        chosen = assign(self.rule, operands)
        several, like = len(chosen.outputs) == len(self.wanted), operands[0]
        moves = [*zip(self.layouts, operands, strict=True), *zip(operands, chosen.targets, strict=True)]
        for i, layout in enumerate(self.wanted):
            moves.append((Layout.of(like.mesh, chosen.outputs[i if several else 0], layout.shape, layout.dtype), layout))
        plans = [plan(src, dst) for src, dst in moves if src is not dst]
        received = sum(most_received(p.steps) for p in plans)
        return received, sum(p.launches for p in plans), sum(target.largest_local_numel for target in chosen.targets)

    def operands(self, choices: Choices) -> list[Layout]:
        """How the operands lie if each axis does this."""
        changed = {axis: choice for axis, choice in zip(self.axes, choices, strict=True) if choice != KEEP}
        return [self._operand(i, layout, changed) for i, layout in enumerate(self.layouts)] if changed else self.layouts

    def _operand(self, operand: int, layout: Layout, changed: dict[str, str | None]) -> Layout:
        dims = []
        for factors, axes in zip(self.rule.inputs[operand], layout.spec.dims, strict=True):
            kept = [axis for axis in axes if axis not in changed]
            added = [axis for axis, factor in changed.items() if factor is not None and factors == (factor,)]
            dims.append(tuple(sorted([*kept, *added], key=self.order.index) if added else kept))
        pending = {axis: kind for axis, kind in layout.spec.unreduced if axis not in changed}
        stay = [new for old, new in zip(layout.spec.dims, dims, strict=True) if new[:1] == old[:1]]
        sizes = {axes: n for axes, n in layout.spec.sizes if any(axes == dim[: len(axes)] for dim in stay)}
        return layout.passing(P(*dims, unreduced=pending, sizes=sizes))


def _factors_alone(rule: Rule) -> set[str]:
    """Factors that are a dim by themselves wherever they appear, and that may be split."""
    inputs = [factors for dims in rule.inputs for factors in dims]
    shared = {f for factors in [*inputs, *[x for dims in rule.outputs for x in dims]] if len(factors) > 1 for f in factors}
    return {f for factors in inputs for f in factors} - shared - rule.whole


def _split(dims: Sequence[tuple[str, ...]], layout: Layout, axis: str) -> str | None:
    """The factor that an axis splits, where that is a dim by itself."""
    factors = dims[layout.dim_of[axis]] if axis in layout.dim_of else ()
    return factors[0] if len(factors) == 1 else None
