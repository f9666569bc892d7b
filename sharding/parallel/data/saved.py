"""What autograd saves of gathered parameters: not the values, but where they are found when they have been gathered again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import engine_hooks


class _Place(NamedTuple):
    """A view of a gathered buffer."""

    buffer: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Others(NamedTuple):
    """What the hooks around ours made of a tensor that is no parameter."""

    packed: Any


class saving_places:
    """with saving_places(find, gathered): views of the buffers are saved as places in them.

    Hooks that were there before, such as those of `torch.utils.checkpoint`, still see all other tensors.

    Args:
        find: from the address of a storage to the number of the buffer that it is, or None.
        gathered: from the number of a buffer to the buffer, gathered again if need be.
    """

    def __init__(self, find: Callable[[int], int | None], gathered: Callable[[int], Tensor]) -> None:
        outer = engine_hooks.saved_tensor_hooks()

        def pack(x: Tensor) -> Any:
            i = find(x.untyped_storage().data_ptr())
            if i is not None:
                return _Place(i, tuple(x.shape), x.stride(), int(x.storage_offset()))
            return x if outer is None else _Others(outer[0](x))

        def unpack(packed: Any) -> Tensor:
            if type(packed) is _Place:
                return gathered(packed.buffer).as_strided(packed.size, packed.stride, packed.offset)
            return packed if outer is None else outer[1](packed.packed)

        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def __enter__(self) -> None:
        self._hooks.__enter__()

    def __exit__(self, *_: object) -> None:
        self._hooks.__exit__()
