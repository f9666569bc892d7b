"""Gradients inside a transform, by `torch.func.vjp`, which can be batched and carry tangents.

Outside of transforms, gradients are those of plain autograd (`gradients.py`). Inside one, a tensor
cannot be made to require grad.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...autograd.named_axes import current_axis_env
from ...autograd.transforms import on_own_level
from ...tensor.autograd import backward
from ..types.type_checker import untracked
from .parts import Results, with_part

Run = Callable[[list[Any]], tuple[Sequence[Tensor], Any]]


class Pullback:
    """A function of local parts that has run once, and its gradients for any number of seeds.

    Args:
        run: takes tensors, and returns the outputs to differentiate and the value, any tree.
        leaves: the tensors that it takes.

    Attributes:
        outs: the outputs to differentiate.
        value: the value.
    """

    def __init__(self, run: Run, leaves: Sequence[Tensor]) -> None:
        self._leaves = leaves
        kept: list[Results] = []

        def inside(*parts: Tensor) -> Any:
            outs, value = run([with_part(x, part) for x, part in zip(leaves, parts, strict=True)])
            kept[:] = Results.of([backward.summable(out) for out in outs]), Results.of(value)
            return kept[0].parts, kept[1].parts

        parts = Results.of(list(leaves)).parts
        found: Any = torch.func.vjp(partial(on_own_level, inside), *parts, has_aux=True)
        outs, self._back, values = found
        self.outs: list[Tensor] = kept[0].with_parts(outs)
        self.value = kept[1].with_parts(values)

    def __call__(self, seeds: Sequence[Any]) -> list[Any]:
        """Return the gradients of the leaves, in their layouts.

        Args:
            seeds: for each of `outs`; None for the default seed of a scalar.
        """
        with untracked() if current_axis_env() is not None else nullcontext():
            parts = tuple(_start(out, seed) for out, seed in zip(self.outs, seeds, strict=True))
            return list(backward.reduce_to_inputs(self._leaves, self._back(parts)))


def _start(out: Any, seed: Any) -> Tensor:
    started = backward._seed(out, seed)
    return torch.ones_like(out) if started is None else started
