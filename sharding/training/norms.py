"""Norms of many tensors by path, with one collective."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.transfer.host_copies import send
from ...mesh.comm.current_world import current_world
from ..parallel.pipeline.live_pipelines import LivePipelines
from ..parallel.pipeline.pipeline import Pipeline
from ..tensor.sharded_tensor import ShardedTensor
from .tally import tally_of

Named = nn.Module | Pipeline | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


def tensor_norms(tensors: Named, of: str = "parameter", ord: float = 2.0) -> dict[str, float]:
    """tensor_norms(model) -> {path: norm}, the same on every rank, whatever the layouts.

        "embed.weight"  P("fsdp", "tp")   [0.5 1.1]  \\
        "norm.weight"   P()               [1.7  . ]   > one all_reduce of a number for each tensor
        "head.weight"   on another mesh   [ .  0.9]  /

    Args:
        tensors: a module, for its parameters (a tied one once); a pipeline, for those of its
            whole model; a dict of tensors by path; or pairs (path, tensor). Sharded tensors on any
            meshes, and plain ones, which must be the same on every rank.
        of: "parameter" for the tensors themselves, "grad" for their gradients; tensors without one
            are skipped.
        ord: 2, any other positive number, or math.inf.

    Returns:
        A norm for each path, in float32 or float64. On a rank outside all meshes: NaN.

    Raises:
        ValueError: on every rank, a tensor that is still pending, as gradients inside
            `accumulate_grads()`; another `of`; an `ord` that is not positive. On ranks that have
            them: parameters of a pipeline in a dict or in pairs, which other ranks do not have.

    Communication: one all_reduce of 8 bytes a tensor over the axes that split one of them (over the
        ranks of all meshes, where there are several; 16 bytes for infinity norms); none if nothing
        is split. For a pipeline over all its ranks, with `of="grad"` of 16 bytes a tensor, and the
        first time one all_gather of small objects over its axis.

    Example:
        >>> for path, norm in sm.training.tensor_norms(model, of="grad").items():
        ...     log(path, norm)
    """
    if of not in ("parameter", "grad"):
        raise ValueError(f'norms(of={of!r}): write "parameter" or "grad"')
    ord = checked_ord("norms", ord)
    if isinstance(tensors, Pipeline):
        return _norms_of_pipeline(tensors, of, ord)
    named = dict(_named_tensors(tensors))
    if current_world().state(LivePipelines).owner_of(named.values()) is not None:
        raise ValueError(
            "norms: these are parameters of a pipeline's stages on this rank, and other ranks have "
            "others; pass the pipeline, as in tensor_norms(pipe)"
        )
    by_path = {path: x.grad if of == "grad" else x for path, x in named.items()}
    measured = {path: x.detach() for path, x in by_path.items() if x is not None}
    check_reduced(
        "norms", {f"{path}.grad" if of == "grad" else path: x for path, x in measured.items()}
    )
    return dict(zip(measured, norms_of(list(measured.values()), ord).tolist(), strict=True))


def _norms_of_pipeline(pipe: Pipeline, of: str, ord: float) -> dict[str, float]:
    if of == "parameter":
        parameters = pipe.whole.parameters()
        norms = norms_of(list(parameters.values()), ord).tolist()
        return dict(zip(parameters, norms, strict=True))
    own = pipe.whole.own_gradients()
    check_reduced("norms", {f"{path}.grad": x for path, x in own.items()})
    gradients = pipe.whole.gradients()
    # which rank has a gradient, the others learn with the norms
    flags = pipe.whole.has_gradients()
    norms = norms_of([*gradients.values(), *flags.values()], ord).tolist()
    by_path = zip(gradients, norms[: len(gradients)], norms[len(gradients) :], strict=True)
    return {path: norm for path, norm, has_gradient in by_path if has_gradient}


def _named_tensors(tensors: Any) -> Iterable[tuple[str, Tensor]]:
    if isinstance(tensors, nn.Module):
        return tensors.named_parameters()
    return tensors.items() if isinstance(tensors, Mapping) else tensors


def check_reduced(name: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise a ValueError for a tensor with a pending reduction."""
    for path, x in tensors.items():
        if isinstance(x, ShardedTensor) and x._layout.pending:
            raise ValueError(
                f"{name}: {path} is {x._layout}, still to be reduced over "
                f"{tuple(x._layout.pending)}, so its values are not known yet; call {name} after "
                "the accumulate_grads() block, which reduces gradients at its end, or reduce it "
                "with redistribute first"
            )


# -- local parts -----------------------------------------------------------------------------------


def norms_of(tensors: Sequence[Tensor], ord: float = 2.0) -> Tensor:
    """norms_of([x, y]) -> their norms, plain float64. Communication: as `tensor_norms`."""
    tally = tally_of(tensors)
    powers = torch.zeros(len(tensors), dtype=torch.float64, device=tally.device)
    if tally.counted:
        powers[list(tally.counted)] = _powers(
            [tensors[i] for i in tally.counted], ord, powers.device
        )
    return _global_norms(powers, ord, tensors)


def total_norm(tensors: Sequence[Tensor], ord: float = 2.0) -> Tensor:
    """total_norm([x, y]) -> norm of all their elements, a plain 0-d float64.

    Communication: as `tensor_norms`, of one number.
    """
    tally = tally_of(tensors)
    powers = _powers([tensors[i] for i in tally.counted], ord, tally.device)
    one = (
        powers.sum(0, keepdim=True)
        if ord < math.inf
        else torch.cat([powers, powers.new_zeros(1)]).amax(0, keepdim=True)
    )
    return _global_norms(one, ord, tensors)[0]


def _global_norms(powers: Tensor, ord: float, tensors: Sequence[Tensor]) -> Tensor:
    """Return norms from each rank's share of their powers."""
    tally = tally_of(tensors)
    if ord < math.inf:
        return tally.reduce(powers, "sum", tensors) ** (1 / ord)
    nan = powers.isnan()  # the maximum of a backend may drop NaN
    largest, has_nan = tally.reduce(
        torch.stack([powers.masked_fill(nan, 0.0), nan.to(powers.dtype)]), "max", tensors
    )
    return largest.masked_fill(has_nan > 0, torch.nan)


def checked_ord(name: str, ord: Any) -> float:
    """Return the order of a norm as a float. Raises: ValueError unless it is positive."""
    if not float(ord) > 0:
        raise ValueError(
            f"{name}: the order of a norm must be a positive number or math.inf, got {ord!r}"
        )
    return float(ord)


def _powers(tensors: Sequence[Tensor], ord: float, device: torch.device) -> Tensor:
    """Return for each local part its norm to the power `ord`, or its largest element; float64."""
    parts = [_real_part(x) for x in tensors]
    groups: dict[Any, list[int]] = {}
    for i, part in enumerate(parts):
        groups.setdefault((part.device, part.dtype) if part.numel() else None, []).append(i)
    groups.pop(None, None)  # parts without elements, which have no maximum
    rows = [torch.zeros((), dtype=torch.float64, device=device)] * len(parts)
    for (_, dtype), places in groups.items():
        some = torch._foreach_norm([parts[i] for i in places], ord, dtype=_accumulator(dtype))
        norms = send(torch.stack(list(some)), device).to(torch.float64).real
        # one by one: an index would be copied to the device, for which the host waits
        for i, row in zip(places, norms.unbind(), strict=True):
            rows[i] = row
    powers = torch.stack(rows) if rows else torch.zeros(0, dtype=torch.float64, device=device)
    return powers if ord == math.inf else powers**ord


def _real_part(x: Tensor) -> Tensor:
    """Return this rank's part, in a dtype that has norms."""
    part = x._local if isinstance(x, ShardedTensor) else x
    return part.detach() if part.is_floating_point() or part.is_complex() else part.double()


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
