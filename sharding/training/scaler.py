"""torch's gradient scaler, whose ranks find infinities together in one collective."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..tensor.sharded_tensor import ShardedTensor
from .norms import check_reduced
from .tally import tally_of


class GradScaler(torch.amp.GradScaler):
    """GradScaler(device): `torch.amp.GradScaler`, for parameters on any meshes, beside plain ones.

        rank 0   grads [1 inf]       found   all ranks skip the step, and halve the scale
        rank 1   grads [2  3 ]   ->  found

    torch's own works on sharded parameters, too, with an all_reduce for each mesh and dtype of gradients; here it is one for all. And
    where a mesh has not all ranks, the others learn of it as well, so that all go on with the same scale.

    Args: those of `torch.amp.GradScaler`, in the same order; `device` is "cuda" by default. All its methods are there.

    Raises:
        ValueError: on every rank, in `unscale_` and `step`: gradients that are still pending, as inside `accumulate_grads()`.

    Communication: in `unscale_`, or in `step` where that was not called, one all_reduce of 4 bytes over the axes that split a parameter
        (over the ranks of all meshes, where there are several); none where nothing is split.

    Example:
        >>> scaler = sm.GradScaler("cuda")
        >>> scaler.scale(loss).backward()
        >>> scaler.unscale_(optimizer)
        >>> sm.clip_grad_norm_(model.parameters(), 1.0)
        >>> scaler.step(optimizer)
        >>> scaler.update()
    """

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """`torch.amp.GradScaler.step`: `unscale_` if that was not called, and the optimizer's step where nothing was infinite.

        Fused optimizers, whose kernels torch lets unscale and skip by themselves, are treated like all others: torch would take the
        scale to the device of the wrappers of sharded tensors, where it loses its value.
        """
        fuses = getattr(optimizer, "_step_supports_amp_scaling", False)
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            optimizer._step_supports_amp_scaling = fuses  # type: ignore[attr-defined]

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """What `unscale_` and `step` of torch's class call, in torch 2.11 to 2.13; a test tells when they do not any more."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        grads = {f"the gradient of parameter {i}": p.grad for i, p in enumerate(parameters) if p.grad is not None}
        check_reduced("GradScaler", grads)
        if not allow_fp16 and any(g.dtype == torch.float16 for g in grads.values()):
            raise ValueError("GradScaler: the gradients are in float16; keep parameters in float32, and compute in float16 by autocast")
        found = _unscaled(list(grads.values()), inv_scale, found_inf)
        return {found_inf.device: _agreed(found, parameters)}


def _unscaled(grads: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor) -> Tensor:
    """Multiplies this rank's parts; 1.0 where one had an infinity or NaN."""
    parts: dict[Any, list[Tensor]] = defaultdict(list)
    for g in grads:
        part = g._local if isinstance(g, ShardedTensor) else g
        parts[part.device, part.dtype].append(part)
    for (device, _), some in parts.items():
        found, scale = found_inf.to(device), inv_scale.to(device)
        torch._amp_foreach_non_finite_check_and_unscale_(some, found, scale)
        found_inf = torch.maximum(found_inf, found.to(found_inf.device))
    return found_inf


def _agreed(found_inf: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """The largest of all ranks, which take part whether they have gradients or not; a rank outside all meshes has found nothing."""
    tally = tally_of(parameters)
    if not tally.known:
        return found_inf
    told = found_inf.to(tally.device, copy=True)
    return tally.agree(told, "max", parameters).to(found_inf.device)
