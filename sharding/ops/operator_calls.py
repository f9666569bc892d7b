"""Which operator a frame of the dispatch runs: name, operands and advice, for reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...mesh.comm.call_site import DESCRIBERS, OperatorCall
from ..tensor.autograd import backward
from ..tensor.sharded_tensor import ShardedTensor
from ..trees import tensors_in
from . import dispatch, methods
from .rules.registry import HANDLERS
from .strategy import OpStrategy, name_of

# Modules of handlers that read values or compute gradients: what these communicate was asked for.
_ASKED_IN = frozenset({backward.__name__, methods.__name__})


def _describe(frame: dict[str, Any]) -> OperatorCall | str:
    """Return the operator that `torch_function` runs; the name alone of what asks for values."""
    func = frame["func"]
    if getattr(HANDLERS.get(func), "__module__", None) in _ASKED_IN:
        return name_of(func)
    tensors = tensors_in((*frame["args"], *(frame["kwargs"] or {}).values()))
    operands = [x for x in tensors if isinstance(x, ShardedTensor)]
    layouts = ", ".join(str(x._layout) for x in operands)
    return OperatorCall(name_of(func), layouts, _advice(operands, frame.get("strategy")))


def _advice(operands: Sequence[ShardedTensor], strategy: OpStrategy | None) -> str:
    """Return what to write before the operator, so that its operands have the layouts it needs."""
    if strategy is None or strategy.decomposition is not None or not strategy.moves:
        return "Redistribute its operands first, so that the dims it works along are whole"
    moved = [
        f"{'x' if len(operands) == 1 else f'operand_{i}'}.redistribute({target.spec})"
        for i, (x, target) in enumerate(zip(operands, strategy.targets, strict=True))
        if target is not x._layout
    ]
    return f"Write {' and '.join(moved)} before it"


DESCRIBERS[dispatch.torch_function.__code__] = _describe
