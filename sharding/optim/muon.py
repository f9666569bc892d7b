"""Muon: steps matrices along their orthogonalised momentum; one rank orthogonalises each matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..lineage import comm_context, mixed, seed_of
from ..tensor.sharded_tensor import ShardedTensor
from .matrix_optimizer import MatrixOptimizer, as_number, check_not_negative, with_grads
from .owners import matrix_shape, owners_of_matrices

# a x + b x^3 + c x^5 takes singular values of up to 1 to about 1
JORDAN = 3.4445, -4.7750, 2.0315
ADJUSTMENTS = (None, "original", "match_rms_adamw")
_MUON = seed_of("muon")


class Muon(MatrixOptimizer):
    """Muon(params): `torch.optim.Muon` for matrices and stacks of them, in any layouts.

    Each matrix is orthogonalised by one rank. AdamW steps the rest.

        momentum, rows split            at its owner            orthogonalised, rows split
        rank 0   [A0] [B0] [C0]         rank 0   [A] [C]        rank 0   [A0] [B0] [C0]
        rank 1   [A1] [B1] [C1]   ->    rank 1   [B]       ->   rank 1   [A1] [B1] [C1]
                         one all_to_all            one all_to_all

    The first nine arguments are those of `torch.optim.Muon`: momentum, Newton-Schulz iteration,
    decoupled weight decay. Momentum has the layouts of the parameters. A split matrix (by FSDP,
    tensor parallelism or both) is gathered at its owner, so the iteration is that of the whole
    matrix. Owners are chosen among all ranks of the mesh to balance the work.

    A parameter of three or more dims is a stack of matrices of its last two: the experts of a
    layer, [experts, m, n], or of several, [layers, experts, m, n]. Each is orthogonalised by
    itself, and can have another owner. (`torch.optim.Muon` refuses such parameters.) Weights of
    convolutions are no such stacks: [out, in, k, k] would be out * in matrices of k x k. Give them
    `flatten=True`, in a group of their own if there are stacks as well; then each is one matrix,
    [out, in * k * k], as in Jordan's Muon. Or leave them to AdamW by `adamw=`. Parameters with
    fewer dims than two are stepped by AdamW, and so should be biases of experts, [experts, n], by
    `adamw=`.

    Args:
        params: parameters, pairs (name, parameter) as from `model.named_parameters()`, or groups of
            either.
        lr: the learning rate.
        weight_decay: decoupled; also for AdamW.
        momentum: the factor of the old momentum.
        nesterov: look ahead by a step of momentum.
        ns_coefficients: of the quintic x -> a x + b x^3 + c x^5; by default those of Jordan et al.
            2024, "Muon: An optimizer for hidden layers in neural networks",
            https://kellerjordan.github.io/posts/muon.
        eps: the minimum norm to divide a matrix by.
        ns_steps: iterations.
        adjust_lr_fn: how to adjust the learning rate of an m x n matrix, also of one in a stack.
            None or "original": times sqrt(max(1, m / n)), as by Jordan. "match_rms_adamw": times
            0.2 sqrt(max(m, n)), so that rates for AdamW fit; Liu et al. 2025, "Muon is scalable for
            LLM training", arXiv:2502.16982.
        ns_dtype: the dtype of the iteration and of communication; bfloat16, as in torch, is 2 bytes
            per element each way.
        flatten: whether a parameter of three or more dims is one matrix, of its first dim by all
            others.
        adamw: patterns such as "*embed*" or "lm_head*" of names of matrices to step with AdamW,
            like all other parameters. Needs named parameters.
        adamw_lr: the learning rate of AdamW, by default `lr`.
        betas, adamw_eps: of AdamW.

    Raises:
        ValueError: on every rank, numbers out of range; a pattern of `adamw` that no name matches;
            a complex parameter. In `step`: gradients that are still pending.

    Communication: in each step two all_to_all over the mesh (for each mesh and `ns_dtype`, if there
        are several). A matrix of n elements costs n elements to its owner, less those that it has,
        and n back for each copy of it. A matrix that a rank has whole is not gathered. AdamW: none.

    Example:
        >>> optimizer = sm.optim.Muon(
        ...     model.named_parameters(), lr=0.02, adamw=["*embed*", "lm_head*"], adamw_lr=3e-4
        ... )
        >>> groups = [{"params": convolutions, "flatten": True}, {"params": others}]
        >>> optimizer = sm.optim.Muon(groups, lr=0.02)
    """

    algorithm = "muon"
    most_dims = None

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = JORDAN,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_dtype: torch.dtype = torch.bfloat16,
        flatten: bool = False,
        adamw: Sequence[str] = (),
        adamw_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
    ) -> None:
        check_not_negative(
            "Muon",
            lr=as_number(lr),
            weight_decay=weight_decay,
            momentum=momentum,
            eps=eps,
            ns_steps=ns_steps,
        )
        if adjust_lr_fn not in ADJUSTMENTS:
            raise ValueError(
                f"Muon(adjust_lr_fn={adjust_lr_fn!r}): write one of "
                f"{', '.join(map(repr, ADJUSTMENTS))}"
            )
        if len(ns_coefficients) != 3:
            raise ValueError(
                f"Muon(ns_coefficients={ns_coefficients}): ns_coefficients must be three numbers, "
                f"such as {JORDAN}"
            )
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_dtype": ns_dtype,
            "flatten": flatten,
            "betas": betas,
            "adamw_eps": adamw_eps,
        }
        super().__init__(params, defaults, adamw, adamw_lr)

    def _step_matrices(self, groups: Sequence[dict[str, Any]]) -> None:
        updates = {}
        for group in groups:
            updates.update(self._updates(group))
        places: dict[Any, list[Any]] = {}
        for p, group in with_grads(groups):
            places.setdefault(
                (p.mesh if isinstance(p, ShardedTensor) else None, group["ns_dtype"]), []
            ).append((p, group))
        for (mesh, dtype), some in places.items():
            momenta = [updates[p] for p, _ in some]
            settings = [group for _, group in some]
            if mesh is None:
                directions: Sequence[Tensor] = [
                    _each_orthogonal(x.to(dtype), group)
                    for x, group in zip(momenta, settings, strict=True)
                ]
            else:
                directions = (
                    _by_owners(momenta, settings, dtype) if mesh.coordinate is not None else momenta
                )
            for (p, group), direction in zip(some, directions, strict=True):
                rate = as_number(group["lr"])
                p.mul_(1 - rate * group["weight_decay"])
                p.add_(
                    direction,
                    alpha=-adjusted_lr(
                        rate, group["adjust_lr_fn"], matrix_shape(p.shape, group["flatten"])
                    ),
                )

    def _updates(self, group: dict[str, Any]) -> dict[Tensor, Tensor]:
        """Return the momentum after this step, by parameter, with Nesterov's look-ahead if set."""
        params = [p for p, _ in with_grads([group])]
        if not params:
            return {}
        for p in params:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(
                    p.grad, memory_format=torch.preserve_format
                )
        grads = [p.grad for p in params]
        buffers = [self.state[p]["momentum_buffer"] for p in params]
        torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
        momenta = (
            torch._foreach_lerp(grads, buffers, group["momentum"]) if group["nesterov"] else buffers
        )
        return dict(zip(params, momenta, strict=True))


def _by_owners(
    matrices: Sequence[ShardedTensor], groups: Sequence[dict[str, Any]], dtype: torch.dtype
) -> list[ShardedTensor]:
    """Return the orthogonalised matrices, with their layouts. Communication: two all_to_all."""
    layouts = tuple(x._layout for x in matrices)
    owners = owners_of_matrices(
        layouts,
        tuple([group["flatten"] for group in groups]),
        # about the number of multiplications of a Newton-Schulz iteration
        lambda rows, columns: rows * columns * min(rows, columns),
        dtype,
    )
    with comm_context(owners.group.world, mixed(_MUON, matrices)):
        # parts may be offloaded to the host
        wholes = owners.gather([x._local.to(x.mesh.device) for x in matrices])
        for i in owners.own_units:
            wholes[i] = _orthogonal(wholes[i], groups[owners.units[i].tensor])
        parts = [torch.empty_like(x._local, dtype=dtype, device=x.mesh.device) for x in matrices]
        owners.scatter(wholes, parts)
    return [
        ShardedTensor._make(part.to(x.device), x._layout.replace(dtype=dtype))
        for part, x in zip(parts, matrices, strict=True)
    ]


def _orthogonal(x: Tensor, group: dict[str, Any]) -> Tensor:
    """Return a whole matrix orthogonalised.

    It may have leading dims of one element, or several dims of columns if it is flattened.
    """
    matrix = x.reshape(matrix_shape(x.shape, group["flatten"]))
    return newton_schulz(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"]).reshape(
        x.shape
    )


def _each_orthogonal(x: Tensor, group: dict[str, Any]) -> Tensor:
    """Return a plain matrix or stack with each matrix orthogonalised."""
    if x.ndim == 2 or group["flatten"]:
        return _orthogonal(x, group)
    matrices = x.reshape(-1, *x.shape[-2:])
    return torch.stack([_orthogonal(matrix, group) for matrix in matrices]).reshape(x.shape)


def newton_schulz(
    x: Tensor, coefficients: Sequence[float] = JORDAN, steps: int = 5, eps: float = 1e-7
) -> Tensor:
    """newton_schulz(x) -> approximately U V^T of a plain x = U S V^T, in the dtype of x.

    Singular values become 0.7 to 1.2.

    The quintic iteration of Jordan et al. 2024, https://kellerjordan.github.io/posts/muon, in
    torch's order of operations.
    """
    if x.shape[0] > x.shape[1]:
        return newton_schulz(x.mT, coefficients, steps, eps).mT.contiguous()
    a, b, c = coefficients
    x = x / x.norm().clamp(min=eps)  # then no singular value is above 1
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def adjusted_lr(lr: float, rule: str | None, shape: Sequence[int]) -> float:
    """Return the learning rate for a matrix of this shape, see `Muon`."""
    rows, columns = shape
    return lr * (
        0.2 * math.sqrt(max(rows, columns))
        if rule == "match_rms_adamw"
        else math.sqrt(max(1, rows / columns))
    )
