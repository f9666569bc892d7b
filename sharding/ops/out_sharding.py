"""`apply`: run an operator whose result must have a given layout, like JAX's `out_sharding=`.

An operator by itself redistributes as little as possible: `x @ w` with a split inner dim is
pending. If the layout of the result is known, there is a choice: run the operator on its operands
in their layouts and redistribute the result, or redistribute operands first.

    x f32[m, k] @ P(None, "tp")      w f32[k, n] @ P("tp")      out_sharding=P("tp")

        result only     local product, reduce_scatter of the result         a share of m n elements
        operands first  all_to_all of x to P("tp"), all_gather of w         a share of m k + k n

Both are priced by the bytes of their plans, for each mesh axis in turn; the fewest bytes win, then
the fewest collectives, then the smallest local operands. The choice is cached for calls with the
same layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ...mesh.comm.call_site import DESCRIBERS
from ..layout.bounded_cache import LayoutCache
from ..layout.layout import Layout
from ..layout.spec import P
from ..redistribute.plan import plan
from ..redistribute.plan.traffic import most_received
from ..tensor.constraint import with_sharding_constraint
from ..tensor.mesh_arguments import SPECS
from ..tensor.redistribute import redistribute_many
from ..tensor.sharded_tensor import ShardedTensor
from ..trees import broadcast_prefix, flatten, place_of, tensors_in
from . import dispatch, plain_operands, strategy
from .rules.notation import Rule
from .rules.propagation import assign, axis_order, factors_alone
from .rules.registry import HANDLERS, writes_first_operand

# for each axis of more than one rank: KEEP, the factor that it splits, or None for whole
Choices = tuple[str | None, ...]
KEEP = "(keep)"  # cannot be the name of a factor


def apply(func: Callable[..., Any], *args: Any, out_sharding: Any, **kwargs: Any) -> Any:
    """apply(func, *args, out_sharding=P(...)) -> func(*args) laid out as out_sharding.

    In the cheapest way known.

    Its communication is explicit: `sm.ops.implicit_comm("forbid")` allows it, and reports show it
    under the operator's name. Differentiable.

    Args:
        func: a function of torch: `torch.matmul`, `torch.einsum`, `torch.nn.functional.linear`,
            `torch.reshape`, ... The result of any other function is redistributed after it has run.
        args, kwargs: its arguments, with at least one `ShardedTensor`.
        out_sharding: a `P` or list of placements for the result; for several results one for all,
            or a tree of them.

    Raises:
        TypeError: no `ShardedTensor` among the arguments, or a result that is not a tensor.
        ValueError: a spec that does not fit the result, an operator that writes in place or into
            `out=`; the errors of `func`.

    Communication: that of `redistribute` of operands, of the operator on them, and of
        `redistribute` of the result. If a summed dim is split: a reduce_scatter into the requested
        split.

    Example:
        >>> y = sm.ops.apply(torch.matmul, x, w, out_sharding=P("dp", "tp"))
    """
    _check_call(func, args, kwargs)
    positional, kwargs = plain_operands.replicated(func, args, kwargs)
    args = tuple(positional)
    key: list[Any] = [apply, func, repr(out_sharding)]
    operands: list[Any] = []
    for name, item in (("", list(args)), *kwargs.items()):
        key.append(name)
        dispatch.locals_of([item], key, operands, func)
    targets = _known_targets(func, args, kwargs, operands, out_sharding, tuple(key))
    moved, options = strategy.with_values(args, kwargs, _redistribute_operands(operands, targets))
    return with_sharding_constraint(func(*moved, **options), out_sharding)


# reports name the operator
DESCRIBERS[apply.__code__] = lambda frame: strategy.name_of(frame["func"])


def _check_call(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    name = strategy.name_of(func)
    if not any(isinstance(x, ShardedTensor) for x in tensors_in((*args, *kwargs.values()))):
        raise TypeError(
            f"apply({name}, ...): no ShardedTensor among the arguments, whose mesh the result "
            "would have; place one first with device_put(t, mesh, P(...))"
        )
    if writes_first_operand(func) or kwargs.get("inplace") is True or kwargs.get("out") is not None:
        raise ValueError(
            f"apply({name}, ...): {name} writes into a tensor, which already has a layout; use the "
            "out-of-place function"
        )


def _redistribute_operands(
    operands: Sequence[ShardedTensor], targets: Sequence[Layout]
) -> list[ShardedTensor]:
    moving = [
        i
        for i, (x, target) in enumerate(zip(operands, targets, strict=True))
        if x._layout is not target
    ]
    moved = (
        redistribute_many([operands[i] for i in moving], [targets[i].spec for i in moving])
        if moving
        else []
    )
    replacements = dict(zip(moving, moved, strict=True))
    return [replacements.get(i, x) for i, x in enumerate(operands)]


# -- the choice ------------------------------------------------------------------------------------


# (operator, arguments and layout of the result) -> the layouts of the operands
_known: LayoutCache[tuple[Any, ...], tuple[Layout, ...]] = LayoutCache()


def _known_targets(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    operands: Sequence[Any],
    out: Any,
    key: tuple[Any, ...],
) -> tuple[Layout, ...]:
    """Return `_targets`, cached on the first operand's layout."""
    first = operands[0]._layout
    try:
        targets = _known.get(first, key)
    except TypeError:  # an argument that cannot be hashed
        targets = None
    if targets is None:
        targets = _targets(func, args, kwargs, operands, out)
        with suppress(TypeError):
            _known.keep(first, key, targets)
    return targets


def _targets(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    operands: Sequence[Any],
    out: Any,
) -> tuple[Layout, ...]:
    """Return the layouts to which the operands are redistributed before the operator runs.

    Raises:
        ValueError: the result cannot have this layout.
    """
    layouts = [x._layout for x in operands]
    strategy.check_one_mesh(func, layouts)
    metas = [strategy.operand_meta(layout) for layout in layouts]
    named = dict(zip(kwargs, strategy.meta_numbers(kwargs.values()), strict=True))
    args, kwargs = strategy.with_values(strategy.meta_numbers(args), named, metas)
    rule = None
    if func not in HANDLERS and strategy.decomposition_for(func, args, kwargs) is None:
        rule = strategy.rule_for(func, args, kwargs, metas)
    requested = _requested_layouts(
        func, strategy.meta_result(func, rule, args, kwargs), layouts[0], out
    )
    if rule is None or not requested:
        return tuple(layouts)
    order = [next(i for i, meta in enumerate(metas) if meta is x) for x in rule.operands]
    best = _Search(rule, [layouts[i] for i in order], requested).best()
    for i, layout in zip(order, best, strict=True):
        layouts[i] = layout
    return tuple(layout.replace(layout.spec) for layout in layouts)


def _requested_layouts(
    func: Callable[..., Any], result: Any, like: Layout, out: Any
) -> list[Layout]:
    """Return the requested layout of each result; none if the shapes depend on values.

    Raises:
        TypeError: a result that is not a tensor.
        ValueError: a spec that does not fit.
    """
    if result is None:
        return []
    name = strategy.name_of(func)
    leaves, _ = flatten(result)
    specs = broadcast_prefix(f"apply({name}, ...): out_sharding", out, result, SPECS)
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"apply({name}, ...): the result{place_of(result, i)} is {leaf!r}, which has no "
                f"layout; call {name} itself"
            )
    pairs = zip(leaves, specs, strict=True)
    return [Layout.of(like.mesh, where, leaf.shape, leaf.dtype) for leaf, where in pairs]


@dataclass
class _Search:
    """Search for the factor that each mesh axis splits when the operator runs.

    Attributes:
        rule: the operator's rule.
        layouts: the layouts of its operands, in the order of the rule.
        requested: the requested layouts of the results.
        prices: choices -> their price.
    """

    rule: Rule
    layouts: list[Layout]
    requested: list[Layout]
    prices: dict[Choices, tuple[float, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        mesh = self.layouts[0].mesh
        self.axes = [axis for axis in mesh.axis_names if mesh.size(axis) > 1]
        self.order = axis_order(
            [*self.requested, *sorted(self.layouts, key=lambda layout: -layout.nbytes)]
        )
        self.free = factors_alone(self.rule)

    def best(self) -> list[Layout]:
        """Return the operands' layouts of the better of two searches.

        One starts from unchanged operands, one from operands split like the result.
        """
        unchanged: Choices = (KEEP,) * len(self.axes)
        like_result: Choices = tuple(
            next(iter(self._factors_of_result(axis)), KEEP) for axis in self.axes
        )
        candidates = list(map(self._improve, dict.fromkeys((unchanged, like_result))))
        return self.operands(min(candidates, key=self.price))

    def _improve(self, choices: Choices) -> Choices:
        for _ in range(2):
            for i, axis in enumerate(self.axes):
                others = [
                    (*choices[:i], option, *choices[i + 1 :]) for option in self._options(axis)
                ]
                choices = min([choices, *others], key=self.price)
        return choices

    def _options(self, axis: str) -> dict[str | None, None]:
        operands = (
            _split(dims, layout, axis)
            for dims, layout in zip(self.rule.inputs, self.layouts, strict=True)
        )
        factors = [f for f in operands if f in self.free]
        return dict.fromkeys([KEEP, None, *self._factors_of_result(axis), *factors])

    def _factors_of_result(self, axis: str) -> Iterator[str]:
        """Yield the factors that the axis splits in a result, if operands have them."""
        several = len(self.rule.outputs) == len(self.requested)
        for i, layout in enumerate(self.requested):
            factor = _split(self.rule.outputs[i if several else 0], layout, axis)
            if factor in self.free:
                yield factor

    def price(self, choices: Choices) -> tuple[float, ...]:
        """Return the price of layouts of the operands, to compare by.

        (bytes that the busiest rank receives, number of collectives, elements of the largest local
        operands).
        """
        if choices not in self.prices:
            self.prices[choices] = self._priced_choice(self.operands(choices))
        return self.prices[choices]

    def _priced_choice(self, operands: Sequence[Layout]) -> tuple[float, ...]:
        chosen = assign(self.rule, operands)
        several, like = len(chosen.outputs) == len(self.requested), operands[0]
        moves = [
            *zip(self.layouts, operands, strict=True),
            *zip(operands, chosen.targets, strict=True),
        ]
        for i, layout in enumerate(self.requested):
            moves.append(
                (
                    Layout.of(
                        like.mesh, chosen.outputs[i if several else 0], layout.shape, layout.dtype
                    ),
                    layout,
                )
            )
        plans = [plan(src, dst) for src, dst in moves if src is not dst]
        received = sum(most_received(p.steps) for p in plans)
        return (
            received,
            sum(p.launches for p in plans),
            sum(target.largest_local_numel for target in chosen.targets),
        )

    def operands(self, choices: Choices) -> list[Layout]:
        """Return the layouts of the operands under these choices."""
        changed = {
            axis: choice for axis, choice in zip(self.axes, choices, strict=True) if choice != KEEP
        }
        return (
            [self._operand(i, layout, changed) for i, layout in enumerate(self.layouts)]
            if changed
            else self.layouts
        )

    def _operand(self, operand: int, layout: Layout, changed: dict[str, str | None]) -> Layout:
        dims = []
        for factors, axes in zip(self.rule.inputs[operand], layout.spec.dims, strict=True):
            unchanged = [axis for axis in axes if axis not in changed]
            added = [
                axis
                for axis, factor in changed.items()
                if factor is not None and factors == (factor,)
            ]
            dims.append(
                tuple(sorted([*unchanged, *added], key=self.order.index) if added else unchanged)
            )
        pending = {axis: kind for axis, kind in layout.spec.unreduced if axis not in changed}
        stay = [new for old, new in zip(layout.spec.dims, dims, strict=True) if new[:1] == old[:1]]
        sizes = {
            axes: n
            for axes, n in layout.spec.sizes
            if any(axes == dim[: len(axes)] for dim in stay)
        }
        return layout.temporary(P(*dims, unreduced=pending, sizes=sizes))


def _split(dims: Sequence[tuple[str, ...]], layout: Layout, axis: str) -> str | None:
    """Return the factor that an axis splits, if it is the only one of its dim."""
    factors = dims[layout.dim_of[axis]] if axis in layout.dim_of else ()
    return factors[0] if len(factors) == 1 else None
