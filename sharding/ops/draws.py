"""Which calls of operators draw random numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def draws_numbers(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of an operator draws from torch's generators.

    Torch marks attention as random; without dropout it draws nothing.
    """
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for i, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            dropout = args[i] if i < len(args) else kwargs.get(argument.name, 0.0)
            return not isinstance(dropout, (int, float)) or dropout != 0
    return True
