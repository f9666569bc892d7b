"""A parameter's place in modules, and what all units of a model have in common."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ....mesh.device_mesh import DeviceMesh
from ...layout.layout import Layout
from ...tensor.sharded_tensor import ShardedTensor
from ..replaced import mark_replaced
from .precision import CPUOffloadPolicy, MixedPrecisionPolicy
from .zero_stage import Form

Place = tuple[nn.Module, str]  # a module, and the name of one of its parameters
_SLOT = "_shardmesh_slot"  # under this name a parameter that is no longer used knows in whose place it stood


def took(x: Any) -> Slot | None:
    """The slot in which this parameter stood before it was split."""
    found = getattr(x, _SLOT, None)
    return None if found is None else found()


@dataclass
class Slot:
    """A parameter of a unit.

    Attributes:
        path: its name in the module that was sharded.
        places: where it stands; several if it is tied.
        base: its layout while it is used.
        rest: its layout at rest.
        own: the mesh on which it lay before; None if it was a plain tensor.
    """

    path: str
    places: list[Place]
    base: Layout
    rest: Layout
    own: DeviceMesh | None = None

    @property
    def value(self) -> Any:
        """What stands there now."""
        owner, name = self.places[0]
        return owner._parameters[name]

    def put(self, value: Any) -> None:
        for owner, name in self.places:
            owner._parameters[name] = value
            if isinstance(owner, nn.RNNBase):  # which has a list of its own
                owner._flat_weights[owner._flat_weights_names.index(name)] = value

    def replace(self, value: nn.Parameter) -> None:
        """Put what is used from now on."""
        mark_replaced(self.value)
        setattr(self.value, _SLOT, weakref.ref(self))
        self.put(value)

    def converted(self, layout: Layout) -> None:
        """The parameter lies as `layout` now: the same but for the dtype.

        Raises:
            ValueError: it lies otherwise.
        """
        if layout is not self.rest.replace(dtype=layout.dtype):
            raise ValueError(f"parameter {self.path} was replaced by {layout}; redistribute it to {self.rest.spec}")
        self.rest, self.base = layout, self.base.replace(dtype=layout.dtype)


def check_parameters(slots: Sequence[Slot], together: Sequence[Sequence[int]], unit: str) -> None:
    """Have the layouts of a unit's slots follow a conversion of the module to another dtype; `together` says which travel together.

    Raises: TypeError, ValueError for a parameter that somebody has replaced by one that lies otherwise.
    """
    for slot in slots:
        x = slot.value
        if type(x) is not ShardedTensor:
            raise TypeError(
                f"{slot.path} was replaced by a plain tensor; copy the values into the parameter, or place them as {slot.rest.spec}"
            )
        if x._layout is not slot.rest:
            slot.converted(x._layout)
    for numbers in together:
        if len({slots[i].rest.dtype for i in numbers}) > 1:
            said = {slots[i].path: slots[i].rest.dtype for i in numbers}
            raise ValueError(f"parameters of {unit} travel together and have several dtypes: {said}; convert all of them")


@dataclass(frozen=True)
class Options:
    """What the units of a model have in common.

    Attributes:
        mesh: every axis there is, those of tensor parallelism too.
        form: over which axes what is split.
        policy: dtypes.
        transport: see `redistribute`.
        unused_differ: whether a parameter may get a gradient on some ranks only.
        offload: whether parameters at rest lie on the host.
    """

    mesh: DeviceMesh
    form: Form
    policy: MixedPrecisionPolicy
    transport: str | None = None
    unused_differ: bool = False
    offload: CPUOffloadPolicy | None = None

    @property
    def inside(self) -> Options:
        """Of units inside the module that is split: what they give is not its output."""
        return replace(self, policy=replace(self.policy, output_dtype=None))
