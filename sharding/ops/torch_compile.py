"""Keep `torch.compile` out of the library's own code.

Dynamo runs the library's code as Python, with a graph break: collectives, hooks and dispatch depend on state that Dynamo does not guard
(gathered parameters, collectives in flight). Code that the library calls, such as a module's forward, is compiled.

Importing Dynamo takes seconds, so it is not imported here: its rules are set when it is, before or after this library. With
`fullgraph=True` a graph break is an error, whose hints are replaced by one that says what to do.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

import torch

from ...mesh.comm.call_site import _OURS

F = TypeVar("F", bound=Callable[..., Any])
_HINT = (
    "torch.compile runs operators on ShardedTensors, and all other code of shardmesh, eagerly: a graph breaks here. Leave out "
    "fullgraph=True; or compile modules that see plain tensors, such as the blocks under fully_shard; or compile the whole step, with its "
    "collectives and the optimizer, by sm.jit(step). For torch's flex_attention, which compiles itself, call sm.ops.flex_attention"
)
_reasons: list[str] = []  # of functions that are not compiled
_RULES = "torch._dynamo.trace_rules"


def keep_compiler_out() -> None:
    """Make Dynamo run the library's code as Python, now if it is imported, else when it is."""
    rules = sys.modules.get(_RULES)
    if rules is not None and hasattr(rules, "_recompile_re"):
        _add_rules(rules)
    elif not any(isinstance(finder, _DynamoFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _DynamoFinder())


def not_compiled(reason: str) -> Callable[[F], F]:
    """Mark a function that compiled code may call; with `fullgraph=True` Dynamo's error shows the reason."""

    def mark(f: F) -> F:
        _reasons.append(reason)
        f._torchdynamo_disable, f._torchdynamo_disable_msg = True, reason  # type: ignore[attr-defined]
        return f

    return mark


def refuse_jit_trace() -> None:
    """Raise inside `torch.jit.trace`, which would record this rank's parts as constants and omit collectives.

    Raises:
        RuntimeError: the caller runs under `torch.jit.trace`.
    """
    if torch._C._get_tracing_state() is not None:
        raise RuntimeError(
            "torch.jit.trace records neither ShardedTensors nor collectives; trace or export a plain model loaded from "
            "sm.checkpoint.full_state_dict(model) on one rank, or use torch.compile"
        )


def _add_rules(rules: Any) -> None:
    package = __name__.rpartition(".sharding")[0]
    for folder in ("mesh", "sharding", "kernels"):
        rules.add(f"{package}.{folder}")
    _explain_breaks()


def _explain_breaks() -> None:
    """Replace the hints of graph breaks at this library's code and objects."""
    from torch._dynamo import exc

    describe = getattr(exc, "format_graph_break_message", None)
    if describe is None or hasattr(describe, "__wrapped__"):
        return

    @functools.wraps(describe)
    def described(gb_type: str, context: str, explanation: str, hints: list[str]) -> str:
        text = f"{context} {explanation}"
        is_ours = "ShardedTensor" in text or any(part in text for part in (*_OURS, *_reasons))
        return describe(gb_type, context, explanation, [_HINT] if is_ours else hints)

    exc.format_graph_break_message = described


class _DynamoFinder(importlib.abc.MetaPathFinder):
    """An import hook that sets the rules once Dynamo's module of rules has run, and removes itself."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _RULES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_add(module: ModuleType) -> None:
                run(module)
                _add_rules(module)

            spec.loader.exec_module = run_and_add  # type: ignore[method-assign]
        return spec


keep_compiler_out()
