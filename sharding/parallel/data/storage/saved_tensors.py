"""Saved-tensor hooks for gathered parameters.

autograd saves the position in the buffer, not the values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....autograd import engine_hooks
from ....tensor.saved_wrapper import wrapper_to_save
from ....tensor.sharded_tensor import ShardedTensor
from ..address import storage_of
from .param_storage import Version


class GatheredBuffer(NamedTuple):
    """A gathered buffer: its number, and the versions of the parameters that it was made from."""

    number: int
    versions: list[Version]


class _BufferView(NamedTuple):
    """A view of a gathered buffer."""

    buffer: GatheredBuffer
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _OuterPacked(NamedTuple):
    """A tensor that is no parameter, packed by the hooks that were active before."""

    packed: Any


def note_in_checkpoint(values: Any) -> None:
    """Let a recomputation fail that differs from its forward in values for parameters.

    One of `torch.utils.checkpoint` fails if it has no values in place of parameters and its forward
    had, or the reverse.

    Checkpoint compares the number of saved tensors: `torch.func.functional_call` around it has
    ended when backward recomputes, and the recomputation would use the parameters themselves.
    """
    hooks = engine_hooks.saved_tensor_hooks()
    if (
        values
        and torch.is_grad_enabled()
        and hooks is not None
        and hooks[0].__module__ == "torch.utils.checkpoint"
    ):
        hooks[0](torch.empty(0))


class saved_param_hooks:
    """with saved_param_hooks(find, gather): save views of gathered buffers by position.

    Hooks that were active before, such as those of `torch.utils.checkpoint`, still see all other
    tensors.

    Args:
        find: storage address -> the gathered buffer at it, or None.
        gather: `(buffer, offset)` -> the buffer as a tensor, gathered again if it was freed; the
            offset is for error messages.
    """

    def __init__(
        self,
        find: Callable[[int], GatheredBuffer | None],
        gather: Callable[[GatheredBuffer, int], Tensor],
    ) -> None:
        outer = engine_hooks.saved_tensor_hooks()
        is_checkpoint = outer is not None and outer[0].__module__ == "torch.utils.checkpoint"

        def pack(x: Tensor) -> Any:
            if type(x) is ShardedTensor:
                return wrapper_to_save(x)
            buffer = find(storage_of(x))
            if buffer is None:
                return x if outer is None else _OuterPacked(outer[0](x))
            # Checkpoint compares the number of saved tensors with that of the recomputation.
            if is_checkpoint:
                outer[0](x)  # type: ignore[index]
            return _BufferView(buffer, tuple(x.shape), x.stride(), int(x.storage_offset()))

        def unpack(packed: Any) -> Tensor:
            if type(packed) is _BufferView:
                return gather(packed.buffer, packed.offset).as_strided(
                    packed.size, packed.stride, packed.offset
                )
            return (
                outer[1](packed.packed)
                if outer is not None and type(packed) is _OuterPacked
                else packed
            )

        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def __enter__(self) -> None:
        self._hooks.__enter__()

    def __exit__(self, *_: object) -> None:
        self._hooks.__exit__()
