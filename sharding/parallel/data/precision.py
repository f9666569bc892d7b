"""Policies of a unit: mixed precision and CPU offload."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...trees import map_nested


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """MixedPrecisionPolicy(param_dtype=..., reduce_dtype=...): torch's, with the same meaning.

    Such as MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32).

    Parameters, their gradients and the optimizer's state keep the dtype that the module has.

    Attributes:
        param_dtype: the dtype in which parameters are gathered and used; None for their own.
        reduce_dtype: the dtype in which gradients are reduced over ranks; None for `param_dtype`.
        output_dtype: the dtype to which floating outputs of the module are cast; None to not cast.
            Not applied to nested `units`.
        cast_forward_inputs: whether floating inputs of the module are cast to `param_dtype`.

    Communication: none by itself; gathering moves `param_dtype`, reducing `reduce_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def used_as(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a parameter is used."""
        return (
            self.param_dtype if self.param_dtype is not None and dtype.is_floating_point else dtype
        )

    def reduction_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a parameter's gradient is reduced."""
        return self.reduce_dtype if self.reduce_dtype is not None else self.used_as(dtype)

    def inputs(self, tree: Any) -> Any:
        """Cast the inputs of a module to `param_dtype`, if asked for."""
        return _cast(tree, self.param_dtype if self.cast_forward_inputs else None)

    def outputs(self, tree: Any) -> Any:
        """Cast the outputs of a module to `output_dtype`."""
        return _cast(tree, self.output_dtype)


@dataclass(frozen=True)
class OffloadPolicy:
    """OffloadPolicy(): torch's; sharded parameters stay on the device."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """CPUOffloadPolicy(pin_memory=True): torch's, with the same meaning.

    Sharded parameters, their gradients and the optimizer's state are kept in host memory, and the
    optimizer steps there. It changes nothing on a CPU mesh.

    Attributes:
        pin_memory: whether to use pinned memory, from which a GPU copies asynchronously.

    Communication: none; each gather copies this rank's part to the device, each reduction copies it
    back.
    """

    pin_memory: bool = True


def precision_of(policy: Any) -> MixedPrecisionPolicy:
    """Return our policy for one of a user: ours, torch's, or None."""
    if policy is None or isinstance(policy, MixedPrecisionPolicy):
        return policy or MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        **{field.name: getattr(policy, field.name) for field in fields(MixedPrecisionPolicy)}
    )


def offload_of(policy: Any) -> CPUOffloadPolicy | None:
    """Return our policy for one of a user: ours, torch's, or None, as for `OffloadPolicy()`."""
    pinned = getattr(policy, "pin_memory", None)
    return None if pinned is None else CPUOffloadPolicy(pinned)


def _cast(tree: Any, dtype: torch.dtype | None) -> Any:
    """Cast the floating tensors in a tree, also in dataclasses that are not registered."""
    if dtype is None:
        return tree

    def cast(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() else x

    def cast_leaf(x: Any) -> Any:
        return map_nested(cast, x) if isinstance(x, Tensor) or is_dataclass(x) else x

    return pytree.tree_map(cast_leaf, tree)
