"""Gradient clipping for sharded and plain parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from .norms import check_reduced, checked_ord, total_norm
from .tally import tally_of

Tensors = Tensor | Iterable[Tensor]


@torch.no_grad()
def get_total_norm(
    tensors: Tensors,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """get_total_norm(tensors) -> the norm of all elements: a plain 0-d tensor, alike on all ranks.

    `torch.nn.utils.get_total_norm` for tensors of any layouts, on any meshes, and plain ones, which
    must be the same on every rank.

    Args:
        tensors: as for torch.
        norm_type: 2, any other positive number, or math.inf.
        error_if_nonfinite: raise if the norm is infinite or NaN.
        foreach: accepted for compatibility; `foreach` operators are always used.

    Returns:
        In the dtype of the tensors, at least float32. On a rank outside all meshes: NaN.

    Raises:
        ValueError: on every rank, a tensor that is still pending; a `norm_type` that is not
            positive.
        RuntimeError: on every rank that knows the norm, as `error_if_nonfinite` says.

    Communication: one all_reduce of 8 bytes over the axes that split one of them (over the ranks of
        all meshes, where there are several; 16 bytes for the infinity norm); none if nothing is
        split.

    Example:
        >>> sm.training.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    """
    ord = checked_ord("get_total_norm", norm_type)
    tensor_list = _as_list(tensors)
    check_reduced("get_total_norm", {f"tensors[{i}]": x for i, x in enumerate(tensor_list)})
    return _total("get_total_norm", tensor_list, ord, error_if_nonfinite)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensors | nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """clip_grad_norm_(parameters, max_norm) -> the norm of all gradients; then they are scaled in
    place to at most `max_norm`.

        rank 0   grads [3 .]        norm 5 on both       [.6  . ]
        rank 1   grads [. 4]   ->   one all_reduce  ->   [ . .8 ]      max_norm=1

    `torch.nn.utils.clip_grad_norm_` also works on sharded parameters, with a collective for each
    layout of gradients and one at the end; this function needs one in total.

    Args:
        parameters: as for torch, or a module. Sharded on any meshes, or plain with the same
            gradients on every rank. Parameters without a gradient are skipped.
        max_norm: the maximum norm; gradients are multiplied by min(max_norm / (norm + 1e-6), 1), as
            in torch.
        norm_type, error_if_nonfinite: as for `get_total_norm`.
        foreach: as for `get_total_norm`.

    Returns:
        A plain 0-d tensor, the same on every rank; NaN on a rank outside all meshes.

    Raises:
        ValueError: on every rank, gradients that are still pending, as inside `accumulate_grads()`;
            no gradient is changed. Clip after the block.
        RuntimeError: on every rank that knows the norm, as `error_if_nonfinite` says; no gradient
            is changed.

    Communication: as `get_total_norm`.

    Example:
        >>> loss.backward()
        >>> norm = sm.training.clip_grad_norm_(model.parameters(), 1.0)
        >>> optimizer.step()
    """
    ord = checked_ord("clip_grad_norm_", norm_type)
    parameter_list = _parameters(parameters)
    grads = list(_grads("clip_grad_norm_", parameter_list).values())
    total = _total("clip_grad_norm_", grads, ord, error_if_nonfinite)
    _scale(grads, (float(max_norm) / (total + 1e-6)).clamp(max=1.0))
    return total


@torch.no_grad()
def clip_grad_value_(
    parameters: Tensors | nn.Module, clip_value: float, foreach: bool | None = None
) -> None:
    """clip_grad_value_(parameters, clip_value): clamp every element of the gradients to
    [-clip_value, clip_value], in place.

    Args:
        parameters: as for `clip_grad_norm_`.
        clip_value: the largest absolute value.
        foreach: as for torch.

    Raises:
        ValueError: on every rank, gradients that are still pending; no gradient is changed.

    Communication: none.

    Example:
        >>> sm.training.clip_grad_value_(model.parameters(), 0.5)
    """
    parameter_list = _parameters(parameters)
    _grads("clip_grad_value_", parameter_list)
    nn.utils.clip_grad_value_(parameter_list, clip_value, foreach)


# --------------------------------------------------------------------------------------------------


def _as_list(tensors: Tensors) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _parameters(parameters: Tensors | nn.Module) -> list[Tensor]:
    return (
        list(parameters.parameters()) if isinstance(parameters, nn.Module) else _as_list(parameters)
    )


def _grads(name: str, parameters: list[Tensor]) -> Mapping[str, Tensor]:
    """Return the existing gradients by name. Raises: ValueError if one is pending."""
    grads = {
        f"parameters[{i}].grad": p.grad for i, p in enumerate(parameters) if p.grad is not None
    }
    check_reduced(name, grads)
    return grads


def _scale(grads: list[Tensor], factor: Tensor) -> None:
    for device in {g.device for g in grads}:
        torch._foreach_mul_([g for g in grads if g.device == device], factor.to(device))


def _total(name: str, tensors: list[Tensor], ord: float, error_if_nonfinite: bool) -> Tensor:
    total = total_norm(tensors, ord)
    if error_if_nonfinite and (total.isnan() or total.isinf()) and tally_of(tensors).known:
        raise RuntimeError(
            f"{name}: the norm of order {ord:g} of {len(tensors)} tensors is {total.item()}, so "
            "they cannot be clipped by it; skip this step, or pass error_if_nonfinite=False to "
            "continue"
        )
    return total.to(_dtype(tensors))


def _dtype(tensors: list[Tensor]) -> torch.dtype:
    promoted = torch.float32
    for dtype in {x.dtype for x in tensors}:
        promoted = torch.promote_types(promoted, dtype.to_real())
    return promoted
