"""Bytes moved by the kernels and by the torch operations that they replace, counted without a GPU.

    python benchmarks/kernel_bytes.py                         all cases, minutes; writes to results/
    python benchmarks/kernel_bytes.py --only "uneven"         cases named so; several may be given
    python benchmarks/kernel_bytes.py --size 1                MB of the full tensor (default 1)
    python benchmarks/kernel_bytes.py --markdown tables.md    writes there instead

Ours: the kernels run in Triton's interpreter, which records every address that a program loads from
or stores to. Addresses inside a case's tensors count; tables of a few KB, which caches hold, do
not. The addresses give

    read, written    bytes per element of the full tensor
    sectors used     share of used bytes in the 32-byte sectors that the 32 lanes of a warp access
                     at a time
    from memory      bytes of the sectors per element, each sector counted once per program: the
                     memory traffic if no program finds another's data in the cache

Lanes are assigned to warps as in Triton's layout pass: neighbours along the dim that is contiguous
in memory, each with as many contiguous elements as fit into 16 bytes
(tests/kernels/test_assembly.py checks this in the machine code).

Torch: the same expression runs on the CPU under a dispatch mode that adds up the bytes of the
tensors that each operation reads and writes; views and empty tensors are free. An operation counts
as one launch, which favours torch: some take several (for instance `cat` of unaligned parts, or
`copy_` between irregular strides).
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from kernel_cases import CASES, RANKS, KernelCase, Work, tensors_in
from report import environment, environment_line, markdown, show, write_markdown
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardmesh.kernels.backend import using_kernels

MB = 1 << 20
# bytes of a sector, lanes of a warp, bytes that a lane moves at a time
SECTOR = 32
WARP = 32
VECTOR = 16
RESULTS = Path(__file__).parent / "results"
COLUMNS = (
    "case",
    "who",
    "launches",
    "read B",
    "written B",
    "of ours",
    "sectors used, loads",
    "stores",
    "from memory B",
)


@dataclass
class Traffic:
    """Memory traffic of some calls.

    Attributes:
        launches: number of our kernels, or of torch's operations.
        read: bytes read.
        written: bytes written.
    """

    launches: int = 0
    read: int = 0
    written: int = 0

    @property
    def bytes(self) -> int:
        return self.read + self.written


# -- ours ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Access:
    """A load or store instruction of one program.

    Attributes:
        op: "load" or "store".
        program: (launch, program).
        addresses: address of every element.
        mask: whether each element is accessed.
        itemsize: bytes of an element.
    """

    op: str
    program: tuple[Any, ...]
    addresses: np.ndarray
    mask: np.ndarray
    itemsize: int

    def by_warp(self) -> tuple[np.ndarray, np.ndarray]:
        """Return addresses and mask, each [accesses by warps, elements of an access]."""
        order = sorted(range(self.addresses.ndim), key=self._step, reverse=True)
        flat, mask = (x.transpose(order).reshape(-1) for x in (self.addresses, self.mask))
        width = min(WARP * vector_width(flat, mask, self.itemsize), flat.size)
        return flat.reshape(-1, width), mask.reshape(-1, width)

    def _step(self, dim: int) -> int:
        """Return the stride in bytes along a dim of the program's block."""
        if self.addresses.shape[dim] == 1:
            return 1 << 62
        first, second = (np.take(self.addresses, i, dim).flat[0] for i in (0, 1))
        return abs(int(second - first))


def vector_width(flat: np.ndarray, mask: np.ndarray, itemsize: int) -> int:
    """Return the vector width of a lane: the largest power of two of elements that are contiguous
    everywhere, up to 16 bytes.
    """
    count = VECTOR // itemsize
    while count > 1:
        if flat.size % count == 0:
            groups = flat.reshape(-1, count)[mask.reshape(-1, count).any(1)]
            if (np.diff(groups, axis=1) == itemsize).all() and (
                groups[:, 0] % (count * itemsize) == 0
            ).all():
                return count
        count //= 2
    return 1


def distinct_by_row(numbers: np.ndarray) -> int:
    """Return the number of distinct values per row, without -1, summed over rows."""
    ordered = np.sort(numbers, axis=1)
    first, others = ordered[:, 0] >= 0, (ordered[:, 1:] != ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    return int(first.sum() + others.sum())


@dataclass
class KernelTraffic(Traffic):
    """Memory traffic of kernels.

    Attributes:
        touched: number of sectors that warps access, summed over their accesses, by "load" or
            "store".
        sectors: the set of sectors that a program accesses, by ("load" or "store", program).
    """

    touched: Counter[str] = field(default_factory=Counter)
    sectors: dict[tuple[Any, ...], set[int]] = field(default_factory=lambda: defaultdict(set))

    def add(self, access: Access) -> None:
        addresses, mask = access.by_warp()
        used = distinct_by_row(np.where(mask, addresses, -1)) * access.itemsize
        if access.op == "load":
            self.read += used
        else:
            self.written += used
        sectors = np.where(mask, addresses // SECTOR, -1)
        self.touched[access.op] += distinct_by_row(sectors)
        self.sectors[access.op, access.program].update(np.unique(sectors[mask]).tolist())

    def used(self, op: str) -> float | None:
        """Return the share of used bytes in the sectors that warps access; None without
        accesses.
        """
        moved = self.read if op == "load" else self.written
        return moved / (SECTOR * self.touched[op]) if self.touched[op] else None

    @property
    def from_memory(self) -> int:
        return SECTOR * sum(map(len, self.sectors.values()))


def traffic_of(work: Work) -> KernelTraffic:
    """Return the traffic of our kernels on the case's tensors."""
    accesses: list[Access] = []
    with (
        using_kernels(),
        recording(accesses) as launches,
        np.errstate(all="ignore"),
    ):  # a GPU does not warn
        results = tensors_in(work.ours(*work.inputs))
    traffic = KernelTraffic(len(launches))
    data = [
        (x.data_ptr(), x.data_ptr() + x.untyped_storage().nbytes())
        for x in (*work.inputs, *results)
    ]
    for access in accesses:
        first = int(access.addresses[access.mask].flat[0])
        if any(start <= first < stop for start, stop in data):
            traffic.add(access)
    return traffic


@contextmanager
def recording(accesses: list[Access]) -> Iterator[list[str]]:
    """Append the interpreter's loads and stores to the list; yield the list of launched kernels."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    launches: list[str] = []
    run = GridExecutor.__call__
    load = InterpreterBuilder.create_masked_load
    store = InterpreterBuilder.create_masked_store

    def record(op: str, builder: Any, pointers: Any, mask: Any) -> None:
        addresses = np.atleast_1d(pointers.data).astype(np.int64)
        where = np.broadcast_to(mask.data, addresses.shape)
        if where.any():
            itemsize = pointers.get_element_ty().primitive_bitwidth // 8
            accesses.append(
                Access(op, (len(launches), builder.grid_idx), addresses, where, itemsize)
            )

    def recorded_run(executor: Any, *args: Any, **kwargs: Any) -> None:
        launches.append(executor.fn.__name__)
        run(executor, *args, **kwargs)

    def recorded_load(builder: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        record("load", builder, pointers, mask)
        return load(builder, pointers, mask, *others)

    def recorded_store(builder: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        record("store", builder, pointers, mask)
        return store(builder, pointers, value, mask, *others)

    with (
        patch.object(GridExecutor, "__call__", recorded_run),
        patch.object(InterpreterBuilder, "create_masked_load", recorded_load),
        patch.object(InterpreterBuilder, "create_masked_store", recorded_store),
    ):
        yield launches


# -- torch -----------------------------------------------------------------------------------------


class TrafficMode(TorchDispatchMode):
    """Add up the bytes that operations read and write; views and empty tensors are free."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = Traffic()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not (func.is_view or func.overloadpacket.__name__ in FREE):
            self._count(func, args, kwargs, result)
        return result

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name, targets = func.overloadpacket.__name__, written_arguments(func, args, kwargs)
        overwritten = (
            set() if name.endswith("_") and name not in OVERWRITING else {id(x) for x in targets}
        )
        self.moved.launches += 1
        self.moved.read += sum(
            distinct_bytes(x) for x in leaves((args, kwargs)) if id(x) not in overwritten
        )
        self.moved.written += sum(distinct_bytes(x) for x in (targets or leaves(result)))


FREE = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_reshape_alias",
    "_unsafe_view",
}
OVERWRITING = {"copy_", "fill_", "zero_"}  # in place, without reading the old values


def leaves(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def written_arguments(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the arguments that an operation writes to."""
    arguments = {
        **dict(zip([a.name for a in func._schema.arguments], args, strict=False)),
        **kwargs,
    }
    names = [
        a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write
    ]
    return leaves([arguments.get(name) for name in names])


def distinct_bytes(x: Tensor) -> int:
    """Return the bytes of a tensor's elements, expanded ones counted once."""
    return x.itemsize * math.prod(
        n for n, stride in zip(x.shape, x.stride(), strict=True) if stride or n == 0
    )


def moved_by_torch(call: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Traffic:
    with TrafficMode() as mode:
        call(*inputs)
    return mode.moved


# -- tables ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CaseTraffic:
    """Memory traffic of a case.

    Attributes:
        name: name of the case.
        elements: number of elements of the full tensor.
        needed: bytes of the inputs and the results.
        ours: traffic of our kernels.
        peers: traffic of torch's operations.
    """

    name: str
    elements: int
    needed: int
    ours: KernelTraffic
    peers: dict[str, Traffic]

    def rows(self) -> list[list[str]]:
        """Return a row of the table for ours and one for each peer."""
        sectors = [
            percent(self.ours, "load"),
            percent(self.ours, "store"),
            figure(self.ours.from_memory, self.elements),
        ]
        first = [self.name, "ours", *amounts(self.ours, self.elements), "", *sectors]
        others = self.peers.items()
        return [
            first,
            *(
                [self.name, who, *amounts(them, self.elements), ratio(them, self.ours), "", "", ""]
                for who, them in others
            ),
        ]


def count(case: KernelCase, size: int) -> CaseTraffic:
    work = case.make(size, "cpu")
    peers = {name: moved_by_torch(peer.call, work.inputs) for name, peer in work.peers.items()}
    return CaseTraffic(case.name, work.elements, work.needed(), traffic_of(work), peers)


def summary(cases: Sequence[CaseTraffic]) -> str:
    least = sum(one.ours.bytes <= one.needed for one in cases)
    ratios = [
        moved.bytes / one.ours.bytes
        for one in cases
        if one.ours.bytes
        for moved in one.peers.values()
    ]
    line = (
        f"Ours moves no more than the inputs and the results, each once, in {least} of "
        f"{len(cases)} cases"
    )
    if not ratios:
        return line + "."
    more = (
        f"{min(ratios):.2f} to {max(ratios):.2f} times as much, {statistics.median(ratios):.2f} in "
        "the median"
    )
    return f"{line}; torch's operations move {more}."


def ratio(moved: Traffic, ours: Traffic) -> str:
    if ours.bytes:
        return f"{moved.bytes / ours.bytes:.2f}x"
    return "ours is a view" if moved.bytes else "both are views"


def amounts(moved: Traffic, elements: int) -> list[str]:
    return [str(moved.launches), figure(moved.read, elements), figure(moved.written, elements)]


def figure(count: int, elements: int) -> str:
    return f"{count / elements:.2f}"


def percent(traffic: KernelTraffic, op: str) -> str:
    used = traffic.used(op)
    return "" if used is None else f"{100 * used:.0f} %"


def document(cases: Sequence[CaseTraffic], megabytes: float) -> str:
    environ = environment()
    command = shlex.join(["python", "benchmarks/kernel_bytes.py", *sys.argv[1:]])
    description = (__doc__ or "").split("\n\n", 2)[2]
    return "\n\n".join(
        [
            f"# Bytes that the kernels move, {environ['date']}",
            "Computed from the addresses that the kernels access in Triton's interpreter, no GPU: "
            f"`{command}`, full tensors of {megabytes:g} MB, {RANKS} ranks, triton "
            f"{triton_version()}.",
            description.rstrip(),
            markdown(COLUMNS, [row for one in cases for row in one.rows()]),
            summary(cases),
            environment_line(environ),
        ]
    )


def triton_version() -> str:
    import triton

    return triton.__version__


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="cases whose names contain this"
    )
    parser.add_argument(
        "--size", type=float, default=1, metavar="MB", help="size of the full tensor (default 1)"
    )
    parser.add_argument(
        "--markdown", metavar="FILE", help="where to write (default: benchmarks/results, by date)"
    )
    args = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported, below
    chosen = [
        case for case in CASES if not args.only or any(text in case.name for text in args.only)
    ]
    traffic = [count(case, int(args.size * MB)) for case in chosen]
    show(
        "Bytes per element of the full tensor",
        COLUMNS,
        [row for one in traffic for row in one.rows()],
    )
    print(summary(traffic))
    write_markdown(
        args.markdown or str(RESULTS / f"{date.today().isoformat()}-kernel-bytes.md"),
        document(traffic, args.size),
    )


if __name__ == "__main__":
    main()
