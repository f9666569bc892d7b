"""The format of quantized records, which the definition and the kernels share."""

from __future__ import annotations

import torch

FORMATS = ("int8", "fp8")
BLOCK = 128
RECORD_ALIGNMENT = 16  # bytes
LARGEST = {"int8": 126.0, "fp8": 416.0}  # of the codes of finite numbers
SMALLEST_SCALE = 2.0**-126

DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})


def record_bytes(elements: int, block: int = BLOCK) -> int:
    """`record_bytes(elements, block) -> int`: bytes of the record of a box with this many elements.

    >>> record_bytes(128), record_bytes(129), record_bytes(0)
    (144, 272, 0)
    """
    blocks = -(-elements // block)
    return -(-blocks * (block + 4) // RECORD_ALIGNMENT) * RECORD_ALIGNMENT
