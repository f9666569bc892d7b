"""Copies without values, on which a model's forward runs to be recorded.

The copy of the model is on "meta" and is made before anything is sharded. Each recording runs on a
copy of that, whose tensors are fake: they have a device, so that a forward that makes tensors
`device=x.device`, or runs under autocast, does the same as with values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ....ops.torch_compile import original_of
from ....tensor.sharded_tensor import ShardedTensor
from .values import tensors_of

T = TypeVar("T")


def on_meta(module: nn.Module) -> nn.Module:
    """Return a copy of a module on "meta".

    Raises:
        ValueError: a parameter is sharded already.
    """
    for name, x in module.named_parameters():
        if isinstance(x, ShardedTensor):
            raise ValueError(
                f"{name} is sharded already; split a model into stages first, then shard the "
                "stages: parallelize(stage, ...), fully_shard(stage, ...)"
            )
    return copy_with(module, lambda x: torch.empty_like(x.detach(), device="meta"))


def as_fake(value: T, mode: Any, device: torch.device) -> T:
    """Return a copy of a module, or of a tree of arguments, with fake tensors of the mode."""

    def convert(x: Tensor) -> Tensor:
        if isinstance(x, ShardedTensor):
            meta = torch.empty(x.shape, dtype=x.dtype, device="meta")
        elif x.layout is torch.strided:
            meta = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        else:
            meta = torch.empty_like(x.detach(), device="meta")
        return mode.fake_tensor_converter.from_meta_and_device(mode, meta, device)

    copied = copy_with(value, convert)
    if isinstance(copied, nn.Module):
        for module in copied.modules():
            original = original_of(module)
            if original is not None:  # nothing is compiled for fake tensors
                module.forward = original.__call__
    return copied


def copy_with(value: T, convert: Callable[[Tensor], Tensor]) -> T:
    """Return a deep copy with `convert(tensor)` in place of each tensor; tied ones stay tied."""
    memo: dict[int, Any] = {}
    with _Converting(convert, memo):
        for x in _tensors_in(value):
            memo.setdefault(id(x), _convert_tensor(x, convert))
        return copy.deepcopy(value, memo)


class _Converting(TorchFunctionMode):
    """Inside, `deepcopy` converts tensors that other objects hold, such as attributes."""

    def __init__(self, convert: Callable[[Tensor], Tensor], memo: dict[int, Any]) -> None:
        super().__init__()
        self._convert, self._memo = convert, memo

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            return self._memo.setdefault(id(args[0]), _convert_tensor(args[0], self._convert))
        return func(*args, **(kwargs or {}))


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, nn.Module):
        return [*value.parameters(), *value.buffers()]
    return tensors_of(value)


def _convert_tensor(x: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
    out = convert(x).requires_grad_(x.requires_grad)
    if isinstance(x, nn.Parameter):
        out._is_param = True  # type: ignore[attr-defined]  # what isinstance(out, nn.Parameter) reads
    return out
