"""Run all passes on a recorded program: the one entry point."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from ....mesh.comm.world import World
from ..collectives import OPERATORS
from ..program import Program, changes_metadata
from .agreement import (
    Schedule,
    agree,
    agree_on_names,
    number_collectives,
    rounds_of,
    schedule_of,
)
from .bucket import bucket_collectives
from .common_collectives import share_common_collectives
from .dead_code import remove_dead_collectives
from .fuse_casts import fuse_casts
from .hoist_reads import hoist_reads, is_movable
from .options import PassOptions
from .overlap import overlap
from .reduce_scatter import scatter_reductions
from .regather import regather, run_again

Pass = Callable[[fx.Graph], int]


def run(
    recording: Program | str,
    options: PassOptions,
    world: World | None,
    meshes: Sequence[Sequence[int]],
    others: Sequence[Program] = (),
) -> Program | str:
    """Return a program with the passes applied that all ranks apply alike.

    `recording` is not changed.

    A pass whose schedules do not fit each other on all ranks is left out, on all of them. So are
    all passes if ranks that have read other values would have other schedules.

    Args:
        recording: the program as recorded, or why there is none: then the other ranks get none.
        world: the ranks to agree with; None for a graph that is only inspected.
        meshes: ranks of each mesh that the function uses. Without a mesh of all its groups only
            `overlap` runs.
        others: the programs of this rank for other values that were read.

    Returns: the program, or why this or another rank has none.
    Raises: JitError on all ranks, naming the first difference, if ranks have recorded different
    collectives of one group.
    Communication: where a mesh has other ranks, an `all_gather_object` of some hashes; of the whole
        schedules where those differ. Again for each pass that is left out.
    """
    twice: frozenset[object] | None = None  # the collectives that all ranks let run twice
    if not options.any:
        is_text = isinstance(recording, str)
        return recording if is_text else _hoist_pass(world, meshes, agreed=False)(recording)
    hoist = _hoist_pass(world, meshes, agreed=True)
    while True:
        stages = [] if isinstance(recording, str) else _stages(recording, options, hoist, twice)
        if world is None:
            return stages[-1][0] if stages else recording
        agreed = agree(
            world,
            meshes,
            recording if isinstance(recording, str) else [_schedule(one) for one, _ in stages],
            bool(stages) and stages[-1][0].is_own,
            [_schedule(program) for program in others],
        )
        chosen = agreed.stage
        if isinstance(chosen, str):
            return chosen
        if isinstance(recording, str):
            return recording
        if chosen is None:  # what does not change the order of starts needs no agreement
            alone = dataclasses.replace(
                PassOptions.of(False),
                overlap=options.overlap,
                max_live_bytes=options.max_live_bytes,
            )
            program = _stages(recording, alone, _hoist_pass(world, meshes, agreed=False))[-1][0]
            return dataclasses.replace(program, is_own=agreed.is_own)
        if chosen == len(stages) - 1:
            if agreed.is_own and not agreed.is_alike:
                program = _hoist_pass(world, meshes, agreed=False)(recording)
                return dataclasses.replace(program, is_alone=True)
            return dataclasses.replace(stages[chosen][0], is_own=agreed.is_own)
        stage, name = stages[chosen + 1]
        if name == "regather" and twice is None:  # ranks with parts of other sizes have other peaks
            twice = agree_on_names(world, list(meshes), run_again(stage.graph))
        elif name == "hoist_reads":
            hoist = _hoist_pass(world, meshes, agreed=True, collectives=False)
        else:
            options = dataclasses.replace(options, **{name: 0})  # type: ignore[arg-type]


def _hoist_pass(
    world: World | None, meshes: Sequence[Sequence[int]], **options: bool
) -> Callable[[Program], Program]:
    """Return a function that returns a program with its reads before the graph.

    Of a program that is only inspected, it returns the program itself.
    """

    def hoist(program: Program) -> Program:
        if world is None or not any(map(is_movable, program.graph.nodes)):
            return program
        copy = dataclasses.replace(program, graph=copy_graph(program.graph))
        return hoist_reads(copy, rounds_of(world.rank, meshes), **options)

    return hoist


def _schedule(program: Program) -> Schedule:
    """Return the collectives of a program, of its reads first."""
    graphs = [*(read.graph for read in program.reads), program.graph]
    return [line for graph in graphs for line in schedule_of(graph)]


def _stages(
    program: Program,
    options: PassOptions,
    hoist: Callable[[Program], Program],
    twice: frozenset[object] | None = None,
) -> list[tuple[Program, str]]:
    """Return the program at each stage.

    The stages are the program as recorded, with its reads before the graph, and after each pass
    that is on.

    Args:
        twice: the collectives that may be gathered again; None for all.
    """
    number_collectives(program.graph)
    inputs = [node for node in program.graph.nodes if node.op == "placeholder"]
    for node, name in zip(inputs, program.names, strict=True):
        node.meta["slot"] = name.endswith((".grad", "(unreduced)"))
    hoisted = hoist(program)
    stages = [(program, ""), (hoisted, "hoist_reads")]  # the same stages on ranks without reads
    program = hoisted
    passes: list[tuple[str, Any, Pass]] = [
        ("dead_collectives", options.dead_collectives, remove_dead_collectives),
        (
            "common_collectives",
            options.common_collectives,
            lambda graph: share_common_collectives(graph, options.max_live_bytes),
        ),
        ("fuse_casts", options.fuse_casts, fuse_casts),
        (
            "reduce_scatter",
            options.reduce_scatter,
            lambda graph: scatter_reductions(graph, program.rank_in),
        ),
        (
            "regather",
            options.regather,
            lambda graph: regather(graph, options.max_live_bytes, twice),
        ),
        (
            "bucket_bytes",
            options.bucket_bytes,
            lambda graph: bucket_collectives(graph, options.bucket_bytes, options.max_live_bytes),
        ),
        ("overlap", options.overlap, lambda graph: overlap(graph, options.max_live_bytes)),
    ]
    is_fixed = changes_metadata(program.graph) or not any(
        node.target in OPERATORS for node in program.graph.nodes
    )
    graph = None if is_fixed else copy_graph(program.graph)
    for name, on, apply in passes:
        if on:
            last = stages[-1][0]
            count = 0 if graph is None else apply(graph)
            stage = dataclasses.replace(
                last,
                graph=graph if count else last.graph,  # type: ignore[arg-type]
                passes=(*last.passes, (name, count)),
            )
            stages.append((stage, name))
            graph = copy_graph(graph) if count and graph is not None else graph
    return stages


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """Return a copy of a graph with its nodes' notes."""
    copied, values = fx.Graph(), {}
    copied.output(copied.graph_copy(graph, values))
    for old, new in values.items():
        new.meta = dict(old.meta)
    return copied
