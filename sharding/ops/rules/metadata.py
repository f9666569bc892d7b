"""Queries that shape, dtype and layout answer, without values or communication; and functions of
memory, which are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...tensor.sharded_tensor import ShardedTensor
from .registry import handler, unique

_ON_THE_WRAPPER = """
    is_floating_point is_signed is_conj is_neg element_size stride is_contiguous nelement numel
    ndimension dim size result_type can_cast is_sparse storage_offset has_names is_distributed
    dense_dim sparse_dim
"""
_ON_THE_PART = "get_device is_pinned is_inference is_shared _is_view"


# These read or change memory, of which one rank has only a part.
_REFUSED = """
    as_strided_scatter set_ resize_ resize_as_ _typed_storage apply_ map_ map2_ share_memory_
    record_stream pin_memory __dlpack__ __dlpack_device__ to_sparse to_sparse_coo to_sparse_csr
    to_sparse_csc to_sparse_bsr to_sparse_bsc to_mkldnn const_data_ptr resize resize_as
"""


def _register() -> None:
    for func in unique(_ON_THE_WRAPPER.split(), ()):
        handler(also=(func,))(_asked_of_wrapper(func))
    for func in unique(_ON_THE_PART.split(), ()):
        handler(also=(func,))(_asked_of_part(func))


def _register_refusals() -> None:
    for name in _REFUSED.split():
        handler(name)(_refused(name))


def _refused(name: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{name} works on the memory of a tensor, of which each rank of a ShardedTensor has "
            "only a part; use x.to_local() for this rank's part, or x.full_tensor() for the whole"
        )

    return refuse


def _strided_as_it_is(result: Callable[[Any], Any], name: str) -> Any:
    def strided(input: Any, size: Any, stride: Any, storage_offset: int | None = None) -> Any:
        """Return the tensor where size, stride and offset are its own; others are of other ranks'
        memory.
        """
        given = (
            tuple(size),
            tuple(stride),
            input.storage_offset() if storage_offset is None else storage_offset,
        )
        own = tuple(input.shape), tuple(input.stride()), input.storage_offset()
        if given != own:
            raise NotImplementedError(
                f"{name}(size={given[0]}, stride={given[1]}, storage_offset={given[2]}) works on "
                "the memory of a tensor, of which each rank of a ShardedTensor has only a part, so "
                f"it takes only the tensor's own {own}; use view, expand, permute or unfold, or "
                "x.full_tensor() for the whole"
            )
        return result(input)

    return strided


def _asked_of_wrapper(func: Any) -> Any:
    """Return a handler that calls the function on the wrapper itself, a meta tensor of the global
    shape.
    """

    def ask(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    return ask


def _asked_of_part(func: Any) -> Any:
    """Return a handler that calls the function on this rank's part."""
    return lambda x, *args, **kwargs: func(x._local, *args, **kwargs)


@handler("is_complex")
def _is_complex(input: Any) -> bool:
    """Return `input.is_complex()`, which torch's optimizers ask of every parameter at every
    step.
    """
    return input._layout.dtype.is_complex


@handler("is_same_size")
def _is_same_size(input: Any, other: Any) -> bool:
    return input.shape == other.shape


@handler("_has_compatible_shallow_copy_type")
def _can_share_data(input: Any, other: Any) -> bool:
    """Return whether `input.data = other` is possible, which `Module.to` needs to know to change a
    parameter in place.
    """
    both = isinstance(input, ShardedTensor) and isinstance(other, ShardedTensor)
    return both and input._local.device.type == other._local.device.type


handler("as_strided")(_strided_as_it_is(lambda x: x.view_as(x), "as_strided"))
handler("as_strided_copy")(_strided_as_it_is(lambda x: x.clone(), "as_strided_copy"))
handler("as_strided_")(_strided_as_it_is(lambda x: x, "as_strided_"))
_register()
_register_refusals()
