"""Marks of modules that the library has laid out: for its own code, and for that of others, which would lay them out again.

`accelerate` leaves a model alone that has `_is_accelerate_prepared`, and so does the `Trainer` of Hugging Face. torch's
`DistributedDataParallel` asks a module which parameters to leave out, before anything else, and is told that it is not needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from torch import nn

_PREPARED = "_shardmesh_prepared"  # under this name a prepared module, and each inside it, says that it is one


class _AlreadyParallel:
    """Stands where DistributedDataParallel looks for names of parameters."""

    def __iter__(self) -> Iterator[str]:
        _refuse_to_be_wrapped()


def _refuse_to_be_wrapped() -> NoReturn:
    raise RuntimeError(
        "this module is parallel already, by shardmesh: call it as it is, without DistributedDataParallel. For data parallelism with "
        "whole parameters make it with sm.data_parallel(model, mesh), which sums gradients itself"
    )


def prepare(module: nn.Module) -> None:
    """Mark a module and those inside it as laid out by the library."""
    for inner in module.modules():
        inner.__dict__[_PREPARED] = True
    module.__dict__["_is_accelerate_prepared"] = True
    module.__dict__["_ddp_params_and_buffers_to_ignore"] = _AlreadyParallel()


def is_prepared(x: Any) -> bool:
    """Return whether this is a module that the library has laid out, or one inside such a module."""
    return isinstance(x, nn.Module) and _PREPARED in x.__dict__
