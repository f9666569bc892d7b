"""Functions of `torch.jit.script` on `ShardedTensor`s: the Python function that was scripted runs.

TorchScript's interpreter is C++, which calls operators on the wrappers of sharded tensors and keeps
a graph of its own there. Autograd runs on local tensors, so gradients would be lost.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

from ...mesh.comm.first_use import first_leaf
from ..tensor.sharded_tensor import ShardedTensor
from ..trees import tensors_in

_PYTHON_FUNCTION = "_torchdynamo_inline"  # set by torch.jit.script and torch.jit.trace


def refuse_script(func: Any) -> None:
    """Raise for TorchScript: a method of a scripted module, or a function that was loaded.

    Raises:
        NotImplementedError: `func` is TorchScript.
    """
    if isinstance(func, (torch.ScriptMethod, torch.jit.ScriptFunction)):
        raise NotImplementedError(
            f"{func.name} is TorchScript, whose interpreter cannot run on ShardedTensors; call the "
            "Python module or function that was scripted, or run it on this rank's part, "
            "x.to_local()"
        )


def _install() -> None:
    """Make scripted functions with a `ShardedTensor` among their arguments run as Python."""
    script_function: Any = torch.jit.ScriptFunction
    run_script = script_function.__call__

    @wraps(run_script)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = tensors_in((*args, *kwargs.values()))
        if not any(isinstance(x, ShardedTensor) for x in tensors):
            return run_script(self, *args, **kwargs)
        function = getattr(self, _PYTHON_FUNCTION, None)
        if function is None:
            return refuse_script(self)
        return function(*args, **kwargs)

    script_function.__call__ = call


first_leaf.before(_install)
