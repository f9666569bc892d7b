"""Compiled kernels without a GPU: the kernels launched by library calls are compiled, not run.

    CALLS {name: call} ---> assemblies(target) {name: [Assembly of each launch]}

Calls use meta tensors and the library's launcher, so kernels are compiled for the types, alignments
and constants of a real run. Compilation needs a process without Triton's interpreter:
`python -m tests.kernels.compiled sm_90` compiles all calls for a target and prints the assemblies
as JSON.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardmesh.kernels import random, symmetric
from shardmesh.kernels.backend import using_kernels
from shardmesh.kernels.box import Box
from shardmesh.kernels.copy import compile_pack, compile_unpack, pack_many, unpack_many
from shardmesh.kernels.quantize import compile_dequantize, compile_quantize, record_bytes
from shardmesh.kernels.random import distributions
from shardmesh.kernels.reduce import compile_combine
from shardmesh.kernels.symmetric import (
    MAX_PROGRAMS,
    AddNorm,
    AsRecord,
    Peers,
    one_shot_all_reduce,
    record_of,
    two_shot_all_reduce,
)

ROOT = Path(__file__).parents[2]
TARGETS = {"sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
LIMIT_S = 240

# -- what is compiled ------------------------------------------------------------------------------

RANKS = 8
Call = Callable[[], object]


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def chunks(shape: Sequence[int], dim: int) -> list[Box]:
    """Return the boxes of the ranks when this dim is split."""
    step = -(-shape[dim] // RANKS)
    cuts = [(min(i * step, shape[dim]), min(i * step + step, shape[dim])) for i in range(RANKS)]
    return [
        (*((0, n) for n in shape[:dim]), cut, *((0, n) for n in shape[dim + 1 :])) for cut in cuts
    ]


def pack(
    shape: Sequence[int],
    dim: int,
    dtype: torch.dtype,
    to: torch.dtype | None = None,
    scale: float | None = None,
) -> None:
    packed = compile_pack(shape, chunks(shape, dim))
    packed(meta(*shape, dtype=dtype), meta(packed.size, dtype=to or dtype), scale=scale)


def pack_bucket(shapes: Sequence[Sequence[int]], dtype: torch.dtype = torch.bfloat16) -> None:
    """Pack tensors split along dim 1 into one buffer."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    packs = [
        _placed(compile_pack, shape, start) for shape, start in zip(shapes, starts, strict=True)
    ]
    pack_many(packs, [meta(*shape, dtype=dtype) for shape in shapes], meta(sum(sizes), dtype=dtype))


def unpack_bucket(shapes: Sequence[Sequence[int]], dtype: torch.dtype = torch.bfloat16) -> None:
    sizes = [torch.Size(shape).numel() for shape in shapes]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    unpacks = [
        _placed(compile_unpack, shape, start) for shape, start in zip(shapes, starts, strict=True)
    ]
    unpack_many(unpacks, meta(sum(sizes), dtype=dtype))


def _placed(compiled: Callable[..., Any], shape: Sequence[int], start: int) -> Any:
    boxes = chunks(shape, 1)
    size = torch.Size(shape).numel() // RANKS
    return compiled(shape, boxes, [start + i * size for i in range(RANKS)])


def add_up(parts: int, dtype: torch.dtype, elements: int = 1 << 20) -> None:
    add = compile_combine((elements,), {((0, elements),): [i * elements for i in range(parts)]})
    add(meta(parts * elements, dtype=dtype))


# Rows in units of 16 bytes, of elements of 1, 2, 4 and 8 bytes.
ALIGNED: dict[str, Call] = {
    f"rows of {dtype}": partial(pack, (512, 2048), 1, dtype)
    for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.float64)
}
# The same where the table says where a tensor begins, or where offsets are large.
BUCKETS: dict[str, Call] = {
    "pack of many": lambda: pack_bucket([(512, 2048), (64, 1024), (128, 512)]),
    "unpack of 200": lambda: unpack_bucket([(64, 1024)] * 200),
}
WIDE: dict[str, Call] = {"wide rows": partial(pack, (1 << 16, 1 << 18), 1, torch.bfloat16)}
CASTS: dict[str, Call] = {
    "cast and scale": partial(pack, (512, 2048), 1, torch.float32, torch.bfloat16, 0.125),
    "cast to float32": partial(pack, (512, 2048), 1, torch.bfloat16, torch.float32),
}
SUMS: dict[str, Call] = {
    f"sum of {parts} {dtype}": partial(add_up, parts, dtype)
    for parts, dtype in ((8, torch.bfloat16), (64, torch.bfloat16))
}
UNEVEN: dict[str, Call] = {
    f"uneven {dtype}": partial(pack, (512, 2043), 1, dtype)
    for dtype in (torch.bfloat16, torch.float32)
}
EVEN_TILES: dict[str, Call] = {
    "runs of 1 byte": partial(pack, (1 << 16, 8), 1, torch.uint8),
    "runs of 2 bytes": partial(pack, (1 << 16, 8), 1, torch.bfloat16),
    "runs of 4 bytes": partial(pack, (1 << 16, 8), 1, torch.float32),
}
TILES: dict[str, Call] = {
    **EVEN_TILES,
    "runs of 2 bytes, uneven": partial(pack, (65537, 8), 1, torch.bfloat16),
    "runs of 6 bytes": partial(pack, (1 << 16, 24), 1, torch.bfloat16),
}


def quantize(shape: Sequence[int], transport: str, dtype: torch.dtype) -> None:
    quantized = compile_quantize(shape, chunks(shape, 1), transport)
    quantized(meta(*shape, dtype=dtype), meta(quantized.size, dtype=torch.uint8))


def dequantize(parts: int, transport: str, dtype: torch.dtype, elements: int = 1 << 20) -> None:
    size = record_bytes(elements)
    add = compile_dequantize(
        (elements,), {((0, elements),): [i * size for i in range(parts)]}, transport
    )
    add(meta(parts * size, dtype=torch.uint8), meta(elements, dtype=dtype))


QUANTIZE: dict[str, Call] = {
    f"quantize {dtype} to {transport}": partial(quantize, (512, 2048), transport, dtype)
    for dtype, transport in ((torch.bfloat16, "int8"), (torch.bfloat16, "fp8"))
}
DEQUANTIZE: dict[str, Call] = {
    f"dequantize {parts} of {transport}": partial(dequantize, parts, transport, torch.bfloat16)
    for parts, transport in ((1, "fp8"), (8, "int8"))
}

SHAPE = (1024, 1024)
DRAWN = {"seed": 1, "stream": 2, "device": "meta"}
DRAWS: dict[str, Call] = {
    "uniform bfloat16": lambda: random.uniform(
        SHAPE, chunks(SHAPE, 1)[1], dtype=torch.bfloat16, **DRAWN
    ),
    "normal float32": lambda: random.normal(
        SHAPE, chunks(SHAPE, 0)[1], dtype=torch.float32, **DRAWN
    ),
    "bernoulli": lambda: random.bernoulli_mask(SHAPE, chunks(SHAPE, 1)[1], p=0.1, **DRAWN),
    "exponential float32": lambda: distributions.exponential(
        SHAPE, chunks(SHAPE, 1)[1], dtype=torch.float32, rate=1.0, **DRAWN
    ),
}


def peers() -> Peers:
    int32, int64 = torch.int32, torch.int64
    buffer = meta(1 << 28, dtype=torch.uint8)
    epochs = meta(MAX_PROGRAMS, dtype=int32)
    error = torch.zeros(RANKS, dtype=int32)
    return Peers(
        0,
        RANKS,
        buffer,
        meta(RANKS, dtype=int64),
        meta(RANKS, dtype=int64),
        epochs,
        error,
        spins=1 << 20,
    )


def all_reduce(
    reduce: Callable[..., Tensor],
    shape: Sequence[int] = (512, 4096),
    epilogue: AddNorm | AsRecord | None = None,
) -> None:
    x, record = meta(*shape), record_of(epilogue)
    out = meta(record_bytes(x.numel(), record.block), dtype=torch.uint8) if record else meta(*shape)
    reduce(peers(), x, out, epilogue)


def norm(shape: Sequence[int] = (512, 4096), record: AsRecord | None = None) -> AddNorm:
    return AddNorm(meta(*shape), meta(*shape[1:]), 1e-5, meta(*shape), record)


LONG = (512, 16384)  # rows as long as can be
ALL_REDUCES: dict[str, Call] = {
    "one shot": lambda: all_reduce(one_shot_all_reduce),
    "two shots, norm": lambda: all_reduce(two_shot_all_reduce, epilogue=norm()),
}
RECORDS: dict[str, Call] = {
    "one shot, record": lambda: all_reduce(one_shot_all_reduce, epilogue=AsRecord("int8")),
    "one shot, norm of long rows, record": lambda: all_reduce(
        one_shot_all_reduce, LONG, norm(LONG, AsRecord("fp8"))
    ),
}
PULLS: dict[str, Call] = {
    "pulled all_gather": lambda: symmetric.all_gather(peers(), meta(512, 128), meta(512, 1024), 1),
    "pulled reduce_scatter": lambda: symmetric.reduce_scatter(
        peers(), meta(512, 1024), meta(512, 128), 1
    ),
}
CALLS: dict[str, Call] = {
    **ALIGNED, **BUCKETS, **WIDE, **CASTS, **SUMS, **UNEVEN, **TILES,
    **QUANTIZE, **DEQUANTIZE, **DRAWS, **ALL_REDUCES, **RECORDS, **PULLS,
}  # fmt: skip

# -- what comes out --------------------------------------------------------------------------------

_PTX = re.compile(
    r"(?P<way>ld|st)(\.[\w:]+)*\.global(\.[\w:]+)*?(\.v(?P<count>\d))?\.[bfsu](?P<bits>\d+)"
)
_AMD = re.compile(
    r"(?:global|flat|buffer)_(?P<way>load|store)_"
    r"[su]?(?P<word>byte|short|dword)(x(?P<count>\d))?\w*"
)
_AMD_BITS = {"byte": 8, "short": 16, "dword": 32}


@dataclass(frozen=True)
class Assembly:
    """The compiled kernel of one launch.

    Attributes:
        kernel: name of the kernel.
        arguments: argument types, and values of constants.
        instructions: names of the instructions, in order.
        registers: number of registers per thread.
        local: bytes of local memory per thread, for spilled registers or arrays.
        fuses: whether the compiler may fuse a multiplication and an addition.
    """

    kernel: str
    arguments: dict[str, Any]
    instructions: list[str]
    registers: int
    local: int
    fuses: bool

    @property
    def loads(self) -> Counter[int]:
        """Bits at a time -> how many loads from global memory; what is the same for all lanes of an
        AMD wave may be loaded by other instructions, and does not count."""
        return self._widths("l")

    @property
    def stores(self) -> Counter[int]:
        """Bits at a time -> how many stores to global memory."""
        return self._widths("s")

    def _widths(self, way: str) -> Counter[int]:
        matches = [_PTX.fullmatch(name) or _AMD.fullmatch(name) for name in self.instructions]
        return Counter(
            _bits(match.groupdict()) for match in matches if match and match["way"][0] == way
        )

    def those(self, pattern: str) -> list[str]:
        """Return the instructions that match this regular expression."""
        return [name for name in self.instructions if re.fullmatch(pattern, name)]


def _bits(parts: dict[str, str]) -> int:
    each = int(parts["bits"]) if "bits" in parts else _AMD_BITS[parts["word"]]
    return each * int(parts["count"] or 1)


@cache
def assemblies(target: str) -> dict[str, list[Assembly]] | None:
    """Return `{name: [Assembly of each launch]}`; None if this Triton does not compile for the
    target.

    Raises:
        RuntimeError: a call failed.
    """
    done = _compiled(target)
    if done.returncode:
        raise RuntimeError(f"{' '.join(done.args)} failed:\n{done.stderr}")
    answers = json.loads(done.stdout)
    return answers and {
        name: [Assembly(**one) for one in launches] for name, launches in answers.items()
    }


@cache  # a failure, too
def _compiled(target: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.kernels.compiled", target]
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_S
    )


# -- in the process that compiles ------------------------------------------------------------------


def main() -> None:
    target = TARGETS[sys.argv[1]]
    if target[0] == "hip":
        torch.version.hip = "7.0"  # as it would be on such a device; launchers look at it
    print(json.dumps(_assembled(target) if _is_supported(target) else None))


def _is_supported(target: tuple[Any, ...]) -> bool:
    """Return whether this Triton supports the target."""
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget

    return any(
        backend.compiler.supports_target(GPUTarget(*target)) for backend in backends.values()
    )


def _assembled(target: tuple[Any, ...]) -> dict[str, list[dict[str, Any]]]:
    assembled = {}
    for name, call in CALLS.items():
        with _compiling(target) as launched, using_kernels():
            try:
                call()
            except Exception as error:
                error.add_note(f"in the call {name!r}, compiled for {target}")
                raise
        assembled[name] = [_read(kernel) for kernel in launched]
    return assembled


class Driver:
    """A device that kernels are compiled for, but not run on."""

    def __init__(self, target: tuple[Any, ...]):
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget(*target)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> str:
        return self.target.backend  # what Triton's own cache of compiled kernels goes by

    def get_current_stream(self, device: str) -> int:
        return 0


@contextmanager
def _compiling(target: tuple[Any, ...]) -> Iterator[list[Any]]:
    """Compile launches inside the block without running them; yield the list of kernels."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    launched: list[Any] = []
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launched.append(run(kernel, *args, grid=grid, warmup=True, **kwargs))

    JITFunction.run = compile_only
    driver.set_active(Driver(target))
    try:
        yield launched
    finally:
        JITFunction.run = run


def _read(kernel: Any) -> dict[str, Any]:
    text = kernel.asm.get("ptx") or kernel.asm["amdgcn"]
    registers, local = _nvidia_resources(text) if "ptx" in kernel.asm else _amd_resources(text)
    types = kernel.src.signature
    constants = {list(types)[i]: value for (i,), value in kernel.src.constants.items()}
    plain = {
        name: value if isinstance(value, (int, float, str)) else str(value)
        for name, value in constants.items()
    }
    return {
        "kernel": kernel.name,
        "arguments": {**types, **plain},
        "registers": registers,
        "local": local,
        "instructions": re.findall(r"^\s+(?:@!?%\w+\s+)?([a-z][\w.:]+)", text, re.MULTILINE),
        "fuses": kernel.metadata.enable_fp_fusion,
    }


def _nvidia_resources(ptx: str) -> tuple[int, int]:
    from triton import knobs

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [
            knobs.nvidia.ptxas.path,
            "-v",
            "--fmad=false",
            "-arch=sm_90a",
            file.name,
            "-o",
            os.devnull,
        ]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return _number(r"Used (\d+) registers", said), _number(r"(\d+) bytes stack frame", said)


def _amd_resources(assembly: str) -> tuple[int, int]:
    return _number(r"\.vgpr_count:\s+(\d+)", assembly), _number(
        r"\.private_segment_fixed_size:\s+(\d+)", assembly
    )


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"no {pattern!r} in:\n{text}")
    return int(match[1])


if __name__ == "__main__":
    main()
