"""Operators whose weight gradients are computed in a later backward than those of their inputs.

    y = f(x, weight)
    backward for the inputs     grad_x = grad_y @ weight.t()             x and grad_y are kept
    backward for the weights    grad_weight = x.t() @ grad_y             they are freed

Gradients of inputs are computed by torch's own nodes. The formulas of weight gradients are those of
torch's derivatives, also in the strides of operands, so that gradients have the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ....autograd.engine_hooks import SavedTensor
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
        weight_grad: (grad of the result, input, weight's form) -> gradient of the weight.
        bias_grad: (grad of the result, input's form) -> gradient of the bias, before it is summed
            to the bias' shape.
    """

    forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]
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
    def is_row_major(self) -> bool:
        """Whether that holds for the transposed matrix, as the weight of `linear` is used."""
        return self.stride[-1] == 1 and self.stride[-2] == self.shape[-1]


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
    bias_grad = None
    if bias is not None and bias.requires_grad and weights.is_weight(bias):
        bias_grad = weights.add_use(bias)
        bias = bias.detach()
    call = _Call(operator, phase, grad, bias_grad, x, weight, bias)
    if x.requires_grad:
        return _with_hook(call, x, weight, bias)
    anchor = weights.anchor(weight.device)
    return _Deferred.apply(call, anchor, x, weight.detach(), bias)  # type: ignore[return-value]


class _Call:
    """A call of an operator whose weight gradients are deferred, without its operands."""

    __slots__ = (
        "_bias_shape",
        "_x_form",
        "bias_grad",
        "operator",
        "phase",
        "weight_form",
        "weight_grad",
    )

    def __init__(
        self,
        operator: Operator,
        phase: Phase,
        weight_grad: WeightGrad,
        bias_grad: WeightGrad | None,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> None:
        self.operator, self.phase = operator, phase
        self.weight_grad, self.bias_grad = weight_grad, bias_grad
        self.weight_form = Form.of(weight)
        self._x_form, self._bias_shape = (None, None) if bias is None else (Form.of(x), bias.shape)

    def defer(self, grad: Tensor, x: Tensor) -> None:
        """Defer the gradients of the weight, and of a bias that is one.

        Args:
            grad: of the result, or of the matrix that it is a view of.
            x: the input, without its graph.
        """
        self.weight_grad.compute = partial(self.operator.weight_grad, grad, x, self.weight_form)
        if self.bias_grad is not None:
            self.bias_grad.compute = partial(_same, self.grad_of_bias(grad))

    def grad_of_bias(self, grad: Tensor) -> Tensor:
        return self.operator.bias_grad(grad, self._x_form).sum_to_size(self._bias_shape)  # type: ignore[misc,arg-type]


def _with_hook(call: _Call, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the result, with torch's own backward for the input.

    A hook of its node defers what concerns the weight.
    """
    saved = SavedTensor(x)
    result = call.operator.forward(x, weight.detach(), bias)
    # A view gets another node where it is written; that of its base stays.
    whole = result._base if result._is_view() else result

    def defer_grads(grads: Sequence[Tensor | None]) -> None:
        call.phase.check()
        if grads[0] is not None:
            call.defer(grads[0], saved.take())

    whole.grad_fn.register_prehook(defer_grads)  # type: ignore[union-attr]
    return result


class _Deferred(torch.autograd.Function):
    """The operator of an input without gradient; its result requires one because of the anchor."""

    @staticmethod
    def forward(
        ctx: Any, call: _Call, _: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.saved = call, SavedTensor(x)
        return call.operator.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        call: _Call = ctx.call
        call.phase.check()
        (grad,) = grads
        if grad is None:
            return None, None, None, None, None
        call.defer(grad, ctx.saved.take())
        bias_grad = call.grad_of_bias(grad) if ctx.needs_input_grad[4] else None
        return None, None, None, None, bias_grad


def use(weights: Weights, phase: Phase, weight: Tensor) -> Tensor:
    """Return a weight as an operand of any operator.

    The operator computes its gradient in the backward for the inputs; it is added to the weight's
    in the backward for the weights.
    """
    grad = weights.add_use(weight)
    anchor = weights.anchor(weight.device)
    return _Used.apply(grad, phase, anchor, weight.detach())  # type: ignore[return-value]


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


def _linear_weight_grad(grad: Tensor, x: Tensor, weight: Form) -> Tensor:
    if weight.is_row_major:
        return _rows(grad).mT @ _rows(x)
    return (_rows(x).mT @ _rows(grad)).mT


def _linear_bias_grad(grad: Tensor, x: Form) -> Tensor:
    return _rows(grad) if x.is_contiguous else grad  # else torch adds the bias after the product


def _matmul(x: Tensor, weight: Tensor, _: Tensor | None) -> Tensor:
    """Return `x @ weight`, a product of matrices.

    All dims of `x` but the last are folded, as torch does where the weight requires a gradient.
    """
    if x.ndim == 2 or x.is_contiguous():
        return x @ weight
    return (_rows(x) @ weight).view(*x.shape[:-1], weight.shape[1])


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if x.ndim == 2 or x.is_contiguous():
        return F.linear(x, weight, bias)
    product = _matmul(x, weight.mT, None)
    return product if bias is None else product + bias


LINEAR = Operator(_linear, _linear_weight_grad, _linear_bias_grad)
ROWS_TIMES_WEIGHT = Operator(
    _matmul,
    lambda grad, x, weight: _right_grad(_rows(grad), _rows(x), weight),
)
WEIGHT_TIMES_COLUMNS = Operator(
    lambda x, weight, _: weight @ x,
    lambda grad, x, weight: _left_grad(grad, weight, x),
)
ADDMM = Operator(
    lambda x, weight, bias: torch.addmm(bias, x, weight),  # type: ignore[arg-type]
    _right_grad,
    lambda grad, _: grad,
)
BATCHES_TIMES_WEIGHT = Operator(lambda x, weight, _: torch.bmm(x, weight), _right_grad)


def grouped_mm(offsets: Tensor) -> Operator:
    """Return the product of consecutive groups of rows with a matrix for each group.

    Args:
        offsets: where each group of rows ends.
    """

    def weight_grad(grad: Tensor, x: Tensor, weight: Form) -> Tensor:
        if weight.is_column_major:
            return F.grouped_mm(grad.mT, x, offs=offsets).mT
        return F.grouped_mm(x.mT, grad, offs=offsets)

    return Operator(lambda x, weight, _: F.grouped_mm(x, weight, offs=offsets), weight_grad)


# -- embeddings ------------------------------------------------------------------------------------


def embedding(padding_idx: int | None, scale_grad_by_freq: bool) -> Operator:
    """Return the lookup of rows of the weight, at the indices that are its input."""

    def forward(indices: Tensor, weight: Tensor, _: Tensor | None) -> Tensor:
        return F.embedding(indices, weight, padding_idx, scale_grad_by_freq=scale_grad_by_freq)

    def weight_grad(grad: Tensor, indices: Tensor, weight: Form) -> Tensor:
        rows = weight.shape[0]
        padding = -1 if padding_idx is None else padding_idx % rows
        return torch.ops.aten.embedding_backward(
            grad, indices, rows, padding, scale_grad_by_freq, False
        )

    return Operator(forward, weight_grad)
