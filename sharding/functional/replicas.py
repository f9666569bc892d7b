"""Compare the arguments and results of a mapped function between ranks.

Between those that should hold the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...mesh.device_mesh import DeviceMesh
from ..autograd.engine_hooks import innermost
from ..layout.layout import Layout
from ..replicas.bit_hash import bit_hash
from ..replicas.compare import compare
from ..replicas.leaves import ReplicaLeaf, replica_ranks
from ..tensor.sharded_tensor import local_of


def check_replicas(named: Sequence[tuple[str, Any, Layout | None]], own: DeviceMesh) -> None:
    """Compare each tensor between the ranks that should hold the same part of it.

    Args:
        named: the name of a value, this rank's part, and its layout; None for a value that is not a
            tensor.
        own: the mesh of the manual axes.

    Raises: ReplicaError, on every rank; the index it names is one in a rank's part, which is what
    the function sees.

    Communication: as `compare`.
    """
    copies = [
        ReplicaLeaf(path, str(layout), local_of(x), replica_ranks(own, layout.spec))
        for path, x, layout in named
        if layout is not None and isinstance(x, Tensor)
    ]
    compare("", copies, own.group(own.axis_names))


_SAMPLE = 1 << 20  # elements of a tensor that are compared when a signature is first seen


def sampled_digest(x: Tensor) -> int | None:
    """Return a hash of evenly spread elements, few enough to be cheap.

    None on the meta device, which has no values.
    """
    flat = innermost(local_of(x)).detach().reshape(-1)  # the values of all examples
    return None if flat.is_meta else int(bit_hash(flat[:: max(1, flat.numel() // _SAMPLE)]))
