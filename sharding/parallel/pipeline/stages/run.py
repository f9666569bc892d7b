"""One forward of a stage: the model's own forward, in which calls of units are answered.

unit of an earlier stage   its carried outputs; zeros in the place of those that nobody needs
unit of this stage         the unit's own call; its outputs are kept if a later stage needs them
unit of a later stage      the run ends
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from .....mesh.comm.thread_context import thread_context
from ....autograd.engine_hooks import saved_tensor_hooks
from ..random_numbers import restored_in_recordings
from .dependencies import Dependencies, Output, UnitCall
from .recording import TensorMeta
from .values import leaves_of, split_value

AfterUnit: TypeAlias = Callable[[int], None]


class _BoundaryReached(BaseException):
    """Ends the forward of a stage; no `except Exception` of the model's code stops it."""


@dataclass(frozen=True)
class SharedTensor:
    """A parameter or buffer that a stage uses outside of units, or in the place of another unit.

    Attributes:
        home: the module of the stage that has it, None if the stage has a placeholder.
        name: its name there.
        targets: the modules of the model that have it, and its names there.
        meta: it on "meta"; a parameter or a buffer.
    """

    home: nn.Module | None
    name: str
    targets: Sequence[tuple[nn.Module, str]]
    meta: Tensor


class StageRun:
    """Answers calls of units in one forward of a stage.

    Args:
        stage: the number of the stage.
        dependencies: for the inputs.
        paths: the path of each module whose calls are intercepted, by id.
        units: the modules of this stage by path.
        carried: the values of the stage's boundary.
        after_unit: called with the number of a unit's call when it has returned, and the next
            call may be of this stage.
    """

    def __init__(
        self,
        stage: int,
        dependencies: Dependencies,
        paths: Mapping[int, str],
        units: Mapping[str, nn.Module],
        carried: Sequence[Tensor],
        after_unit: AfterUnit | None,
    ) -> None:
        self._after_unit = after_unit
        self._stage, self._dependencies = stage, dependencies
        self._paths, self._units = paths, units
        self._called = {call.path for call in dependencies.calls}
        self._next = 0
        self._checkpoints: dict[int, tuple[Any, int]] = {}
        self._outer_hooks = _saved_tensor_hooks()
        own = dependencies.carried[stage]
        if len(carried) != len(own):
            raise ValueError(
                f"stage {stage} takes {len(own)} carried tensors for these inputs, got "
                f"{len(carried)}; see StagedModel.boundary"
            )
        self._values: dict[Output, Tensor] = {}
        for output, x in zip(own, carried, strict=True):
            _check_tensor(dependencies.calls[output.call], output.index, x, f"carried into {stage}")
            self._values[output] = x
        last = stage == len(dependencies.carried) - 1
        self._following = () if last else dependencies.carried[stage + 1]
        self._needed_later = frozenset(self._following)
        self._is_last = last

    def forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the model's result in the last stage, else the values carried into the next one.

        Raises:
            RuntimeError: the forward calls other units than it did when it was recorded.
        """
        try:
            with thread_context.setting(module_calls=self), restored_in_recordings():
                result = model(*args, **kwargs)
        except _BoundaryReached:
            return tuple(self._values[output] for output in self._following)
        if not self._is_last or self._next != len(self._dependencies.calls):
            raise RuntimeError(
                f"stage {self._stage}: the forward ended after {self._next} calls of units, but "
                f"{len(self._dependencies.calls)} were recorded for inputs of these shapes; "
                "which units are called must not depend on values"
            )
        return result

    def call(
        self,
        module: nn.Module,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Answer a call of a unit; calls of other modules are their own."""
        path = self._paths.get(id(module))
        if path is None or path not in self._called:
            return original(*args, **kwargs)
        call = self._next_call(path)
        if call.stage > self._stage:
            raise _BoundaryReached
        self._next += 1
        if call.is_container:
            return original(*args, **kwargs)
        self._check_checkpoint(call)
        number = self._next - 1
        if call.stage < self._stage:
            result = self._earlier(call, args, kwargs)
            if self._dependencies.calls[self._next].stage == self._stage:
                self._call_after_unit(number)
            return result
        unit = self._units.get(path, module)  # leaves are not among them
        with thread_context.setting(module_calls=None):
            result = original(*args, **kwargs) if unit is module else unit(*args, **kwargs)
        if not self._is_last:
            self._keep(call, result)
        self._call_after_unit(number)
        return result

    def _call_after_unit(self, number: int) -> None:
        if self._after_unit is not None:
            self._after_unit(number)

    def _next_call(self, path: str) -> UnitCall:
        calls = self._dependencies.calls
        call = calls[self._next] if self._next < len(calls) else None
        if call is None or call.path != path:
            raise RuntimeError(
                f"stage {self._stage}: the forward calls {path!r} as unit {self._next}, where it "
                f"called {call and call.path!r} when it was recorded for inputs of these shapes; "
                "which units are called must not depend on values"
            )
        return call

    def _earlier(self, call: UnitCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # by leaf, since a forward may decide by values to pass None, as masks without padding
        arguments = leaves_of((args, kwargs)) if call.arguments else []
        tensors: list[Any] = []
        for index, meta in enumerate(call.metas):
            output = Output(self._next - 1, index)
            if index in call.arguments:
                tensors.append(arguments[call.arguments[index]])
            elif index in call.copies:
                tensors.append(tensors[call.copies[index]])
            elif output in self._values:
                x = self._values[output]
                tensors.append(x.clone() if index in call.written else x)
            else:
                tensors.append(
                    placeholder(meta, self._dependencies.device, is_written=index in call.written)
                )
        return call.tree.with_tensors(tensors)  # type: ignore[union-attr]  # texts are of the last stage

    def _keep(self, call: UnitCall, result: Any) -> None:
        """Keep the outputs that later stages need.

        Raises:
            RuntimeError: the unit returned something else than when it was recorded.
        """
        tensors, tree = split_value(result)
        if tree != call.tree:
            raise RuntimeError(
                f"unit {call.path!r} returned {tree}, and {call.tree} when it was recorded for "
                "inputs of these shapes; what units return beside tensors must not depend on values"
            )
        for index, x in enumerate(tensors):
            output = Output(self._next - 1, index)
            if output in self._needed_later:
                _check_tensor(call, index, x, "returned")
                self._values[output] = x.clone() if index in call.written else x

    def _check_checkpoint(self, call: UnitCall) -> None:
        """Raise if a function under torch.utils.checkpoint calls units of several stages.

        It is run again in backward, where nobody says which stage it is of.
        """
        hooks = _saved_tensor_hooks()
        if hooks is None or hooks is self._outer_hooks:
            return
        _, stage = self._checkpoints.setdefault(id(hooks), (hooks, call.stage))
        if stage != call.stage:
            raise ValueError(
                f"{call.path!r} of stage {call.stage} is called in the same checkpointed function "
                f"as a unit of stage {stage}; move the boundary to where the function begins, or "
                "checkpoint each unit by itself"
            )


def placeholder(meta: TensorMeta | Tensor, device: torch.device, is_written: bool) -> Tensor:
    """Return zeros that use no memory, unless something writes them."""
    if is_written:
        return torch.zeros(meta.shape, dtype=meta.dtype, device=device)
    return torch.zeros((), dtype=meta.dtype, device=device).expand(meta.shape)


@contextmanager
def shared_tensors(tensors: Sequence[SharedTensor], device: torch.device) -> Iterator[None]:
    """Put the tensors of a stage into the modules of the model for a run.

    Parameters stay there afterwards, for recomputation; what stands for a parameter in a forward,
    such as a gathered one or that of a recording, does not.
    """
    is_recorded = thread_context.recorder is not None
    transient: list[tuple[dict[str, Any], str, Any]] = []
    for shared in tensors:
        if shared.home is None:
            value = placeholder(shared.meta, device, is_written=False)
        else:
            value = _table(shared.home, shared)[shared.name]
        for module, name in shared.targets:
            table = _table(module, shared)
            is_transient = is_recorded or not isinstance(value, type(shared.meta))
            if shared.home is None or is_transient:
                transient.append((table, name, table[name]))
            table[name] = value
    try:
        yield
    finally:
        for table, name, before in transient:
            table[name] = before


def _table(module: nn.Module, shared: SharedTensor) -> dict[str, Any]:
    return module._parameters if isinstance(shared.meta, nn.Parameter) else module._buffers


def _check_tensor(call: UnitCall, index: int, x: Any, what: str) -> None:
    """Raise a RuntimeError if a value has another shape than the recorded one."""
    shape = call.metas[index].shape
    if not isinstance(x, Tensor) or x.shape != shape:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise RuntimeError(
            f"tensor {index} of unit {call.path!r}, {what}: expected shape {tuple(shape)}, as "
            f"recorded for inputs of these shapes, got {got}"
        )


def _saved_tensor_hooks() -> Any:
    """Return the pack hook of the innermost `saved_tensors_hooks`, None outside."""
    hooks = saved_tensor_hooks()
    return hooks and hooks[0]
