"""Parameters during a forward: what modules have in their place, and what forward writes to them.

    before    module.weight = the sharded parameter    or a value that replaces it for one call, as
                                                       torch.func.functional_call does
    forward   module.weight = a value in use           gathered, the local part itself, or made
                                                       from the value that replaces it
    after     module.weight = what it was before       a write to the value in use is carried over,
                                                       or an error

A value in use that is the parameter's own memory takes writes as in torch. Any other is compared
with how it was put in: its address (`p.data = x`, `set_`) and its version (operators in place).
Writes to its `.data` have neither: the first, 16th, 256th, ... forward compares hashes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....mesh.comm.dispatch_modes import not_recomputed
from ....mesh.comm.thread_context import thread_context
from ...autograd import engine_hooks
from ...replicas.bit_hash import bit_hash
from ...replicas.compare import compare
from ...replicas.leaves import replica_leaves
from ...tensor.sharded_tensor import ShardedTensor
from .plan import UnitPlan
from .slot import Slot
from .substitutes import Substitutes

_HASHED_FORWARDS = frozenset(16**k for k in range(16))  # the host waits for their comparison


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
    """Puts values in place of a unit's parameters for a forward, and the parameters back after it.

    Attributes:
        uses: the values in use; none outside of a forward.
    """

    def __init__(self, plan: UnitPlan) -> None:
        self._plan = plan
        self.uses: list[Use] = []
        self._hashes: list[tuple[Use, Tensor]] = []  # of copies, as they were put in
        self._forwards = 0

    def put(self, values: Sequence[Any], substitutes: Substitutes) -> None:
        """Use these values, one for each parameter, and others at some places of parameters."""
        for i, (slot, value) in enumerate(zip(self._plan.slots, values, strict=True)):
            for k, (owner, name) in enumerate(slot.places):
                in_use = substitutes.get((i, k), value)
                self.uses.append(Use(i, slot, owner, name, in_use))
                slot.put_in(owner, name, in_use)
        self._forwards += 1
        is_hashed = self._forwards in _HASHED_FORWARDS and engine_hooks.current_backward() == -1
        if is_hashed and thread_context.recorder is None:
            self._hashes = [
                (use, bit_hash(use.local))
                for use in self.uses
                if not use.local.is_meta and self._is_copy(use)
            ]

    def _is_copy(self, use: Use) -> bool:
        return use.is_copy if use.is_replaced else self._plan.is_copy(use.number)

    def restore(self) -> None:
        """Put back what the modules had."""
        for use in self.uses:
            if not use.is_replaced or use.owner._parameters.get(use.name) is use.in_use:
                use.slot.put_in(use.owner, use.name, use.before)
        self.uses, self._hashes = [], []

    # -- writes ------------------------------------------------------------------------------------

    @not_recomputed
    def keep_writes(self) -> None:
        """Carry over what forward has written to parameters in use.

        Where copies last until the next step (ZeRO-1, ZeRO-2), this rank's rows are copied to the
        parameter after each forward, since writes to `.data` may leave no trace.

        Raises:
            RuntimeError: a written value is one that forward frees, or one in another dtype.
            ReplicaError: with sharded optimizer state, ranks have written different values.

        Communication: none if nothing is written; else with sharded optimizer state one comparison,
        see `assert_replicated`.
        """
        if not self.uses:
            return
        plan = self._plan
        uses = list({(use.number, id(use.in_use)): use for use in self._written_uses()}.values())
        uses += self._written_by_data({use.number for use in uses})
        if not uses:
            if not plan.options.stage.parameter and plan.options.policy.param_dtype is None:
                for bucket in plan.buckets:
                    bucket.storage.copy_whole_to_shard(bucket.parameters)
            return
        for use in uses:
            self._check_write(use)
        uses = [use for use in uses if not use.is_replaced]
        for use in uses:
            if not plan.is_copy(use.number):
                parameter = use.slot.value
                parameter._local.data = use.local.data
                parameter._data_accesses += 1
        copies = [use for use in uses if plan.is_copy(use.number)]
        if copies:
            self._write_copies(copies)

    def _written_uses(self) -> Iterator[Use]:
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

    def _written_by_data(self, known: set[int]) -> list[Use]:
        """Return the uses whose values have changed since they were hashed, without known ones."""
        hashes = [(use, before) for use, before in self._hashes if use.number not in known]
        self._hashes = []
        if not hashes:
            return []
        before = torch.stack([one for _, one in hashes])
        now = torch.stack([bit_hash(use.local) for use, _ in hashes])
        is_changed = (before != now).tolist()
        return [use for (use, _), changed in zip(hashes, is_changed, strict=True) if changed]

    def _check_write(self, use: Use) -> None:
        why = self._why_lost(use)
        if why is None:
            return
        for bucket in self._plan.buckets:
            bucket.storage.drop_copies()
        self._forwards = 0  # the next forward compares again
        path = use.slot.path
        raise RuntimeError(
            f"{path} was written in forward, and the write would be lost: {why}. Write to {path} "
            "outside of forward, where it is a ShardedTensor, or keep it in a buffer; with "
            "data_parallel(model, mesh), without a precision policy, parameters are whole and "
            "forward may write to them"
        )

    def _why_lost(self, use: Use) -> str | None:
        """Return why a write to a parameter in use cannot be kept; None if it can."""
        local, layout, options = use.local, use.slot.base, self._plan.options
        if use.is_replaced:
            return "the value that replaces it is used from a copy" if use.is_copy else None
        is_copy = self._plan.is_copy(use.number)
        if options.policy.param_dtype is not None and is_copy:
            dtype = options.policy.used_as(layout.dtype)
            return f"forward uses a copy in {dtype}, by its precision policy"
        if options.stage.parameter and is_copy:
            return "forward uses gathered values, which are freed after it"
        if type(use.in_use) is ShardedTensor and (
            use.in_use.spec != layout.spec or use.in_use.shape != layout.shape
        ):
            return f"it is {use.in_use._layout} now; assign values laid out as {layout.spec}"
        if local.shape != layout.local_shape or local.dtype is not layout.dtype:
            return (
                f"its values have shape {list(local.shape)} and dtype {local.dtype} now; assign "
                "values of the same shape and dtype"
            )
        if local._base is not None and type(local._base.grad_fn).__name__ == "CopySlices":
            return "autograd records it; write under torch.no_grad()"
        return None

    def _write_copies(self, uses: list[Use]) -> None:
        """Write whole values to the sharded parameters."""
        values = {
            use.slot.path: ShardedTensor._make(use.local.detach(), use.slot.base) for use in uses
        }
        group = self._plan.options.mesh.group()
        compare(
            f"{self._plan.display_name}: written in forward: ",
            replica_leaves(list(values.items()), group.ranks),
            group,
        )
        by_number = {use.number: use for use in uses}
        for bucket in self._plan.buckets:
            written = {k: by_number[i] for k, i in enumerate(bucket.numbers) if i in by_number}
            if written:
                bucket.storage.update_shard(
                    bucket.parameters,
                    {k: use.local for k, use in written.items()},
                    is_in_whole=not any(use.is_assigned for use in written.values()),
                )
