"""Keep `torch.compile` out of the library's own code.

Dynamo runs the library's code as Python, with a graph break: collectives, hooks and dispatch depend
on state that Dynamo does not guard (gathered parameters, collectives in flight). Code that the
library calls, such as a module's forward, is compiled.

    marks     on functions that compiled code may call: the graph breaks there, and with
              `fullgraph=True` the error says why
    rules     Dynamo's list of files that it does not compile gets the library's, when Dynamo first
              meets a `ShardedTensor` or calls a function from which the library calls the program

Nothing of this happens at import, and Dynamo, whose import takes seconds, is not imported here.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import nn

from ...mesh.comm.call_site import _OURS
from .block_masks import FLEX_ATTENTION

F = TypeVar("F", bound=Callable[..., Any])
_ADVICE = (
    "torch.compile runs operators on ShardedTensors, and all other code of shardmesh, eagerly: a "
    "graph breaks here. In place of torch.compile(block, fullgraph=True) write sm.jit(block), "
    "whose calls are graphs with their collectives, or sm.jit(step) for a whole step. Or leave out "
    "fullgraph=True; or compile modules that see plain tensors, such as the blocks under "
    "fully_shard. For torch's flex_attention, which compiles itself, call sm.ops.flex_attention"
)
_RULES = "torch._dynamo.trace_rules"
ORIGINAL = "_orig_mod"  # where `torch.compile(module)` and `sm.jit(module)` keep the module
# the part of Dynamo in C++, which is always there
_frames: Any = torch._C._dynamo.eval_frame  # type: ignore[attr-defined]
_SKIP, _DEFAULT = _frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT


def original_of(module: nn.Module) -> nn.Module | None:
    """Return the module that a compiled one was made of, None for one that is not compiled."""
    return module._modules.get(ORIGINAL)


class _Rules:
    are_set = False


def keep_compiler_out() -> None:
    """Make Dynamo, if it is imported, run the library's code as Python from now on."""
    if not _Rules.are_set and _RULES in sys.modules:
        rules: Any = sys.modules[_RULES]
        if hasattr(rules, "_recompile_re"):  # else it is being imported
            package = __name__.rpartition(".sharding")[0]
            for folder in ("mesh", "sharding", "kernels"):
                rules.add(f"{package}.{folder}")
            _Rules.are_set = True


@contextmanager
def compiled_code_as_python() -> Iterator[None]:
    """Run functions that `torch.compile` has compiled, or that compile themselves, as Python.

    Dynamo does not compile under a dispatch mode, and what it then skips, such as the call inside
    of torch's `flex_attention`, it skips from then on.
    """
    if "torch._dynamo" not in sys.modules and FLEX_ATTENTION not in sys.modules:
        yield
        return
    callback = _frames.set_eval_frame(None)  # of compiled code that calls the library
    try:
        with _eager_stance:
            yield
    finally:
        _frames.set_eval_frame(callback)


class _EagerStance:
    """The stance "force_eager", which Dynamo has once for all threads.

    The last thread that leaves a block of it restores the stance before the first one's block.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = 0
        self._stance: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._blocks:
                self._stance = torch.compiler.set_stance("force_eager")
            self._blocks += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._blocks -= 1
            if not self._blocks:
                self._stance.__exit__(None, None, None)


_eager_stance = _EagerStance()


def not_compiled(reason: str, *, calls_program: bool = False) -> Callable[[F], F]:
    """Mark a function that compiled code may call.

    With `fullgraph=True` Dynamo's error shows the reason.

    Args:
        reason: why it is not compiled.
        calls_program: whether it calls functions of the program, which are compiled. It should
            begin with `keep_compiler_out()`.
    """

    def mark(f: F) -> F:
        f._torchdynamo_disable, f._torchdynamo_disable_msg = True, f"{reason}. {_ADVICE}"  # type: ignore[attr-defined]
        if f.__code__.co_filename.startswith(_OURS):  # else it is contextlib's
            of_calls = _DEFAULT if calls_program else _SKIP
            _frames.set_code_exec_strategy(f.__code__, _frames._FrameExecStrategy(_SKIP, of_calls))
        return f

    return mark


def mark_entry(value: Any, *, calls_program: bool = False) -> Any:
    """Mark a public function, or a class's constructor, as `not_compiled`; return it."""
    f: Any = vars(value).get("__init__") if isinstance(value, type) else value
    if type(f) is FunctionType and not hasattr(f, "_torchdynamo_disable"):
        not_compiled(
            "shardmesh depends on state that compiled code does not see",
            calls_program=calls_program,
        )(f)
    return value


# -- calls of modules ------------------------------------------------------------------------------

COMPILED = "_compiled_call_impl"  # what `nn.Module.__call__` calls in place of `_call_impl`


@dataclass(eq=False)
class ModuleCompiler:
    """The attribute `compile` of a module whose calls are intercepted.

    What is compiled is the call inside of the interception.

    Args:
        module: the module.
        call: what runs in place of its `_call_impl`, None at first.
    """

    module: Any
    call: Callable[..., Any] | None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without compiled code, as `nn.Module` does."""
        return {"module": self.module, "call": None}

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.call = torch.compile(
            MethodType(type(self.module)._call_impl, self.module), *args, **kwargs
        )


def compiled_call(module: Any) -> Callable[..., Any] | None:
    """Return what calls of a module run in place of its `_call_impl`, None if they run that."""
    compiler = module.__dict__.get("compile")
    if isinstance(compiler, ModuleCompiler):
        return compiler.call
    return module.__dict__.get(COMPILED)


def set_compiled_call(module: Any, call: Callable[..., Any] | None) -> None:
    """Let calls of a module run this in place of its `_call_impl`, inside of interceptions."""
    compiler = module.__dict__.get("compile")
    if isinstance(compiler, ModuleCompiler):
        compiler.call = call
    elif call is None:
        module.__dict__.pop(COMPILED, None)
    else:
        module.__dict__[COMPILED] = call


def flattening(x: Any) -> Any:
    """`x.__tensor_flatten__`, which `torch.compile` asks for when it meets a tensor: there is none.

    Raises:
        AttributeError: always.
    """
    keep_compiler_out()
    raise AttributeError(
        f"{type(x).__name__} has no __tensor_flatten__: torch.compile runs operators on it eagerly"
    )


def refuse_jit_trace() -> None:
    """Raise inside `torch.jit.trace`.

    It would record this rank's parts as constants and omit collectives.

    Raises:
        RuntimeError: the caller runs under `torch.jit.trace`.
    """
    if torch._C._get_tracing_state() is not None:
        raise RuntimeError(
            "torch.jit.trace records neither ShardedTensors nor collectives; trace or export a "
            "plain model loaded from sm.checkpoint.full_state_dict(model) on one rank, or use "
            "torch.compile"
        )
