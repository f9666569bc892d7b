"""`Experts`: the modules of a mixture of experts as one module, split over an axis."""

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
    """Experts(modules, mesh): like modules as the experts of `moe`, their parameters stacked [e ...] and split over an axis.

    Its parameters have the names of those of one module under `each`. They are ordinary ShardedTensor parameters: optimizers,
    `fully_shard` and checkpoints see nothing special.

    Args:
        modules: like modules, one for each expert; each maps rows [n d] to [n f]. Their values on the mesh's first rank count.
        mesh: the mesh; by default the one that is set.
        axis, capacity: see `moe`.

    Raises:
        ValueError: no modules, modules of which parameters differ in name, shape or dtype, or that have buffers.

    Communication: of making it, one all_to_all for each parameter.

    Example:
        >>> experts = sm.Experts([MLP(d) for _ in range(8)], mesh)
        >>> y = experts(x, sm.top_k_routing(self.router(x), 2))
    """

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
        self.axis, self.capacity = (axis,) if isinstance(axis, str) else tuple(axis), capacity
        self.each = copy.deepcopy(modules[0])
        for name, p in modules[0].named_parameters():
            stacked = torch.stack([module.get_parameter(name).detach() for module in modules])
            owner, _, last = name.rpartition(".")
            placed = distribute_tensor(stacked, mesh, P(self.axis))
            self.each.get_submodule(owner).register_parameter(last, nn.Parameter(placed, p.requires_grad))

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        params = dict(self.each.named_parameters())
        return moe(x, routing, self._of_one, params, axis=self.axis, capacity=self.capacity)

    def _of_one(self, rows: Tensor, params: dict[str, Tensor]) -> Tensor:
        return functional_call(self.each, params, (rows,))

    def extra_repr(self) -> str:
        return f"axis={self.axis}, capacity={self.capacity}"


def _check_alike(modules: Sequence[nn.Module]) -> None:
    if not modules:
        raise ValueError("Experts: no modules; give one for each expert")
    described = [{name: (list(p.shape), p.dtype) for name, p in module.named_parameters()} for module in modules]
    odd = next((i for i, one in enumerate(described) if one != described[0]), None)
    if odd is not None:
        raise ValueError(f"Experts: modules[{odd}] has parameters {described[odd]}, and modules[0] {described[0]}; they are to be alike")
    buffers = [name for name, _ in modules[0].named_buffers()]
    if buffers:
        raise ValueError(f"Experts: the modules have the buffers {buffers}, of which one expert's would serve all; make them without")
