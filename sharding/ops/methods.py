"""The methods of `ShardedTensor` that communicate, dispatch or take part in autograd.

They are bound to the class at import.

The class itself, in `sharded_tensor.py`, imports none of what implements them.
`sharding/__init__.py` imports this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ...mesh.comm.thread_context import thread_context
from ..autograd.engine_hooks import any_requires_grad
from ..layout.spec import P, Placement
from ..lineage import comm_context
from ..redistribute.autograd import redistribute_local
from ..tensor import convert, process_data, torch_checkpoint
from ..tensor.autograd import backward as backward_passes
from ..tensor.autograd import leaf_grads
from ..tensor.autograd.local_part import check_gradient_known, known_local
from ..tensor.redistribute import redistribute
from ..tensor.sharded_tensor import ShardedTensor
from . import custom_function, dispatch, torch_compile, torch_transforms

# -- parts and whole tensors -----------------------------------------------------------------------


def full_tensor(
    x: ShardedTensor, *, grad_placements: P | Sequence[Placement] | None = None
) -> Tensor:
    """Return the whole tensor, on every rank of the mesh, as a plain tensor.

    Args:
        grad_placements: as for `shardmesh.to_local`.

    Communication: what `redistribute` to replicated needs.
    """
    return convert.to_local(redistribute(x, P()), grad_placements=grad_placements)


def addressable_data(x: ShardedTensor, index: int) -> Tensor:
    """Return the data of `addressable_shards[index]`: this rank's part, outside the graph.

    Raises:
        IndexError: no such shard.
    """
    return process_data.addressable_shards(x)[index].data


# -- values ----------------------------------------------------------------------------------------


def _value(x: ShardedTensor) -> Tensor:
    """Return the whole tensor, without gradient; pending values are reduced first."""
    world = x.mesh.world
    if x.mesh.coordinate is None:
        raise RuntimeError(
            f"rank {world.rank} is outside {x.mesh} and holds no part of this tensor"
        )
    with comm_context(world, x._lineage):
        return redistribute_local(x._local.detach(), x._layout, x._layout.replicated)


def item(x: ShardedTensor) -> Any:
    """Return the one element, the same on every rank. Communication: that of reducing it."""
    if x.numel() != 1:
        raise RuntimeError(f"a tensor with {x.numel()} elements cannot be converted to a number")
    value = _value(x)
    if thread_context.recorder is not None:
        thread_context.recorder.note_equal(value, x.mesh.ranks)
    return value.item()


def tolist(x: ShardedTensor) -> Any:
    """Return the whole tensor as nested lists, on every rank. Communication: as `full_tensor`."""
    return _value(x).tolist()


def numpy(x: ShardedTensor, *, force: bool = False) -> Any:
    """Return the whole tensor as a numpy array, on every rank. Communication: as `full_tensor`."""
    if x.requires_grad and not force:
        raise RuntimeError(
            "cannot call numpy() on a tensor that requires grad; use tensor.detach().numpy()"
        )
    return _value(x).numpy(force=force)


def __array__(x: ShardedTensor, dtype: Any = None, copy: bool | None = None) -> Any:
    return np.array(numpy(x), dtype=dtype, copy=copy)


def __float__(x: ShardedTensor) -> float:
    return float(item(x))


def __int__(x: ShardedTensor) -> int:
    return int(item(x))


def __index__(x: ShardedTensor) -> int:
    return item(x).__index__()


def __complex__(x: ShardedTensor) -> complex:
    return complex(item(x))


def __bool__(x: ShardedTensor) -> bool:
    if x.numel() != 1:
        raise RuntimeError(
            "the truth value of a tensor with more than one element is ambiguous; use .any() or "
            ".all()"
        )
    return bool(item(x))


def __format__(x: ShardedTensor, spec: str) -> str:
    return format(item(x), spec) if x.ndim == 0 else object.__format__(x, spec)


def __contains__(x: ShardedTensor, element: Any) -> bool:
    return bool((x == element).any())


def __iter__(x: ShardedTensor) -> Iterator[ShardedTensor]:
    if x.ndim == 0:
        raise TypeError("iteration over a 0-d tensor")
    return iter(x.unbind(0))  # type: ignore[arg-type]


def __reversed__(x: ShardedTensor) -> Tensor:
    return x.flip(0) if x.ndim else x


def __repr__(x: ShardedTensor, **_: Any) -> str:
    """Return the text of the tensor, with its layout and this rank's values.

    `ShardedTensor(f32[8, 8] @ P('x', None) on (x=4), local [2, 8] ...)`. No communication.
    """
    local = Tensor.__repr__(x._local.detach())
    kind = "Parameter(ShardedTensor" if getattr(x, "_is_param", False) else "ShardedTensor"
    grad = ", requires_grad=True" if x._local.requires_grad and x._local.is_leaf else ""
    if x._local.grad_fn is not None:
        grad = f", grad_fn=<{type(x._local.grad_fn).__name__}>"
    return f"{kind}({x._layout!r}{grad},\n{local}" + (")" * kind.count("(")) + ")"


# -- gradients -------------------------------------------------------------------------------------


def _requires_grad(x: ShardedTensor) -> bool:
    """Whether autograd tracks this tensor. Assignment is `requires_grad_`."""
    return x._local.requires_grad or (any_requires_grad(x) and known_local(x).requires_grad)


def requires_grad_(x: ShardedTensor, requires_grad: bool = True) -> ShardedTensor:
    """Ask for this tensor's gradient; it will be in `.grad`, in this tensor's own layout."""
    x._local.requires_grad_(requires_grad)
    x._sync_requires_grad()
    if requires_grad and x._local.is_leaf:
        leaf_grads.register_leaf(x)
        backward_passes.register_wrapper(x)
    return x


def _grad_fn(x: ShardedTensor) -> Any:
    """The node of the local graph that made this tensor; None for a leaf."""
    check_gradient_known(x)
    return x._local.grad_fn


def _is_leaf(x: ShardedTensor) -> bool:
    """Whether no operation made this tensor, as far as autograd knows."""
    return known_local(x).is_leaf


def backward(
    x: ShardedTensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Compute the gradients of this tensor with respect to the leaves.

    Without `gradient` the tensor must have one element.

    Communication: that of the backward of each redistribution, and at the end one bucketed
        reduction per set of axes and dtype for leaves that are replicated (not inside
        `accumulate_grads()`).
    """
    backward_passes.backward(x, gradient, retain_graph, create_graph, inputs=inputs)


# -- binding ---------------------------------------------------------------------------------------

_GRAD = (
    "The gradient, a `ShardedTensor` in this tensor's own layout. Reading it never communicates."
)
_OWN_SHARDS = (
    "The part that this rank holds and its place, as a list of one; empty on a rank outside the "
    "mesh."
)
_ALL_SHARDS = (
    "The part of every rank of the mesh, in mesh order; `data` is None for those of other ranks."
)

for _method in (
    full_tensor,
    addressable_data,
    item,
    tolist,
    numpy,
    __array__,
    __float__,
    __int__,
    __index__,
    __complex__,
    __bool__,
    __format__,
    __contains__,
    __iter__,
    __reversed__,
    __repr__,
    requires_grad_,
    backward,
    leaf_grads.register_hook,
    leaf_grads.register_post_accumulate_grad_hook,
    redistribute,
    convert.to_local,
):
    setattr(
        ShardedTensor,
        _method.__name__,
        torch_compile.mark_entry(_method, calls_program=_method is backward),
    )

for _name, _attribute in {
    "__create_write_items__": torch_checkpoint.create_write_items,
    "__create_chunk_list__": torch_checkpoint.create_chunk_list,
    "__get_tensor_shard__": torch_checkpoint.get_tensor_shard,
    "__hash__": torch_checkpoint.tensor_hash,
    "__tensor_flatten__": property(torch_compile.flattening),
    "_take_over_history": custom_function.take_over,
    "from_local": staticmethod(torch_compile.mark_entry(convert.from_local)),
    "addressable_shards": property(process_data.addressable_shards, doc=_OWN_SHARDS),
    "global_shards": property(process_data.global_shards, doc=_ALL_SHARDS),
    "requires_grad": property(_requires_grad, requires_grad_),  # pyright: ignore
    "grad": property(
        leaf_grads.get_grad, leaf_grads.set_grad, lambda x: leaf_grads.set_grad(x, None), _GRAD
    ),
    "grad_fn": property(_grad_fn),
    "is_leaf": property(_is_leaf),
    "__torch_function__": classmethod(dispatch.torch_function),
    "__torch_dispatch__": classmethod(torch_transforms.torch_dispatch),
}.items():
    setattr(ShardedTensor, _name, _attribute)
