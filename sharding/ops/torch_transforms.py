"""torch's own `vmap` and `grad` on `ShardedTensor`s.

They wrap tensors in C++, and turn each operator of a function into operators of aten on what they
have wrapped:

    torch.vmap(f)(x)    f sees a tensor of torch around the wrapper of x, shaped as one example
      sin               its C++ code   aten.sin(wrapper of x)   `__torch_dispatch__`: torch.sin(x),
                                                                with x's batch dim

So the batch is a dim of the global tensor like any other, split as the operands are, and gradients
are those of global values. Plain tensors beside, which torch's own rules make (offsets of the
examples) or the function uses, count as replicated, and are compared. A `ShardedTensor` that is no
argument meets one that is wrapped in `run_with_wrapped`, which hands it to C++ as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import enable_reentrant_dispatch
from torch.utils import _pytree as pytree

from ..autograd.engine_hooks import in_foreign_forward_mode, is_transformed
from ..tensor.sharded_tensor import ShardedTensor
from .plain_operands import compared_arguments

aten = torch.ops.aten

# In-place operators that change the shape of their operand.
_RESHAPING: dict[Any, Callable[..., Any]] = {
    aten.squeeze_.default: torch.squeeze,
    aten.squeeze_.dim: torch.squeeze,
    aten.squeeze_.dims: torch.squeeze,
    aten.unsqueeze_.default: torch.unsqueeze,
    aten.transpose_.default: torch.transpose,
    aten.t_.default: torch.t,
}
# Views that C++ code asks for by the strides of the wrapper; the part may have others.
_VIEWS = frozenset((aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default))


def torch_dispatch(
    cls: type, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
) -> Any:
    """Run an operator that C++ code calls on the wrapper: its `__torch_dispatch__`.

    Raises:
        RuntimeError: the operator is none of aten; forward mode of torch's own;
            `__torch_function__` is switched off, so that the caller wants the wrapper itself, which
            has no values; an operand that was computed inside torch.func.grad or sm.vmap.
        NotImplementedError: no public function does what the operator does.
        ReplicaError: on every rank: a plain operand that differs between ranks, such as random
            numbers of torch's own.

    Communication: that of the operator; the first time a line has a plain operand, an all_gather of
    about 100 bytes.
    """
    # autograd detaches before it passes a tensor to a hook
    if func is aten.detach.default and not torch._C._is_torch_function_enabled():
        return args[0].detach()
    if (
        func.namespace != "aten"
        or in_foreign_forward_mode()
        or not torch._C._is_torch_function_enabled()
    ):
        return ShardedTensor._refuse_dispatch(func)
    kwargs = {} if kwargs is None else kwargs
    for x in pytree.tree_leaves((args, kwargs)):
        if type(x) is ShardedTensor and is_transformed(x._local):
            raise RuntimeError(
                f"{func}, by a transform of torch.func, on a ShardedTensor that was computed "
                "inside of a transform from one that is no argument of it; pass it as an argument, "
                "or use this library's transforms alone: sm.vmap, sm.grad, sm.vjp, sm.jacrev"
            )
    args, kwargs = pytree.tree_map_only(_OperandInCpp, _without_history, (args, kwargs))
    with enable_reentrant_dispatch(), torch._C._EnableTorchFunction():
        if func in _RESHAPING:
            return _reshape_in_place(args[0], _RESHAPING[func](*args, **kwargs))
        if func in _VIEWS:
            result = args[0].reshape(args[1])
        else:
            args, kwargs = compared_arguments(func, args, kwargs)
            result = func(*args, **kwargs)  # `__torch_function__`
        if func._schema.is_mutable and result is args[0]:
            return result
        return pytree.tree_map_only(ShardedTensor, _without_history, result)


def run_with_wrapped(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a function on tensors that torch's transforms wrap, and on `ShardedTensor`s."""
    args, kwargs = pytree.tree_map_only(
        ShardedTensor,
        lambda x: _wrap(_OperandInCpp, x, x._local.requires_grad),
        (tuple(args), kwargs),
    )
    return func(*args, **kwargs)


class _OperandInCpp(ShardedTensor):
    """A `ShardedTensor` that torch's functions take as it is, down to `__torch_dispatch__`."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]


def _without_history(x: ShardedTensor) -> ShardedTensor:
    """Return a new wrapper of the part, without grad, which C++ may make a result of autograd."""
    return _wrap(ShardedTensor, x, False)


def _wrap(cls: type, x: ShardedTensor, requires_grad: bool) -> Any:
    out = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        cls,
        x._layout.shape,
        dtype=x._layout.dtype,
        device=x._local.device,
        requires_grad=requires_grad,
    )
    out._local, out._layout, out._lineage = x._local, x._layout, x._lineage
    return out


def _reshape_in_place(x: ShardedTensor, result: ShardedTensor) -> ShardedTensor:
    with torch._C.DisableTorchFunctionSubclass():
        Tensor.data.__set__(x, _without_history(result))  # type: ignore[attr-defined]
    x._local, x._layout, x._lineage = result._local, result._layout, result._lineage
    return x
