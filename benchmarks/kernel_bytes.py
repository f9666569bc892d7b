"""What the kernels move, counted without a GPU, beside what the torch operations that they replace move.

    python benchmarks/kernel_bytes.py                          all cases, minutes; writes benchmarks/results/<date>-kernel-bytes.md
    python benchmarks/kernel_bytes.py --only "uneven"          cases whose names have this in them; may be given several times
    python benchmarks/kernel_bytes.py --size 1                 MB of the full tensor (default 1)
    python benchmarks/kernel_bytes.py --markdown tables.md     writes there instead

Ours: the kernels run in Triton's interpreter, and every address that a program loads from or stores to is written down. Of
these, those in a case's tensors count; tables are a few KB that the caches hold. From the addresses follow

    read, written    bytes per element of the full tensor
    sectors used     of the 32-byte sectors that the 32 lanes of a warp touch at a time, the share of bytes that are wanted
    from memory      bytes of the sectors per element, each counted once for each program that touches it: what comes from
                     memory if no program finds in the cache what another one left there

Lanes are dealt to warps as Triton's layout pass does: neighbours along the dim that is contiguous in memory, each as many
elements as lie together, up to 16 bytes (tests/kernels/test_assembly.py checks in the machine code that this is so).

Torch: the same expression runs on the CPU under a dispatch mode that adds up the bytes of the tensors that each operation
reads and writes; views are free, and so are new tensors. An operation counts as one launch, which is kind to torch: some
take several (`cat` of unaligned parts, for instance, or `copy_` between odd strides).
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
from kernel_cases import CASES, RANKS, Case, Work, tensors_in
from report import environment, environment_line, markdown, show, write_markdown
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardmesh.kernels.backend import using_kernels

MB = 1 << 20
SECTOR, WARP, VECTOR = 32, 32, 16  # bytes of a sector, lanes of a warp, bytes that a lane moves at a time
RESULTS = Path(__file__).parent / "results"
COLUMNS = ("case", "who", "launches", "read B", "written B", "of ours", "sectors used, loads", "stores", "from memory B")


@dataclass
class Moved:
    """What some calls move.

    Attributes:
        launches: kernels of ours, operations of torch.
        read, written: bytes.
    """

    launches: int = 0
    read: int = 0
    written: int = 0

    @property
    def bytes(self) -> int:
        return self.read + self.written


# -- ours --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Access:
    """What one instruction of one program loads or stores.

    Attributes:
        way: "load" or "store".
        program: (launch, program).
        addresses: of every element.
        inside: whether the element is accessed.
        itemsize: bytes of an element.
    """

    way: str
    program: tuple[Any, ...]
    addresses: np.ndarray
    inside: np.ndarray
    itemsize: int

    def by_warp(self) -> tuple[np.ndarray, np.ndarray]:
        """The addresses and whether they are accessed: [accesses of warps, elements of an access]."""
        order = sorted(range(self.addresses.ndim), key=self._step, reverse=True)
        flat, inside = (x.transpose(order).reshape(-1) for x in (self.addresses, self.inside))
        width = min(WARP * vector(flat, inside, self.itemsize), flat.size)
        return flat.reshape(-1, width), inside.reshape(-1, width)

    def _step(self, dim: int) -> int:
        """Bytes between neighbours along a dim of the program's block."""
        if self.addresses.shape[dim] == 1:
            return 1 << 62
        first, second = (np.take(self.addresses, i, dim).flat[0] for i in (0, 1))
        return abs(int(second - first))


def vector(flat: np.ndarray, inside: np.ndarray, itemsize: int) -> int:
    """How many elements a lane moves at a time: the most that lie together everywhere, a power of two, up to 16 bytes."""
    count = VECTOR // itemsize
    while count > 1:
        if flat.size % count == 0:
            groups = flat.reshape(-1, count)[inside.reshape(-1, count).any(1)]
            if (np.diff(groups, axis=1) == itemsize).all() and (groups[:, 0] % (count * itemsize) == 0).all():
                return count
        count //= 2
    return 1


def distinct_by_row(numbers: np.ndarray) -> int:
    """How many different numbers there are in each row, without -1, all rows together."""
    ordered = np.sort(numbers, axis=1)
    first, others = ordered[:, 0] >= 0, (ordered[:, 1:] != ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    return int(first.sum() + others.sum())


@dataclass
class Traffic(Moved):
    """What kernels move.

    Attributes:
        touched: way -> sectors that warps touch, summed over their accesses.
        sectors: (way, program) -> the sectors that the program touches.
    """

    touched: Counter[str] = field(default_factory=Counter)
    sectors: dict[tuple[Any, ...], set[int]] = field(default_factory=lambda: defaultdict(set))

    def add(self, access: Access) -> None:
        addresses, inside = access.by_warp()
        wanted = distinct_by_row(np.where(inside, addresses, -1)) * access.itemsize
        if access.way == "load":
            self.read += wanted
        else:
            self.written += wanted
        sectors = np.where(inside, addresses // SECTOR, -1)
        self.touched[access.way] += distinct_by_row(sectors)
        self.sectors[access.way, access.program].update(np.unique(sectors[inside]).tolist())

    def used(self, way: str) -> float | None:
        """Of the bytes of the sectors that warps touch, the share that they want."""
        moved = self.read if way == "load" else self.written
        return moved / (SECTOR * self.touched[way]) if self.touched[way] else None

    @property
    def from_memory(self) -> int:
        return SECTOR * sum(map(len, self.sectors.values()))


def traffic_of(work: Work) -> Traffic:
    """What our kernels move; tables and other small things do not count."""
    accesses: list[Access] = []
    with using_kernels(), recording(accesses) as launches, np.errstate(all="ignore"):  # as silent as a GPU
        made = tensors_in(work.ours(*work.inputs))
    traffic = Traffic(len(launches))
    data = [(x.data_ptr(), x.data_ptr() + x.untyped_storage().nbytes()) for x in (*work.inputs, *made)]
    for access in accesses:
        first = int(access.addresses[access.inside].flat[0])
        if any(start <= first < stop for start, stop in data):
            traffic.add(access)
    return traffic


@contextmanager
def recording(accesses: list[Access]) -> Iterator[list[str]]:
    """Inside the block, what the interpreter's programs load and store is added to the list; gives the kernels launched."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    launches: list[str] = []
    run, load, store = GridExecutor.__call__, InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def record(way: str, builder: Any, pointers: Any, mask: Any) -> None:
        addresses = np.atleast_1d(pointers.data).astype(np.int64)
        inside = np.broadcast_to(mask.data, addresses.shape)
        if inside.any():
            itemsize = pointers.get_element_ty().primitive_bitwidth // 8
            accesses.append(Access(way, (len(launches), builder.grid_idx), addresses, inside, itemsize))

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


# -- torch -------------------------------------------------------------------------------------------------------------


class Counting(TorchDispatchMode):
    """Adds up the bytes that operations read and write; views and new tensors without values are free."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = Moved()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if not (func.is_view or func.overloadpacket.__name__ in FREE):
            self._count(func, args, kwargs, made)
        return made

    def _count(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        name, targets = func.overloadpacket.__name__, written_arguments(func, args, kwargs)
        overwritten = set() if name.endswith("_") and name not in OVERWRITING else {id(x) for x in targets}
        self.moved.launches += 1
        self.moved.read += sum(held(x) for x in leaves((args, kwargs)) if id(x) not in overwritten)
        self.moved.written += sum(held(x) for x in (targets or leaves(made)))


FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_reshape_alias", "_unsafe_view"}
OVERWRITING = {"copy_", "fill_", "zero_"}  # in place without reading what was there


def leaves(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def written_arguments(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operation writes to."""
    given = {**dict(zip([a.name for a in func._schema.arguments], args, strict=False)), **kwargs}
    names = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return leaves([given.get(name) for name in names])


def held(x: Tensor) -> int:
    """Bytes of its elements, those that are repeated once."""
    return x.itemsize * math.prod(n for n, stride in zip(x.shape, x.stride(), strict=True) if stride or n == 0)


def moved_by_torch(call: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Moved:
    with Counting() as counting:
        call(*inputs)
    return counting.moved


# -- tables ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counted:
    """What a case moves.

    Attributes:
        name: of the case.
        elements: that bytes are given for each of.
        needed: bytes of the inputs and the results.
        ours: what our kernels move.
        peers: what torch's operations move.
    """

    name: str
    elements: int
    needed: int
    ours: Traffic
    peers: dict[str, Moved]

    def rows(self) -> list[list[str]]:
        """A row of the table for ours and one for each of its peers."""
        sectors = [percent(self.ours, "load"), percent(self.ours, "store"), figure(self.ours.from_memory, self.elements)]
        first = [self.name, "ours", *amounts(self.ours, self.elements), "", *sectors]
        others = self.peers.items()
        return [first, *([self.name, who, *amounts(them, self.elements), ratio(them, self.ours), "", "", ""] for who, them in others)]


def counted(case: Case, size: int) -> Counted:
    work = case.make(size, "cpu")
    peers = {name: moved_by_torch(peer.call, work.inputs) for name, peer in work.peers.items()}
    return Counted(case.name, work.elements, work.needed(), traffic_of(work), peers)


def summary(found: Sequence[Counted]) -> str:
    least = sum(one.ours.bytes <= one.needed for one in found)
    ratios = [moved.bytes / one.ours.bytes for one in found if one.ours.bytes for moved in one.peers.values()]
    line = f"Ours moves no more than the inputs and the results, each once, in {least} of {len(found)} cases"
    if not ratios:
        return line + "."
    more = f"{min(ratios):.2f} to {max(ratios):.2f} times as much, {statistics.median(ratios):.2f} in the median"
    return f"{line}; torch's operations move {more}."


def ratio(moved: Moved, ours: Moved) -> str:
    if ours.bytes:
        return f"{moved.bytes / ours.bytes:.2f}x"
    return "ours is a view" if moved.bytes else "both are views"


def amounts(moved: Moved, elements: int) -> list[str]:
    return [str(moved.launches), figure(moved.read, elements), figure(moved.written, elements)]


def figure(count: int, elements: int) -> str:
    return f"{count / elements:.2f}"


def percent(traffic: Traffic, way: str) -> str:
    used = traffic.used(way)
    return "" if used is None else f"{100 * used:.0f} %"


def document(found: Sequence[Counted], megabytes: float) -> str:
    environ = environment()
    command = shlex.join(["python", "benchmarks/kernel_bytes.py", *sys.argv[1:]])
    description = (__doc__ or "").split("\n\n", 2)[2]
    return "\n\n".join([
        f"# Bytes that the kernels move, {environ['date']}",
        f"Computed from the addresses that the kernels access in Triton's interpreter, no GPU: `{command}`, "
        f"full tensors of {megabytes:g} MB, {RANKS} ranks, triton {triton_version()}.",
        description.rstrip(),
        markdown(COLUMNS, [row for one in found for row in one.rows()]),
        summary(found),
        environment_line(environ),
    ])  # fmt: skip


def triton_version() -> str:
    import triton

    return triton.__version__


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="cases whose names have this in them")
    parser.add_argument("--size", type=float, default=1, metavar="MB", help="of the full tensor (default 1)")
    parser.add_argument("--markdown", metavar="FILE", help="where to write (default: benchmarks/results, by date)")
    args = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which nothing has done yet
    chosen = [case for case in CASES if not args.only or any(text in case.name for text in args.only)]
    found = [counted(case, int(args.size * MB)) for case in chosen]
    show("Bytes per element of the full tensor", COLUMNS, [row for one in found for row in one.rows()])
    print(summary(found))
    write_markdown(args.markdown or str(RESULTS / f"{date.today().isoformat()}-kernel-bytes.md"), document(found, args.size))


if __name__ == "__main__":
    main()
