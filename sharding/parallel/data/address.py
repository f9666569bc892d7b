"""Where a tensor's memory is, also on "meta", where `data_ptr()` is 0 for every tensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def address_of(x: Tensor) -> Any:
    """Return a value that tensors share that begin at the same memory; 0 if it has no elements."""
    if not x.is_meta:
        return x.data_ptr()
    storage: Any = x.untyped_storage()
    return (storage._cdata, x.storage_offset()) if x.numel() else 0


def storage_of(x: Tensor) -> int:
    """Return a number that is the same for tensors with the same storage."""
    storage: Any = x.untyped_storage()
    return storage._cdata if x.is_meta else storage.data_ptr()
