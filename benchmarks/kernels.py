"""Kernel times on a GPU, compared with a copy of the same bytes and with torch's operations.

    python benchmarks/kernels.py                      1 MB to 2 GB; writes to benchmarks/results/
    python benchmarks/kernels.py --quick              1 and 64 MB, fewer rounds, no torch.compile
    python benchmarks/kernels.py --size 256           MB of the full tensor; several may be given
    python benchmarks/kernels.py --only "uneven"      cases whose names contain it; several as well
    python benchmarks/kernels.py --markdown tables.md --json figures.json

The device-to-device copy rate is measured first: bytes that `copy_` of a contiguous tensor reads
and writes per second. Each case (kernel_cases.py) then runs ours, the torch operations that it
replaces, the same under torch.compile where that is possible, and a copy of the bytes that the case
must read and write, interleaved in random order. The L2 cache is overwritten before each call.
Times are between two CUDA events around a call, medians over rounds:

    GB/s             bytes that must be read and written (inputs and results, each once) / time
    of the copy      time of the copy of the same bytes / time: 1 is the limit of the memory
    ours faster      time / time of ours
    wanted           targets on an H200: of the copy for ours, of the ratio for the others

All results are compared before anything is timed; a different result is an error that names the
implementation. Timing needs a GPU; kernel_bytes.py counts bytes without one.
"""

from __future__ import annotations

import argparse
import random
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from kernel_cases import CASES, KernelCase, Peer, Work, disagreeing
from report import environment, environment_line, markdown, show, write_json, write_markdown

MB = 1 << 20
DEVICE = "cuda"
SIZES, QUICK_SIZES = (1, 16, 128, 1024, 2048), (1, 64)
ROUNDS, QUICK_ROUNDS = 30, 10
# Several times the L2 cache of any GPU, and long enough for the host to enqueue the next launch.
FLUSHED = 512 * MB
RESULTS = Path(__file__).parent / "results"
COLUMNS = ("case", "MB", "who", "us", "GB/s", "of the copy", "wanted", "ours faster", "wanted ")
COPY, OURS, COMPILED = "copy", "ours", ", compiled"
NO_GPU = (
    "benchmarks/kernels.py needs a CUDA device, and torch sees none: benchmarks/kernel_bytes.py "
    "counts what the kernels move without one."
)

Call = Callable[[], Any]


@dataclass(frozen=True)
class TimedPeer:
    """The time of one implementation of a case at a size.

    Attributes:
        case: name of the case.
        megabytes: size of the full tensor.
        who: "ours", or a peer's name.
        seconds: median time.
        bytes: bytes that must be moved.
        copy: median time of a copy of the same bytes.
        ours: median time of ours.
        wanted: target: for ours the fraction of the copy rate, for others the speedup of ours; None
            without a target.
    """

    case: str
    megabytes: float
    who: str
    seconds: float
    bytes: int
    copy: float
    ours: float
    wanted: float | None

    @property
    def of_copy(self) -> float:
        return self.copy / self.seconds

    @property
    def slower(self) -> float:
        """Speedup of ours."""
        return self.seconds / self.ours

    @property
    def missed(self) -> bool:
        return (
            self.wanted is not None
            and (self.of_copy if self.who == OURS else self.slower) < self.wanted
        )

    def row(self) -> list[str]:
        wanted = (
            "" if self.wanted is None else f"{self.wanted:.2f}{' MISSED' if self.missed else ''}"
        )
        is_ours = self.who == OURS
        return [
            self.case,
            f"{self.megabytes:g}",
            self.who,
            f"{self.seconds * 1e6:.1f}",
            f"{self.bytes / self.seconds / 1e9:.0f}",
            f"{self.of_copy:.2f}",
            wanted if is_ours else "",
            "" if is_ours else f"{self.slower:.2f}x",
            "" if is_ours else wanted,
        ]


# -- time on a GPU ---------------------------------------------------------------------------------


def medians(calls: Mapping[str, Call], rounds: int) -> dict[str, float]:
    """Return the median seconds of each call, interleaved in random order, with a flushed
    L2 cache.
    """
    flushed = torch.empty(FLUSHED, dtype=torch.uint8, device=DEVICE)
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {
        name: [] for name in calls
    }
    order = random.Random(0)
    for call in calls.values():  # compile, and fill caches of tables and memory
        call()
        call()
    for _ in range(rounds):
        for name in order.sample(list(calls), len(calls)):
            flushed.zero_()
            events[name].append(timed(calls[name]))
    torch.cuda.synchronize()
    return {
        name: statistics.median(a.elapsed_time(b) for a, b in pairs) / 1e3
        for name, pairs in events.items()
    }


def timed(call: Call) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    return start, stop


def copying(size: int) -> Call:
    """Return a copy that reads and writes this many bytes in total."""
    source = torch.zeros(max(1, size // 2), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def copy_rate(rounds: int) -> float:
    """Return the bytes per second that a device-to-device copy of 1 GB reads and writes."""
    size = 2 * 1024 * MB
    return size / medians({COPY: copying(size)}, rounds)[COPY]


# -- one case --------------------------------------------------------------------------------------


def measured(case: KernelCase, megabytes: float, rounds: int, compiling: bool) -> list[TimedPeer]:
    """Return the times of ours and its peers; nothing if ours is a view.

    Raises:
        RuntimeError: if a peer gives a different result.
    """
    torch.compiler.reset()  # torch.compile stops after recompiling a function for a few shapes
    work = case.make(int(megabytes * MB), DEVICE)
    size = work.needed()
    if not size:
        return []
    if wrong := disagreeing(case, work):
        raise RuntimeError(
            f"{case.name}, {megabytes:g} MB: {', '.join(wrong)} and ours give different results"
        )
    peers = with_compiled(work, compiling)
    calls = {name: bound(peer.call, work) for name, peer in peers.items()}
    times = medians({COPY: copying(size), OURS: bound(work.ours, work), **calls}, rounds)
    wanted = {OURS: case.target, **{name: peer.least for name, peer in peers.items()}}
    return [
        TimedPeer(
            case.name, megabytes, who, times[who], size, times[COPY], times[OURS], wanted[who]
        )
        for who in (OURS, *peers)
    ]


def with_compiled(work: Work, compiling: bool) -> dict[str, Peer]:
    """Return the peers, eager and compiled."""
    compiled = {
        name + COMPILED: Peer(torch.compile(peer.call, dynamic=False), least=peer.least)
        for name, peer in work.peers.items()
        if compiling and peer.compiled
    }
    return {**work.peers, **compiled}


def bound(call: Callable[..., Any], work: Work) -> Call:
    return lambda: call(*work.inputs)


# -- tables ----------------------------------------------------------------------------------------


def all_measured(
    cases: Sequence[KernelCase], sizes: Sequence[float], rounds: int, compiling: bool
) -> Iterator[TimedPeer]:
    for case in cases:
        for megabytes in sizes:
            print(f"{case.name}, {megabytes:g} MB", file=sys.stderr, flush=True)
            yield from measured(case, megabytes, rounds, compiling)


def summary(peers: Sequence[TimedPeer]) -> str:
    """Return how many targets are met, and which are missed."""
    wanted = [one for one in peers if one.wanted is not None]
    missed = [f"{one.case}, {one.megabytes:g} MB: {one.who}" for one in wanted if one.missed]
    return f"{len(wanted) - len(missed)} of {len(wanted)} targets are met." + "".join(
        f"\n- missed: {one}" for one in missed
    )


def hardware() -> str:
    properties = torch.cuda.get_device_properties(0)
    return (
        f"{properties.name}, {properties.total_memory / 1e9:.0f} GB, CUDA "
        f"{torch.version.cuda or torch.version.hip}"
    )


def document(peers: Sequence[TimedPeer], rate: float) -> str:
    import triton

    environ = environment()
    return "\n\n".join(
        [
            f"# Kernels, {environ['date']}",
            f"`{shlex.join(['python', 'benchmarks/kernels.py', *sys.argv[1:]])}` on {hardware()}, "
            f"triton {triton.__version__}. A device-to-device copy of 1 GB reads and writes "
            f"{rate / 1e9:.0f} GB/s.",
            (__doc__ or "").split("\n\n", 2)[2].rstrip(),
            markdown(COLUMNS, [one.row() for one in peers]),
            summary(peers),
            environment_line(environ),
        ]
    )


def figures(peers: Sequence[TimedPeer], rate: float) -> dict[str, Any]:
    return {
        "environment": environment(),
        "device": hardware(),
        "copy_rate": rate,
        "cases": [vars(one) for one in peers],
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, few rounds, no torch.compile"
    )
    parser.add_argument(
        "--size",
        type=float,
        action="append",
        metavar="MB",
        help="size of the full tensor; may be given several times",
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="cases whose names contain this"
    )
    parser.add_argument(
        "--markdown", metavar="FILE", help="where to write (default: benchmarks/results, by date)"
    )
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if not torch.cuda.is_available():
        print(NO_GPU)
        return
    cases = [
        case for case in CASES if not args.only or any(text in case.name for text in args.only)
    ]
    sizes = args.size or (QUICK_SIZES if args.quick else SIZES)
    rounds = QUICK_ROUNDS if args.quick else ROUNDS
    rate = copy_rate(rounds)
    print(f"{hardware()}: a copy reads and writes {rate / 1e9:.0f} GB/s", flush=True)
    peers = list(all_measured(cases, sizes, rounds, compiling=not args.quick))
    show("Kernels", COLUMNS, [one.row() for one in peers])
    print(summary(peers))
    write_json(args.json, figures(peers, rate))
    write_markdown(
        args.markdown or str(RESULTS / f"{date.today().isoformat()}-kernels.md"),
        document(peers, rate),
    )


if __name__ == "__main__":
    main()
