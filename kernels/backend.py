"""Choose between Triton kernels, on accelerators, and torch operations, everywhere else.

Every kernel of this folder exists twice: `name.py` defines it in torch operations, and
`name_triton.py` next to it has it for accelerators. Triton is imported when the first tensor needs
it.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

_WITH_KERNELS = frozenset({"cuda"})  # ROCm's devices are "cuda" to torch, too


class _Override(threading.local):
    """The argument of the innermost `using_kernels` in this thread; None outside."""

    use: bool | None = None


_override = _Override()


def wants_kernels(device: torch.device) -> bool:
    """`wants_kernels(device) -> bool`: whether tensors of this device use Triton kernels."""
    use = _override.use
    return _by_default(device) if use is None else use


@cache
def _by_default(device: torch.device) -> bool:
    return device.type in _WITH_KERNELS and _has_triton()


@contextmanager
def using_kernels(use: bool = True) -> Iterator[None]:
    """Use kernels for tensors of every device, or of none, inside the block and in this thread.

    For tests and measurements: on a CPU this needs Triton's interpreter (TRITON_INTERPRET=1 in the
    environment), which is thousands of times slower than torch.
    """
    before = _override.use
    _override.use = use
    try:
        yield
    finally:
        _override.use = before


@cache
def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        warnings.warn(
            "triton is not installed, so boxes are packed, reduced and quantized by torch "
            "operations, which read and write memory more often; pip install triton",
            stacklevel=2,
        )
        return False
    return True
