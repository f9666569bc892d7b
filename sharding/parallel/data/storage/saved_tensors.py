"""What autograd saves of gathered parameters: not the values, but where they are found when they have been gathered again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....tensor.autograd import engine_hooks
from ....tensor.sharded_tensor import ShardedTensor
from .param_storage import Version


class Buffer(NamedTuple):
    """A gathered buffer: its number, and what it was made of."""

    number: int
    made_of: list[Version]


class _Place(NamedTuple):
    """A view of a gathered buffer."""

    buffer: Buffer
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Others(NamedTuple):
    """What the hooks around ours made of a tensor that is no parameter."""

    packed: Any


class _SavedWrapper(ShardedTensor):
    """A sharded argument of `torch.utils.checkpoint`; the nodes of autograd itself save local tensors.

    Autograd copies what an unpack hook returns by detaching it in C++, from where no `ShardedTensor` comes back but one made here.
    """

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return ShardedTensor._make_guarded(args[0]._local, args[0]._layout, args[0]._lineage)  # with its gradient history
        return super().__torch_dispatch__(func, types, args, kwargs)


def _saved_wrapper(x: ShardedTensor) -> ShardedTensor:
    if not x._local.requires_grad:  # it may come back uncopied
        return ShardedTensor._make_guarded(x._local, x._layout, x._lineage)
    out: Any = Tensor._make_subclass(_SavedWrapper, x._layout.meta, x._local.requires_grad)
    out._local, out._layout, out._lineage = x._local, x._layout, x._lineage
    return out


class saving_places:
    """with saving_places(find, gathered): views of the buffers are saved as places in them.

    Hooks that were there before, such as those of `torch.utils.checkpoint`, still see all other tensors.

    Args:
        find: from the address of a storage to the buffer that it is, or None.
        gathered: from a buffer, and an offset in it that is wanted, to the tensor that it is, gathered again if need be.
    """

    def __init__(self, find: Callable[[int], Buffer | None], gathered: Callable[[Buffer, int], Tensor]) -> None:
        outer = engine_hooks.saved_tensor_hooks()
        counted = outer is not None and outer[0].__module__ == "torch.utils.checkpoint"

        def pack(x: Tensor) -> Any:
            if type(x) is ShardedTensor:
                return _saved_wrapper(x)
            buffer = find(x.untyped_storage().data_ptr())
            if buffer is None:
                return x if outer is None else _Others(outer[0](x))
            if counted:  # checkpoint compares how many tensors the recomputation saves; some of its own it saves without us
                outer[0](x)  # type: ignore[index]
            return _Place(buffer, tuple(x.shape), x.stride(), int(x.storage_offset()))

        def unpack(packed: Any) -> Tensor:
            if type(packed) is _Place:
                return gathered(packed.buffer, packed.offset).as_strided(packed.size, packed.stride, packed.offset)
            return outer[1](packed.packed) if outer is not None and type(packed) is _Others else packed

        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def __enter__(self) -> None:
        self._hooks.__enter__()

    def __exit__(self, *_: object) -> None:
        self._hooks.__exit__()
