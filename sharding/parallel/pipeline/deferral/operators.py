"""Operators that compute the gradients of their inputs in one backward, and those of their weights
in a later one.

    y = f(x, weight)
    backward for the inputs     grad_x = grad_y @ weight.t()             x and grad_y are kept
    backward for the weights    grad_weight = x.t() @ grad_y             they are freed

The formulas are those of torch's own derivatives, also in the strides of operands, so that
gradients have the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ....autograd.engine_hooks import save_at_once, take_saved
from .weights import WeightGrad, Weights


class Phase:
    """Which part of a backward is running.

    Attributes:
        is_input: whether it is the one for the inputs.
        may_recompute: whether backward may run operators of the forward again: the forward ran
            under saved-tensor hooks, or in part without gradients, as a checkpoint does.
    """

    def __init__(self) -> None:
        self.is_input = False
        self.may_recompute = False

    def check(self) -> None:
        """Raise if the running backward is not the one for the inputs.

        Raises:
            RuntimeError: gradients of a recorded forward are computed by something else, or are to
                be differentiated again.
        """
        if not self.is_input:
            raise RuntimeError(
                "a gradient of a forward inside of SplitBackward.recording() was computed outside "
                "of its backward_input(): run the forward without recording() for "
                "torch.autograd.grad and backward()"
            )
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a backward in two parts has no second derivatives (create_graph=True): run the "
                "forward without SplitBackward.recording()"
            )


class Operator(NamedTuple):
    """An operator of an input and a weight, and its derivatives.

    Attributes:
        forward: (input, weight, bias) -> result.
        input_grad: (grad of the result, input's form, weight) -> gradient of the input.
        weight_grad: (grad of the result, input, weight's form) -> gradient of the weight.
        bias_grad: (grad of the result, input's form) -> gradient of the bias, before it is summed
            to the bias' shape.
    """

    forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    input_grad: Callable[[Tensor, Form, Tensor], Tensor]
    weight_grad: Callable[[Tensor, Tensor, Form], Tensor]
    bias_grad: Callable[[Tensor, Form], Tensor] | None = None


class Form(NamedTuple):
    """The shape and strides of a tensor whose memory is not kept."""

    shape: torch.Size
    stride: tuple[int, ...]
    is_contiguous: bool

    @classmethod
    def of(cls, x: Tensor) -> Form:
        return cls(x.shape, x.stride(), x.is_contiguous())

    @property
    def is_column_major(self) -> bool:
        """Whether torch computes the gradient of this operand of a matmul transposed."""
        return self.stride[-2] == 1 and self.stride[-1] == self.shape[-2]

    @property
    def transposed(self) -> Form:
        *first, rows, columns = self.shape
        *strides, row, column = self.stride
        shape = torch.Size((*first, columns, rows))
        return Form(shape, (*strides, column, row), False)


def defer(
    operator: Operator,
    weights: Weights,
    phase: Phase,
    x: Tensor,
    weight: Tensor,
    grad: WeightGrad,
    bias: Tensor | None = None,
) -> Tensor:
    """Return an operator's result; backward for the inputs defers the gradient of the weight.

    Args:
        x: the input; with or without gradient.
        weight, grad: a weight, see `Weights.is_weight`, and its gradient from this use.
        bias: a weight or any other tensor.
    """
    bias_weight_grad = None
    if bias is not None and bias.requires_grad and weights.is_weight(bias):
        bias_weight_grad = weights.add_use(bias)
        bias = bias.detach()
    call = _Call(operator, phase, weight, grad, bias_weight_grad)
    return _Deferred.apply(call, grad.anchor, x, bias)  # type: ignore[return-value]


class _Call(NamedTuple):
    operator: Operator
    phase: Phase
    weight: Tensor
    weight_grad: WeightGrad
    bias_weight_grad: WeightGrad | None


class _Deferred(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, _: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        weight = call.weight
        ctx.set_materialize_grads(False)
        ctx.operator, ctx.phase, ctx.weight_grad = call.operator, call.phase, call.weight_grad
        ctx.bias_weight_grad = call.bias_weight_grad
        ctx.bias_shape = None if bias is None else bias.shape
        ctx.x_form, ctx.weight_form = Form.of(x), Form.of(weight)
        save_at_once(ctx, x, weight.detach() if ctx.needs_input_grad[2] else None)
        return call.operator.forward(x, weight, bias)  # the weight still requires grad, as in torch

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ctx.phase.check()
        (grad,) = grads
        if grad is None:
            return None, None, None, None
        operator: Operator = ctx.operator
        x, weight = take_saved(ctx)
        ctx.weight_grad.compute = partial(operator.weight_grad, grad, x, ctx.weight_form)  # type: ignore[arg-type]
        x_grad = None if weight is None else operator.input_grad(grad, ctx.x_form, weight)
        bias_grad = None
        bias_weight_grad: WeightGrad | None = ctx.bias_weight_grad
        if ctx.needs_input_grad[3] or bias_weight_grad is not None:
            bias_grad = operator.bias_grad(grad, ctx.x_form).sum_to_size(ctx.bias_shape)  # type: ignore[misc]
        if bias_weight_grad is not None:
            bias_weight_grad.compute = partial(_same, bias_grad)
            bias_grad = None
        return None, None, x_grad, bias_grad


def use(weights: Weights, phase: Phase, weight: Tensor) -> Tensor:
    """Return a weight as an operand of any operator, which computes its gradient in the backward
    for the inputs. It is added to the weight's in the backward for the weights.
    """
    grad = weights.add_use(weight)
    return _Used.apply(grad, phase, grad.anchor, weight.detach())  # type: ignore[return-value]


class _Used(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_grad: WeightGrad, phase: Phase, _: Tensor, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.weight_grad, ctx.phase = weight_grad, phase
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.phase.check()
        if grads[0] is not None:
            ctx.weight_grad.compute = partial(_same, grads[0])
        return None, None, None, None


def _same(x: Any) -> Tensor:
    return x


# -- matrix products -------------------------------------------------------------------------------


def _left_grad(grad: Tensor, left: Form, right: Tensor) -> Tensor:
    """Return the gradient of `left` in `left @ right`, of matrices or batches of them."""
    if left.is_column_major and len(left.shape) == 2:
        return (right @ grad.mT).mT
    return grad @ right.mT


def _right_grad(grad: Tensor, left: Tensor, right: Form) -> Tensor:
    """Return the gradient of `right` in `left @ right`, of matrices or batches of them."""
    if right.is_column_major and len(right.shape) == 2:
        return (grad.mT @ left).mT
    return left.mT @ grad


def _rows(x: Tensor) -> Tensor:
    """Return a tensor as a matrix of its last dim, as torch folds the others in a product."""
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _folded_left_grad(grad: Tensor, left: Form, right: Tensor) -> Tensor:
    """Return the gradient of `left` in `left @ right`, where `right` is a matrix."""
    if len(left.shape) == 2:
        return _left_grad(grad, left, right)
    return (_rows(grad) @ right.mT).reshape(left.shape)


def _linear_weight_grad(grad: Tensor, x: Tensor, weight: Form) -> Tensor:
    return _right_grad(_rows(grad), _rows(x), weight.transposed).mT


def _linear_bias_grad(grad: Tensor, x: Form) -> Tensor:
    return _rows(grad) if x.is_contiguous else grad  # else torch adds the bias after the product


LINEAR = Operator(
    F.linear,
    lambda grad, x, weight: _folded_left_grad(grad, x, weight.mT),
    _linear_weight_grad,
    _linear_bias_grad,
)
ROWS_TIMES_WEIGHT = Operator(
    lambda x, weight, _: x @ weight,
    _folded_left_grad,
    lambda grad, x, weight: _right_grad(_rows(grad), _rows(x), weight),
)
WEIGHT_TIMES_COLUMNS = Operator(
    lambda x, weight, _: weight @ x,
    lambda grad, x, weight: _right_grad(grad, weight, x),
    lambda grad, x, weight: _left_grad(grad, weight, x),
)
ADDMM = Operator(
    lambda x, weight, bias: torch.addmm(bias, x, weight),  # type: ignore[arg-type]
    _left_grad,
    _right_grad,
    lambda grad, _: grad,
)
BATCHES_TIMES_WEIGHT = Operator(lambda x, weight, _: torch.bmm(x, weight), _left_grad, _right_grad)


def grouped_mm(offsets: Tensor) -> Operator:
    """Return the product of consecutive groups of rows with a matrix for each group.

    Args:
        offsets: where each group of rows ends.
    """

    def input_grad(grad: Tensor, x: Form, weight: Tensor) -> Tensor:
        if x.is_column_major:
            return F.grouped_mm(weight, grad.mT, offs=offsets).mT
        return F.grouped_mm(grad, weight.mT, offs=offsets)

    def weight_grad(grad: Tensor, x: Tensor, weight: Form) -> Tensor:
        if weight.is_column_major:
            return F.grouped_mm(grad.mT, x, offs=offsets).mT
        return F.grouped_mm(x.mT, grad, offs=offsets)

    return Operator(
        lambda x, weight, _: F.grouped_mm(x, weight, offs=offsets), input_grad, weight_grad
    )


# -- embeddings ------------------------------------------------------------------------------------


def embedding(padding_idx: int | None, scale_grad_by_freq: bool) -> Operator:
    """Return the lookup of rows of the weight, at the indices that are its input."""

    def forward(indices: Tensor, weight: Tensor, _: Tensor | None) -> Tensor:
        return F.embedding(indices, weight, padding_idx, scale_grad_by_freq=scale_grad_by_freq)

    def input_grad(grad: Tensor, _: Form, __: Tensor) -> Tensor:
        raise AssertionError("indices have no gradient")

    def weight_grad(grad: Tensor, indices: Tensor, weight: Form) -> Tensor:
        rows = weight.shape[0]
        padding = -1 if padding_idx is None else padding_idx % rows
        return torch.ops.aten.embedding_backward(
            grad, indices, rows, padding, scale_grad_by_freq, False
        )

    return Operator(forward, input_grad, weight_grad)
