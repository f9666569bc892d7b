"""Draws the pictures of docs/planner.md, looking.md, pipeline.md and eval_shape.md.

`.venv/bin/python docs/make_images.py [folder]`, by default docs/images.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

import shardmesh as sm
from shardmesh import P

MESH = sm.AbstractMesh((2, 4), ("dp", "tp"))
NODES = sm.topology.Topology.default("cuda", crossing=("dp",))

# name: shape, before, after, topology
PICTURES = {
    "layout": ((5, 8), P("dp", "tp"), P("dp", "tp"), None),
    "ragged": (
        (8, 8),
        P("dp", "tp", sizes={"dp": (3, 5)}),
        P("dp", "tp", sizes={"dp": (3, 5)}),
        None,
    ),
    "slice": ((4096, 4096), P("dp"), P("dp", "tp"), None),
    "all_gather": ((4096, 4096), P("tp"), P(), None),
    "reduce_scatter": ((4096, 4096), P("dp", unreduced={"tp"}), P("dp", "tp"), None),
    "all_reduce": ((4096, 4096), P("dp", unreduced={"tp"}), P("dp"), None),
    "permute": ((4096, 4096), P(("dp", "tp")), P(("tp", "dp")), None),
    "all_to_all_v": ((4096, 4096), P("dp", "tp"), P("tp", "dp"), None),
    "all_to_all_reduce": ((4096, 4096), P("tp", unreduced={"dp"}), P("dp", "tp"), None),
    "hierarchical_all_to_all_v": ((4096, 4096), P("dp"), P(None, "dp"), NODES),
}

# name: mesh, shape, spec
LAYOUTS = {
    "pages": (sm.AbstractMesh((2, 2, 2), ("dp", "cp", "tp")), (4, 5, 6), P("dp", "cp", "tp")),
    "uneven": (sm.AbstractMesh((2, 3), ("dp", "tp")), (4, 8), P("tp", unreduced={"dp"})),
}


def main(folder: Path) -> None:
    """Writes one SVG for each entry of `PICTURES`; the steps of a plan are as its name says."""
    folder.mkdir(exist_ok=True)
    for name, (shape, src, dst, topology) in PICTURES.items():
        explained = sm.debug.explain(
            sm.Layout.of(MESH, src, shape, torch.bfloat16), dst, topology=topology
        )
        explained.picture(folder / f"{name}.svg")
        print(f"{name}.svg: {', '.join(step.op for step in explained.steps) or 'one layout'}")


def draw_layouts(folder: Path) -> None:
    """Writes one SVG for each entry of `LAYOUTS`."""
    folder.mkdir(exist_ok=True)
    for name, (mesh, shape, spec) in LAYOUTS.items():
        sm.debug.visualize(
            sm.Layout.of(mesh, spec, shape), style="picture", path=folder / f"{name}.svg"
        )
        print(f"{name}.svg")


def layers(x: Any, w1: Any, w2: Any) -> Any:
    """Two layers whose weights are gathered."""
    return (x @ w1.redistribute(P())).relu() @ w2.redistribute(P())


def draw_timelines(folder: Path) -> None:
    """Writes the timeline of a graph whose collectives start early."""
    folder.mkdir(exist_ok=True)
    layouts = [
        sm.Layout.of(sm.AbstractMesh((8, 4), ("fsdp", "tp")), P("fsdp"), (n, 4096))
        for n in (8192, 4096, 4096)
    ]
    graph = (
        sm.jit(layers, compiler_options={"overlap": True, "max_live_bytes": 2**28})
        .lower(*layouts)
        .compile()
    )
    sm.debug.timeline(graph, flops=400e12, path=folder / "timeline.svg")
    print("timeline.svg")


def draw_schedules(folder: Path) -> None:
    """Writes two steps of a pipeline, with a check of gradients before and after the optimizer."""
    folder.mkdir(exist_ok=True)
    schedule = sm.parallel.make_schedule("zb_v", 2, 3)
    for check in ("before", "after"):
        timeline = schedule.simulate(steps=2, optimizer=1, gradient_check=check)
        timeline.picture(folder / f"check_{check}.svg", title=f'zb_v, gradient_check="{check}"')
        print(f"check_{check}.svg")


class Block(torch.nn.Module):
    """A block of two layers with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def build() -> Any:
    """Six blocks under FSDP and tensor parallelism, and their optimizer."""
    with torch.device("meta"):
        model = torch.nn.Sequential(*(Block(1024) for _ in range(6)))
    plan = {"*.up": sm.parallel.colwise(), "*.down": sm.parallel.rowwise()}
    sm.parallel.parallelize(model, plan=plan, src_data_rank=None)
    sm.parallel.fully_shard(model, axes="fsdp", units=Block, src_data_rank=None)
    return model, torch.optim.AdamW(model.parameters())


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: Any) -> None:
    """A training step."""
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def draw_evaluation(folder: Path) -> None:
    """Writes the memory of a training step and what it receives, on one of 32 ranks."""
    folder.mkdir(exist_ok=True)
    mesh = sm.AbstractMesh((8, 4), ("fsdp", "tp"))
    model, optimizer = sm.debug.eval_shape(build, mesh=mesh).result
    batch = sm.Layout.of(mesh, P("fsdp"), (8192, 1024))
    evaluated = sm.debug.eval_shape(step, model, optimizer, batch)
    evaluated.picture(folder / "memory.svg")
    evaluated.report.picture(folder / "received.svg")
    print("memory.svg\nreceived.svg")


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "images"
    main(target)
    draw_layouts(target)
    draw_timelines(target)
    draw_schedules(target)
    draw_evaluation(target)
