"""Clipping of gradients, wherever they lie."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from .norms import check_reduced, checked_ord, total_norm
from .tally import tally_of

Tensors = Tensor | Iterable[Tensor]


@torch.no_grad()
def get_total_norm(
    tensors: Tensors, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> Tensor:
    """get_total_norm(tensors) -> the norm of all their elements: a plain 0-d tensor, the same on every rank.

    `torch.nn.utils.get_total_norm` for tensors of any layouts, on any meshes, beside plain ones, which are taken to be the same on
    every rank.

    Args:
        tensors: as for torch.
        norm_type: 2, any other positive number, or math.inf.
        error_if_nonfinite: raise where the norm is infinite or NaN.
        foreach: taken for torch's sake; parts are always gone through as lists.

    Returns:
        In the dtype of the tensors, but no narrower than float32. On a rank outside all meshes: NaN.

    Raises:
        ValueError: on every rank, a tensor that is still pending; a `norm_type` that is not positive.
        RuntimeError: on every rank that knows the norm, as `error_if_nonfinite` says.

    Communication: one all_reduce of 8 bytes over the axes that split one of them (over the ranks of all meshes, where there are
        several; 16 bytes for the infinity norm); none where nothing is split.

    Example:
        >>> sm.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    """
    ord, found = checked_ord("get_total_norm", norm_type), _listed(tensors)
    check_reduced("get_total_norm", {f"tensors[{i}]": x for i, x in enumerate(found)})
    return _total("get_total_norm", found, ord, error_if_nonfinite)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensors | nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """clip_grad_norm_(parameters, max_norm) -> the norm of all gradients before; they are scaled in place to at most `max_norm`.

        rank 0   grads [3 .]        norm 5 on both       [.6  . ]
        rank 1   grads [. 4]   ->   one all_reduce  ->   [ . .8 ]      max_norm=1

    `torch.nn.utils.clip_grad_norm_` works on sharded parameters, too, with a collective for each layout of gradients and one at the
    end; this is one for all.

    Args:
        parameters: as for torch, or a module. Sharded on any meshes, and plain, whose gradients are taken to be the same on every rank.
            Gradients that are None are left out.
        max_norm: what the norm is afterwards at most; gradients are multiplied by min(max_norm / (norm + 1e-6), 1), as torch does.
        norm_type, error_if_nonfinite: as for `get_total_norm`.
        foreach: as for `get_total_norm`.

    Returns:
        A plain 0-d tensor, the same on every rank; NaN on a rank outside all meshes, which has nothing to scale.

    Raises:
        ValueError: on every rank, gradients that are still pending, as they are inside `accumulate_grads()`: then no gradient is
            changed. Clip after the block.
        RuntimeError: on every rank that knows the norm, as `error_if_nonfinite` says; no gradient is changed.

    Communication: as `get_total_norm`.

    Example:
        >>> loss.backward()
        >>> norm = sm.clip_grad_norm_(model.parameters(), 1.0)
        >>> optimizer.step()
    """
    ord, found = checked_ord("clip_grad_norm_", norm_type), _parameters(parameters)
    grads = list(_grads("clip_grad_norm_", found).values())
    total = _total("clip_grad_norm_", grads, ord, error_if_nonfinite)
    _scale(grads, (float(max_norm) / (total + 1e-6)).clamp(max=1.0))
    return total


@torch.no_grad()
def clip_grad_value_(parameters: Tensors | nn.Module, clip_value: float, foreach: bool | None = None) -> None:
    """clip_grad_value_(parameters, clip_value): every element of the gradients is put into [-clip_value, clip_value], in place.

    Args:
        parameters: as for `clip_grad_norm_`.
        clip_value: the largest absolute value.
        foreach: as for torch.

    Raises:
        ValueError: on every rank, gradients that are still pending: then no gradient is changed.

    Communication: none.

    Example:
        >>> sm.clip_grad_value_(model.parameters(), 0.5)
    """
    found = _parameters(parameters)
    _grads("clip_grad_value_", found)
    nn.utils.clip_grad_value_(found, clip_value, foreach)


# ----------------------------------------------------------------------------------------------------------------------


def _listed(tensors: Tensors) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _parameters(parameters: Tensors | nn.Module) -> list[Tensor]:
    return list(parameters.parameters()) if isinstance(parameters, nn.Module) else _listed(parameters)


def _grads(what: str, parameters: list[Tensor]) -> Mapping[str, Tensor]:
    """By place, those that there are. Raises: ValueError where one is pending."""
    grads = {f"parameters[{i}].grad": p.grad for i, p in enumerate(parameters) if p.grad is not None}
    check_reduced(what, grads)
    return grads


def _scale(grads: list[Tensor], factor: Tensor) -> None:
    for device in {g.device for g in grads}:
        torch._foreach_mul_([g for g in grads if g.device == device], factor.to(device))


def _total(what: str, tensors: list[Tensor], ord: float, error_if_nonfinite: bool) -> Tensor:
    total = total_norm(tensors, ord)
    if error_if_nonfinite and (total.isnan() or total.isinf()) and tally_of(tensors).known:
        raise RuntimeError(
            f"{what}: the norm of order {ord:g} of {len(tensors)} tensors is {total.item()}, so they cannot be clipped by it; skip this "
            "step, or pass error_if_nonfinite=False to go on with it"
        )
    return total.to(_dtype(tensors))


def _dtype(tensors: list[Tensor]) -> torch.dtype:
    found = torch.float32
    for dtype in {x.dtype for x in tensors}:
        found = torch.promote_types(found, dtype.to_real())
    return found
