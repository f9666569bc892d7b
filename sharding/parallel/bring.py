"""Operands of a layer, brought to where it needs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..layout.layout import Layout
from ..tensor.redistribute import redistribute_many


def bring(tensors: Sequence[Any], targets: Sequence[Layout]) -> list[Any]:
    """The tensors laid out so; those that are already, as they are, not copied.

    Communication: as `redistribute_many`, of the others.
    """
    moving = [i for i, (x, target) in enumerate(zip(tensors, targets, strict=True)) if x._layout is not target]
    found = list(tensors)
    if moving:
        moved = redistribute_many([tensors[i] for i in moving], [targets[i].spec for i in moving])
        for i, x in zip(moving, moved, strict=True):
            found[i] = x
    return found
