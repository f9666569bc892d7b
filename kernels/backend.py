"""Which form of a kernel runs: Triton's on an accelerator, torch operations everywhere else.

Every kernel of this folder exists twice: `name.py` has it in torch operations, which is its definition, and beside it
`name_triton.py` for accelerators. Nothing imports Triton before the first tensor that wants it.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

_WITH_KERNELS = frozenset({"cuda"})  # ROCm's devices are "cuda" to torch, too


class _Chosen(threading.local):
    """What `using_kernels` says in this thread; None outside of it."""

    use: bool | None = None


_chosen = _Chosen()


def wants_kernels(device: torch.device) -> bool:
    """`wants_kernels(device) -> bool`: whether what lies on this device is for Triton."""
    use = _chosen.use
    return _by_default(device) if use is None else use


@cache
def _by_default(device: torch.device) -> bool:
    return device.type in _WITH_KERNELS and _has_triton()


@contextmanager
def using_kernels(use: bool = True) -> Iterator[None]:
    """Inside the block kernels run for tensors of every device, or for none; in this thread.

    For tests and measurements: on a CPU this takes Triton's interpreter (TRITON_INTERPRET=1 in the environment), thousands
    of times slower than torch.
    """
    before = _chosen.use
    _chosen.use = use
    try:
        yield
    finally:
        _chosen.use = before


@cache
def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        warnings.warn(
            "triton is not installed, so boxes are packed, reduced and quantised by torch operations, which pass over memory "
            "more often; pip install triton",
            stacklevel=2,
        )
        return False
    return True
