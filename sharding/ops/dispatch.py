"""Operators on `ShardedTensor`s.

Look up a cached strategy, then call the same torch function on the local tensors.

    torch.f(x, y, 2)  ->  key (f, layout of x, layout of y, 2)  ->  strategy, cached:
        which operands must be redistributed first, and to which layout
        what to call on the local tensors
        the layout of each result

`choose_strategy` derives a new strategy from the operator's rule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...mesh.comm.thread_context import thread_context
from ..autograd.engine_hooks import (
    any_requires_grad,
    in_foreign_forward_mode,
    innermost,
    is_transformed,
    transforming,
)
from ..autograd.transforms import is_foreign, refuse_foreign
from ..layout.bounded_cache import keep
from ..layout.layout import Layout
from ..lineage import comm_context, mixed, piece_of, seed_of, seed_with_ints, with_drawn
from ..redistribute.autograd import redistribute_local
from ..tensor.autograd.local_part import known_local
from ..tensor.resharding import Resharding, settled
from ..tensor.sharded_tensor import ShardedTensor
from ..trees import map_tensors, tensors_in
from . import nonmember, plain_operands, torch_transforms
from .rules.argument_forms import (
    has_numpy_names,
    has_tensor_as_number,
    with_numbers,
    with_torch_names,
)
from .rules.aten import public_call
from .rules.free_ints import shared_arguments
from .rules.registry import HANDLERS, LOOKS_AT_FLOATS, RULES
from .sliced_from import ReshapedFrom, base_of, check_base, is_reshape, marked_as_copy
from .strategy import AS_RETURNED, OpStrategy, choose_strategy, common_name, name_of, with_values
from .torch_compile import not_compiled, refuse_jit_trace
from .torch_script import refuse_script

_ATTRIBUTE_ACCESS = frozenset({"__get__", "__set__", "__delete__"})  # they ask for no values
_VALUES = frozenset({int, bool, type(None), str, torch.dtype})  # what most static arguments are
_NO_KWARGS: dict[str, Any] = {}
_no_torch_function = torch._C.DisableTorchFunctionSubclass
_is_grad_enabled = torch.is_grad_enabled


@not_compiled(
    "operators on ShardedTensors run eagerly: without fullgraph=True they are a break in the "
    "graph, and what works on plain tensors around them is compiled"
)
def torch_function(
    cls: type,
    func: Callable[..., Any],
    types: Any,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Run `func` on arguments that include a `ShardedTensor`: its `__torch_function__`."""
    if kwargs is None:
        kwargs = _NO_KWARGS
    handle = HANDLERS.get(func)
    if handle is not None:
        result = handle(*args, **kwargs)
        if result is not NotImplemented:
            return result
    if thread_context.implicit_replication:
        if plain_operands.plain_targets(func, args, kwargs):
            return plain_operands.write_plain(func, args, kwargs)
        args, kwargs = plain_operands.replicated_arguments(args, kwargs)
    key: list[Any] = [func]
    operands: list[Any] = []
    local_args: list[Any] = []
    for item in args:
        kind = type(item)
        if kind is ShardedTensor:  # this branch and the next are `_local_of`, inlined
            local = item._local
            if not local.requires_grad and any_requires_grad(item):
                local = known_local(item)
            key.append(item._layout)
            operands.append(item)
            local_args.append(local)
        elif kind in _VALUES:
            key += kind, item
            local_args.append(item)
        elif kind is tuple or kind is list:
            local_args.append(locals_of(item, key, operands, func))
        else:
            local_args.append(_local_of(item, key, operands, func))
    local_kwargs = kwargs
    if kwargs:
        local_kwargs = {}
        for name, item in kwargs.items():
            kind = type(item)
            if kind in _VALUES:
                key += name, kind, item
                local_kwargs[name] = item
            else:
                key.append(name)
                local_kwargs[name] = _local_of(item, key, operands, func)
    try:
        strategy = operands[0]._layout.strategies.get(tuple(key)) if operands else None
    except TypeError:  # an argument that cannot be hashed
        strategy = None
    if strategy is None:
        if any(isinstance(item, Resharding) for item in key):
            return func(*settled(tuple(args)), **settled(kwargs))
        strategy = _new_strategy(func, args, kwargs, key, operands)
    wrap_result = strategy.wrap
    if wrap_result is not None:
        out = wrap_result(strategy.func(*local_args, **local_kwargs))
        out._lineage = mixed(strategy.seed, operands)
        return out
    if strategy.run is _ON_WRAPPERS:
        return _on_wrappers(func, args, kwargs)
    lineage, before = mixed(strategy.seed, operands), thread_context.last_draw
    result = strategy.run(strategy, args, kwargs, local_args, local_kwargs, operands)  # type: ignore[misc]
    if thread_context.last_draw is not before:
        return _with_lineage(True, result, with_drawn(lineage, before), operands)
    return _with_lineage(strategy.in_place, result, lineage, operands)


# -- reading the arguments -------------------------------------------------------------------------


def _local_of(item: Any, key: list[Any], operands: list[Any], func: Any) -> Any:
    """Return an argument with locals for `ShardedTensor`s; extend the key and the operands."""
    kind = type(item)
    if kind is ShardedTensor:
        local = item._local
        if not local.requires_grad and any_requires_grad(item):
            local = known_local(item)
        key.append(item._layout)
        operands.append(item)
        return local
    if kind in _VALUES:
        key += kind, item
    elif kind is float or kind is complex:
        # most only compare it with zero
        key.append(item if func in LOOKS_AT_FLOATS else kind if item else 0.0)
    elif kind is list or kind is tuple:
        return locals_of(item, key, operands, func)
    elif kind is slice:
        key += kind, item.start, item.stop, item.step
    elif isinstance(item, Tensor):
        key.append(_plain_key(item, func))
    elif isinstance(item, torch.SymFloat):
        key.append(_NOT_CACHED)
    else:
        key.append(kind)
        key.append(item)
    return item


def locals_of(items: Any, key: list[Any], operands: list[Any], func: Any) -> Any:
    """Return `_local_of` of a list or tuple, of numbers and slices without a call for each."""
    key += type(items), len(items)
    before = len(key)
    for item in items:
        kind = type(item)
        if kind in _VALUES:
            key += kind, item
        elif kind is slice:
            key += kind, item.start, item.stop, item.step
        else:
            del key[before:]
            return type(items)([_local_of(part, key, operands, func) for part in items])
    return items


_ON_META = "meta"
# In a key: a transform of torch's own around a ShardedTensor, see `torch_transforms.py`; and a
# plain tensor that may be treated as replicated, see `plain_operands.py`.
_WRAPPED, _PLAIN = object(), object()
_NOT_CACHED: list[Any] = []  # cannot be hashed, as no key with a number of a recording may be


def _plain_key(tensor: Tensor, func: Any) -> Any:
    """Return the key of a plain tensor, which with one element is used as a number.

    Raises:
        RuntimeError: and not TypeError, which Python's `+` and `@` would turn into "unsupported
            operand".
    """
    if is_transformed(tensor):
        sharded = isinstance(innermost(tensor), ShardedTensor)
        if sharded and is_foreign() and not in_foreign_forward_mode():
            return _WRAPPED
        refuse_foreign(f"{name_of(func)} of a ShardedTensor")
    if tensor.ndim == 0 and not (tensor.requires_grad and torch.is_grad_enabled()):
        return (tensor.dtype, _ON_META) if tensor.is_meta else tensor.dtype
    if tensor.ndim == 0 or plain_operands.is_one_element(tensor) or plain_operands.may_replicate():
        return _PLAIN
    return plain_operands.refuse(tensor, func)


# -- new strategies --------------------------------------------------------------------------------


_SPELLINGS = 16  # of each strategy, the calls with different ints that are looked up at once


def _new_strategy(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    key: list[Any],
    operands: list[Any],
) -> OpStrategy:
    """Return the strategy of a new key, shared by calls that differ in ints that decide nothing."""
    shared = shared_arguments(func, args, kwargs) if operands else None
    if shared is None:
        return _make_strategy(func, args, kwargs, key, operands)
    shared_key = _key_of(func, *shared)
    strategies = operands[0]._layout.strategies
    try:
        strategy = strategies.get(tuple(shared_key))
    except TypeError:  # an argument that cannot be hashed
        strategy = None
    if strategy is None:
        strategy = _make_strategy(func, args, kwargs, shared_key, operands)
    spelled = strategy.with_seed(
        seed_with_ints(strategy.seed, [item for item in key if type(item) is int])
    )
    with suppress(TypeError):
        _keep_spelling(strategies, strategy, tuple(key), spelled)
    return spelled


def _key_of(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    key: list[Any] = [func]
    for item in args:
        _local_of(item, key, [], func)
    for name, item in kwargs.items():
        key.append(name)
        _local_of(item, key, [], func)
    return key


def _keep_spelling(
    strategies: dict[Any, Any], strategy: OpStrategy, key: tuple[Any, ...], spelled: OpStrategy
) -> None:
    """Cache a strategy under the key of one call too, and no longer under the oldest of those."""
    if strategy.spellings is None:
        strategy.spellings = deque()
    keep(strategies, key, spelled)
    strategy.spellings.append(key)
    if len(strategy.spellings) > _SPELLINGS:
        strategies.pop(strategy.spellings.popleft(), None)


def _make_strategy(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    key: list[Any],
    operands: list[Any],
) -> OpStrategy:
    """Make the strategy for a new key and cache it."""
    refuse_jit_trace()
    refuse_script(func)
    wrapped = plain = False
    for k in key:
        if k is _WRAPPED:
            wrapped = True
        elif k is _PLAIN:
            plain = True
        elif type(k) is tuple and k[-1:] == (_ON_META,):
            plain_operands.refuse_without_value(func, operands)
    call = _Call(func, args, kwargs, operands, wrapped, plain)
    run = next((run for applies, run in _KINDS_OF_CALLS if applies(call)), None)
    if run is _WITH_PLAIN and not operands:
        tensors = tensors_in((*args, *kwargs.values()))
        plain_operands.refuse(next(filter(plain_operands.is_plain_operand, tensors)), func)
    if run is not None:
        strategy = OpStrategy(func, run=run)
    elif (public := public_call(func)) is not None:
        strategy = OpStrategy(func, decomposition=public, run=_run_decomposition)
    else:
        strategy = choose_strategy(func, args, kwargs, operands, key)
        strategy.run = _runner(func, strategy, operands[0]._layout)
        if strategy.run is None:
            strategy.wrap = wrapper(strategy.outputs, func)
    strategy.seed = seed_of(
        " ".join([common_name(func), *(str(k) for k in key if type(k) in _VALUES)])
    )
    if operands:
        with suppress(TypeError):  # an argument that cannot be hashed: not cached
            keep(operands[0]._layout.strategies, tuple(key), strategy)
    return strategy


def _runner(func: Any, strategy: OpStrategy, layout: Layout) -> Callable[..., Any] | None:
    """Return how to run a strategy; None if its one result only has to be wrapped."""
    if strategy.decomposition is not None:
        return _run_decomposition
    if layout.mesh.coordinate is None:  # type: ignore[attr-defined]
        return partial(nonmember.run, func)
    if strategy.detached_view and is_reshape(func):
        return _run_reshape
    if strategy.moves or strategy.in_place or type(strategy.outputs) is not Layout:
        return _run
    return None


# -- calls that are not of an operator on the local tensors ----------------------------------------


class _Call(NamedTuple):
    """A call, its sharded operands, and whether its key has `_WRAPPED` and `_PLAIN`."""

    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    operands: list[Any]
    wrapped: bool
    plain: bool


def _runs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the `run` of a strategy that calls `function(func, args, kwargs)`."""
    return lambda strategy, args, kwargs, *_: function(strategy.func, args, kwargs)


def _with_plain(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if plain_operands.are_numbers_of_ranks(args, kwargs):
        return plain_operands.on_whole_values(func, args, kwargs)
    args, kwargs = plain_operands.replicated(func, args, kwargs)
    return torch_function(ShardedTensor, func, (), args, kwargs)


def _into_out(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run `torch.f(x, out=y)`: copy the result into y, in its layout. As in torch, no gradient."""
    out = kwargs["out"]
    result = func(*args, **{name: value for name, value in kwargs.items() if name != "out"})
    sharded = isinstance(out, ShardedTensor) and isinstance(result, ShardedTensor)
    if not sharded or out.shape != result.shape:
        raise NotImplementedError(
            f"{name_of(func)}: out= takes one ShardedTensor of the shape of the result; use the "
            "result instead"
        )
    if result.requires_grad or (out.requires_grad and _is_grad_enabled()):
        raise RuntimeError(
            f"{name_of(func)}: out= has no gradient, and one of the arguments requires grad"
        )
    return out.copy_(result)


def _on_wrappers(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    with _no_torch_function():
        return func(*args, **kwargs)


_ON_WRAPPERS = _runs(_on_wrappers)
_WITH_PLAIN = _runs(_with_plain)
# Kinds of calls, and how to run them. The first that applies counts.
_KINDS_OF_CALLS: tuple[tuple[Callable[[_Call], Any], Callable[..., Any]], ...] = (
    (lambda c: c.wrapped, _runs(torch_transforms.run_with_wrapped)),
    (
        lambda c: c.operands and plain_operands.plain_targets(c.func, c.args, c.kwargs),
        _runs(plain_operands.write_plain),
    ),
    (
        lambda c: has_numpy_names(c.func, c.kwargs),
        _runs(
            lambda func, args, kwargs: torch_function(
                ShardedTensor, func, (), args, with_torch_names(kwargs)
            )
        ),
    ),
    (
        lambda c: has_tensor_as_number(c.func, c.kwargs),
        _runs(
            lambda func, args, kwargs: torch_function(
                ShardedTensor, func, (), args, with_numbers(func, kwargs)
            )
        ),
    ),
    (lambda c: c.plain, _WITH_PLAIN),
    (lambda c: not c.operands, _ON_WRAPPERS),
    (lambda c: name_of(c.func) in _ATTRIBUTE_ACCESS and c.func not in RULES, _ON_WRAPPERS),
    (lambda c: c.kwargs.get("out") is not None and not public_call(c.func), _runs(_into_out)),
)


# -- running ---------------------------------------------------------------------------------------


def _redistribute_operands(
    strategy: OpStrategy, args: Sequence[Any], kwargs: dict[str, Any], operands: list[Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments with each operand's local tensor in the layout that it must have."""
    moved = []
    for x, target in zip(operands, strategy.targets, strict=True):
        with comm_context(x._layout.mesh.world, x._lineage):  # type: ignore[attr-defined]
            moved.append(redistribute_local(x._local, x._layout, target))
    if strategy.detached_view:
        moved[0] = marked_as_copy(moved[0], operands[0]._local)
    return with_values(args, kwargs, moved)


def _run_decomposition(
    strategy: OpStrategy,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    local_args: Any,
    local_kwargs: Any,
    operands: list[Any],
) -> Any:
    with comm_context(operands[0]._layout.mesh.world, mixed(strategy.seed, operands)):
        return strategy.decomposition(*args, **kwargs)  # type: ignore[misc]


def _with_lineage(writes: bool, result: Any, lineage: int, operands: Sequence[Any]) -> Any:
    """Set the lineage of each result; operands returned unchanged keep theirs."""
    for i, x in enumerate(result if type(result) in (tuple, list) else (result,)):
        if type(x) is ShardedTensor and (writes or all(x is not operand for operand in operands)):
            x._lineage = piece_of(lineage, i)
    return result


def _run(
    strategy: OpStrategy,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    local_args: Sequence[Any],
    local_kwargs: dict[str, Any],
    operands: list[Any],
) -> Any:
    """Run a strategy that does more than call the function and wrap its one result."""
    if strategy.moves:
        local_args, local_kwargs = _redistribute_operands(strategy, args, kwargs, operands)
    if strategy.in_place:
        check_base(operands[0])
    result = strategy.func(*local_args, **local_kwargs)
    if strategy.in_place:
        operands[0]._sync_requires_grad()  # it may require grad from now on
        return operands[0]
    outputs = strategy.outputs
    if type(outputs) is Layout:
        return wrap(result, outputs, strategy.func)
    if outputs is None:
        return result
    if outputs is AS_RETURNED:
        like = operands[0]._layout
        return map_tensors(
            lambda t: ShardedTensor._make(t, nonmember.whole_like(t, like)), (result,)
        )[0]
    return strategy.container(
        [wrap(r, layout, strategy.func) for r, layout in zip(result, outputs, strict=True)]
    )


def _run_reshape(
    strategy: OpStrategy,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    _: Any,
    __: Any,
    operands: list[Any],
) -> Any:
    """Run a reshape of a redistributed copy; `sliced_from.py` takes writes to it to the operand."""
    out = _run(strategy, args, kwargs, (), {}, operands)
    out._sliced_from = ReshapedFrom(operands[0], out.shape)
    return out


def wrap(local: Tensor, layout: Layout, func: Any = None) -> Any:
    """Return a `ShardedTensor` with this rank's part, of the part's dtype (see autocast).

    Args:
        func: the operator that returned the part, for errors.

    Raises:
        RuntimeError: the part does not have the shape of the layout: the rule of an operator is
            wrong.
    """
    if local.dtype is not layout.dtype:
        layout = layout.replace(dtype=local.dtype)
    if local.shape != layout.local_shape:
        name = "an operator" if func is None else name_of(func)
        raise RuntimeError(
            f"{name} returned a local tensor of shape {list(local.shape)} for {layout}: its rule "
            "is wrong. If the rule is yours (sm.ops.register_rule), sm.ops.check_rule shows where; "
            "else please report it"
        )
    return ShardedTensor._make(local if _is_grad_enabled() else _detach(local), layout)


def _detach(local: Tensor) -> Tensor:
    """Detach a local tensor and keep its mark as a view of a copy: detached, it has no base."""
    if transforming():
        return local  # detached, it would lose its tangent
    out = local.detach()
    if getattr(base_of(local), "_is_moved_copy", False):
        out._is_moved_copy = True  # type: ignore[attr-defined]
    return out


def wrapper(layout: Layout, func: Any) -> Callable[[Tensor], Any]:
    """Return `wrap` for one layout, without a call for results of the expected shape and dtype."""
    meta, shape, dtype = layout.meta, layout.local_shape, layout.dtype

    def wrap_local(local: Tensor) -> Any:
        if local.dtype is not dtype or local.shape != shape:
            return wrap(local, layout, func)
        out = meta.data
        if local.requires_grad:
            if _is_grad_enabled():
                out.requires_grad = True
            else:  # a view of a leaf, not to become a leaf if a custom autograd.Function returns it
                local = _detach(local)
        out.__class__ = ShardedTensor  # type: ignore[assignment]
        out._local = local  # type: ignore[attr-defined]
        out._layout = layout  # type: ignore[attr-defined]
        return out

    return wrap_local
