"""Redistribution on gloo processes: shardmesh compared with both planners of torch's DTensor.

    python benchmarks/redistribute.py                        4 and 8 gloo processes, ten minutes
    python benchmarks/redistribute.py --size 4096            tensors of 64 MB instead of 4 MB
    python benchmarks/redistribute.py --only "(2, 4)"        one mesh; may be given several times
    python benchmarks/redistribute.py --calibrate            planned by `sm.topology.calibrate`
    python benchmarks/redistribute.py --quick                small, one axis, 2 processes, seconds
    python benchmarks/redistribute.py --json figures.json --markdown tables.md

All pairs of {R, S0, S1} per axis on (4), (2, 4), (4, 2) and (2, 2, 2), pairs with pending values
(P) and uneven shapes. Every pair runs once for bytes, launches and a check of the result; all pairs
are also timed, except most of the 702 on (2, 2, 2).

The implementations run in the same processes over the same process groups, interleaved in random
order; a round's time is that of its slowest rank. If ours seems more than 5 % slower than either of
DTensor's, the pair is timed again with more rounds, and only the second measurement counts.
DTensor's planners:

    greedy      what `DTensor.redistribute` does: axis by axis, from the last to the first
    min-cost    the cheapest sequence of such steps by DTensor's cost model; dtensor.py says how to
                select it

Bytes received per rank (the maximum over ranks) are counted by the same convention for all: (n-1)
parts for an all_gather or reduce_scatter, 2(n-1)/n of the buffer for an all_reduce, the parts from
other ranks for an all_to_all. Ours are counted by `sm.debug.comm_budget`; DTensor's are computed
from the arguments of its functional collectives (where CommDebugMode counts calls). On the CPU,
DTensor gathers where it would call all_to_all on a GPU; the summary also gives the bytes for a GPU.
The bound, for pairs that reduce nothing, is the part of a rank's destination box outside its source
box,
|dst box - src box|.
"""

from __future__ import annotations

import argparse
import atexit
import logging
import math
import os
import random
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as dt
from dtensor import CountFunctional, redistribution, renamed
from measure import Call, Times, interleaved, slowest
from report import environment, environment_line, markdown, show, write_json, write_markdown
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor._redistribute import use_min_cost_redistribution_plan

import shardmesh as sm

GREEDY, MIN_COST, OURS = "greedy", "min-cost", "ours"
THEIRS = (GREEDY, MIN_COST)
PLACEMENTS = {"S0": ("Shard", 0), "S1": ("Shard", 1), "R": ("Replicate",), "P": ("Partial",)}

MESHES = ((4,), (2, 4), (4, 2), (2, 2, 2))
QUICK_MESH = (2,)
TIMED_OF_MANY = 60  # of the 702 pairs on (2, 2, 2)
TOO_SLOW, IN_DOUBT = 1.05, 4
WASTEFUL = 1.2

# Destinations by source, by number of axes.
PENDING = {
    1: {"P": ["R", "S0", "S1"], "R": ["P"]},
    2: {
        "P P": ["R R", "S0 R", "S0 S0", "S0 S1", "S1 S1"],
        "P R": ["R R", "S0 R", "R S0", "S1 S0"],
        "R P": ["R R", "S0 S1"],
        "P S0": ["R R", "R S0", "S0 R", "S0 S0", "S0 S1", "S1 S0"],
        "S1 P": ["R R", "R S1", "S1 R", "S1 S0", "S1 S1"],
        "R R": ["P R", "P P"],
        "R S0": ["P S0"],
    },
    3: {
        "P P P": ["R R R", "S0 S0 S0", "S0 S1 R"],
        "P S0 S1": ["R R R", "S1 S0 R", "S0 S0 S1"],
        "S0 P P": ["S0 R R", "R S0 S1"],
        "R R R": ["P P P"],
    },
}
UNEVEN = {
    1: {"S0": ["R", "S1"], "S1": ["S0"], "P": ["R", "S0"]},
    2: {
        "S0 S1": ["S1 S0", "R R"],
        "S0 S0": ["R R", "S1 S1"],
        "S0 R": ["R S0"],
        "P S0": ["S0 R", "S1 S0"],
    },
    3: {"S0 S1 R": ["R S0 S1"], "S0 S0 S0": ["R R R", "S1 S1 S1"], "P P P": ["S0 S0 S0"]},
}


@dataclass(frozen=True)
class RedistributeConfig:
    """How long to measure.

    Attributes:
        rounds: rounds per implementation; `IN_DOUBT` times as many when a pair is timed again.
        batch_s: seconds per round.
    """

    rounds: int
    batch_s: float


# -- one pair of layouts ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """A redistribution of a tensor of this shape on a mesh of this shape; `src` and `dst` have one
    word per axis.
    """

    mesh: tuple[int, ...]
    shape: tuple[int, int]
    src: str
    dst: str
    timed: bool = True

    def placements(self, words: str, module: Any) -> list[Any]:
        """Return the words as placements of `torch.distributed.tensor` or shardmesh."""
        return [
            getattr(module, name)(*arguments)
            for name, *arguments in map(PLACEMENTS.__getitem__, words.split())
        ]

    def layout(self, words: str, mesh: Any) -> sm.Layout:
        """Return the words as a layout."""
        return sm.Layout.of(mesh, self.placements(words, sm), self.shape)

    def bound(self) -> int | None:
        """Return the bytes that some rank must receive; None for a reduction, where it depends on
        the algorithm.
        """
        if "P" in self.src:
            return None
        mesh = sm.AbstractMesh(self.mesh)
        src, dst = self.layout(self.src, mesh), self.layout(self.dst, mesh)
        return 4 * max(_missing(src.box_at(c), box) for c, box in dst.boxes())

    def __str__(self) -> str:
        even = all(n % math.prod(self.mesh) == 0 for n in self.shape)
        return f"{self.mesh} {self.src} -> {self.dst}{'' if even else ', uneven'}"


def _missing(have: Any, want: Any) -> int:
    """Return the number of elements of the box `want` outside the box `have`."""
    common = [max(0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in zip(have, want, strict=True)]
    return math.prod(stop - start for start, stop in want) - math.prod(common)


def pairs_on(mesh: tuple[int, ...], size: int) -> list[Pair]:
    """Return all pairs without pending values, some with, and some uneven; only a fixed sample of
    very many is timed.
    """
    even, uneven = (size, size), (size - 3, size - 9)
    words = list(map(" ".join, product(("R", "S0", "S1"), repeat=len(mesh))))
    moves = [Pair(mesh, even, src, dst) for src, dst in product(words, words) if src != dst]
    if len(moves) > 2 * TIMED_OF_MANY:
        timed = set(random.Random(0).sample(moves, TIMED_OF_MANY))
        moves = [replace(pair, timed=pair in timed) for pair in moves]
    listed = ((PENDING, even), (UNEVEN, uneven))
    others = [
        Pair(mesh, shape, s, d)
        for table, shape in listed
        for s, ds in table[len(mesh)].items()
        for d in ds
    ]
    return moves + others


@dataclass(frozen=True)
class Result:
    """The figures of one implementation for a pair.

    Attributes:
        received: bytes received per rank.
        on_gpu: the same on a GPU, where DTensor calls all_to_all instead of all_gather.
        launches: number of collectives per rank.
        right: whether the result is correct.
        times: None for a pair that is not timed.
        again: whether `times` is the second, longer measurement.
    """

    received: int
    on_gpu: int
    launches: int
    right: bool
    times: Times | None = None
    again: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for the JSON file."""
        counts = {
            "bytes_received": self.received,
            "bytes_received_on_gpu": self.on_gpu,
            "launches": self.launches,
        }
        times = {} if self.times is None else {**self.times.as_dict(), "timed_again": self.again}
        return {**counts, "right": self.right, **times}

    @property
    def median(self) -> float:
        """Seconds of the median round; nan if not timed."""
        return math.nan if self.times is None else self.times.median


Results = dict[str, Result]
PairResults = tuple[Pair, Results]


# -- in a rank -------------------------------------------------------------------------------------


def measure_pairs(
    pairs: Sequence[Pair], config: RedistributeConfig, calibrate: bool
) -> list[Results]:
    """Return the results of pairs on meshes of all processes; runs in every process."""
    # After DTensor, gloo's threads outlive destroy_process_group, and sometimes abort a process at
    # interpreter shutdown.
    atexit.register(os._exit, 0)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)  # DTensor logs every suboptimal pair
    meshes = {
        shape: Meshes.of(shape, calibrate) for shape in dict.fromkeys(pair.mesh for pair in pairs)
    }
    return [_measure(pair, meshes[pair.mesh], config) for pair in _with_progress(pairs)]


def _with_progress(pairs: Sequence[Pair]) -> Iterator[Pair]:
    for i, pair in enumerate(pairs):
        if i % 50 == 0 and dist.get_rank() == 0:
            print(f"{i} of {len(pairs)} pairs", file=sys.stderr, flush=True)
        yield pair


@dataclass(frozen=True)
class Meshes:
    """One mesh in each implementation, over the same process groups."""

    ours: sm.DeviceMesh
    theirs: dict[str, TorchMesh]

    @staticmethod
    def of(shape: tuple[int, ...], calibrate: bool) -> Meshes:
        mesh = sm.init_device_mesh("cpu", shape)
        if calibrate:
            sm.topology.calibrate(mesh)
        return Meshes(mesh, {name: renamed(mesh, name) for name in THEIRS})


def _measure(pair: Pair, meshes: Meshes, config: RedistributeConfig) -> Results:
    full = (
        torch.arange(math.prod(pair.shape), dtype=torch.float32).remainder_(1000).view(pair.shape)
    )
    src, dst = pair.layout(pair.src, meshes.ours), pair.layout(pair.dst, meshes.ours)
    local = _part(full, src)
    their_src = pair.placements(pair.src, dt)
    their_dst = pair.placements(pair.dst, dt)
    calls = {
        name: redistribution(local, mesh, their_src, their_dst, pair.shape)
        for name, mesh in meshes.theirs.items()
    }
    calls[OURS] = _ours(pair, meshes.ours, local)
    everyone = _gathered({name: _counted(name, call, full, dst) for name, call in calls.items()})
    results = {name: _busiest([counts[name] for counts in everyone]) for name in calls}
    return _timed(calls, results, config) if pair.timed else results


def _ours(pair: Pair, mesh: sm.DeviceMesh, local: Tensor) -> Call:
    x = sm.from_local(local, mesh, pair.placements(pair.src, sm), shape=pair.shape)
    dst = pair.placements(pair.dst, sm)
    return lambda: x.redistribute(dst).to_local()


def _part(full: Tensor, layout: sm.Layout) -> Tensor:
    """Return this rank's part of a tensor; for a pending sum, the first rank holds the value and
    the others zeros.
    """
    part = full[tuple(slice(start, stop) for start, stop in layout.box)].clone()
    coordinate = layout.mesh.coordinate  # type: ignore[attr-defined]
    return part * all(coordinate[layout.mesh.axis_index(axis)] == 0 for axis in layout.pending)


def _gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _largest(value: int) -> int:
    return max(_gathered(value))


# -- time ------------------------------------------------------------------------------------------


def _timed(calls: dict[str, Call], results: Results, config: RedistributeConfig) -> Results:
    """Return the results with times; time again if ours seems too slow. All ranks know all times,
    so they decide alike.
    """
    times = _times(calls, config.rounds, config.batch_s)
    again = any(times[OURS].median > TOO_SLOW * times[name].median for name in THEIRS)
    if again:
        times = _times(calls, IN_DOUBT * config.rounds, config.batch_s)
    return {name: replace(results[name], times=times[name], again=again) for name in calls}


def _times(calls: dict[str, Call], rounds: int, batch_s: float) -> dict[str, Times]:
    own_times = interleaved(
        calls, rounds=rounds, batch_s=batch_s, agree=_largest, together=dist.barrier
    )
    everyone = _gathered(own_times)
    return {name: slowest([times[name] for times in everyone]) for name in calls}


# -- bytes and launches ----------------------------------------------------------------------------


def _counted(name: str, call: Call, full: Tensor, dst: sm.Layout) -> Result:
    """Run the first call on this rank; return the bytes it received and whether the result is
    correct.
    """
    if name == OURS:
        with sm.debug.comm_budget() as used:
            result = call()
        return Result(
            used.bytes_received, used.bytes_received, used.launches, _is_right(result, full, dst)
        )
    with CountFunctional() as theirs, use_min_cost_redistribution_plan(name == MIN_COST):
        result = call()
    return Result(
        theirs.received,
        theirs.received - theirs.saved_on_gpu,
        theirs.launches,
        _is_right(result, full, dst),
    )


def _is_right(part: Tensor, full: Tensor, dst: sm.Layout) -> bool:
    """Return whether this rank's part is correct. For pending values, only their sum must be."""
    if dst.pending:
        part = part.clone()
        dst.mesh.group(tuple(dst.pending)).all_reduce(part)  # type: ignore[attr-defined]
    right = full[tuple(slice(start, stop) for start, stop in dst.box)]
    return part.shape == right.shape and bool(torch.equal(part, right))


def _busiest(ranks: Sequence[Result]) -> Result:
    """Return the maxima of bytes and launches over ranks; correct if all are."""
    received, on_gpu, launches = (
        max(getattr(r, n) for r in ranks) for n in ("received", "on_gpu", "launches")
    )
    return Result(received, on_gpu, launches, all(r.right for r in ranks))


# -- figures ---------------------------------------------------------------------------------------

COLUMNS = (
    "mesh, pair",
    "greedy KB",
    "min-cost KB",
    "ours KB",
    "bound KB",
    "launches",
    "greedy ms",
    "min-cost ms",
    "ours ms",
    "greedy / ours",
    "min-cost / ours",
)


def table_row(pair: Pair, results: Results) -> list[str]:
    """Return a row of the table: maximum bytes over ranks, medians of rounds."""
    bound = pair.bound()
    return [
        f"{pair}{' (again)' if results[OURS].again else ''}",
        *(f"{r.received / 1000:.1f}" for r in results.values()),
        "-" if bound is None else f"{bound / 1000:.1f}",
        " : ".join(str(r.launches) for r in results.values()),
        *(f"{r.median * 1e3:.3f}{'' if r.right else ' wrong'}" for r in results.values()),
        *(f"{results[name].median / results[OURS].median:.2f}x" for name in THEIRS),
    ]


MESH_COLUMNS = (
    "mesh",
    "pairs",
    "timed",
    "greedy / bound",
    "min-cost / bound",
    "ours / bound",
    "launches",
    "greedy / ours, time",
    "min-cost / ours, time",
)


def mesh_rows(pairs: Sequence[PairResults]) -> list[list[str]]:
    """Return a row per mesh and one for all: geometric means, and the worst in parentheses."""
    meshes = list(dict.fromkeys(pair.mesh for pair, _ in pairs))
    rows = [_mesh_row(str(mesh), [f for f in pairs if f[0].mesh == mesh]) for mesh in meshes]
    return [*rows, _mesh_row("all", pairs)]


def _mesh_row(name: str, pairs: Sequence[PairResults]) -> list[str]:
    over = [
        _spread([r[who].received / b for b, r in _bounded(pairs)], max)
        for who in (GREEDY, MIN_COST, OURS)
    ]
    timed = _communicating(pairs)
    faster = [_spread([r[who].median / r[OURS].median for _, r in timed], min) for who in THEIRS]
    launches = [str(sum(r[who].launches for _, r in pairs)) for who in (GREEDY, MIN_COST, OURS)]
    return [name, str(len(pairs)), str(len(timed)), *over, " : ".join(launches), *faster]


def _bounded(pairs: Sequence[PairResults]) -> list[tuple[int, Results]]:
    """Return bound and results of the pairs that must communicate and reduce nothing."""
    return [(bound, results) for pair, results in pairs if (bound := pair.bound())]


def _communicating(pairs: Sequence[PairResults]) -> list[PairResults]:
    """Return the pairs that communicate, are timed and have correct results."""
    return [
        (p, r)
        for p, r in pairs
        if p.timed and r[OURS].launches and all(x.right for x in r.values())
    ]


def _spread(values: Sequence[float], worst: Callable[[Sequence[float]], float]) -> str:
    return f"{statistics.geometric_mean(values):.2f} ({worst(values):.2f})" if values else "-"


def summary(pairs: Sequence[PairResults]) -> list[str]:
    """Summarize the table: bytes, launches and time against their targets."""
    lines = [
        _bytes_line(pairs),
        _launches_line(pairs),
        *(_time_line(pairs, name) for name in THEIRS),
        _slower_line(pairs),
    ]
    wrong = [
        f"{pair} ({name})" for pair, results in pairs for name, r in results.items() if not r.right
    ]
    return [*lines, *([f"Wrong results: {'; '.join(wrong)}."] if wrong else [])]


def _bytes_line(pairs: Sequence[PairResults]) -> str:
    bounded = _bounded(pairs)
    parts = [
        f"{name} {_spread([r[name].received / b for b, r in bounded], max)}"
        for name in (GREEDY, MIN_COST, OURS)
    ]
    gpu = [f"{name} {_spread([r[name].on_gpu / b for b, r in bounded], max)}" for name in THEIRS]
    return (
        f"Bytes received over the bound, {len(bounded)} pairs that must communicate and reduce "
        f"nothing, geometric mean (worst): {', '.join(parts)}. With all_to_all as on a GPU: "
        f"{', '.join(gpu)}."
    )


def _launches_line(pairs: Sequence[PairResults]) -> str:
    totals = ", ".join(
        f"{sum(r[name].launches for _, r in pairs)} by {name}" for name in (GREEDY, MIN_COST, OURS)
    )
    more = [str(p) for p, r in pairs if r[OURS].launches > min(r[name].launches for name in THEIRS)]
    return (
        f"Collectives launched: {totals}; pairs in which ours launches more than either: "
        f"{_listed(more)}."
    )


def _time_line(pairs: Sequence[PairResults], name: str) -> str:
    timed = _communicating(pairs)
    ratios = [r[name].median / r[OURS].median for _, r in timed]
    wasteful = [
        r[name].median / r[OURS].median
        for p, r in timed
        if (b := p.bound()) and r[name].received > WASTEFUL * b
    ]
    return (
        f"Time of {name} over ours, geometric mean (worst): {_spread(ratios, min)} of "
        f"{len(ratios)} pairs that communicate; {_spread(wasteful, min)} of the {len(wasteful)} in "
        f"which it moves more than {WASTEFUL} times the bound."
    )


def _slower_line(pairs: Sequence[PairResults]) -> str:
    slow = []
    for pair, r in pairs:
        best = min((r[name].median for name in THEIRS if r[name].right), default=math.nan)
        if r[OURS].median > TOO_SLOW * best:
            slow.append(f"{pair} ({r[OURS].median / best:.2f}x)")
    return (
        f"Pairs in which ours takes more than {TOO_SLOW} times as long as the faster of the two: "
        f"{_listed(slow)}."
    )


def _listed(items: Sequence[str]) -> str:
    return f"{len(items)}: {'; '.join(items)}" if items else "none"


# -- command line ----------------------------------------------------------------------------------


def run(
    pairs: Sequence[Pair], config: RedistributeConfig, calibrate: bool
) -> Iterator[PairResults]:
    """Yield the results of all pairs; meshes of one size share their processes."""
    for ranks in sorted({math.prod(pair.mesh) for pair in pairs}):
        chosen = [pair for pair in pairs if math.prod(pair.mesh) == ranks]
        results = sm.launch(
            measure_pairs, ranks, (chosen, config, calibrate), env={"OMP_NUM_THREADS": "1"}
        )
        yield from zip(chosen, results[0], strict=True)


def chosen_pairs(size: int, only: Sequence[str] | None, quick: bool) -> list[Pair]:
    """Return the pairs on the chosen meshes."""
    meshes = [QUICK_MESH] if quick else [m for m in MESHES if not only or str(m) in only]
    return [pair for mesh in meshes for pair in pairs_on(mesh, size)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the chosen meshes, print the tables and write the files asked for."""
    options = _options(arguments)
    size = 64 if options.quick else options.size
    config = RedistributeConfig(3, 0) if options.quick else RedistributeConfig(5, 1e-2)
    pairs = list(run(chosen_pairs(size, options.only, options.quick), config, options.calibrate))
    rows = [table_row(*one) for one in pairs if one[0].timed]
    means = mesh_rows(pairs)
    title = (
        f"redistribute, f32[{size}, {size}] (uneven: [{size - 3}, {size - 9}]), "
        f"gloo{', ours calibrated' * options.calibrate}"
    )
    show(title, COLUMNS, rows)
    show("by mesh", MESH_COLUMNS, means)
    env, lines = environment(), summary(pairs)
    print("\n".join([*lines, environment_line(env)]))
    figures = [
        {"pair": str(p), "bound": p.bound(), **{name: x.as_dict() for name, x in r.items()}}
        for p, r in pairs
    ]
    write_json(
        options.json,
        {"environment": env, "size": size, "calibrated": options.calibrate, "pairs": figures},
    )
    text = [
        f"## {title}",
        "\n".join(f"- {line}" for line in lines),
        markdown(MESH_COLUMNS, means),
        markdown(COLUMNS, rows),
    ]
    write_markdown(options.markdown, "\n\n".join([*text, environment_line(env)]))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--size", type=int, default=1024, help="rows and columns of the tensor, a multiple of 8"
    )
    parser.add_argument(
        "--only", choices=[str(m) for m in MESHES], action="append", help="a mesh to run on"
    )
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="plan ours with the measured topology of this machine",
    )
    parser.add_argument("--quick", action="store_true", help="small tensors, one axis, 2 processes")
    parser.add_argument("--json", metavar="PATH", help="write all figures here")
    parser.add_argument("--markdown", metavar="PATH", help="write the table here")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
