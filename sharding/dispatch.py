"""Operators on `ShardedTensor`s: a cached decision, then the same torch function on the local tensors.

    torch.f(x, y, 2)  ->  key (f, layout of x, layout of y, 2)  ->  decision, found in a dictionary or made once:
        which operands must be redistributed first, and to which layout
        what to call on the local tensors
        the layout of each result

`decide` makes the decision, from the operator's rule.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..mesh.device_mesh import DeviceMesh
from . import outside
from .cache import keep
from .compiler import not_compiled, refuse_jit_trace
from .decide import FOUND, Decision, common_name, decide, name_of, with_values
from .dtensor import is_dtensor
from .engine_hooks import any_requires_grad, is_transformed
from .layout import Layout, dtype_name
from .lineage import carrying, mixed, piece_of, seed_of
from .redistribute import redistribute_local
from .rules.registry import HANDLERS, LOOKS_AT_FLOATS, RULES
from .spec import P
from .tensor import ShardedTensor

_ATTRIBUTE_ACCESS = frozenset({"__get__", "__set__", "__delete__"})  # attributes that values have no part in
_VALUES = frozenset({int, bool, type(None), str, torch.dtype})  # what most static arguments are
_NO_KWARGS: dict[str, Any] = {}
_no_torch_function = torch._C.DisableTorchFunctionSubclass
_wrapper_grad_fn = Tensor.grad_fn.__get__  # type: ignore[attr-defined]
_is_grad_enabled = torch.is_grad_enabled


class _Thread(threading.local):
    implicit_replication = False


class _MovedCopies:
    exist = False  # whether a view was ever made of a moved copy


_thread = _Thread()
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
    if _thread.implicit_replication:
        args, kwargs = replicated_arguments(args, kwargs)
    key: list[Any] = [func]
    operands: list[Any] = []
    local_args: list[Any] = []
    checking = _is_grad_enabled()
    for item in args:
        kind = type(item)
        if kind is ShardedTensor:  # this and the next: what `_local_of` does, without a call
            local = item._local
            if checking and not local.requires_grad and any_requires_grad(item):
                check_gradient_known(item)
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
    lineage = mixed(decision.seed, operands)
    result = decision.run(decision, args, kwargs, local_args, local_kwargs, operands)
    return _with_lineage(decision, result, lineage, operands)


# -- reading the arguments ---------------------------------------------------------------------------------------------


def _local_of(item: Any, key: list[Any], operands: list[Any], func: Any) -> Any:
    """An argument with `ShardedTensor`s replaced by their locals; adds to the cache key and to the list of operands."""
    kind = type(item)
    if kind is ShardedTensor:
        local = item._local
        if not local.requires_grad and _is_grad_enabled() and any_requires_grad(item):
            check_gradient_known(item)
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


def refuse_without_value(func: Any, operands: Sequence[ShardedTensor]) -> None:
    """For a plain tensor on "meta" beside sharded ones with values: an operator with it would do nothing, silently.

    Raises:
        RuntimeError: always, except where those are on "meta" as well.
    """
    if not all(x._local.is_meta for x in operands):
        raise RuntimeError(
            f"{name_of(func)}: a plain tensor on 'meta', which has no value, beside ShardedTensors on {operands[0].device}. Code that "
            "places a number where it finds x.device in C++, as torch's gradient clipping and GradScaler do, finds 'meta': use "
            "sm.clip_grad_norm_ or sm.GradScaler, or make the number a ShardedTensor"
        )


def _plain_key(tensor: Tensor, func: Any) -> Any:
    """A plain 0-d tensor is a number; any other plain tensor could mean anything, so it is an error.

    Raises:
        RuntimeError: not a TypeError, which Python's `+` and `@` would turn into "unsupported operand".
    """
    if is_transformed(tensor):
        raise RuntimeError(
            f"{name_of(func)}: a ShardedTensor inside a transform of torch.func, which would not see through it; use "
            "torch.autograd.grad, or apply the transform to this rank's part, x.to_local()"
        )
    if tensor.ndim == 0 and not (tensor.requires_grad and torch.is_grad_enabled()):
        return (tensor.dtype, _ON_META) if tensor.is_meta else tensor.dtype
    kind = "torch's DTensor" if is_dtensor(tensor) else "a plain tensor"
    what = f"{name_of(func)}: mixes {kind} {dtype_name(tensor.dtype)}{list(tensor.shape)} with a ShardedTensor"
    if tensor.ndim == 0:
        raise RuntimeError(
            f"{what}, and the plain one requires grad: its gradient would differ between ranks; make it a ShardedTensor with "
            "distribute_tensor(t, mesh, [Replicate()] * mesh.ndim)"
        )
    raise RuntimeError(
        f"{what}; say how the plain tensor lies on the mesh with distribute_tensor(t, mesh, placements) or "
        "ShardedTensor.from_local(t, mesh, placements), or take plain tensors as replicated inside "
        "`with sm.implicit_replication():`"
    )


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Inside, a plain tensor beside a `ShardedTensor` is taken as replicated: every rank must hold the same values.

    Its gradient is reduced over the mesh, as for `from_local(t, mesh, [Replicate(), ...])`.

    Communication: none by itself.
    """
    before = _thread.implicit_replication
    _thread.implicit_replication = True
    try:
        yield
    finally:
        _thread.implicit_replication = before


def takes_plain() -> bool:
    """Whether plain tensors count as replicated here: inside `implicit_replication()`."""
    return _thread.implicit_replication


def replicated_arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """The arguments with their plain tensors made `ShardedTensor`s on the mesh of the others."""
    mesh = next((t.mesh for t in tensors_in((*args, *kwargs.values())) if isinstance(t, ShardedTensor)), None)
    if mesh is None:
        return args, kwargs
    return _replicate_plain(args, mesh), dict(zip(kwargs, _replicate_plain(kwargs.values(), mesh), strict=True))


def _replicate_plain(items: Iterable[Any], mesh: DeviceMesh) -> list[Any]:
    out: list[Any] = []
    for item in items:
        if type(item) in (list, tuple):
            item = type(item)(_replicate_plain(item, mesh))
        elif isinstance(item, Tensor) and not isinstance(item, ShardedTensor) and (item.ndim > 0 or item.requires_grad):
            item = ShardedTensor.from_local(item, mesh, P())
        out.append(item)
    return out


def tensors_in(items: Iterable[Any]) -> Iterator[Any]:
    """The tensors among arguments, also those in lists, tuples and dicts."""
    for item in items:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from tensors_in(item)
        elif isinstance(item, dict):
            yield from tensors_in(item.values())


# -- running -----------------------------------------------------------------------------------------------------------


def _decided(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], key: list[Any], operands: list[Any]
) -> Decision:
    """A new decision, kept for the next call with this key."""
    refuse_jit_trace()
    if any(type(k) is tuple and k[-1:] == (_ON_META,) for k in key):
        refuse_without_value(func, operands)
    if not operands or (name_of(func) in _ATTRIBUTE_ACCESS and func not in RULES):
        decision = Decision(func, (), False, None)
        decision.run = _on_wrappers
    elif kwargs.get("out") is not None:
        decision = Decision(func, (), False, None)
        decision.run = _into_out
    else:
        decision = _settled(decide(func, args, kwargs, operands, key))
        if decision.form is None and _is_outside(operands[0]._layout):
            decision.run = partial(outside.run, func)
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


def _moved(
    decision: Decision, args: Sequence[Any], kwargs: dict[str, Any], operands: list[Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments with every operand's local tensor in the layout that the decision asks for."""
    pairs = zip(operands, decision.targets, strict=True)
    moved = []
    for x, target in pairs:
        with carrying(x._layout.mesh.world, x._lineage):  # type: ignore[attr-defined]
            moved.append(redistribute_local(x._local, x._layout, target))
    if decision.detached_view:
        moved[0] = marked_as_copy(moved[0], operands[0]._local)
    return with_values(args, kwargs, moved)


def marked_as_copy(moved: Tensor, original: Tensor) -> Tensor:
    """The moved operand of a view, marked so that writing to any view of it is refused."""
    if moved.untyped_storage()._cdata == original.untyped_storage()._cdata:
        moved = moved.clone()
    _base(moved)._is_moved_copy = True  # type: ignore[attr-defined]
    _moved_copies.exist = True
    return moved


def _base(local: Tensor) -> Tensor:
    return local if local._base is None else local._base


def _run_form(
    decision: Decision, args: Sequence[Any], kwargs: dict[str, Any], local_args: Any, local_kwargs: Any, operands: list[Any]
) -> Any:
    with carrying(operands[0]._layout.mesh.world, mixed(decision.seed, operands)):
        return decision.form(*args, **kwargs)  # type: ignore[misc]


def _with_lineage(decision: Decision, result: Any, lineage: int, operands: Sequence[Any]) -> Any:
    """The results, known to be made of the operands; also on ranks outside the mesh. What an operator only hands back stays what it is."""
    for i, x in enumerate(result if type(result) in (tuple, list) else (result,)):
        if type(x) is ShardedTensor and (decision.in_place or all(x is not operand for operand in operands)):
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
        return outside.each_tensor(result, lambda t: ShardedTensor._make(t, outside.whole_like(t, like)))
    return decision.container([wrap(r, layout) for r, layout in zip(result, outputs, strict=True)])


def _is_outside(layout: Layout) -> bool:
    return layout.mesh.coordinate is None  # type: ignore[attr-defined]


def check_gradient_known(x: Any) -> None:
    """Refuse a tensor whose wrapper has a gradient history that its local tensor lacks.

    That is what a custom `autograd.Function` applied to a ShardedTensor leaves behind: it saw only the wrapper, and the
    gradient would be lost without a word.
    """
    if not _is_grad_enabled():
        return
    with _no_torch_function():
        lost = _wrapper_grad_fn(x) is not None
    if lost:
        raise RuntimeError(
            "this ShardedTensor came out of a custom autograd.Function (a module's full backward hook is one, too), which worked on "
            "the wrapper, so its gradient would be lost; use x.register_hook for a hook, and apply the function to local tensors instead: "
            "ShardedTensor.from_local(MyFunction.apply(x.to_local()), x.mesh, x.placements, shape=x.shape)"
        )


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
