"""`GradScaler`: torch's gradient scaler, with one collective for all parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...mesh.comm.current_world import current_world
from ...mesh.comm.recording.recorder import CommTag
from ...mesh.comm.thread_context import thread_context
from ..parallel.pipeline.live_pipelines import LivePipelines
from ..tensor.sharded_tensor import ShardedTensor
from .norms import check_reduced
from .tally import tally_of

_STAGES = CommTag("do all stages of the pipeline have finite gradients")


class GradScaler(torch.amp.GradScaler):
    """GradScaler(device): `torch.amp.GradScaler`, for parameters on any meshes and plain ones.

        rank 0   grads [1 inf]       found   all ranks skip the step, and halve the scale
        rank 1   grads [2  3 ]   ->  found

    torch's own class also works on sharded parameters, with an all_reduce for each mesh and dtype
    of gradients; this one needs one in total. Ranks outside a mesh also get the result, so that all
    ranks have the same scale.

    Args: those of `torch.amp.GradScaler`, in the same order; `device` is "cuda" by default. All its
    methods are inherited.

    Raises:
        ValueError: on every rank, in `unscale_` and `step`: gradients that are still pending, as
            inside `accumulate_grads()`.

    Communication: in `unscale_`, or in `step` if that was not called, one all_reduce of 4 bytes
        over the axes that split a parameter (over the ranks of all meshes, where there are
        several); none if nothing is split. For parameters of a pipeline over all its ranks, each of
        which has an optimizer.

    Example:
        >>> scaler = sm.training.GradScaler("cuda")
        >>> scaler.scale(loss).backward()
        >>> scaler.unscale_(optimizer)
        >>> sm.training.clip_grad_norm_(model.parameters(), 1.0)
        >>> scaler.step(optimizer)
        >>> scaler.update()
    """

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Run `torch.amp.GradScaler.step`.

        `unscale_` if that was not called, and the optimizer's step if all gradients are finite.

        Fused optimizers, which torch lets unscale and skip in their kernels, are treated like all
        others: torch would move the scale to the meta device of the wrappers, where it loses its
        value.

        Raises: JitError inside `sm.jit(fullgraph=True)`: whether the optimizer steps depends on
            values.
        """
        if thread_context.recorder is not None:
            thread_context.recorder.refuse(
                "GradScaler.step reads whether all gradients are finite, and the optimizer steps "
                "only then",
                "Keep scaler.step(optimizer), scaler.update() and optimizer.zero_grad() outside of "
                "sm.jit; scaler.scale(loss).backward() may be inside. bfloat16 needs no scaler",
            )
        fuses = getattr(optimizer, "_step_supports_amp_scaling", False)
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            optimizer._step_supports_amp_scaling = fuses  # type: ignore[attr-defined]

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """Override the method that torch's `unscale_` and `step` call, in torch 2.11 to 2.13.

        A test notices if that changes.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        grads = {
            f"the gradient of parameter {i}": p.grad
            for i, p in enumerate(parameters)
            if p.grad is not None
        }
        check_reduced("GradScaler", grads)
        if not allow_fp16 and any(g.dtype == torch.float16 for g in grads.values()):
            raise ValueError(
                "GradScaler: the gradients are in float16; keep parameters in float32, and compute "
                "in float16 by autocast"
            )
        own_found_inf = _unscale_parts(list(grads.values()), inv_scale, found_inf)
        return {found_inf.device: _reduce_found_inf(own_found_inf, parameters)}


def _unscale_parts(grads: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor) -> Tensor:
    """Unscale this rank's parts; return 1.0 if one has an infinity or NaN."""
    parts: dict[Any, list[Tensor]] = defaultdict(list)
    for g in grads:
        part = g._local if isinstance(g, ShardedTensor) else g
        parts[part.device, part.dtype].append(part)
    for (device, _), some in parts.items():
        device_found_inf, scale = found_inf.to(device), inv_scale.to(device)
        torch._amp_foreach_non_finite_check_and_unscale_(some, device_found_inf, scale)
        found_inf = torch.maximum(found_inf, device_found_inf.to(found_inf.device))
    return found_inf


def _reduce_found_inf(found_inf: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return the maximum over ranks, which take part also without gradients.

    A rank outside all meshes contributes 0.
    """
    model = current_world().state(LivePipelines).owner_of(parameters)
    if model is not None:
        mesh = model.tensors.mesh
        value = found_inf.to(mesh.device, copy=True)
        mesh.group().all_reduce(value, "max", tag=_STAGES)
        return value.to(found_inf.device)
    tally = tally_of(parameters)
    if not tally.known:
        return found_inf
    value = found_inf.to(tally.device, copy=True)
    return tally.reduce(value, "max", parameters).to(found_inf.device)
