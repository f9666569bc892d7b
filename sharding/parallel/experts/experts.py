"""`Experts`: the experts of a mixture as one module, split over an axis."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ....mesh.context import given_or_current
from ....mesh.device_mesh import DeviceMesh
from ...layout.spec import P
from ...tensor.convert import distribute_tensor
from .moe import moe
from .router import Routing


class Experts(nn.Module):
    """Experts(modules, mesh): modules of one kind as the experts of `moe`.

    Their parameters are stacked [e ...] and split over an axis.

    Its parameters have the names of one module's under `each`. They are ordinary ShardedTensor
    parameters for optimizers, `fully_shard` and checkpoints. A call is one operator of a graph of
    `sm.jit`.

    Args:
        modules: one module per expert, with equal parameter shapes; each maps rows [n d] to [n f].
            The mesh's first rank gives the values.
        mesh: the mesh; by default the one that is set.
        axis, capacity: see `moe`.

    Raises:
        ValueError: no modules, modules whose parameters differ in name, shape or dtype, or modules
            with buffers.

    Communication: one all_to_all per parameter in the constructor.

    Example:
        >>> experts = sm.parallel.Experts([MLP(d) for _ in range(8)], mesh)
        >>> y = experts(x, sm.parallel.top_k_routing(self.router(x), 2))
    """

    _reads_inner_parameters = True  # of `each`; `fully_shard` gathers them for a call

    def __init__(
        self,
        modules: Sequence[nn.Module],
        mesh: DeviceMesh | None = None,
        *,
        axis: str | tuple[str, ...] = "ep",
        capacity: float | None = None,
    ) -> None:
        super().__init__()
        _check_alike(modules)
        mesh = given_or_current(mesh)
        self.axis = (axis,) if isinstance(axis, str) else tuple(axis)
        self.capacity = capacity
        self.each = copy.deepcopy(modules[0])
        for name, p in modules[0].named_parameters():
            stacked = torch.stack([module.get_parameter(name).detach() for module in modules])
            owner, _, last = name.rpartition(".")
            sharded = distribute_tensor(stacked, mesh, P(self.axis))
            self.each.get_submodule(owner).register_parameter(
                last, nn.Parameter(sharded, p.requires_grad)
            )

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        params = dict(self.each.named_parameters())
        return moe(
            x,
            routing,
            lambda rows, params: functional_call(self.each, params, (rows,)),
            params,
            axis=self.axis,
            capacity=self.capacity,
        )

    def extra_repr(self) -> str:
        return f"axis={self.axis}, capacity={self.capacity}"


def _check_alike(modules: Sequence[nn.Module]) -> None:
    if not modules:
        raise ValueError("Experts: no modules; pass one for each expert")
    described = [
        {name: (list(p.shape), p.dtype) for name, p in module.named_parameters()}
        for module in modules
    ]
    different = next((i for i, one in enumerate(described) if one != described[0]), None)
    if different is not None:
        raise ValueError(
            f"Experts: modules[{different}] has parameters {described[different]}, but modules[0] "
            f"{described[0]}"
        )
    buffers = [name for name, _ in modules[0].named_buffers()]
    if buffers:
        raise ValueError(
            f"Experts: the modules have buffers {buffers}, which experts cannot share; use modules "
            "without buffers"
        )
