"""Shampoo: preconditions matrices from both sides; one rank has each matrix's preconditioners."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor

from ...kernels.box import Box, box_shape, slices
from ...mesh.device_mesh import DeviceMesh
from ..layout.layout import Layout
from ..lineage import comm_context, mixed, seed_of
from ..tensor.convert import distribute_tensor
from ..tensor.sharded_tensor import ShardedTensor
from .matrix_optimizer import MatrixOptimizer, as_number, check_not_negative, with_grads
from .owners import MatrixUnit, layout_at, owners_of

_SHAMPOO = seed_of("shampoo")
_SIDES = ("left", "right")


class Shampoo(MatrixOptimizer):
    """Shampoo(params): Gupta et al. 2018 for matrices of any layouts.

    Each matrix is preconditioned by one rank. AdamW steps the rest.

        L += G G^T,  R += G^T G,  W -= lr L^(-1/4) G R^(-1/4)          L, R begin as epsilon I

        gradients, rows split          at its owner                       direction, rows split
        rank 0   [A0] [B0]             rank 0   A, its L and R            rank 0   [A0] [B0]
        rank 1   [A1] [B1]     ->      rank 1   B, its L and R    ->      rank 1   [A1] [B1]
                   one all_to_all                     one all_to_all

    "Shampoo: preconditioned stochastic tensor optimization", arXiv:1802.09568, algorithm 1.
    Matrices larger than `block_size` are split into blocks with their own preconditioners. Owners
    of blocks are chosen among all ranks of the mesh to balance the work; split blocks are gathered
    at their owner. Preconditioners are sharded tensors that are whole at their owner, in float32 or
    float64; momentum has the layouts of the parameters.

    Only parameters of two dims are matrices here. Those of three and more, such as weights of
    convolutions and stacks of experts' matrices, are stepped by AdamW: the paper's preconditioner
    for each dim of a tensor is not implemented, and the owners of blocks would need 2 m^2 n
    elements for a stack of n. `Muon` takes stacks.

    Args:
        params: parameters, pairs (name, parameter) as from `model.named_parameters()`, or groups of
            either.
        lr: the learning rate.
        momentum: of the preconditioned gradient, as in SGD: M = momentum M + direction, W -= lr M.
        weight_decay: decoupled, W -= lr weight_decay W; also for AdamW.
        epsilon: the initial value of preconditioners.
        update_freq: the number of steps between computations of roots; statistics are accumulated
            in each step.
        block_size: the maximum side of a block.
        adamw, adamw_lr, betas, adamw_eps: as for `Muon`.

    Raises:
        ValueError: on every rank, numbers out of range; a pattern of `adamw` that no name matches;
            a complex parameter. In `step`: gradients that are still pending.

    Communication: in each step two all_to_all over the mesh (for each mesh and dtype, if there are
        several), as for `Muon`, but in the gradients' dtype, at least float32. AdamW: none.
        Preconditioners are redistributed after loading a state with other owners.

    Example:
        >>> embeddings = {"adamw": ["*embed*"], "adamw_lr": 1e-3}
        >>> sm.optim.Shampoo(model.named_parameters(), lr=0.05, momentum=0.9, **embeddings)
    """

    algorithm = "shampoo"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.1,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        epsilon: float = 1e-4,
        update_freq: int = 1,
        block_size: int = 1024,
        *,
        adamw: Sequence[str] = (),
        adamw_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
    ) -> None:
        check_not_negative(
            "Shampoo",
            lr=as_number(lr),
            momentum=momentum,
            weight_decay=weight_decay,
            epsilon=epsilon,
        )
        if update_freq < 1 or block_size < 1:
            raise ValueError(
                f"Shampoo(update_freq={update_freq}, block_size={block_size}): both must be at "
                "least 1"
            )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "epsilon": epsilon,
            "update_freq": update_freq,
            "block_size": block_size,
            "betas": betas,
            "adamw_eps": adamw_eps,
        }
        super().__init__(params, defaults, adamw, adamw_lr)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as in torch, but keep the dtype of preconditioners.

        torch would cast them to that of the parameters.
        """
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own_params = chain.from_iterable(group["params"] for group in self.param_groups)
        for index, p in zip(saved, own_params, strict=True):
            for name, x in state_dict["state"].get(index, {}).items():
                if name.startswith(_SIDES):
                    self.state[p][name] = x.to(
                        p.mesh.device if isinstance(p, ShardedTensor) else p.device, copy=True
                    )

    def _step_matrices(self, groups: Sequence[dict[str, Any]]) -> None:
        alike: dict[Any, list[Any]] = {}  # (mesh, dtype of the statistics) -> (parameter, group)
        for p, group in with_grads(groups):
            state = self.state[p]
            state["step"] = state.get("step", torch.tensor(0.0)) + 1
            mesh = p.mesh if isinstance(p, ShardedTensor) else None
            dtype = torch.promote_types(p.dtype, torch.float32)
            alike.setdefault((mesh, dtype), []).append((p, group))
        for (mesh, dtype), members in alike.items():
            if mesh is None:
                directions = [self._direction(p, group, dtype) for p, group in members]
            elif mesh.coordinate is None:
                directions = [p.grad for p, _ in members]
            else:
                directions = self._directions_by_owners(members, mesh, dtype)
            for (p, group), direction in zip(members, directions, strict=True):
                self._update(p, group, direction)

    def _update(self, p: Any, group: dict[str, Any], direction: Tensor) -> None:
        rate = as_number(group["lr"])
        state = self.state[p]
        if group["momentum"]:
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(
                    p.grad, memory_format=torch.preserve_format
                )
            direction = state["momentum_buffer"].mul_(group["momentum"]).add_(direction)
        p.mul_(1 - rate * group["weight_decay"])
        p.add_(direction, alpha=-rate)

    def _direction(self, p: Tensor, group: dict[str, Any], dtype: torch.dtype) -> Tensor:
        """Return the direction of a plain matrix."""
        direction = torch.empty_like(p, dtype=dtype)
        has_new_roots = self._has_new_roots(p, group)
        for block, box in enumerate(blocks(p.shape, group["block_size"])):
            index = slices(box)
            state = self._block_state(p, block, box, group, dtype, None)
            grad = p.grad[index].to(dtype)  # type: ignore[index]
            direction[index] = _precondition(grad, state, group, has_new_roots)
        return direction

    def _directions_by_owners(
        self, members: Sequence[Any], mesh: DeviceMesh, dtype: torch.dtype
    ) -> list[ShardedTensor]:
        """Return the directions of sharded matrices on one mesh, in the layouts of their gradients.

        Communication: two all_to_all.
        """
        grads = [p.grad for p, _ in members]
        layouts = tuple(g._layout for g in grads)
        units, numbers = _units(layouts, [group["block_size"] for _, group in members])
        owners = owners_of(layouts, units, dtype)
        states = []
        for unit, block, owner in zip(units, numbers, owners.owner, strict=True):
            p, group = members[unit.tensor]
            sides = [layout_at(p.mesh, owner, (n, n), dtype) for n in box_shape(unit.box)]
            states.append(self._block_state(p, block, unit.box, group, dtype, sides))
        with comm_context(owners.group.world, mixed(_SHAMPOO, grads)):
            # parts may be offloaded to the host
            wholes = owners.gather([g._local.to(mesh.device) for g in grads])
            for i in owners.own_units:
                p, group = members[units[i].tensor]
                has_new_roots = self._has_new_roots(p, group)
                wholes[i] = _precondition(wholes[i], states[i], group, has_new_roots)
            parts = [torch.empty_like(g._local, dtype=dtype, device=mesh.device) for g in grads]
            owners.scatter(wholes, parts)
        return [
            ShardedTensor._make(part.to(g.device), g._layout.replace(dtype=dtype))
            for part, g in zip(parts, grads, strict=True)
        ]

    def _block_state(
        self,
        p: Any,
        block: int,
        box: Box,
        group: dict[str, Any],
        dtype: torch.dtype,
        layouts: Sequence[Layout] | None,
    ) -> dict[str, Tensor]:
        """Return this rank's parts of a block's preconditioners and roots, created if missing.

        Args:
            block: its index in the matrix, and `box` where it is.
            layouts: of the left and the right ones; None for a plain matrix.
        """
        names = (
            [*_SIDES, *(f"{side}_root" for side in _SIDES)] if group["update_freq"] > 1 else _SIDES
        )
        parts = {}
        for i, name in enumerate(names):
            n = box_shape(box)[i % 2]
            layout = None if layouts is None else layouts[i % 2]
            key = f"{name}_{block}"
            matrix = self.state[p].get(key)
            if matrix is None:
                matrix = _identity(
                    n,
                    group["epsilon"],
                    dtype,
                    p.device if layout is None else p.mesh.device,
                    layout,
                )
            elif layout is not None and not isinstance(matrix, ShardedTensor):
                # loaded whole on every rank
                matrix = distribute_tensor(matrix, p.mesh, layout.spec, src_data_rank=None)
            elif layout is not None and matrix._layout is not layout:
                matrix = matrix.redistribute(p.mesh, layout.spec)
            self.state[p][key] = matrix
            parts[name] = matrix if layout is None else matrix._local  # type: ignore[attr-defined]
        return parts

    def _has_new_roots(self, p: Tensor, group: dict[str, Any]) -> bool:
        """Return whether roots are computed in this step."""
        return (int(self.state[p]["step"]) - 1) % group["update_freq"] == 0


# --------------------------------------------------------------------------------------------------


def blocks(shape: Sequence[int], size: int) -> Iterator[Box]:
    """Return the boxes of a matrix with at most `size` elements a side, in row-major order."""
    return product(*([(start, min(start + size, n)) for start in range(0, n, size)] for n in shape))


def _units(
    layouts: Sequence[Layout], sizes: Sequence[int]
) -> tuple[tuple[MatrixUnit, ...], list[int]]:
    """Return the blocks of all matrices, and the index of each in its matrix."""
    numbered = [
        (i, b, box)
        for i, layout in enumerate(layouts)
        for b, box in enumerate(blocks(layout.shape, sizes[i]))
    ]
    return tuple(MatrixUnit(i, box, _work(*box_shape(box))) for i, _, box in numbered), [
        b for _, b, _ in numbered
    ]


def _work(rows: int, columns: int) -> int:
    """Return the approximate number of multiplications, mostly of the eigendecompositions."""
    return rows**3 + columns**3


def _identity(
    n: int, scale: float, dtype: torch.dtype, device: torch.device, layout: Layout | None
) -> Tensor:
    """Return `scale` times the identity; with a layout, without rows away from the owner."""
    if layout is None:
        return torch.eye(n, dtype=dtype, device=device) * scale
    return ShardedTensor._make_guarded(
        torch.eye(*layout.local_shape, dtype=dtype, device=device) * scale, layout
    )


def _precondition(
    g: Tensor, state: dict[str, Tensor], group: dict[str, Any], has_new_roots: bool
) -> Tensor:
    """Update the statistics of a whole block and return its direction."""
    state["left"].addmm_(g, g.mT)
    state["right"].addmm_(g.mT, g)
    if group["update_freq"] == 1:
        left, right = (inverse_fourth_root(state[side], group["epsilon"]) for side in _SIDES)
        return left @ g @ right
    if has_new_roots:
        for side in _SIDES:
            state[f"{side}_root"].copy_(inverse_fourth_root(state[side], group["epsilon"]))
    return state["left_root"] @ g @ state["right_root"]


def inverse_fourth_root(x: Tensor, least: float) -> Tensor:
    """inverse_fourth_root(x) -> x^(-1/4) of a symmetric x, by its eigenvectors.

    Eigenvalues are clamped to at least `least`, which is their exact lower bound.
    """
    values, vectors = torch.linalg.eigh(x)
    return (vectors * values.clamp(min=least) ** -0.25) @ vectors.mT
