"""Steps of one stage over microbatches with whole backwards, and with backwards in two parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardmesh as sm
from shardmesh.sharding.parallel.pipeline.split_backward import SplitBackward

ZERO_BUBBLE = ("F0", "F1", "I0", "I1", "W0", "W1")
LATE_WEIGHTS = ("F0", "I0", "F1", "I1", "F2", "W0", "I2", "W1", "W2")
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "embedding_dense_backward", "_grouped_mm"})


class Step(NamedTuple):
    """What a step has computed.

    Attributes:
        input_grads: of each microbatch, as they were after its I (or B); None for integers.
        grads: of the parameters, by name.
        products: the shapes of the matrix products in all I, and in all W.
    """

    input_grads: list[Tensor | None]
    grads: dict[str, Tensor | None]
    products: tuple[list[torch.Size], list[torch.Size]]


class Products(TorchDispatchMode):
    """Collects the shapes of the results of products, in the calling thread."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._opname in _PRODUCTS:
            self.shapes.append(out.shape)
        return out


def run_step(
    module: nn.Module,
    inputs: Sequence[Any],
    order: Sequence[str],
    *,
    split: bool,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    accumulates: bool = False,
) -> Step:
    """Run the actions of a schedule for one stage.

    Args:
        inputs: one for each microbatch; floating ones get a gradient.
        order: such as `ZERO_BUBBLE`.
        split: whether "I0" and "W0" are the two parts; else "I0" is the whole backward and "W0"
            nothing.
        forward: by default the module itself.
        accumulates: whether the step is inside of `sm.accumulate_grads()`.
    """
    forward = forward or (lambda module, x: module(x))
    leaves = [x.detach().clone() for x in inputs]
    for x in leaves:
        if x.is_floating_point():
            x.requires_grad_()
    input_grads: list[Tensor | None] = [None] * len(inputs)
    backwards: dict[int, SplitBackward] = {}
    outputs: dict[int, Any] = {}
    in_i, in_w = Products(), Products()
    with sm.accumulate_grads() if accumulates else nullcontext():
        for action in order:
            kind, i = action[0], int(action[1:])
            if kind == "F":
                backwards[i] = SplitBackward()
                with backwards[i].recording() if split else nullcontext():
                    outputs[i] = forward(module, leaves[i])
            elif kind == "I":
                y = outputs.pop(i)
                grad = seed_like(y, i)
                with in_i:
                    if split:
                        backwards[i].backward_input([y], [grad])
                    else:
                        torch.autograd.backward([y], [grad])
                input_grads[i] = whole(leaves[i].grad)
            elif split:
                with in_w:
                    backwards.pop(i).backward_weight()
    grads = {name: whole(x.grad) for name, x in module.named_parameters()}
    return Step(input_grads, grads, (in_i.shapes, in_w.shapes))


def seed_like(y: Any, i: int) -> Any:
    """Return the gradient of an output: other values for each element and each microbatch."""
    if y.ndim == 0:
        return None
    values = torch.arange(y.numel(), dtype=torch.float64, device=y.device).reshape(y.shape)
    grad = torch.cos(values + i).to(y.dtype)
    if not isinstance(y, sm.ShardedTensor):
        return grad
    return sm.device_put(grad, y.mesh, y.spec)


def whole(x: Any) -> Tensor | None:
    if x is None:
        return None
    return x.detach().full_tensor() if isinstance(x, sm.ShardedTensor) else x.detach().clone()


def assert_same_bits(step: Step, expected: Step) -> None:
    """Compare all gradients, bit by bit."""
    for i, (x, y) in enumerate(zip(step.input_grads, expected.input_grads, strict=True)):
        _assert_equal(f"gradient of input {i}", x, y)
    assert step.grads.keys() == expected.grads.keys()
    for name, x in step.grads.items():
        _assert_equal(name, x, expected.grads[name])


def _assert_equal(name: str, x: Tensor | None, y: Tensor | None) -> None:
    assert (x is None) == (y is None), f"{name}: {x} and {y}"
    if x is None or y is None:
        return
    assert (x.dtype, x.shape) == (y.dtype, y.shape), name
    assert torch.equal(x, y), f"{name} differs by {(x - y).abs().max().item()}"
