"""Launches of Triton kernels in a few microseconds of host time.

The only place that calls Triton's launcher.

    first launch    Triton binds and specializes the arguments, hashes constants and options,
                    compiles, and launches
    later ones      the compiled kernel is found by what Triton specialized on, and its launcher
                    called with plain addresses

A `KernelLauncher` has what does not change between launches: kernel, grid, constants and options;
those that differ only in the grid share compiled kernels. What remains of Triton's key are the
dtypes of tensors, whether their addresses, and integers, are multiples of 16, and whether integers
are 1 or need 64 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

NO_FUSION = {"enable_fp_fusion": False}  # a fused multiply-add rounds once where torch rounds twice
_IS_HIP = torch.version.hip is not None
# by kernel, dtypes and constants, then by arguments: launcher, function and metadata
_launches: dict[tuple, dict[tuple, tuple[Any, Any, Any]]] = {}


class KernelLauncher:
    """A kernel with its grid, constants and options.

    Args:
        kernel: a `triton.jit` function, whose constants come last.
        grid: one to three sizes.
        constants: values of its constants, and options such as `num_warps`.
        dtypes: of the first arguments, the dtypes as which their elements are read; None for their
            own.
    """

    __slots__ = ("_constants", "_dtypes", "_fixed", "_grid", "_kernel", "_launches", "_tail")

    def __init__(
        self,
        kernel: Any,
        grid: Sequence[int],
        constants: dict[str, Any],
        dtypes: Sequence[torch.dtype | None] = (),
    ) -> None:
        self._kernel, self._constants, self._dtypes = kernel, constants, dtypes
        self._grid = (*grid, 1, 1)[:3]
        self._tail = tuple([constants[name] for name in kernel.arg_names if name in constants])
        params = kernel.params if isinstance(kernel, JITFunction) else []
        self._fixed = [bool(p.do_not_specialize and p.annotation_type) for p in params]
        constants = {
            name: id(x) if isinstance(x, JITFunction) else x for name, x in constants.items()
        }
        self._launches = _launches.setdefault((id(kernel), *dtypes, *constants.items()), {})

    def __call__(self, *args: Tensor | float) -> None:
        """Launch on the current stream of the current device."""
        if not self._fixed:  # in Triton's interpreter
            self._first(args)
            return
        active: Any = driver.active
        device = active.get_current_device()
        key, arguments = [device], []
        for x, fixed in zip(args, self._fixed, strict=False):
            if isinstance(x, Tensor):
                address = x.data_ptr()
                key.append(
                    (x.dtype, address & 15 == 0, _IS_HIP and x.untyped_storage().nbytes() < 1 << 31)
                )
                arguments.append(address if x.is_cuda else x)
            else:
                if not fixed and isinstance(x, int):
                    key.append((x & 15 == 0, x == 1, x.bit_length() > 31))
                arguments.append(x)
        cached = self._launches.get(tuple(key))
        if cached is None or _has_hooks():
            compiled = self._first(args)
            if compiled is not None:
                self._launches[tuple(key)] = (
                    compiled.run,
                    compiled.function,
                    compiled.packed_metadata,
                )
            return
        run, function, metadata = cached
        run(
            *self._grid,
            active.get_current_stream(device),
            function,
            metadata,
            None,
            None,
            None,
            *arguments,
            *self._tail,
        )

    def _first(self, args: Sequence[Tensor | float]) -> Any:
        """Launch as Triton does; return the compiled kernel, None if there is none to keep."""
        typed = [
            triton.reinterpret(x, dtype) if dtype else x
            for x, dtype in zip(args, self._dtypes, strict=False)
        ]
        return self._kernel[self._grid](*typed, *args[len(typed) :], **self._constants)


def _has_hooks() -> bool:
    """Return whether a profiler wants to be told of launches."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return any(getattr(hook, "calls", hook) for hook in hooks)
