"""Recorded calls: what tells one from another, whether they still hold, and how they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards  # type: ignore[import-not-found]

from ...mesh.comm.world import World
from ..ops.recomputation import next_graph_number
from ..tensor.sharded_tensor import ShardedTensor
from .backends.segments import Backend
from .collectives import forget_lineages
from .draws import advance
from .passes.alias import written_inputs
from .program import Runner, run_plainly
from .recording import Recording, Result, seal
from .results import unflatten_result
from .selection import Prologue
from .state.differences import changed_gradient, changed_tensor, facts_of
from .state.guard import Guard
from .state.holders import PLAIN
from .state.slots import emptiness_of, signature


class Static(NamedTuple):
    """A static argument: a constant of the graph.

    Attributes:
        kind: its class: 1, 1.0 and True are other constants.
    """

    value: Any
    kind: type


class Entry:
    """A recorded call of one signature, and the state that must not have changed since.

    Attributes:
        recording: the program and its inputs and outputs.
        prologue: computes the values that select it.
        reason: why it was recorded although there were others; None for the first one.
        runner: its compiled graph; None before the first call.
        calls: how often that has run.
        number: see `ops/recomputation.py`.

    Args:
        guard: the Python state that the function reaches.
        leaves: those of the arguments.
        signatures: of the gradients before the call.
        check_state: whether later calls compare that state.
    """

    def __init__(
        self,
        recording: Recording,
        guard: Guard,
        leaves: Sequence[Any],
        signatures: list[Any],
        reason: str | None,
        check_state: bool = True,
    ) -> None:
        self.recording, self.reason, self.calls = recording, reason, 0
        self.number = next_graph_number()
        self.prologue = Prologue(recording.program.reads)
        self.runner: Runner | None = None
        self.guard, self._signatures, self._checks_state = guard, signatures, check_state
        self._overlap = self._overlaps(leaves)
        self._by_reference = [x for x, _ in recording.by_reference]
        self._addresses = [address for _, address in recording.by_reference]
        self._same_tensors = _tensor_guards(self._by_reference)
        self._facts = [facts_of(x) for x in self._by_reference]
        guard.leave_out(self._by_reference)
        self._written = written_inputs(recording.program.graph)
        self._gate: list[Tensor] | None = None
        self._are_empty = emptiness_of(recording.slots, signatures)

    def _overlaps(self, leaves: Sequence[Any]) -> list[Any]:
        """Return which tensors among the arguments share memory with state of the function.

        Returns: for each tensor its id if it shares memory with state that the function reaches,
            else None.
        """
        storages = self.guard.storages
        return [
            id(x) if x.untyped_storage()._cdata in storages else None for x in local_parts(leaves)
        ]

    def _same_gradients(self, leaves: Sequence[Any]) -> bool:
        """Return True if every gradient slot holds the same kind of value as when recorded.

        Fast path: all were None.
        """
        if self._are_empty is not None:
            return self._are_empty()
        return [signature(slot.get(leaves)) for slot in self.recording.slots] == self._signatures

    def change(self, leaves: Sequence[Any]) -> str | None:
        """Return why the recording does not hold for this call, None if it does."""
        change = self.guard.change() if self._checks_state else None
        for condition in self.recording.conditions:
            change = change or condition.change()
        if change is not None:
            return change
        if not self._same_gradients(leaves):
            slots = self.recording.slots
            return changed_gradient(
                slots, self._signatures, [signature(slot.get(leaves)) for slot in slots]
            )
        addresses = list(map(Tensor.data_ptr, self._by_reference))
        is_same = self._same_tensors(*self._by_reference) and addresses == self._addresses
        # None if only a dispatch mode is active that was not.
        if not is_same and (change := self._changed_tensor()) is not None:
            return change
        if self.recording.derived and self.guard.was_written():
            return "what the library had made from parameters is outdated"
        if self._overlaps(leaves) != self._overlap:
            return "an argument shares memory with other state of the function than before"
        return None

    def _changed_tensor(self) -> str | None:
        """Return which tensor that is taken by reference has changed, None if none has."""
        for x, facts, address in zip(self._by_reference, self._facts, self._addresses, strict=True):
            if facts_of(x) != facts or x.data_ptr() != address:
                name = self.guard.names.get(id(x), "a tensor of the library")
                return changed_tensor(name, facts, x)
        return None

    def forget_lineages(self) -> None:
        """Let the graph run while other ranks run those of other values."""
        if forget_lineages(self.recording.program.graph):
            self.runner = None

    def _differentiable(self, leaves: Sequence[Any]) -> list[Tensor]:
        """Return the leaves of autograd that results depend on.

        Those that are no arguments are behind one tensor, which is made once.
        """
        if self._gate is None:
            needed = [x for x in self._by_reference if x.requires_grad and x.is_leaf]
            self._gate = [seal(needed[0], *needed[1:])] if needed else []
        return [*self._gate, *(x for x in local_parts(leaves) if x.requires_grad)]

    def __call__(
        self, leaves: Sequence[Any], carried: Sequence[Any], world: World, backend: Backend
    ) -> Any:
        """Run the graph.

        Args:
            carried: what the prologue has returned.
        """
        recording = self.recording
        outputs = self._outputs([*leaves, *carried] if carried else leaves, world, backend)
        for slot, number, layout, lineage in recording.effects:
            gradient = None if number is None else _as_result(outputs[number], layout, lineage)
            setattr(slot.owner(leaves), slot.name, gradient)
        results = []
        for result in recording.results:
            value = value_of(result, outputs, leaves)
            results.append(seal(value, *self._differentiable(leaves)) if result.sealed else value)
        return unflatten_result(recording.tree, results)

    def _outputs(self, values: Sequence[Any], world: World, backend: Backend) -> Sequence[Any]:
        """Run the program on what its sources return of these values; return its outputs."""
        program = self.recording.program
        inputs = [source(values) for source in program.sources]
        if self.runner is None:
            self.runner = backend(program, inputs)
        outputs = run_plainly(self.runner, inputs)
        self.calls += 1
        if self._written:
            torch.autograd.graph.increment_version([inputs[i] for i in self._written])
        advance(world, program.draws)
        return outputs


# -- signatures ------------------------------------------------------------------------------------


def key_of(leaves: Sequence[Any], tensors: Sequence[Tensor] | None = None) -> Any:
    """Return what identifies the signature of a call, of its leaves and of torch's modes.

    Args:
        tensors: the local parts of the leaves, if the caller has them.
    """
    tensors = local_parts(leaves) if tensors is None else tensors
    return _modes(), tuple([_key(x) for x in leaves]), _same_memory(tensors)


def _key(x: Any) -> Any:
    """Return what of a leaf belongs to the signature."""
    if isinstance(x, ShardedTensor):
        return x._layout, x._local.stride(), x._local.requires_grad
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype, x.device, x.requires_grad
    if type(x) is float:
        return float
    if type(x) is Static:
        return x
    return (type(x), x) if isinstance(x, PLAIN) and type(x) is not slice else (type(x), id(x))


def local_parts(leaves: Sequence[Any]) -> list[Tensor]:
    """Return the tensors among leaves, the local parts of sharded ones."""
    return [
        x._local if isinstance(x, ShardedTensor) else x for x in leaves if isinstance(x, Tensor)
    ]


def _same_memory(parts: Sequence[Tensor]) -> Any:
    """Return for each tensor which one before it shares its memory, and how far apart they are.

    The result is None if no tensors share memory.
    """
    if len(parts) < 2:
        return None
    storages = [x.untyped_storage()._cdata if x.numel() else -1 - i for i, x in enumerate(parts)]
    if len(set(storages)) == len(storages):
        return None
    first = [parts[storages.index(one)] for one in storages]
    return tuple(
        (storages.index(one), x.storage_offset() - y.storage_offset())
        for one, x, y in zip(storages, parts, first, strict=True)
    )


def _modes() -> Any:
    """Return the modes of torch that decide which operators run."""
    autocast: Any = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
    if torch.is_autocast_enabled("cuda"):
        autocast = autocast, torch.get_autocast_dtype("cuda")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch._C._get_deterministic_algorithms(),
        autocast,
    )


def _tensor_guards(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Return a function that tells whether tensors still have the same metadata.

    It compares their shapes, strides, dtypes and `requires_grad`.
    """
    if not tensors:
        return lambda: True
    shapes: Any = [list(x.shape) for x in tensors]
    strides: Any = [list(x.stride()) for x in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check


# -- running ---------------------------------------------------------------------------------------


def value_of(result: Result, outputs: Sequence[Any], leaves: Sequence[Any]) -> Any:
    """Return a leaf of the result of a call whose program has returned these outputs."""
    number, layout, lineage, _, same = result
    return same(leaves) if number is None else _as_result(outputs[number], layout, lineage)  # type: ignore[misc]


def _as_result(x: Any, layout: Any, lineage: int) -> Any:
    return x if layout is None else ShardedTensor._make_guarded(x, layout, lineage)
