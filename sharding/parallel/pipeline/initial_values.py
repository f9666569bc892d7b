"""Initial values of a model made on "meta", in stages: those of the whole model on any mesh.

    rank 0, stage 0   embed  blocks.0                    memory, and its values
                                       blocks.1  head    no memory: draws the same random numbers

Random tensors are numbered in the order in which the whole model draws them (`random.py`), so every
rank runs the initialisers of the whole model, in their order. A tensor of another rank's stage is a
`ShardedTensor` on that stage's ranks, of which this rank holds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...layout.layout import Layout
from ...layout.spec import P
from ...tensor.sharded_tensor import ShardedTensor, local_of
from ..data.materialize import write_initial_values
from ..data.unit import units_in
from ..replaced import mark_replaced
from .stage_tensors import LINEAGE, StageTensors
from .stages.staged_model import StagedModel
from .stages.units import Place, places_of


def materialize_stages(
    staged: StagedModel,
    tensors: StageTensors,
    placement: Sequence[int],
    init: Callable[[nn.Module], object] | None,
) -> None:
    """Allocate and initialise what this rank holds of a model on "meta".

    See `Pipeline.materialize`.

    Args:
        staged: the model.
        tensors: of the pipeline.
        placement: the rank of each stage along the axis.
        init: as in `sm.parallel.materialize`.

    Raises:
        ValueError: as `sm.parallel.materialize`.

    Communication: as `sm.parallel.materialize`, among the ranks of each stage.
    """
    if not staged.on_meta:
        return
    whole = staged.copy_on_meta()
    places = list(places_of(whole))
    copies = _own_tensors(staged, whole)
    for (path, name), x in places:
        own = copies.get(id(x))
        table = _tables(whole.get_submodule(path), x)
        table[name] = own[0] if own else _elsewhere(staged, tensors, placement, (path, name), x)
    units = [unit for stage in staged.stages.values() for unit in units_in(stage)]
    write_initial_values(whole, tensors.mesh_of(tensors.place), units, init)
    new: dict[int, Tensor] = {}
    for (path, name), x in places:
        value = _tables(whole.get_submodule(path), x)[name]
        for number, old in enumerate(copies.get(id(x), ())):
            if local_of(old).is_meta and id(old) not in new:
                new[id(old)] = _copy(old, value) if number else value
    _replace((*staged.stages.values(), staged.model), new)
    for unit in units:
        unit.plan.flatten_parameters()
    staged.on_meta = frozenset()


def _own_tensors(staged: StagedModel, whole: nn.Module) -> dict[int, list[Tensor]]:
    """Return what this rank holds, by the id of the tensor in a copy of the model.

    There are several tensors where several stages have a copy.
    """
    modules = dict(whole.named_modules(remove_duplicate=False))
    on_all_ranks = [
        (place, x) for place, x in places_of(staged.model) if staged.holders(place) is None
    ]
    own: dict[int, list[Tensor]] = {}
    for listed in (*(places_of(stage) for stage in staged.stages.values()), on_all_ranks):
        for (path, name), x in listed:
            key = id(_tables(modules[path], x)[name])
            copies = own.setdefault(key, [])
            if not any(x is other for other in copies):
                copies.append(x)
    return own


def _elsewhere(
    staged: StagedModel, tensors: StageTensors, placement: Sequence[int], place: Place, like: Tensor
) -> ShardedTensor:
    """Return a tensor of another rank's stage, on "meta" if it is there on that rank."""
    stage = min(staged.holders(place) or (0,))
    layout = Layout.of(tensors.mesh_of(placement[stage]), P(), like.shape, like.dtype)
    device = "meta" if staged.first_place(place) in staged.on_meta else tensors.mesh.device
    local = torch.empty(layout.local_shape, dtype=like.dtype, device=device)
    return ShardedTensor._make_guarded(local, layout, LINEAGE)


def _copy(old: Tensor, value: Tensor) -> Tensor:
    """Return a further copy of a tied tensor, laid out as it was on "meta"."""
    local = torch.empty_like(local_of(old), device=local_of(value).device)
    copy: Any = local
    if isinstance(old, ShardedTensor):
        copy = ShardedTensor._make_guarded(local, old._layout, LINEAGE)
    copy.copy_(value.detach())
    if not isinstance(old, nn.Parameter):
        return copy
    mark_replaced(old)
    return nn.Parameter(copy, requires_grad=old.requires_grad)


def _replace(roots: Sequence[nn.Module], new: dict[int, Tensor]) -> None:
    for root in roots:
        for module in root.modules():
            for table in (module._parameters, module._buffers):
                for name, x in table.items():
                    if id(x) in new:
                        table[name] = new[id(x)]  # type: ignore[assignment]


def _tables(module: nn.Module, x: Tensor) -> dict[str, Any]:
    return module._parameters if isinstance(x, nn.Parameter) else module._buffers
