"""The parameters of a unit and their owners, and the options that all units of a model share."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from ....mesh.device_mesh import DeviceMesh
from ...layout.layout import Layout
from ...tensor.sharded_tensor import ShardedTensor
from ..replaced import mark_replaced
from .grads.offloaded_grads import OffloadedGrads
from .precision import CPUOffloadPolicy, MixedPrecisionPolicy
from .zero_stage import ZeroStage

Place = tuple[nn.Module, str]  # a module and the name of one of its parameters
_SLOT = "_shardmesh_slot"  # the attribute of a replaced parameter that refers to its slot


def slot_of_replaced(x: Any) -> Slot | None:
    """Return the slot of a parameter that a sharded one has replaced, else None."""
    slot_ref = getattr(x, _SLOT, None)
    return None if slot_ref is None else slot_ref()


@dataclass
class Slot:
    """A parameter of a unit.

    Attributes:
        path: its name in the sharded module.
        places: its owners and names; several if it is tied.
        base: its layout in use.
        rest: its sharded layout, between uses.
        own: its mesh before; None if it was a plain tensor.
        dim: the dim that is split between uses; None if the bucket chooses 0 or 1.
        value: the parameter, also while modules have another value in its place.
    """

    path: str
    places: list[Place]
    base: Layout
    rest: Layout
    own: DeviceMesh | None = None
    dim: int | None = None
    value: Any = field(init=False)

    def __post_init__(self) -> None:
        owner, name = self.places[0]
        self.value = owner._parameters[name]

    @staticmethod
    def put_in(owner: nn.Module, name: str, value: Any) -> None:
        """Set what a module has at a place."""
        owner._parameters[name] = value
        if isinstance(owner, nn.RNNBase):  # it keeps a separate list
            owner._flat_weights[owner._flat_weights_names.index(name)] = value

    def replace(self, value: nn.Parameter) -> None:
        """Replace the parameter for good, and mark the old one."""
        mark_replaced(self.value)
        setattr(self.value, _SLOT, weakref.ref(self))
        self._set(value)

    def adopt(self) -> None:
        """Take over a new `nn.Parameter` of the module, as after `load_state_dict(assign=True)`."""
        for owner, name in self.places:
            x: Any = owner._parameters.get(name)
            if x is not self.value and isinstance(x, nn.Parameter):
                self._set(x)

    def _set(self, value: nn.Parameter) -> None:
        self.value = value
        for owner, name in self.places:
            self.put_in(owner, name, value)

    def update_dtype(self, layout: Layout) -> None:
        """Take over a new layout of the parameter, which may differ in the dtype only.

        Raises:
            ValueError: the layout differs in more.
        """
        if layout is not self.rest.replace(dtype=layout.dtype):
            raise ValueError(
                f"parameter {self.path} was replaced by {layout}; redistribute it to "
                f"{self.rest.spec}"
            )
        self.rest, self.base = layout, self.base.replace(dtype=layout.dtype)


def check_parameters(slots: Sequence[Slot], together: Sequence[Sequence[int]], unit: str) -> None:
    """Update the layouts of a unit's slots to the dtypes that their parameters have now.

    Raises: TypeError, ValueError for a parameter that was replaced by one with another layout.
    """
    for slot in slots:
        x = slot.value
        if type(x) is not ShardedTensor:
            raise TypeError(
                f"{slot.path} was replaced by a plain tensor; copy the values into the parameter, "
                f"or shard them as {slot.rest.spec}"
            )
        if x._layout is not slot.rest:
            slot.update_dtype(x._layout)
    for numbers in together:
        if len({slots[i].rest.dtype for i in numbers}) > 1:
            dtypes = {slots[i].path: slots[i].rest.dtype for i in numbers}
            raise ValueError(
                f"parameters of {unit} are gathered together but have several dtypes: {dtypes}; "
                "convert all of them"
            )


@dataclass(frozen=True)
class UnitOptions:
    """Options that all units of a model share.

    Attributes:
        mesh: the mesh with all axes, those of tensor parallelism too.
        stage: the axes that split parameters, gradients and optimizer state.
        policy: dtypes.
        transport: see `redistribute`.
        find_unused: whether a parameter may have a gradient on some ranks only.
        offload: whether sharded parameters are kept on the host.
        offloaded: their gradients, if they are copied while backward continues.
        data_axes: the axes along which ranks may have different plain inputs, so that gradients are
            averaged.
    """

    mesh: DeviceMesh
    stage: ZeroStage
    policy: MixedPrecisionPolicy
    transport: str | None = None
    find_unused: bool = False
    offload: CPUOffloadPolicy | None = None
    offloaded: OffloadedGrads | None = None
    data_axes: tuple[str, ...] = ()

    @property
    def inside(self) -> UnitOptions:
        """The options of nested units, whose outputs are not cast."""
        return replace(self, policy=replace(self.policy, output_dtype=None))
