"""Redistribution over real processes: torch's DTensor against shardmesh, in time, bytes and launches.

    python benchmarks/redistribute.py                        4 and 8 gloo processes, large tensors, a few minutes
    python benchmarks/redistribute.py --size small           tensors so small that latency and host time decide
    python benchmarks/redistribute.py --only "(2, 2)"        one mesh; may be given several times
    python benchmarks/redistribute.py --json figures.json --markdown tables.md

Both libraries run in the same processes over the same process groups and take turns in every round; a round's time is
that of its slowest rank. Results are compared with the right answer first: "wrong" marks one that differs.

Bytes received per rank (the largest over the ranks) are counted by one convention for both: (n-1) parts for an
all_gather or reduce_scatter, 2(n-1)/n of the buffer for an all_reduce, what comes from others for an all_to_all. Ours
are what `sm.comm_budget` counts at the groups; DTensor's are computed from the arguments of the functional collectives
that it dispatches (its own CommDebugMode counts calls in the same place). The bound, for pairs without a pending value,
is what a rank must hold afterwards and did not hold before, |dst box - src box|.
"""

from __future__ import annotations

import argparse
import atexit
import logging
import math
import os
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as dt
from measure import Call, Times, interleaved, slowest
from report import environment, environment_line, markdown, show, write_json, write_markdown
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardmesh as sm

DTENSOR, OURS = "DTensor", "ours"
_MOVES_NOTHING = ("wait_tensor", "_wrap_tensor_autograd")
PLACEMENTS = {"S0": ("Shard", 0), "S1": ("Shard", 1), "R": ("Replicate",), "P": ("Partial",)}

EVEN, UNEVEN = "even", "uneven"
PAIRS: dict[tuple[int, ...], list[tuple[str, str, str]]] = {
    (4,): [
        ("S0", "R", EVEN),
        ("S1", "R", EVEN),
        ("S0", "S1", EVEN),
        ("S1", "S0", EVEN),
        ("R", "S0", EVEN),
        ("P", "R", EVEN),
        ("P", "S0", EVEN),
        ("P", "S1", EVEN),
        ("S0", "R", UNEVEN),
        ("S0", "S1", UNEVEN),
        ("P", "S0", UNEVEN),
    ],
    (2, 2): [
        ("S0 S1", "S1 S0", EVEN),
        ("S0 S0", "S1 S1", EVEN),
        ("S0 R", "R S0", EVEN),
        ("S0 S1", "R R", EVEN),
        ("S0 S0", "R R", EVEN),
        ("S0 S1", "S0 S0", EVEN),
        ("R S0", "S0 S0", EVEN),
        ("P S0", "R R", EVEN),
        ("P P", "R R", EVEN),
        ("P S0", "S0 S1", EVEN),
        ("S0 S1", "S1 S0", UNEVEN),
        ("S0 S0", "R R", UNEVEN),
    ],
    (8,): [
        ("S0", "R", EVEN),
        ("S0", "S1", EVEN),
        ("S1", "S0", EVEN),
        ("P", "R", EVEN),
        ("P", "S0", EVEN),
        ("S0", "S1", UNEVEN),
    ],
    (2, 4): [
        ("S0 S1", "S1 S0", EVEN),
        ("S0 S0", "S1 S1", EVEN),
        ("R S0", "S0 R", EVEN),
        ("S0 S1", "R S0", EVEN),
        ("S0 S0", "R R", EVEN),
        ("P S1", "S1 R", EVEN),
        ("P P", "S0 S1", EVEN),
    ],
    (2, 2, 2): [
        ("S0 S1 R", "R S0 S1", EVEN),
        ("S0 S0 S0", "S1 S1 S1", EVEN),
        ("S0 S1 S0", "S1 S0 S1", EVEN),
        ("S0 S0 S1", "R R R", EVEN),
        ("P S0 S1", "S1 S0 R", EVEN),
        ("P P P", "R R R", EVEN),
        ("S0 S1 R", "R S0 S1", UNEVEN),
    ],
}


@dataclass(frozen=True)
class Size:
    """Global shapes, and how long to measure."""

    even: tuple[int, int]
    uneven: tuple[int, int]
    rounds: int
    batch_s: float


SIZES = {
    "small": Size((64, 64), (61, 67), rounds=25, batch_s=4e-3),
    "large": Size((1024, 2048), (1021, 2039), rounds=15, batch_s=1e-2),
}


# -- one pair of layouts -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """A redistribution: on a mesh of this shape, of a tensor of this shape, from and to a word per axis."""

    mesh: tuple[int, ...]
    shape: tuple[int, int]
    src: str
    dst: str
    kind: str

    def placements(self, words: str, module: Any) -> list[Any]:
        """The words as placements of `torch.distributed.tensor` or of shardmesh."""
        return [getattr(module, name)(*arguments) for name, *arguments in map(PLACEMENTS.__getitem__, words.split())]

    def layout(self, words: str, mesh: Any) -> sm.Layout:
        """The words as a layout."""
        return sm.Layout.of(mesh, self.placements(words, sm), self.shape)

    def bound(self) -> int | None:
        """Bytes that some rank must receive; None with pending values, where it depends on the algorithm."""
        if "P" in self.src or "P" in self.dst:
            return None
        mesh = sm.AbstractMesh(self.mesh)
        src, dst = self.layout(self.src, mesh), self.layout(self.dst, mesh)
        return 4 * max(_missing(src.box_at(c), box) for c, box in dst.boxes())

    def __str__(self) -> str:
        return f"{self.src} -> {self.dst}{'' if self.kind == EVEN else ', ' + self.kind}"


def _missing(have: Any, want: Any) -> int:
    """Elements of the box `want` that are not in the box `have`."""
    common = [max(0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in zip(have, want, strict=True)]
    return math.prod(stop - start for start, stop in want) - math.prod(common)


@dataclass(frozen=True)
class Result:
    """What one contestant needs for a pair: the time, and per rank the bytes received and the collectives."""

    times: Times
    received: int
    launches: int
    right: bool

    def as_dict(self) -> dict[str, Any]:
        """For the JSON file."""
        return {**self.times.as_dict(), "bytes_received": self.received, "launches": self.launches, "right": self.right}


# -- in a rank ---------------------------------------------------------------------------------------------------------


def measure_mesh(
    mesh_shape: tuple[int, ...], pairs: Sequence[Pair], rounds: int, batch_s: float
) -> list[dict[str, Result]]:
    """Run in every process: all pairs on one mesh."""
    # After DTensor, gloo's threads outlive destroy_process_group, and now and then a process then aborts while its
    # interpreter is taken down. So leave without taking it down.
    atexit.register(os._exit, 0)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)  # DTensor advises on every suboptimal pair
    ours = sm.init_device_mesh("cpu", mesh_shape)
    theirs = ours.to_torch()
    return [_measure(pair, ours, theirs, rounds, batch_s) for pair in pairs]


def _measure(pair: Pair, ours: sm.DeviceMesh, theirs: Any, rounds: int, batch_s: float) -> dict[str, Result]:
    full = torch.arange(math.prod(pair.shape), dtype=torch.float32).remainder_(1000).view(pair.shape)
    src, dst = pair.layout(pair.src, ours), pair.layout(pair.dst, ours)
    local, right = _part(full, src), _part(full, dst)
    our_x = sm.from_local(local, ours, src.spec, shape=pair.shape)
    their_x = dt.DTensor.from_local(
        local, theirs, pair.placements(pair.src, dt), run_check=False, shape=full.shape, stride=full.stride()
    )
    our_dst, their_dst = pair.placements(pair.dst, sm), pair.placements(pair.dst, dt)
    calls: dict[str, Callable[[], Any]] = {
        DTENSOR: lambda: their_x.redistribute(theirs, their_dst).to_local(),
        OURS: lambda: our_x.redistribute(our_dst).to_local(),
    }
    counts = {DTENSOR: _count_dtensor(calls[DTENSOR]), OURS: _count_ours(calls[OURS])}
    answers = {name: _gathered(_equal(call(), right)) for name, call in calls.items()}
    times = interleaved(calls, rounds=rounds, batch_s=batch_s, agree=_largest, together=dist.barrier)
    return {name: _result(times[name], counts[name], answers[name]) for name in calls}


def _result(times: Times, counts: tuple[int, int], answers: Sequence[bool]) -> Result:
    received, launches = counts
    return Result(slowest(_gathered(times)), _largest(received), _largest(launches), all(answers))


def _part(full: Tensor, layout: sm.Layout) -> Tensor:
    """This rank's part of a tensor; of ranks with a pending sum the first holds the value, the others hold zeros."""
    part = full[tuple(slice(start, stop) for start, stop in layout.box)].clone()
    coordinate = layout.mesh.coordinate  # type: ignore[attr-defined]
    return part * all(coordinate[layout.mesh.axis_index(axis)] == 0 for axis in layout.pending)


def _equal(found: Tensor, right: Tensor) -> bool:
    return found.shape == right.shape and bool(torch.equal(found, right))


def _gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _largest(value: int) -> int:
    return max(_gathered(value))


def _count_ours(call: Call) -> tuple[int, int]:
    call()
    with sm.comm_budget() as used:
        call()
    return used.bytes_received, used.launches


def _count_dtensor(call: Call) -> tuple[int, int]:
    call()
    with CountedCollectives() as used:
        call()
    return used.received, used.launches


class CountedCollectives(TorchDispatchMode):
    """Counts the functional collectives inside, and the bytes that each brings to this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.received = self.launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace in ("_c10d_functional", "_dtensor", "c10d") and name not in _MOVES_NOTHING:
            self.launches += 1
            self.received += _received(name, args, out)
        return out


def _received(name: str, args: Sequence[Any], out: Any) -> int:
    """Bytes that a functional collective brings to this rank.

    Raises:
        NotImplementedError: one that has not been needed so far.
    """
    x = args[0]
    if name == "all_gather_into_tensor":
        return out.nbytes - x.nbytes
    if name == "reduce_scatter_tensor":
        return x.nbytes - out.nbytes
    if name == "all_reduce":
        n = _group_of(args[-1]).size()
        return 2 * (n - 1) * x.nbytes // n
    if name == "all_to_all_single":
        return out.nbytes - args[1][_group_of(args[-1]).rank()] * x.element_size() * math.prod(out.shape[1:])
    raise NotImplementedError(f"how many bytes does {name} receive?")


def _group_of(group: Any) -> dist.ProcessGroup:
    if isinstance(group, str):
        from torch.distributed.distributed_c10d import _resolve_process_group

        return _resolve_process_group(group)  # type: ignore[arg-type]
    return group


# -- figures -----------------------------------------------------------------------------------------------------------

COLUMNS = (
    "mesh, pair", "DTensor ms", "ours ms", "ratio", "DTensor KB", "ours KB", "bound KB",
    "DTensor/bound", "ours/bound", "launches",
)  # fmt: skip


def table_row(pair: Pair, results: dict[str, Result]) -> list[str]:
    """One line of the table: medians of rounds, largest bytes over ranks."""
    theirs, ours, bound = results[DTENSOR], results[OURS], pair.bound()
    over = [_ratio(r.received, bound) if bound is not None else "-" for r in (theirs, ours)]
    return [
        f"{pair.mesh} {pair}",
        _milliseconds(theirs),
        _milliseconds(ours),
        _ratio(theirs.times.median, ours.times.median),
        *(f"{r.received / 1000:.1f}" for r in (theirs, ours)),
        "-" if bound is None else f"{bound / 1000:.1f}",
        *over,
        f"{theirs.launches} : {ours.launches}",
    ]


def _milliseconds(result: Result) -> str:
    return f"{result.times.median * 1e3:.3f}{'' if result.right else ' wrong'}"


def _ratio(a: float, b: float) -> str:
    return "-" if b == 0 else f"{a / b:.2f}x"


def summary(found: Sequence[tuple[Pair, dict[str, Result]]]) -> list[str]:
    """Geometric means over the pairs, wrong results left out."""
    fair = [(p, r) for p, r in found if r[DTENSOR].right and r[OURS].right]
    speed = [r[DTENSOR].times.median / r[OURS].times.median for _, r in fair]
    bounded = [(p.bound() or 0, r) for p, r in fair if p.bound()]
    moves = [r for _, r in fair if r[OURS].received]
    lines = [
        f"DTensor takes {_geomean(speed):.2f} times as long as ours (geometric mean of {len(fair)} pairs, "
        f"from {min(speed):.2f} to {max(speed):.2f}).",
        f"Bytes received over the bound, {len(bounded)} pairs without pending values that must communicate: "
        f"DTensor {_geomean([r[DTENSOR].received / b for b, r in bounded]):.2f} "
        f"(worst {max(r[DTENSOR].received / b for b, r in bounded):.2f}), "
        f"ours {_geomean([r[OURS].received / b for b, r in bounded]):.2f} "
        f"(worst {max(r[OURS].received / b for b, r in bounded):.2f}).",
        f"Bytes received, DTensor over ours, all {len(moves)} pairs that communicate: "
        f"{_geomean([r[DTENSOR].received / r[OURS].received for r in moves]):.2f}.",
        f"Collectives launched: {sum(r[DTENSOR].launches for _, r in fair)} by DTensor, "
        f"{sum(r[OURS].launches for _, r in fair)} by ours.",
    ]
    wrong = [str(p.mesh) + " " + str(p) for p, r in found if not r[DTENSOR].right]
    return lines + ([f"DTensor's result is wrong for: {'; '.join(wrong)}."] if wrong else [])


def _geomean(values: Sequence[float]) -> float:
    return statistics.geometric_mean(values) if values else float("nan")


def run(size: Size, only: Sequence[str] | None) -> Iterator[tuple[Pair, dict[str, Result]]]:
    """All pairs, mesh by mesh, each mesh in processes of its own."""
    for mesh_shape, words in PAIRS.items():
        if only and str(mesh_shape) not in only:
            continue
        pairs = [Pair(mesh_shape, getattr(size, kind), src, dst, kind) for src, dst, kind in words]
        arguments = (mesh_shape, pairs, size.rounds, size.batch_s)
        results = sm.launch(measure_mesh, math.prod(mesh_shape), arguments, env={"OMP_NUM_THREADS": "1"})
        yield from zip(pairs, results[0], strict=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the chosen meshes, print the table and write the files asked for."""
    options = _options(arguments)
    found = list(run(SIZES[options.size], options.only))
    rows = [table_row(pair, results) for pair, results in found]
    size = SIZES[options.size]
    title = (
        f"redistribute, f32{list(size.even)} (uneven: {list(size.uneven)}), gloo; bytes received by the busiest rank"
    )
    show(title, COLUMNS, rows)
    env, lines = environment(), summary(found)
    print("\n".join([*lines, environment_line(env)]))
    figures = [
        {"mesh": p.mesh, "pair": str(p), "bound": p.bound(), **{n: x.as_dict() for n, x in r.items()}} for p, r in found
    ]
    write_json(options.json, {"environment": env, "size": options.size, "pairs": figures})
    text = [f"### {title}", markdown(COLUMNS, rows), "\n".join(f"- {line}" for line in lines), environment_line(env)]
    write_markdown(options.markdown, "\n\n".join(text))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="large", help="small: latency decides; large: bytes")
    parser.add_argument("--only", choices=[str(m) for m in PAIRS], action="append", help="a mesh to run on")
    parser.add_argument("--json", metavar="PATH", help="write all figures here")
    parser.add_argument("--markdown", metavar="PATH", help="write the table here")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
