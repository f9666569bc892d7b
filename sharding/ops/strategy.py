"""Choose how to run an operator.

From its rule and the layouts of its operands to an `OpStrategy`, which dispatch caches.

Running the operator on meta tensors of the global shapes validates the arguments as torch itself
does, with the same result on every rank and before any communication, and gives the shapes and
dtypes of the results.
"""

from __future__ import annotations

import inspect
import math
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...mesh.comm.call_site import user_line
from ...mesh.comm.dispatch_modes import outside_of_program_modes
from ...mesh.comm.thread_context import thread_context
from ...mesh.comm.transforms import is_transformed, outside_of_transforms
from ..layout.bounded_cache import keep
from ..layout.layout import Layout, distinct_mesh_names
from ..layout.spec import P
from ..tensor import random
from ..tensor.sharded_tensor import ShardedTensor
from ..trees import map_tensors
from .device_result import device_result
from .rules.notation import Dim, NoMatch, Rule
from .rules.propagation import CannotKeep, assign
from .rules.registry import DECOMPOSITIONS, RANDOM, RESULT_IS_VIEW, RULES, writes_first_operand

AS_RETURNED = object()  # as `OpStrategy.outputs`: whatever tensors the function returns, replicated


@dataclass(slots=True, eq=False)
class OpStrategy:
    """How to run one operator on operands of known layouts.

    Attributes:
        func: what to call on the local tensors; the operator itself if it does not run on those.
        targets: the layout each operand must have, in the order of the operands among the
            arguments.
        moves: whether any operand has to be redistributed.
        outputs: layout of the result, or of each result; None if the operator returns no tensor; or
            `AS_RETURNED`.
        container: the type that several results are returned in.
        in_place: the result is the first operand.
        detached_view: the result would be a view, but of a redistributed copy.
        example: for `AS_RETURNED`, the results on meta tensors, or None if their shapes depend on
            values.
        decomposition: what to call instead, with the operator's own arguments.
        run: `(strategy, args, kwargs, local_args, local_kwargs, operands) -> result`.
        wrap: if all there is to do is to call `func` on the locals and wrap its one result: makes
            that a `ShardedTensor`; `run` is not called then.
        seed: the hash that the operator and its static arguments add to lineages.
        spellings: the keys of the calls that share the strategy and differ in ints alone
            (`free_ints`), the latest ones.
    """

    func: Callable[..., Any]
    targets: tuple[Layout, ...] = ()
    moves: bool = False
    outputs: Any = None
    container: Callable[[list[Any]], Any] = tuple
    in_place: bool = False
    detached_view: bool = False
    example: Any = None
    decomposition: Callable[..., Any] | None = None
    run: Callable[..., Any] | None = None
    wrap: Callable[[Tensor], Any] | None = None
    seed: int = 0
    spellings: deque[Any] | None = None

    def with_seed(self, seed: int) -> OpStrategy:
        """Return a strategy that differs in its seed alone."""
        strategy = OpStrategy.__new__(OpStrategy)
        for name in OpStrategy.__slots__:
            setattr(strategy, name, getattr(self, name))
        strategy.seed = seed
        return strategy


def choose_strategy(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    operands: Sequence[Any],
    key: Sequence[Any],
) -> OpStrategy:
    """Choose how to run an operator on these operands.

    `key` holds all that the strategy depends on.

    Raises:
        ValueError: operands on different meshes.
        CannotKeep: an in-place operator that would change the layout of the tensor that it writes.
        NotImplementedError: an in-place operator without a rule.
        whatever torch raises for these arguments, on the global shapes.

    Communication: none.
    """
    with (
        outside_of_transforms(),
        outside_of_program_modes(),
        thread_context.setting(on_stand_ins=True),
    ):
        layouts = [x._layout for x in operands]
        check_one_mesh(func, layouts)
        metas = [operand_meta(layout) for layout in layouts]
        named = dict(zip(kwargs, meta_numbers(kwargs.values()), strict=True))
        meta_args, meta_kwargs = with_values(meta_numbers(args), named, metas)
        in_place = writes_first_operand(func) or kwargs.get("inplace") is True
        decomposition = decomposition_for(func, meta_args, meta_kwargs)
        if isinstance(decomposition, OpStrategy):
            return decomposition
        if decomposition is not None:
            return OpStrategy(func, decomposition=decomposition)
        rule = rule_for(func, meta_args, meta_kwargs, metas)
        if rule is None:
            _check_operator(func)
            return _gathering_strategy(
                func, layouts, meta_result(func, None, meta_args, meta_kwargs), in_place
            )
        if rule.pointwise:
            result = _pointwise_result(func, rule, meta_args, meta_kwargs, key)
        else:
            result = meta_result(func, rule, meta_args, meta_kwargs)
        return _from_rule(func, rule, layouts, metas, result, in_place)


# -- arguments -------------------------------------------------------------------------------------


def common_name(func: Any) -> str:
    """Return a name that is the same on every rank, without addresses and names of the program."""
    if isinstance(func, torch._ops.OpOverload) and func.namespace != "aten":
        return "operator of the program"
    return getattr(func, "__name__", type(func).__name__)


def name_of(func: Any) -> str:
    """Return the name of an operator for a message."""
    return getattr(func, "__name__", repr(func))


def with_values(
    args: Sequence[Any], kwargs: dict[str, Any], values: Iterable[Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments with each `ShardedTensor` replaced by the next value."""
    rest = iter(values)
    return _substitute(args, rest), dict(
        zip(kwargs, _substitute(kwargs.values(), rest), strict=True)
    )


def _substitute(items: Iterable[Any], values: Iterator[Any]) -> list[Any]:
    out: list[Any] = []
    for item in items:
        if isinstance(item, ShardedTensor):
            item = next(values)
        elif type(item) in (list, tuple):
            item = type(item)(_substitute(item, values))
        out.append(item)
    return out


def operand_meta(layout: Layout) -> Tensor:
    """Return a meta tensor for an operand; rule makers tell it from a number by its `_operand`."""
    meta = layout.meta.detach()
    meta._operand = layout  # type: ignore[attr-defined]
    return meta


def meta_numbers(items: Iterable[Any]) -> list[Any]:
    """Return the arguments with plain 0-d tensors, which are numbers, on the meta device too."""
    return map_tensors(_meta_number, items)


def _meta_number(x: Tensor) -> Tensor:
    if isinstance(x, ShardedTensor):
        return x
    if is_transformed(x):
        return torch.empty(x.shape, dtype=x.dtype, device="meta")
    return x.detach().to("meta")


def check_one_mesh(func: Callable[..., Any], layouts: Sequence[Layout]) -> None:
    for layout in layouts[1:]:
        if layout.mesh is not layouts[0].mesh:
            one, other = distinct_mesh_names(layouts[0].mesh, layout.mesh)
            raise ValueError(
                f"{name_of(func)}: operands are on two meshes, {one} and {other}; redistribute "
                "them to one mesh first (the one that has all the axes)"
            )


# -- with a decomposition --------------------------------------------------------------------------


def decomposition_for(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Callable[..., Any] | None:
    """Return the decomposition for these operands, if any, after torch's errors about arguments."""
    maker = DECOMPOSITIONS.get(func)
    if maker is None:
        return None
    try:
        return maker(*args, **kwargs)
    except (TypeError, AttributeError, IndexError, KeyError, ValueError, RuntimeError):
        meta_result(func, None, args, kwargs)
        raise


# -- with a rule -----------------------------------------------------------------------------------


def rule_for(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], metas: Sequence[Tensor]
) -> Rule | None:
    """Return the rule for this call; None if there is none for these arguments."""
    maker = RULES.get(func)
    if maker is None:
        return None
    try:
        rule = maker(*args, **kwargs)
    except NoMatch:
        return None
    except (TypeError, AttributeError, IndexError, KeyError):
        if not _fits_signature(maker, args, kwargs):
            return None
        meta_result(func, None, args, kwargs)  # torch's own error about these arguments comes first
        raise
    covered = rule is not None and sorted(map(id, rule.operands)) == sorted(map(id, metas))
    return rule if covered else None


def _fits_signature(maker: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    try:
        inspect.signature(maker).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def meta_result(
    func: Callable[..., Any], rule: Rule | None, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Return the operator's result on meta tensors; None if its shape depends on values."""
    if rule is not None and rule.result is not None:
        return rule.result
    try:
        with torch.no_grad():
            return func(*args, **kwargs)
    except RuntimeError as error:
        unknown = isinstance(error, NotImplementedError) or "meta tensor" in str(error)
        result = None if rule is None else device_result(func, rule, args, kwargs)
        if result is None and (rule is not None or not unknown):
            raise
        return result


_dtypes: dict[Any, torch.dtype] = {}  # pointwise call, without shapes -> dtype of its result


def _pointwise_result(
    func: Callable[..., Any],
    rule: Rule,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    key: Sequence[Any],
) -> Any:
    """Return `meta_result` of a pointwise operator.

    The operator is run once for each combination of dtypes.

    torch needs up to half a millisecond for it; broadcasting the shapes is all that is needed after
    the first time.
    """
    shape = _broadcast_shape([x.shape for x in rule.operands])
    if shape is None:
        return meta_result(func, rule, args, kwargs)
    kind = tuple((k.dtype, k.shape == ()) if type(k) is Layout else k for k in key)
    try:
        dtype = _dtypes.get(kind)
    except TypeError:  # an argument that cannot be hashed
        return meta_result(func, rule, args, kwargs)
    if dtype is not None and (shape == rule.operands[0].shape or not writes_first_operand(func)):
        return torch.empty(shape, dtype=dtype, device="meta")
    result = meta_result(func, rule, args, kwargs)
    if isinstance(result, Tensor) and result.shape == shape:
        keep(_dtypes, kind, result.dtype)
    return result


def _broadcast_shape(shapes: Sequence[torch.Size]) -> torch.Size | None:
    """Return the common shape; None if they do not broadcast, of which torch's error is best."""
    if all(shape == shapes[0] for shape in shapes):
        return shapes[0]
    try:
        return torch.broadcast_shapes(*shapes)
    except RuntimeError:
        return None


def _from_rule(
    func: Callable[..., Any],
    rule: Rule,
    layouts: list[Layout],
    metas: list[Tensor],
    result: Any,
    in_place: bool,
) -> OpStrategy:
    position = {id(meta): i for i, meta in enumerate(metas)}
    order = [position[id(x)] for x in rule.operands]
    try:
        chosen = assign(rule, [layouts[i] for i in order], order.index(0) if in_place else None)
    except CannotKeep:
        raise CannotKeep(
            f"{name_of(func)} writes into {layouts[0]}, and would have to change its layout to do "
            "so; redistribute it first, or use the out-of-place form"
        ) from None
    targets = list(layouts)
    for i, target in zip(order, chosen.targets, strict=True):
        targets[i] = target
    outputs = _output_layouts(func, rule, chosen.outputs, layouts[0], result)
    local = rule.local or func
    if rule.bind is not None:
        local = rule.bind(
            chosen.targets, [outputs] if isinstance(outputs, Layout) else outputs or []
        )
    return make_strategy(func, local, layouts, targets, outputs, result, in_place)


def make_strategy(
    func: Callable[..., Any],
    local: Callable[..., Any],
    layouts: Sequence[Layout],
    targets: Sequence[Layout],
    outputs: Any,
    result: Any,
    in_place: bool,
) -> OpStrategy:
    """Return the strategy to run `local` on operands redistributed from `layouts` to `targets`.

    Args:
        func: the operator.
        outputs: layout of the result, or of each.
        result: what the operator returns on meta tensors.
        in_place: the result is the first operand.
    """
    container: Any = tuple  # or torch's: a list, or a named tuple such as torch.return_types.max
    if isinstance(result, (list, tuple)):
        container = list if isinstance(result, list) else type(result)
    return OpStrategy(
        local,
        tuple(targets),
        moves=list(targets) != list(layouts),
        outputs=outputs,
        container=container,
        in_place=in_place,
        detached_view=func in RESULT_IS_VIEW and targets[0] is not layouts[0],
    )


def _output_layouts(
    func: Callable[..., Any], rule: Rule, specs: Sequence[P], like: Layout, result: Any
) -> Any:
    """Return the layout of each result tensor; a rule with one spec gives it to all results.

    Raises:
        RuntimeError: the rule does not describe this result.
    """
    if result is None:
        return None
    results = [result] if isinstance(result, Tensor) else list(result)
    several = len(specs) == len(results)
    layouts = []
    for i, r in enumerate(results):
        _check_describes(func, rule.outputs[i if several else 0], rule.sizes, r)
        layouts.append(Layout.of(like.mesh, specs[i if several else 0], r.shape, r.dtype))
    return layouts[0] if isinstance(result, Tensor) else layouts


def _check_describes(
    func: Callable[..., Any], dims: Sequence[Dim], sizes: dict[str, int], result: Tensor
) -> None:
    stated = [math.prod(sizes[f] for f in factors) if factors else None for factors in dims]
    if len(dims) != result.ndim or any(
        n not in (None, size) for n, size in zip(stated, result.shape, strict=True)
    ):
        raise RuntimeError(
            f"the rule of {name_of(func)} gives dims {stated}, and the result has "
            f"{list(result.shape)}"
        )


# -- without a rule --------------------------------------------------------------------------------

_warned: set[Any] = set()


def _gathering_strategy(
    func: Callable[..., Any], layouts: list[Layout], result: Any, in_place: bool
) -> OpStrategy:
    """Return the strategy without a rule: every rank gathers whole operands, with a warning."""
    if in_place:
        _check_writable(func, layouts, result)
    targets = [layout.replicated for layout in layouts]
    if targets != layouts and func not in _warned:
        _warned.add(func)
        pairs = zip(layouts, targets, strict=True)
        total = sum(layout.nbytes for layout, target in pairs if layout is not target)
        text = (
            f"{name_of(func)} has no sharding rule for this call: its inputs are gathered whole on "
            "every rank "
        )
        warnings.warn_explicit(f"{text}({total:,} bytes here)", UserWarning, *user_line())
    run = partial(random.call_seeded, layouts[0].mesh, func) if func in RANDOM else func
    return OpStrategy(
        run, tuple(targets), targets != layouts, AS_RETURNED, in_place=in_place, example=result
    )


# Where torch's operators on values come from; methods of Tensor have no module.
_OPERATOR_MODULES = frozenset(
    {None, "torch", "torch.functional", "torch.nn.functional", "torch._tensor"}
)


def _check_operator(func: Callable[..., Any]) -> None:
    """Raise for anything but torch's operators on values.

    They are the only ones that can run on gathered copies.

    A collective of `torch.distributed` would communicate the copies, and functions of other
    libraries may do anything.

    Raises:
        NotImplementedError: not an operator on values.
    """
    module = getattr(func, "__module__", None)
    if module not in _OPERATOR_MODULES and not str(module).startswith("torch._C."):
        metrics = (
            "; for metrics of torchmetrics pass sync_on_compute=False, as ShardedTensors are the "
            "values of all ranks"
        )
        raise NotImplementedError(
            f"{module}.{name_of(func)} does not support ShardedTensors; call it on this rank's "
            "part, x.to_local(), and wrap the result with ShardedTensor.from_local, or use "
            f"redistribute for communication{metrics if 'torchmetrics' in sys.modules else ''}"
        )


def _check_writable(func: Callable[..., Any], layouts: list[Layout], result: Any) -> None:
    """Raise unless the tensor is replicated and keeps its shape, to be written without a rule."""
    if not all(layout.is_fully_replicated for layout in layouts):
        raise NotImplementedError(
            f"{name_of(func)} has no sharding rule and writes in place; use its out-of-place form, "
            "or redistribute to Replicate() first"
        )
    if isinstance(result, Tensor) and result.shape != layouts[0].shape:
        raise NotImplementedError(
            f"{name_of(func)} would change the shape of {layouts[0]} in place; use the "
            "out-of-place form"
        )
