"""Operators on `ShardedTensor`s: a cached decision, then the same torch function on the local tensors.

    torch.f(x, y, 2)  ->  key (f, layout of x, layout of y, 2)  ->  decision, found in a dictionary or made once:
        which operands must be redistributed first, and to which layout
        what to call on the local tensors
        the layout of each result

`decide` makes the decision, from the operator's rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..layout.bounded_cache import keep
from ..layout.layout import Layout
from ..redistribute.autograd import redistribute_local
from ..tensor.autograd.engine_hooks import any_requires_grad, is_transformed, transforming
from ..tensor.sharded_tensor import ShardedTensor
from ..tensor.transforms import refuse_foreign
from . import nonmember, plain_operands
from .custom_function import take_over
from .lineage import comm_context, drawn, mixed, piece_of, seed_of, with_drawn
from .rules.aten import public_call
from .rules.number_arguments import has_tensor_as_number, with_numbers
from .rules.registry import HANDLERS, LOOKS_AT_FLOATS, RULES
from .strategy import FOUND, Decision, common_name, decide, name_of, with_values
from .torch_compile import not_compiled, refuse_jit_trace

_ATTRIBUTE_ACCESS = frozenset({"__get__", "__set__", "__delete__"})  # attributes that values have no part in
_VALUES = frozenset({int, bool, type(None), str, torch.dtype})  # what most static arguments are
_NO_KWARGS: dict[str, Any] = {}
_no_torch_function = torch._C.DisableTorchFunctionSubclass
_wrapper_grad_fn = Tensor.grad_fn.__get__  # type: ignore[attr-defined]
_number_of_result = Tensor.output_nr.__get__  # type: ignore[attr-defined]
_is_grad_enabled = torch.is_grad_enabled
_thread_state = plain_operands.thread_state


class _MovedCopies:
    exist = False  # whether a view was ever made of a moved copy


_moved_copies = _MovedCopies()


@not_compiled(
    "operators on ShardedTensors run eagerly: without fullgraph=True they are a break in the graph, and what works on plain tensors around "
    "them is compiled"
)
def torch_function(
    cls: type, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Run `func` on arguments among which is a `ShardedTensor`: its `__torch_function__`."""
    if kwargs is None:
        kwargs = _NO_KWARGS
    handle = HANDLERS.get(func)
    if handle is not None:
        result = handle(*args, **kwargs)
        if result is not NotImplemented:
            return result
    if _thread_state.implicit_replication:
        args, kwargs = plain_operands.replicated_arguments(args, kwargs)
    key: list[Any] = [func]
    operands: list[Any] = []
    local_args: list[Any] = []
    for item in args:
        kind = type(item)
        if kind is ShardedTensor:  # this and the next: what `_local_of` does, without a call
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
        decision = operands[0]._layout.decisions.get(tuple(key)) if operands else None
    except TypeError:  # an argument that cannot be hashed
        decision = None
    if decision is None:
        decision = _decided(func, args, kwargs, key, operands)
    if decision.direct:
        out = decision.wrap(decision.func(*local_args, **local_kwargs))
        out._lineage = mixed(decision.seed, operands)
        return out
    if decision.run is _on_wrappers:
        return _on_wrappers(decision, args, kwargs)
    lineage, before = mixed(decision.seed, operands), drawn.last
    result = decision.run(decision, args, kwargs, local_args, local_kwargs, operands)
    if drawn.last is not before:
        return _with_lineage(True, result, with_drawn(lineage, before), operands)
    return _with_lineage(decision.in_place, result, lineage, operands)


# -- reading the arguments ---------------------------------------------------------------------------------------------


def _local_of(item: Any, key: list[Any], operands: list[Any], func: Any) -> Any:
    """An argument with `ShardedTensor`s replaced by their locals; adds to the cache key and to the list of operands."""
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
        key.append(item if func in LOOKS_AT_FLOATS else kind if item else 0.0)  # others look at no float but zero
    elif kind is list or kind is tuple:
        return locals_of(item, key, operands, func)
    elif kind is slice:
        key += kind, item.start, item.stop, item.step
    elif isinstance(item, Tensor):
        key.append(_plain_key(item, func))
    else:
        key.append(kind)
        key.append(item)
    return item


def locals_of(items: Any, key: list[Any], operands: list[Any], func: Any) -> Any:
    """`_local_of` for a list or tuple; one of numbers and slices, as shapes and indices are, without calls in between."""
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
_PLAIN = object()  # in a key: a plain tensor that may count as replicated, see `plain_operands.py`


def _plain_key(tensor: Tensor, func: Any) -> Any:
    """A plain 0-d tensor is a number, and one of one element is like one; any other could mean anything, so it is an error outside of
    prepared modules.

    Raises:
        RuntimeError: not a TypeError, which Python's `+` and `@` would turn into "unsupported operand".
    """
    if is_transformed(tensor):
        refuse_foreign(f"{name_of(func)} of a ShardedTensor")
    if tensor.ndim == 0 and not (tensor.requires_grad and torch.is_grad_enabled()):
        return (tensor.dtype, _ON_META) if tensor.is_meta else tensor.dtype
    if plain_operands.is_one_element(tensor) or plain_operands.may_replicate():
        return _PLAIN
    return plain_operands.refuse(tensor, func)


# -- running -----------------------------------------------------------------------------------------------------------


def _decided(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], key: list[Any], operands: list[Any]
) -> Decision:
    """A new decision, kept for the next call with this key."""
    refuse_jit_trace()
    if any(type(k) is tuple and k[-1:] == (_ON_META,) for k in key):
        plain_operands.refuse_without_value(func, operands)
    if has_tensor_as_number(func, kwargs):
        decision = Decision(func, (), False, None)
        decision.run = _run_with_numbers
    elif any(k is _PLAIN for k in key):
        if not operands:
            plain_operands.refuse(next(filter(plain_operands.is_plain_operand, plain_operands.tensors_in((*args, *kwargs.values())))), func)
        decision = Decision(func, (), False, None)
        decision.run = _run_beside_plain
    elif not operands or (name_of(func) in _ATTRIBUTE_ACCESS and func not in RULES):
        decision = Decision(func, (), False, None)
        decision.run = _on_wrappers
    elif (public := public_call(func)) is not None:
        decision = Decision(func, (), False, None)
        decision.form, decision.run = public, _run_form
    elif kwargs.get("out") is not None:
        decision = Decision(func, (), False, None)
        decision.run = _into_out
    else:
        decision = _settled(decide(func, args, kwargs, operands, key))
        if decision.form is None and _is_outside(operands[0]._layout):
            decision.run = partial(nonmember.run, func)
    decision.seed = seed_of(" ".join([common_name(func), *(str(k) for k in key if type(k) in _VALUES)]))
    if operands:
        with suppress(TypeError):  # an argument that cannot be hashed: decide anew each time
            keep(operands[0]._layout.decisions, tuple(key), decision)
    return decision


def _settled(decision: Decision) -> Decision:
    """The decision, with the shortest way to run it."""
    decision.run = _run
    if decision.form is not None:
        decision.run = _run_form
        return decision
    special = decision.moves or decision.in_place or type(decision.outputs) is not Layout
    if not special and not _is_outside(decision.outputs):
        decision.direct = True
        decision.wrap = wrapper(decision.outputs)
    return decision


def _run_beside_plain(decision: Decision, args: Sequence[Any], kwargs: dict[str, Any], *_: Any) -> Any:
    args, kwargs = plain_operands.replicated(decision.func, args, kwargs)
    return torch_function(ShardedTensor, decision.func, (), args, kwargs)


def _run_with_numbers(decision: Decision, args: Sequence[Any], kwargs: dict[str, Any], *_: Any) -> Any:
    return torch_function(ShardedTensor, decision.func, (), args, with_numbers(decision.func, kwargs))


def _moved(
    decision: Decision, args: Sequence[Any], kwargs: dict[str, Any], operands: list[Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments with every operand's local tensor in the layout that the decision asks for."""
    pairs = zip(operands, decision.targets, strict=True)
    moved = []
    for x, target in pairs:
        with comm_context(x._layout.mesh.world, x._lineage):  # type: ignore[attr-defined]
            moved.append(redistribute_local(x._local, x._layout, target))
    if decision.detached_view:
        moved[0] = marked_as_copy(moved[0], operands[0]._local)
    return with_values(args, kwargs, moved)


def marked_as_copy(moved: Tensor, original: Tensor) -> Tensor:
    """The moved operand of a view, marked so that writing to any view of it is refused."""
    if transforming():
        moved = moved.clone() if moved is original else moved
    elif moved.untyped_storage()._cdata == original.untyped_storage()._cdata:
        moved = moved.clone()
    _base(moved)._is_moved_copy = True  # type: ignore[attr-defined]
    _moved_copies.exist = True
    return moved


def _base(local: Tensor) -> Tensor:
    return local if local._base is None else local._base


def _run_form(
    decision: Decision, args: Sequence[Any], kwargs: dict[str, Any], local_args: Any, local_kwargs: Any, operands: list[Any]
) -> Any:
    with comm_context(operands[0]._layout.mesh.world, mixed(decision.seed, operands)):
        return decision.form(*args, **kwargs)  # type: ignore[misc]


def _with_lineage(has_written: bool, result: Any, lineage: int, operands: Sequence[Any]) -> Any:
    """The results, known to be made of the operands; also on ranks outside the mesh. What an operator only hands back stays what it is."""
    for i, x in enumerate(result if type(result) in (tuple, list) else (result,)):
        if type(x) is ShardedTensor and (has_written or all(x is not operand for operand in operands)):
            x._lineage = piece_of(lineage, i)
    return result


def _run(
    decision: Decision,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    local_args: Sequence[Any],
    local_kwargs: dict[str, Any],
    operands: list[Any],
) -> Any:
    """Whatever a decision may ask for, beyond calling the function and wrapping its result."""
    if decision.moves:
        local_args, local_kwargs = _moved(decision, args, kwargs, operands)
    if decision.in_place:
        check_base(operands[0])
    result = decision.func(*local_args, **local_kwargs)
    if decision.in_place:
        operands[0]._sync_requires_grad()  # it may require grad from now on
        return operands[0]
    outputs = decision.outputs
    if type(outputs) is Layout:
        return wrap(result, outputs)
    if outputs is None:
        return result
    if outputs is FOUND:
        like = operands[0]._layout
        return nonmember.each_tensor(result, lambda t: ShardedTensor._make(t, nonmember.whole_like(t, like)))
    return decision.container([wrap(r, layout) for r, layout in zip(result, outputs, strict=True)])


def _is_outside(layout: Layout) -> bool:
    return layout.mesh.coordinate is None  # type: ignore[attr-defined]


def check_gradient_known(x: Any) -> None:
    """Have the local tensor know the gradient history of the wrapper, if that has one: see `custom_function`.

    Raises:
        RuntimeError: a history that the local tensor cannot have; the gradient would be lost without a word.
    """
    with _no_torch_function():
        node = _wrapper_grad_fn(x)
        number = _number_of_result(x)
    if node is not None:
        take_over(x, node, number)


def part_of(x: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, which knows its gradient history; a plain tensor as it is."""
    return known_local(x) if isinstance(x, ShardedTensor) else x


def known_local(x: Any) -> Tensor:
    """The local tensor, whose gradient history is that of the whole; see `check_gradient_known`."""
    if not x._local.requires_grad:
        check_gradient_known(x)
    return x._local


def wrap(local: Tensor, layout: Layout) -> Any:
    """A `ShardedTensor` around this rank's part; the dtype is taken from the part (autocast may have changed it).

    Raises:
        RuntimeError: the part has not the shape that the layout gives it: an operator rule is wrong.
    """
    if local.dtype is not layout.dtype:
        layout = layout.replace(dtype=local.dtype)
    if local.shape != layout.local_shape:
        raise RuntimeError(
            f"an operator gave a local tensor of shape {list(local.shape)} for {layout}: its rule is wrong"
        )
    return ShardedTensor._make(local if _is_grad_enabled() else _detached(local), layout)


def _detached(local: Tensor) -> Tensor:
    """Outside the graph, but still known for a view of a moved copy, if it is one: torch does not know the base of what is
    detached."""
    if transforming():
        return local  # detached, it would lose its tangent
    out = local.detach()
    if getattr(_base(local), "_is_moved_copy", False):
        out._is_moved_copy = True  # type: ignore[attr-defined]
    return out


def wrapper(layout: Layout) -> Callable[[Tensor], Any]:
    """`wrap` with the layout filled in, for results of the expected shape and dtype without any call in between."""
    meta, shape, dtype = layout.meta, layout.local_shape, layout.dtype

    def wrap_local(local: Tensor) -> Any:
        if local.dtype is not dtype or local.shape != shape:
            return wrap(local, layout)
        out = meta.data
        if local.requires_grad:
            if _is_grad_enabled():
                out.requires_grad = True
            else:  # a view of a leaf; a custom autograd.Function that returns it must not pass for a leaf itself
                local = _detached(local)
        out.__class__ = ShardedTensor  # type: ignore[assignment]
        out._local = local  # type: ignore[attr-defined]
        out._layout = layout  # type: ignore[attr-defined]
        return out

    return wrap_local


def check_base(x: Any) -> None:
    """Refuse to write to a view of a tensor that had to be redistributed.

    Raises:
        RuntimeError: the base would not change.
    """
    check_bases((x,))


def check_bases(tensors: Iterable[Any]) -> None:
    """`check_base` for several; nothing to look at while no view was ever made of a moved copy."""
    if _moved_copies.exist and any(getattr(_base(x._local), "_is_moved_copy", False) for x in tensors):
        raise RuntimeError(
            "in-place operator on a view whose base had to be redistributed: the base would not change; "
            "write to the base, or call .clone() first to say that it should not"
        )


def _into_out(decision: Decision, args: Sequence[Any], kwargs: dict[str, Any], *_: Any) -> Any:
    """`torch.f(x, out=y)`: the result, copied into y as y lies. As in torch, not differentiable."""
    out = kwargs["out"]
    result = decision.func(*args, **{name: value for name, value in kwargs.items() if name != "out"})
    if not isinstance(out, ShardedTensor) or not isinstance(result, ShardedTensor) or out.shape != result.shape:
        raise NotImplementedError(
            f"{name_of(decision.func)}: out= takes one ShardedTensor of the shape of the result; use the result instead"
        )
    if result.requires_grad or (out.requires_grad and _is_grad_enabled()):
        raise RuntimeError(f"{name_of(decision.func)}: out= has no gradient, and one of the arguments requires grad")
    return out.copy_(result)


def _on_wrappers(decision: Decision, args: Sequence[Any], kwargs: dict[str, Any], *_: Any) -> Any:
    with _no_torch_function():
        return decision.func(*args, **kwargs)
