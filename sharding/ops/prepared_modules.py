"""Mark modules that the library has laid out, so that other libraries do not lay them out again.

`accelerate` and the `Trainer` of Hugging Face leave a model alone that has
`_is_accelerate_prepared`. torch's `DistributedDataParallel` first asks a module which parameters to
ignore; a prepared module raises there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ...mesh.device_mesh import DeviceMesh
from .plain_operands import accept_plain_operands


class _AlreadyParallel:
    """Raise when DistributedDataParallel reads the names of the parameters to ignore.

    Copies, those in other processes as well, let plain operands count as replicated on their mesh.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        accept_plain_operands(mesh)

    def __reduce__(self) -> tuple[Any, ...]:
        return _AlreadyParallel, (self._mesh,)

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError(
            "this module is parallel already, by shardmesh: call it as it is, without "
            "DistributedDataParallel. For data parallelism with whole parameters make it with "
            "sm.parallel.data_parallel(model, mesh), which sums gradients itself"
        )


def prepare(module: nn.Module, mesh: DeviceMesh) -> None:
    """Mark a module as laid out on a mesh, and let plain operands count as replicated there."""
    module.__dict__["_is_accelerate_prepared"] = True
    module.__dict__["_ddp_params_and_buffers_to_ignore"] = _AlreadyParallel(mesh)
