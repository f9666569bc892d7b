"""Queries that shape, dtype and layout answer; and functions of memory, which are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...tensor.sharded_tensor import ShardedTensor
from .registry import handler

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


@handler(*_ON_THE_WRAPPER.split(), with_func=True)
def _ask_wrapper(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the function on the wrapper itself, a meta tensor of the global shape."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


@handler(*_ON_THE_PART.split(), with_func=True)
def _ask_part(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    return func(x._local, *args, **kwargs)


@handler(*_REFUSED.split(), with_func=True)
def _refuse(func: Any, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(
        f"{func.__name__} works on the memory of a tensor, of which each rank of a ShardedTensor "
        "has only a part; use x.to_local() for this rank's part, or x.full_tensor() for the whole"
    )


_STRIDED: dict[str, Callable[[Any], Any]] = {
    "as_strided": lambda x: x.view_as(x),
    "as_strided_copy": lambda x: x.clone(),
    "as_strided_": lambda x: x,
}


@handler(*_STRIDED, with_func=True)
def _as_strided(func: Any, input: Any, size: Any, stride: Any, storage_offset: Any = None) -> Any:
    """Return the tensor for its own size, stride and offset; others are of other ranks' memory."""
    offset = input.storage_offset() if storage_offset is None else storage_offset
    own = tuple(input.shape), tuple(input.stride()), input.storage_offset()
    if (tuple(size), tuple(stride), offset) != own:
        raise NotImplementedError(
            f"{func.__name__}(size={tuple(size)}, stride={tuple(stride)}, storage_offset={offset}) "
            "works on the memory of a tensor, of which each rank of a ShardedTensor has only a "
            f"part, so it takes only the tensor's own {own}; use view, expand, permute or unfold, "
            "or x.full_tensor() for the whole"
        )
    return _STRIDED[func.__name__](input)


# torch's optimizers ask this of every parameter at every step.
handler("is_complex")(lambda input: input._layout.dtype.is_complex)
handler("is_same_size")(lambda input, other: input.shape == other.shape)


@handler("_has_compatible_shallow_copy_type")
def _can_share_data(input: Any, other: Any) -> bool:
    """Return whether `input.data = other` is possible, as `Module.to` does in place."""
    both = isinstance(input, ShardedTensor) and isinstance(other, ShardedTensor)
    return both and input._local.device.type == other._local.device.type
