"""Cost of planning by mesh size: time and memory of `sm.debug.plan`, `sm.debug.explain`, and the
lookup of one rank's routes.

    python benchmarks/plan_scale.py                          8 to 131,072 ranks, to 5 axes, minutes
    python benchmarks/plan_scale.py --quick                  one small mesh, seconds
    python benchmarks/plan_scale.py --only "(512, 8, 32)"    one mesh; may be given several times
    python benchmarks/plan_scale.py --json figures.json --markdown tables.md

No devices and no processes: layouts are on a `sm.AbstractMesh`, once with all ranks in one node
("flat") and once with nodes of 8 (of 2 or 4 on the smallest meshes). Every case runs in three
parts, each in a separate fork, so that caches start empty:

    plan      `sm.debug.plan(src, dst, topology)`
    explain   `str(sm.debug.explain(src, dst, topology=topology))`, which plans again
    rank      the boxes that the rank in the middle of the mesh sends and receives (`routes` of
              every step)

Times are CPU times, since nothing waits. "peers" is the number of ranks that this rank exchanges
data with; the cost may grow with it and with the number of axes. Memory is the peak of Python's
allocations (tracemalloc, in a separate run) and the growth of the process.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import resource
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from multiprocessing.connection import Connection
from typing import Any

from report import environment, environment_line, markdown, show, write_json, write_markdown

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.redistribute.plan import Plan, Step
from shardmesh.sharding.redistribute.plan.routes import routes
from shardmesh.sharding.redistribute.plan.steps import RING_OPS

MESHES = (
    (8,), (512,), (16384,), (131072,),
    (2, 4), (64, 8), (16384, 8),
    (2, 2, 2), (16, 8, 4), (512, 8, 32),
    (2, 2, 2, 2), (64, 8, 16, 16),
    (2, 2, 2, 2, 2), (8, 8, 8, 16, 16),
)  # fmt: skip
QUICK = ((2, 2, 2),)
_REPEATS = 5
EVEN, UNEVEN = (1 << 18, 1 << 18), ((1 << 18) - 5, (1 << 18) - 3)

Specs = Callable[[tuple[str, ...]], tuple[P, P]]

# Functions from the axes of a mesh to source and destination specs; those of the second table need
# at least two axes.
ON_ANY: dict[str, Specs] = {
    "S0 -> R, all axes": lambda axes: (P(axes), P()),
    "S0 -> S1, all axes": lambda axes: (P(axes), P(None, axes)),
    "P -> R, all axes": lambda axes: (P(None, unreduced=axes), P()),
    "P -> S0, all axes": lambda axes: (P(None, unreduced=axes), P(axes)),
}
ON_SEVERAL: dict[str, Specs] = {
    "axes of a dim reversed": lambda axes: (P(axes), P(axes[::-1])),
    "axes of two dims exchanged": lambda axes: (P(axes[0], axes[1:]), P(axes[1:], axes[0])),
    "FSDP all_gather": lambda axes: (P(axes[0], axes[1:]), P(None, axes[1:])),
    "FSDP all_gather, minor": lambda axes: (P((*axes[1:], axes[0])), P(axes[1:])),
    "FSDP reduce_scatter": lambda axes: (
        P(None, axes[1:], unreduced={axes[0]}),
        P(axes[0], axes[1:]),
    ),
    "TP S1 -> S0": lambda axes: (P(axes[:-1], axes[-1]), P(axes)),
    "TP S0 -> R": lambda axes: (P(axes), P(axes[:-1])),
    "TP P -> R": lambda axes: (P(axes[:-1], unreduced={axes[-1]}), P(axes[:-1])),
    "DP replicas, TP S0 -> S1": lambda axes: (P(axes[-1]), P(None, axes[-1])),
    "DP replicas, TP S0 -> R": lambda axes: (P(axes[-1]), P()),
}
UNEVEN_PAIRS = ("S0 -> S1, all axes", "FSDP all_gather", "FSDP reduce_scatter", "TP S1 -> S0")


@dataclass(frozen=True)
class PlanCase:
    """One plan.

    Attributes:
        mesh: shape of the mesh.
        node_size: ranks per node; None for a single node.
        pair: name of the pair of specs.
        shape: shape of the tensor.
    """

    mesh: tuple[int, ...]
    node_size: int | None
    pair: str
    shape: tuple[int, int]

    def layouts(self) -> tuple[sm.Layout, sm.Layout]:
        """Return source and destination, on a new mesh without caches."""
        mesh = sm.AbstractMesh(self.mesh, tuple("abcde"[: len(self.mesh)]))
        src, dst = (ON_ANY | ON_SEVERAL)[self.pair](mesh.axis_names)
        return sm.Layout.of(mesh, src, self.shape), sm.Layout.of(mesh, dst, self.shape)

    @property
    def topology(self) -> sm.topology.Topology:
        return sm.topology.Topology.default("cuda", node_size=self.node_size)

    @property
    def has_nodes(self) -> bool:
        return self.node_size is not None

    def __str__(self) -> str:
        nodes = "flat" if self.node_size is None else f"nodes of {self.node_size}"
        return f"{self.mesh} {nodes}, {self.pair}{'' if self.shape == EVEN else ', uneven'}"


@dataclass(frozen=True)
class PartFigures:
    """One part of a case.

    Attributes:
        seconds: median time.
        grown: bytes by which the process grew.
        result: what the timed function returned.
    """

    seconds: float
    grown: int
    result: Any


@dataclass(frozen=True)
class CaseFigures:
    """Seconds and bytes of a case; None for a part that exceeds the time limit."""

    steps: str | None
    peers: int | None
    plan: float | None
    explain: float | None
    rank: float | None
    allocated: int | None
    grown: int


def cases(meshes: Sequence[tuple[int, ...]]) -> list[PlanCase]:
    """Return all pairs on these meshes, flat and with nodes."""
    return [
        PlanCase(mesh, node_size, pair, shape)
        for mesh in meshes
        for node_size in (None, min(8, math.prod(mesh) // 4))
        for pair in (ON_ANY | ON_SEVERAL if len(mesh) > 1 else ON_ANY)
        for shape in ((EVEN, UNEVEN) if pair in UNEVEN_PAIRS else (EVEN,))
    ]


# -- one case, in separate processes ---------------------------------------------------------------


def time_plan(case: PlanCase) -> PartFigures:
    """Time `sm.debug.plan`; return its steps."""
    return _timed(
        lambda layouts: _steps(sm.debug.plan(*layouts, topology=case.topology)), case.layouts
    )


def time_explain(case: PlanCase) -> PartFigures:
    """Time `str(sm.debug.explain(...))`."""
    return _timed(
        lambda layouts: str(sm.debug.explain(*layouts, topology=case.topology)), case.layouts
    )


def time_rank(case: PlanCase) -> PartFigures:
    """Time the lookup of what one rank sends and receives in a given plan; return the number of its
    peers.
    """
    return _timed(_peers, lambda: sm.debug.plan(*case.layouts(), topology=case.topology))


def allocated(case: PlanCase) -> int:
    """Return the peak of Python's allocations while planning, looking up one rank and
    explaining.
    """
    src, dst = case.layouts()
    tracemalloc.start()
    _peers(sm.debug.plan(src, dst, case.topology))
    str(sm.debug.explain(src, dst, topology=case.topology))
    return tracemalloc.get_traced_memory()[1]


def _timed(call: Callable[[Any], Any], prepare: Callable[[], Any]) -> PartFigures:
    """Time the call; `prepare` runs before each repetition, so that the mesh has no caches."""
    before, times, result = _resident(), [], None
    while len(times) < _REPEATS and sum(times) < 1:
        prepared = prepare()
        start = time.process_time()
        result = call(prepared)
        times.append(time.process_time() - start)
    return PartFigures(statistics.median(times), _resident() - before, result)


def _steps(plan: Plan) -> str:
    return " + ".join(step.op for step in plan.steps)


def _peers(plan: Plan) -> int:
    """Return how many ranks the middle rank sends to or receives from, over all steps; a ring
    counts its whole group.
    """
    me = tuple(n // 2 for n in plan.src.mesh.shape)
    return sum(_peers_in(step, me) for step in plan.steps if not step.is_local)


def _peers_in(step: Step, me: tuple[int, ...]) -> int:
    if step.op in RING_OPS:
        return step.group_size - 1
    return len({other for route in routes(step, me) for other, _ in (*route.sends, *route.recvs)})


def _resident() -> int:
    """Return the peak memory of this process in bytes (Linux reports KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def warm_up() -> None:
    """Run imports and first calls, on a mesh that is not measured."""
    for case in (
        PlanCase((3, 2), None, "FSDP all_gather", UNEVEN),
        PlanCase((3, 2), 2, "P -> R, all axes", EVEN),
    ):
        run_case(case, math.inf, lambda call, case, limit_s: call(case))


def in_fork(call: Callable[[PlanCase], Any], case: PlanCase, limit_s: float) -> Any:
    """Run a call in a fork of this process; return None if it exceeds the limit."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(send, call, case))
    process.start()
    send.close()
    # EOFError if the fork failed; its traceback is on stderr.
    result = receive.recv() if receive.poll(limit_s) else None
    process.kill()
    process.join()
    return result


def _send_result(send: Connection, call: Callable[[PlanCase], Any], case: PlanCase) -> None:
    send.send(call(case))


# -- figures ---------------------------------------------------------------------------------------

Result = tuple[PlanCase, CaseFigures]
COLUMNS = (
    "mesh, nodes, pair",
    "steps",
    "peers",
    "plan ms",
    "explain ms",
    "rank ms",
    "Python MB",
    "process MB",
)


def run_case(
    case: PlanCase,
    limit_s: float,
    within: Callable[[Callable[[PlanCase], Any], PlanCase, float], Any],
) -> CaseFigures:
    """Run all parts of a case; measure Python's memory only if all stay within the limit."""
    parts: list[PartFigures | None] = [
        within(call, case, limit_s) for call in (time_plan, time_explain, time_rank)
    ]
    plan, explain, rank = (None if part is None else part.seconds for part in parts)
    steps, peers = (None if part is None else part.result for part in (parts[0], parts[2]))
    peak = None if None in parts else within(allocated, case, 4 * limit_s)
    return CaseFigures(
        steps,
        peers,
        plan,
        explain,
        rank,
        peak,
        max((part.grown for part in parts if part), default=0),
    )


def table_row(case: PlanCase, figures: CaseFigures, limit_s: float) -> list[str]:
    """Return a row of the table."""
    seconds = [
        f"over {limit_s * 1e3:.0f}" if s is None else f"{s * 1e3:.2f}"
        for s in (figures.plan, figures.explain, figures.rank)
    ]
    peers = "-" if figures.peers is None else f"{figures.peers:,}"
    memory = [
        "-" if size is None else f"{size / 1e6:.1f}" for size in (figures.allocated, figures.grown)
    ]
    return [str(case), figures.steps or "-", peers, *seconds, *memory]


def summary(results: Sequence[Result], limit_s: float) -> list[str]:
    """Summarize: the slowest case of each part, plans over a second, and growth with the world
    size.
    """
    lines = [_slowest(part, results, limit_s) for part in ("plan", "explain", "rank")]
    case, most = max(results, key=lambda one: one[1].allocated or 0)
    lines.append(f"Largest allocation of Python: {(most.allocated or 0) / 1e6:.1f} MB ({case}).")
    over = [str(case) for case, f in results if f.plan is None or f.plan > 1]
    lines.append(
        f"Plans that take more than a second: {len(over)}{': ' * bool(over)}{'; '.join(over)}."
    )
    return [*lines, *_growth(results)]


def _slowest(part: str, results: Sequence[Result], limit_s: float) -> str:
    done = [(case, seconds) for case, f in results if (seconds := getattr(f, part)) is not None]
    case, most = max(done, key=lambda one: one[1])
    late = f", {len(results) - len(done)} over {limit_s:g} s" if len(done) < len(results) else ""
    middle = statistics.median(seconds for _, seconds in done)
    return f"{part}: median {middle * 1e3:.2f} ms, slowest {most * 1e3:.1f} ms ({case}){late}."


def _growth(results: Sequence[Result]) -> Iterator[str]:
    """Compare planning on the largest and the smallest mesh, by number of axes, flat and with
    nodes.
    """
    for ndim, nodes in product(sorted({len(case.mesh) for case, _ in results}), (False, True)):
        chosen = [
            (c, f.plan)
            for c, f in results
            if len(c.mesh) == ndim and c.has_nodes == nodes and f.plan
        ]
        meshes = sorted({case.mesh for case, _ in chosen}, key=math.prod)
        if len(meshes) < 2:
            continue
        small, large = (
            {(case.pair, case.shape): seconds for case, seconds in chosen if case.mesh == mesh}
            for mesh in (meshes[0], meshes[-1])
        )
        both = [(small[what], large[what]) for what in small if what in large]
        if both:
            yield (
                f"plan {'with nodes' if nodes else 'flat'}, {meshes[-1]} over {meshes[0]}: "
                f"{statistics.geometric_mean(b / a for a, b in both):.1f}x in geometric mean, "
                f"slowest {max(b for _, b in both) * 1e3:.1f} ms."
            )


def run(chosen: Sequence[PlanCase], limit_s: float) -> Iterator[Result]:
    """Run every case in forks, and print the progress."""
    mesh = None
    for case in chosen:
        if case.mesh != mesh:
            mesh = case.mesh
            print(f"mesh {mesh}", file=sys.stderr, flush=True)
        yield case, run_case(case, limit_s, in_fork)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the chosen meshes, print the table and write the files asked for."""
    options = _options(arguments)
    meshes = [
        m
        for m in (QUICK if options.quick else MESHES)
        if not options.only or str(m) in options.only
    ]
    warm_up()
    results = list(run(cases(meshes), options.limit))
    rows = [table_row(case, figures, options.limit) for case, figures in results]
    title = "planning, f32[262144, 262144] (uneven: [262139, 262141]) on meshes without devices"
    show(title, COLUMNS, rows)
    env, lines = environment(), summary(results, options.limit)
    print("\n".join([*lines, environment_line(env)]))
    figures = [
        {"case": str(case), "ranks": math.prod(case.mesh), **asdict(f)} for case, f in results
    ]
    write_json(
        options.json,
        {"environment": env, "limit_s": options.limit, "cases": figures, "summary": lines},
    )
    text = [
        f"## {title}",
        "\n".join(f"- {line}" for line in lines),
        markdown(COLUMNS, rows),
        environment_line(env),
    ]
    write_markdown(options.markdown, "\n\n".join(text))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"only the mesh {QUICK[0]}")
    parser.add_argument("--only", choices=[str(m) for m in MESHES], action="append", help="a mesh")
    parser.add_argument(
        "--limit", type=float, default=5.0, metavar="SECONDS", help="time limit of a part"
    )
    parser.add_argument("--json", metavar="PATH", help="write all figures here")
    parser.add_argument("--markdown", metavar="PATH", help="write the table here")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
