"""A device that is not there, for Triton's own code of a launch: kernels are compiled for sm_90,
loaded and launched as far as their arguments go.

    with device() as launches:      a process without Triton's interpreter
        call()
    launches                        [Launch(grid, function, arguments), ...]

`python -m tests.kernels.launched` prints as JSON what differs between the launches of
`KernelLauncher` and those of Triton.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch

from tests.kernels import compiled
from tests.kernels.compiled import CALLS, ROOT, TARGETS


class Launch(NamedTuple):
    grid: tuple[int, int, int]
    function: Any
    arguments: tuple[Any, ...]


class Device(compiled.Driver):
    """A driver of Triton whose launches are recorded."""

    def __init__(self, record: Any) -> None:
        super().__init__(TARGETS["sm_90"])
        self.record = record
        properties = {"max_shared_mem": 1 << 18}
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: properties,
            load_binary=lambda name, kernel, *rest: (name, hash(kernel), 64, 0, 1024),
        )

    def launcher_cls(self, src: Any, metadata: Any) -> Any:
        # A compiled kernel is loaded once, by the first of these.
        return lambda *args: _active().record(*args)

    def get_current_stream(self, device: str) -> int:
        return 7


def _active() -> Any:
    from triton.runtime.driver import driver

    return driver.active


@contextmanager
def device(record: Any = None) -> Iterator[list[Launch]]:
    """Launch on the device inside the block; yield the list of launches."""
    from triton.runtime import driver

    from shardmesh.kernels.backend import using_kernels

    launches: list[Launch] = []

    def add(
        x: int,
        y: int,
        z: int,
        stream: int,
        function: Any,
        metadata: Any,
        given: Any,
        enter: Any,
        leave: Any,
        *args: Any,
    ) -> None:
        assert stream == 7
        plain = tuple(x.data_ptr() if hasattr(x, "data_ptr") else str(x) for x in args)
        launches.append(Launch((x, y, z), function, plain))

    device: Any = Device(record or add)
    driver.set_active(device)  # for good: there is none to go back to
    with using_kernels():
        yield launches


# -- what the tests ask ----------------------------------------------------------------------------


@cache
def answers() -> dict[str, Any]:
    """Return what `main` prints in a process without the interpreter."""
    env = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)


def main() -> None:
    compiled.peers = cache(compiled.peers)  # whose error flags have an address
    print(
        json.dumps(
            {
                "calls": differing_calls(),
                "kept": kept(),
                "specialized": differing_arguments(),
                "hooks": hooks(),
            }
        )
    )


def differing_calls() -> list[str]:
    """Return the calls of the library whose second launches differ from what Triton launches."""
    from shardmesh.kernels import launcher

    calls = []
    for name, call in CALLS.items():
        with device() as launches:
            call()
            first, launches[:] = launches[:], []
            call()
        with device() as plain, mock.patch.object(launcher, "_has_hooks", return_value=True):
            call()
        if not first == launches == plain or not plain:
            calls.append(name)
    return calls


def kept() -> dict[str, int]:
    """Return how often each call goes through Triton when it is repeated."""
    from triton.runtime.jit import JITFunction

    counts = {}
    for name in CALLS:
        with device():
            CALLS[name]()
            with mock.patch.object(JITFunction, "run", side_effect=AssertionError) as run:
                CALLS[name]()
            counts[name] = run.call_count
    return counts


def differing_arguments() -> list[str]:
    """Return the arguments for which a launcher takes another kernel than Triton would."""
    import triton

    from shardmesh.kernels.launcher import KernelLauncher
    from tests.kernels import toy_kernel

    toy: Any = toy_kernel.toy
    memory = torch.zeros(64)
    tensors = [memory, memory[1:], memory[4:], memory.view(torch.int32), memory.view(torch.float64)]
    numbers = [0, 1, 2, 16, 17, -16, (1 << 31) - 1, 1 << 31, 1 << 40, (1 << 40) + 1]
    constants, dtypes, calls = {"BLOCK": 8, "num_warps": 1}, [None, torch.int32, torch.int64], []
    # Which read elements as these.
    launchers = {dtype: KernelLauncher(toy, (3,), constants, (dtype,)) for dtype in dtypes}
    cases = list(itertools.product(tensors, numbers, [1, 2, 16], dtypes))
    for x, n, k, dtype in cases + cases[::-1]:
        with device() as launches:
            launchers[dtype](x, n, k, 0.5)
            toy[(3,)](triton.reinterpret(x, dtype) if dtype else x, n, k, 0.5, **constants)
        if launches[0] != launches[1]:
            calls.append(f"{x.dtype} as {dtype} at {x.data_ptr() % 16}, {n}, {k}")
    return calls


def hooks() -> list[str]:
    """Return the launches that a profiler is told of, if it starts after the first."""
    from triton import knobs

    told: list[str] = []
    hook = lambda metadata: told.append(metadata.get()["name"])  # noqa: E731 - compared by identity
    call = lambda x, y, z, stream, function, metadata, given, enter, leave, *args: (  # noqa: E731
        enter and enter(given)
    )
    with device(call):
        CALLS["rows of torch.bfloat16"]()
        CALLS["rows of torch.bfloat16"]()
        knobs.runtime.launch_enter_hook.add(hook)
        CALLS["rows of torch.bfloat16"]()
        knobs.runtime.launch_enter_hook.remove(hook)
        CALLS["rows of torch.bfloat16"]()
    return told


if __name__ == "__main__":
    main()
