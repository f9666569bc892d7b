"""Gradient clipping for sharded and plain parameters.

A pipeline is clipped by the norm of its whole model. A list of the parameters of this rank's stages
is taken for the pipeline if it has all of them that have a gradient; one that has only some raises,
since ranks of other stages, which may have none, would not take part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ...mesh.comm.current_world import current_world
from ..parallel.pipeline.live_pipelines import LivePipelines
from ..parallel.pipeline.pipeline import Pipeline
from ..parallel.pipeline.state import WholeModel
from .norms import check_reduced, checked_ord, total_norm
from .tally import tally_of

Tensors = Tensor | Iterable[Tensor]


@torch.no_grad()
def get_total_norm(
    tensors: Tensors | Pipeline,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """get_total_norm(tensors) -> the norm of all elements: a plain 0-d tensor, alike on all ranks.

    `torch.nn.utils.get_total_norm` for tensors of any layouts, on any meshes, and plain ones, which
    must be the same on every rank.

    Args:
        tensors: as for torch; or a pipeline, for the gradients of its whole model.
        norm_type: 2, any other positive number, or math.inf.
        error_if_nonfinite: raise if the norm is infinite or NaN.
        foreach: accepted for compatibility; `foreach` operators are always used.

    Returns:
        In the dtype of the tensors, at least float32. On a rank outside all meshes: NaN.

    Raises:
        ValueError: on every rank, a tensor that is still pending; a `norm_type` that is not
            positive. On ranks that have them: some, not all, of the gradients or parameters of a
            pipeline.
        RuntimeError: on every rank that knows the norm, as `error_if_nonfinite` says.

    Communication: one all_reduce of 8 bytes over the axes that split one of them (over the ranks of
        all meshes, where there are several; 16 bytes for the infinity norm); none if nothing is
        split. For a pipeline over all its ranks, and the first time one all_gather of small objects
        over its axis.

    Example:
        >>> sm.training.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    """
    ord = checked_ord("get_total_norm", norm_type)
    model = tensors.whole if isinstance(tensors, Pipeline) else None
    tensor_list = [] if isinstance(tensors, Pipeline) else _as_list(tensors)
    if model is None:
        model = _model_of("get_total_norm", tensor_list)
    if model is not None:
        check_reduced("get_total_norm", model.own_gradients())
        tensor_list = list(model.gradients().values())
    check_reduced("get_total_norm", {f"tensors[{i}]": x for i, x in enumerate(tensor_list)})
    return _total("get_total_norm", tensor_list, ord, error_if_nonfinite)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensors | nn.Module | Pipeline,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """clip_grad_norm_(parameters, max_norm) -> the norm of all gradients.

    Then they are scaled in place to at most `max_norm`.

        rank 0   grads [3 .]        norm 5 on both       [.6  . ]
        rank 1   grads [. 4]   ->   one all_reduce  ->   [ . .8 ]      max_norm=1

    `torch.nn.utils.clip_grad_norm_` also works on sharded parameters, with a collective for each
    layout of gradients and one at the end; this function needs one in total.

    Args:
        parameters: as for torch, or a module. Sharded on any meshes, or plain with the same
            gradients on every rank. Parameters without a gradient are skipped. A pipeline, or all
            of its `parameters()`, is clipped by the norm of its whole model, in which a tied
            parameter counts once. (`torch.nn.utils.clip_grad_norm_` knows only the parameters that
            it gets, of this rank's stages.)
        max_norm: the maximum norm; gradients are multiplied by min(max_norm / (norm + 1e-6), 1), as
            in torch.
        norm_type, error_if_nonfinite: as for `get_total_norm`.
        foreach: as for `get_total_norm`.

    Returns:
        A plain 0-d tensor, the same on every rank; NaN on a rank outside all meshes.

    Raises:
        ValueError: on every rank, gradients that are still pending, as inside `accumulate_grads()`;
            no gradient is changed. Clip after the block. On ranks that have them: some, not all,
            of the parameters of a pipeline.
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
    model = parameters.whole if isinstance(parameters, Pipeline) else None
    if model is None:
        model = _model_of("clip_grad_norm_", parameter_list)
    measured = grads if model is None else list(model.gradients().values())
    total = _total("clip_grad_norm_", measured, ord, error_if_nonfinite)
    factor = (float(max_norm) / (total + 1e-6)).clamp(max=1.0)
    for device in {g.device for g in grads}:
        torch._foreach_mul_([g for g in grads if g.device == device], factor.to(device))
    return total


@torch.no_grad()
def clip_grad_value_(
    parameters: Tensors | nn.Module | Pipeline, clip_value: float, foreach: bool | None = None
) -> None:
    """clip_grad_value_(parameters, clip_value): clamp every element of the gradients.

    They are clamped to [-clip_value, clip_value], in place.

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


def _parameters(parameters: Tensors | nn.Module | Pipeline) -> list[Tensor]:
    if isinstance(parameters, nn.Module | Pipeline):
        return list(parameters.parameters())
    return _as_list(parameters)


def _model_of(name: str, tensors: Sequence[Tensor]) -> WholeModel | None:
    """Return the whole model of a pipeline if the tensors are its parameters, or gradients.

    All of them that are on this rank and have a gradient.

    Raises:
        ValueError: they are some of these.
    """
    model = current_world().state(LivePipelines).owner_of(tensors)
    if model is None:
        return None
    numbers = {id(x) for x in tensors}
    missing = [
        path
        for path, p in model.named_parameters()
        if p.grad is not None and id(p) not in numbers and id(p.grad) not in numbers
    ]
    if missing:
        raise ValueError(
            f"{name}: these are parameters of a pipeline's stages on this rank, without "
            f"{missing[0]!r}; other ranks have other stages, so a norm of some of them is not "
            f"known here. Call {name}(pipe, ...) for that of the whole model, or take norms of "
            'parts from tensor_norms(pipe, of="grad")'
        )
    return model


def _grads(name: str, parameters: list[Tensor]) -> Mapping[str, Tensor]:
    """Return the existing gradients by name. Raises: ValueError if one is pending."""
    grads = {
        f"parameters[{i}].grad": p.grad for i, p in enumerate(parameters) if p.grad is not None
    }
    check_reduced(name, grads)
    return grads


def _total(name: str, tensors: Sequence[Tensor], ord: float, error_if_nonfinite: bool) -> Tensor:
    total = total_norm(tensors, ord)
    if error_if_nonfinite and (total.isnan() or total.isinf()) and tally_of(tensors).known:
        raise RuntimeError(
            f"{name}: the norm of order {ord:g} of {len(tensors)} tensors is {total.item()}, so "
            "they cannot be clipped by it; skip this step, or pass error_if_nonfinite=False to "
            "continue"
        )
    return total.to(_dtype(tensors))


def _dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    promoted = torch.float32
    for dtype in {x.dtype for x in tensors}:
        promoted = torch.promote_types(promoted, dtype.to_real())
    return promoted
