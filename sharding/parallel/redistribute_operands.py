"""Redistribution of a layer's operands to the layouts that it needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..layout.layout import Layout
from ..tensor.redistribute import redistribute_many


def redistribute_operands(tensors: Sequence[Any], targets: Sequence[Layout]) -> list[Any]:
    """Redistribute tensors to the target layouts; one with its layout already is unchanged.

    Communication: that of `redistribute_many`, for the others.
    """
    moving = [
        i
        for i, (x, target) in enumerate(zip(tensors, targets, strict=True))
        if x._layout is not target
    ]
    found = list(tensors)
    if moving:
        moved = redistribute_many([tensors[i] for i in moving], [targets[i].spec for i in moving])
        for i, x in zip(moving, moved, strict=True):
            found[i] = x
    return found
