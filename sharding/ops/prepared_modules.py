"""Marks on modules that the library has laid out.

By them neither its own code nor other libraries lay them out again.

`accelerate` and the `Trainer` of Hugging Face leave a model alone that has
`_is_accelerate_prepared`. torch's `DistributedDataParallel` first asks a module which parameters to
ignore; a prepared module raises there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

_PREPARED = "_shardmesh_prepared"  # attribute of a prepared module and of each module inside it


class _AlreadyParallel:
    """Raise when DistributedDataParallel reads the names of the parameters to ignore."""

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError(
            "this module is parallel already, by shardmesh: call it as it is, without "
            "DistributedDataParallel. For data parallelism with whole parameters make it with "
            "sm.parallel.data_parallel(model, mesh), which sums gradients itself"
        )


def prepare(module: nn.Module) -> None:
    """Mark a module and those inside it as laid out by the library."""
    for inner in module.modules():
        inner.__dict__[_PREPARED] = True
    module.__dict__["_is_accelerate_prepared"] = True
    module.__dict__["_ddp_params_and_buffers_to_ignore"] = _AlreadyParallel()


def is_prepared(x: Any) -> bool:
    """Return whether the library has laid out this module, or one that it is inside of."""
    return isinstance(x, nn.Module) and _PREPARED in x.__dict__


def adapts_prepared(x: Any) -> bool:
    """Return whether this is an adapter, as peft's, of a module that the library has laid out."""
    return isinstance(x, nn.Module) and is_prepared(x._modules.get("base_layer"))
