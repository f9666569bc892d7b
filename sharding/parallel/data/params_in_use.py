"""Parameters during a forward: what modules have in their place, and what forward writes to them.

    before    module.weight = the sharded parameter    or a value that replaces it for one call, as
                                                       torch.func.functional_call does
    forward   module.weight = a value in use           gathered, the local part itself, or made
                                                       from the value that replaces it
    after     module.weight = what it was before       a write to the value in use is carried over,
                                                       or an error

A value in use that is the parameter's own memory takes writes as in torch. Any other is compared
with how it was put in: its address (`p.data = x`, `set_`) and its version (operators in place).
Writes to its `.data` have neither: see `Unit._keep_writes`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ...tensor.sharded_tensor import ShardedTensor
from .slot import Slot


def replaced_values(slots: list[Slot]) -> dict[tuple[int, int], Tensor]:
    """Return the values that replace parameters for this call, by the numbers of slot and place.

    Raises:
        TypeError: a plain `nn.Parameter` replaces a parameter; its gradient would not be averaged.
        ValueError: a value of another shape, or on another mesh.
    """
    replaced: dict[tuple[int, int], Tensor] = {}
    for i, slot in enumerate(slots):
        parameter = slot.value
        for k, (owner, name) in enumerate(slot.places):
            x: Any = owner._parameters.get(name)
            if x is not parameter:
                replaced[i, k] = _checked(slot, x)
    return replaced


def _checked(slot: Slot, x: Any) -> Tensor:
    if isinstance(x, ShardedTensor):
        if x.shape != slot.base.shape:
            raise ValueError(
                f"{slot.path} of shape {list(slot.base.shape)} was replaced by {x._layout}; pass a "
                "value of the same shape"
            )
        if x.mesh != slot.base.mesh:
            raise ValueError(
                f"{slot.path} was replaced by {x._layout}; pass a value on {slot.base.mesh}, where "
                "the parameter is"
            )
        return x
    if isinstance(x, nn.Parameter):
        raise TypeError(
            f"{slot.path} was replaced by a plain tensor that is an nn.Parameter, whose gradient "
            "would not be averaged over the ranks; copy the values into the parameter, or shard "
            f"them as {slot.rest.spec}. For torch.func.functional_call pass ShardedTensors, or "
            "plain tensors that are no nn.Parameter, such as x.detach().requires_grad_(): each "
            "rank then uses its own, and its gradient is this rank's"
        )
    if not isinstance(x, Tensor):
        raise TypeError(f"{slot.path} was replaced by {type(x).__name__}; assign a tensor")
    return x


class Use:
    """A parameter in use at one place.

    Attributes:
        number: of the parameter in its unit.
        slot: the parameter.
        owner, name: where it is used.
        before: what the module had, and has again afterwards.
        in_use: what it has during forward.
        local: this rank's part of that.
    """

    __slots__ = (
        "_address",
        "_shape",
        "_version",
        "before",
        "in_use",
        "local",
        "name",
        "number",
        "owner",
        "slot",
    )

    def __init__(self, number: int, slot: Slot, owner: nn.Module, name: str, in_use: Any) -> None:
        self.number, self.slot, self.owner, self.name = number, slot, owner, name
        self.before, self.in_use = owner._parameters.get(name), in_use
        local = self.local = in_use._local if type(in_use) is ShardedTensor else in_use
        self._address, self._shape = local.data_ptr(), local.shape
        self._version = 0 if local.is_inference() else local._version

    @property
    def is_replaced(self) -> bool:
        """Whether the module had another value than the parameter."""
        return self.before is not self.slot.value

    @property
    def is_copy(self) -> bool:
        """Whether the value in use was put in with other memory than what the module had."""
        before: Any = self.before
        local = before._local if isinstance(before, ShardedTensor) else before
        return self._address != local.data_ptr()

    @property
    def is_assigned(self) -> bool:
        """Whether the value in use has other memory now."""
        return self.local.data_ptr() != self._address or self.local.shape != self._shape

    @property
    def is_written(self) -> bool:
        """Whether forward has changed the value in use."""
        if self.is_assigned:
            return True
        return not self.local.is_inference() and self.local._version != self._version


class ParamsInUse:
    """Puts values in place of parameters for a forward, and the parameters back after it."""

    def __init__(self) -> None:
        self.uses: list[Use] = []

    def put(self, number: int, slot: Slot, place: int, value: Any) -> None:
        """Use this value at a place of a parameter."""
        self.uses.append(Use(number, slot, *slot.places[place], value))
        slot.put_at(place, value)

    def written(self) -> Iterator[Use]:
        """Yield the uses whose value forward has changed.

        Raises:
            RuntimeError: forward has replaced the attribute of a parameter.
        """
        for use in self.uses:
            now = use.owner._parameters.get(use.name)
            if now is not use.in_use and not use.is_replaced:
                raise RuntimeError(
                    f"{use.slot.path} was replaced in forward, by {type(now).__name__}; write to "
                    "the parameter's values instead, as in self.weight.data = values, or use "
                    "another attribute"
                )
            if use.is_written:
                yield use

    def restore(self) -> None:
        """Put back what the modules had."""
        for use in self.uses:
            if not use.is_replaced or use.owner._parameters.get(use.name) is use.in_use:
                use.slot.put_in(use.owner, use.name, use.before)
        self.uses = []
