"""`debug.print`: print values where the program computes them, also in a graph."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...mesh.comm.thread_context import thread_context
from ..layout.layout import Layout
from ..tensor.sharded_tensor import ShardedTensor


def print(text: str, *values: Any, **named: Any) -> None:
    """Print a text with values in it, in each call.

    Inside `sm.jit` it is a part of the graph. Python's `print` runs only while the graph is
    recorded, and reading a tensor ends it.

    Each rank prints. A tensor of one element is formatted as a number. A `ShardedTensor` that is
    replicated is shown as a tensor; of one that is split or pending, this rank's part, and the
    layout. Values of gradient histories are printed, and the histories are not changed.

    Args:
        text: as for `str.format`; braces that are no fields are doubled.
        values, named: what stands in the fields: tensors, numbers and other objects. Objects that
            are no tensors and not computed in the graph are constants of it.

    Communication: none.

    Example:
        >>> @sm.jit
        ... def step(x):
        ...     sm.debug.print("loss {:.3f}", loss := model(x).mean())
        ...     loss.backward()
    """
    leaves = [*values, *named.values()]
    layouts = [x._layout if isinstance(x, ShardedTensor) else None for x in leaves]
    locals_ = [x._local if isinstance(x, ShardedTensor) else x for x in leaves]
    locals_ = [x.detach() if isinstance(x, Tensor) else x for x in locals_]
    show = _Show(text, len(values), tuple(named), layouts)
    if thread_context.recorder is None:
        show(*locals_)
    else:
        thread_context.recorder.effect(show, locals_)


class _Show:
    """Prints values: the target of a node.

    Args:
        text: the format.
        count: of the values without a name.
        names: of the others.
        layouts: those of the sharded ones.
    """

    def __init__(
        self, text: str, count: int, names: Sequence[str], layouts: Sequence[Layout | None]
    ) -> None:
        self.text, self.count, self.names, self.layouts = text, count, names, layouts
        self.__name__ = "print"

    def __call__(self, *values: Any) -> None:
        shown = [_value_text(x, layout) for x, layout in zip(values, self.layouts, strict=True)]
        named = dict(zip(self.names, shown[self.count :], strict=True))
        sys.stdout.write(self.text.format(*shown[: self.count], **named) + "\n")


def _value_text(x: Any, layout: Layout | None) -> Any:
    if not isinstance(x, Tensor) or x.is_meta:
        return x
    with torch._C._DisableTorchDispatch():
        if layout is not None and not layout.is_fully_replicated:
            return f"{x} (this rank's part of {layout})"
        return x.item() if x.numel() == 1 else x
