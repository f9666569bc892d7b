"""Planning against mesh size: time and memory of `sm.plan`, of its explanation, and of what one rank looks up.

    python benchmarks/plan_scale.py                          meshes of 8 to 131,072 ranks, one to five axes, minutes
    python benchmarks/plan_scale.py --quick                  small meshes only, seconds
    python benchmarks/plan_scale.py --only "(512, 8, 32)"    one mesh; may be given several times
    python benchmarks/plan_scale.py --json figures.json --markdown tables.md

No devices and no processes: layouts on a `sm.AbstractMesh`, once with all ranks in one node ("flat") and once with
nodes of 8. Every case runs in a fork of its own, so that nothing is remembered from another, in three parts:

    plan      `sm.plan(src, dst, topology)`
    explain   `str(sm.explain(src, dst, topology=topology))`, which plans again
    rank      what the rank in the middle of the mesh sends and receives, box by box (`routes` of every exchange)

"peers" is how many others that rank exchanges data with: what the cost may grow with, beside the number of axes.
Memory is what Python allocated at most (tracemalloc, in a run of its own) and how much larger the process became.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import resource
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from report import environment, environment_line, markdown, show, write_json, write_markdown

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.plan import Plan, Step
from shardmesh.sharding.plan.route import routes
from shardmesh.sharding.plan.steps import RING_OPS

MESHES = (
    (8,), (512,), (16384,), (131072,),
    (2, 4), (64, 8), (16384, 8),
    (2, 2, 2), (16, 8, 4), (512, 8, 32),
    (2, 2, 2, 2), (64, 8, 16, 16),
    (2, 2, 2, 2, 2), (8, 8, 8, 16, 16),
)  # fmt: skip
QUICK = ((8,), (2, 4), (2, 2, 2))
NODE_SIZES = (None, 8)
_REPEATS = 5
EVEN, UNEVEN = (1 << 18, 1 << 18), ((1 << 18) - 5, (1 << 18) - 3)

Specs = Callable[[tuple[str, ...]], tuple[P, P]]

# From the axes of a mesh to the specs before and after; those of the second table need at least two axes.
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
    "FSDP reduce_scatter": lambda axes: (P(None, axes[1:], unreduced={axes[0]}), P(axes[0], axes[1:])),
    "TP S1 -> S0": lambda axes: (P(axes[:-1], axes[-1]), P(axes)),
    "TP S0 -> R": lambda axes: (P(axes), P(axes[:-1])),
    "TP P -> R": lambda axes: (P(axes[:-1], unreduced={axes[-1]}), P(axes[:-1])),
    "DP replicas, TP S0 -> S1": lambda axes: (P(axes[-1]), P(None, axes[-1])),
    "DP replicas, TP S0 -> R": lambda axes: (P(axes[-1]), P()),
}
UNEVEN_PAIRS = ("S0 -> S1, all axes", "FSDP all_gather", "FSDP reduce_scatter", "TP S1 -> S0")


@dataclass(frozen=True)
class Case:
    """One plan: mesh, ranks of a node (None: all share one), the name of the pair, the shape of the tensor."""

    mesh: tuple[int, ...]
    node_size: int | None
    pair: str
    shape: tuple[int, int]

    def layouts(self) -> tuple[sm.Layout, sm.Layout]:
        """Source and destination, on a mesh that nothing is known about yet."""
        mesh = sm.AbstractMesh(self.mesh, tuple("abcde"[: len(self.mesh)]))
        src, dst = (ON_ANY | ON_SEVERAL)[self.pair](mesh.axis_names)
        return sm.Layout.of(mesh, src, self.shape), sm.Layout.of(mesh, dst, self.shape)

    @property
    def topology(self) -> sm.Topology:
        return sm.Topology.default("cuda", node_size=self.node_size)

    def __str__(self) -> str:
        nodes = "flat" if self.node_size is None else f"nodes of {self.node_size}"
        return f"{self.mesh} {nodes}, {self.pair}{'' if self.shape == EVEN else ', uneven'}"


@dataclass(frozen=True)
class Figures:
    """What a case takes: seconds, and bytes."""

    ops: str
    peers: int
    plan: float
    explain: float
    rank: float
    allocated: int = 0
    grown: int = 0


def cases(meshes: Sequence[tuple[int, ...]]) -> list[Case]:
    """All pairs on these meshes, flat and with nodes."""
    return [
        Case(mesh, node_size, pair, shape)
        for mesh in meshes
        for node_size in NODE_SIZES
        for pair in (ON_ANY | ON_SEVERAL if len(mesh) > 1 else ON_ANY)
        for shape in ((EVEN, UNEVEN) if pair in UNEVEN_PAIRS else (EVEN,))
    ]


# -- one case, in a process of its own ---------------------------------------------------------------------------------


def measure(case: Case) -> Figures:
    """Time all parts, each on layouts and a mesh that nothing is known about yet, and how much the process grows."""
    before, topology = _resident(), case.topology
    plan, plan_s = _median(lambda layouts: sm.plan(*layouts, topology=topology), case.layouts)
    _, explain_s = _median(lambda layouts: str(sm.explain(*layouts, topology=topology)), case.layouts)
    peers, rank_s = _median(_peers, lambda: sm.plan(*case.layouts(), topology=topology))
    ops = " + ".join(step.op for step in plan.steps)
    return Figures(ops, peers, plan_s, explain_s, rank_s, grown=_resident() - before)


def allocated(case: Case) -> int:
    """Bytes that Python holds at most while it plans, explains and looks up one rank."""
    src, dst = case.layouts()
    tracemalloc.start()
    plan = sm.plan(src, dst, case.topology)
    _peers(plan)
    str(sm.explain(src, dst, topology=case.topology))
    return tracemalloc.get_traced_memory()[1]


def _median(call: Callable[[Any], Any], prepare: Callable[[], Any]) -> tuple[Any, float]:
    """What the call returns for what was prepared, and its median time."""
    times, found = [], None
    while len(times) < _REPEATS and sum(times) < 1:
        prepared = prepare()
        start = time.perf_counter()
        found = call(prepared)
        times.append(time.perf_counter() - start)
    return found, statistics.median(times)


def _peers(plan: Plan) -> int:
    """How many ranks the one in the middle sends to or receives from, over all steps: a ring has all of its group."""
    me = tuple(n // 2 for n in plan.src.mesh.shape)
    return sum(_peers_in(step, me) for step in plan.steps if not step.is_local)


def _peers_in(step: Step, me: tuple[int, ...]) -> int:
    if step.op in RING_OPS:
        return step.group_size - 1
    return len({other for route in routes(step, me) for other, _ in (*route.sends, *route.recvs)})


def _resident() -> int:
    """The most bytes that this process has held (Linux counts in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def warm_up() -> None:
    """Plan and explain something, on a mesh that is none of those measured: imports and first calls."""
    for case in (Case((3, 2), None, "FSDP all_gather", UNEVEN), Case((3, 2), 2, "P -> R, all axes", EVEN)):
        measure(case)


def in_fork(call: Callable[[Case], Any], case: Case, limit_s: float) -> Any:
    """The answer of a fork of this process; None if it takes longer than the limit."""
    with multiprocessing.get_context("fork").Pool(1) as pool:  # leaving the block ends the process
        try:
            return pool.apply_async(call, (case,)).get(limit_s)
        except multiprocessing.TimeoutError:
            return None


# -- figures -----------------------------------------------------------------------------------------------------------

Found = tuple[Case, Figures | None]
COLUMNS = ("mesh, nodes, pair", "steps", "peers", "plan ms", "explain ms", "rank ms", "Python MB", "process MB")


def run(chosen: Sequence[Case], limit_s: float) -> Iterator[Found]:
    """Every case; None where it takes longer than the limit."""
    for case in chosen:
        figures = in_fork(measure, case, limit_s)
        peak = None if figures is None else in_fork(allocated, case, 5 * limit_s)
        yield case, figures if figures is None or peak is None else Figures(**{**asdict(figures), "allocated": peak})


def table_row(case: Case, figures: Figures | None, limit_s: float) -> list[str]:
    """One line of the table."""
    if figures is None:
        return [str(case), *["-"] * 2, f"over {limit_s * 1e3:.0f}", *["-"] * 4]
    seconds = [f"{s * 1e3:.2f}" for s in (figures.plan, figures.explain, figures.rank)]
    sizes = [f"{size / 1e6:.1f}" for size in (figures.allocated, figures.grown)]
    return [str(case), figures.ops or "none", f"{figures.peers:,}", *seconds, *sizes]


def summary(found: Sequence[Found], limit_s: float) -> list[str]:
    """The slowest of each part, what is over a second, and how times grow with the world."""
    done = [(case, figures) for case, figures in found if figures is not None]
    late = [str(case) for case, figures in found if figures is None]
    lines = [_slowest(part, done) for part in ("plan", "explain", "rank")]
    lines += [f"Largest allocation of Python: {_largest(done)}."] if done else []
    over = [f"{case} ({f.plan:.1f} s)" for case, f in done if f.plan > 1]
    lines.append(f"Plans that take more than a second: {'; '.join(over) or 'none'}.")
    if late:
        lines.append(f"Given up after {limit_s:g} s: {'; '.join(late)}.")
    return [*lines, *_growth(done)]


def _slowest(part: str, done: Sequence[tuple[Case, Figures]]) -> str:
    seconds = [getattr(figures, part) for _, figures in done]
    case = done[seconds.index(max(seconds))][0]
    return f"{part}: median {statistics.median(seconds) * 1e3:.2f} ms, slowest {max(seconds) * 1e3:.1f} ms ({case})."


def _largest(done: Sequence[tuple[Case, Figures]]) -> str:
    case, figures = max(done, key=lambda pair: pair[1].allocated)
    return f"{figures.allocated / 1e6:.1f} MB ({case})"


def _growth(done: Sequence[tuple[Case, Figures]]) -> list[str]:
    """By number of axes, the time of the largest mesh over that of the smallest: pairs with few peers, and the others."""
    lines = []
    for ndim in sorted({len(case.mesh) for case, _ in done}):
        meshes = sorted({case.mesh for case, _ in done if len(case.mesh) == ndim}, key=math.prod)
        small, large = ({_what(c): f for c, f in done if c.mesh == mesh} for mesh in (meshes[0], meshes[-1]))
        ratios = {k: large[k].plan / small[k].plan for k in small.keys() & large.keys()}
        if len(meshes) > 1 and ratios:
            worst = max(ratios, key=lambda key: ratios[key])
            lines.append(
                f"plan, {meshes[-1]} over {meshes[0]}: {statistics.geometric_mean(ratios.values()):.1f}x in geometric mean, "
                f"worst {ratios[worst]:.1f}x ({large[worst].peers:,} peers: {worst[1]})."
            )
    return lines


def _what(case: Case) -> tuple[int | None, str, tuple[int, int]]:
    return case.node_size, case.pair, case.shape


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the chosen meshes, print the table and write the files asked for."""
    options = _options(arguments)
    meshes = [m for m in (QUICK if options.quick else MESHES) if not options.only or str(m) in options.only]
    warm_up()
    found = list(run(cases(meshes), options.limit))
    rows = [table_row(case, figures, options.limit) for case, figures in found]
    title = "planning, f32[262144, 262144] (uneven: [262139, 262141]) on meshes without devices"
    show(title, COLUMNS, rows)
    env, lines = environment(), summary(found, options.limit)
    print("\n".join([*lines, environment_line(env)]))
    figures = [{"case": str(case), "ranks": math.prod(case.mesh), **asdict(f)} for case, f in found if f is not None]
    write_json(options.json, {"environment": env, "limit_s": options.limit, "cases": figures, "summary": lines})
    text = [f"## {title}", "\n".join(f"- {line}" for line in lines), markdown(COLUMNS, rows), environment_line(env)]
    write_markdown(options.markdown, "\n\n".join(text))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"only the meshes {', '.join(map(str, QUICK))}")
    parser.add_argument("--only", choices=[str(m) for m in MESHES], action="append", help="a mesh")
    parser.add_argument("--limit", type=float, default=20.0, metavar="SECONDS", help="give a case up after so long")
    parser.add_argument("--json", metavar="PATH", help="write all figures here")
    parser.add_argument("--markdown", metavar="PATH", help="write the table here")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
