"""A dispatch mode that records the names of operators."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class RecordedOperators(TorchDispatchMode):
    """Record the names of the operators of a namespace, such as "aten", or "c10d" for torch's
    collectives.

    Attributes:
        names: in the order of the calls.
    """

    def __init__(self, namespace: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self._namespace = namespace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == self._namespace:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))
