"""Time of a step as one graph (`sm.jit`), next to eager code and torch.compile.

    python benchmarks/compiled.py                          host time: four tensor-parallel MLP blocks, no communication, about two minutes
    python benchmarks/compiled.py --processes 4            twelve blocks with AdamW on gloo processes, ours only
    python benchmarks/compiled.py --processes 4 --no-inductor      the same without Inductor, which takes minutes to compile
    python benchmarks/compiled.py --json figures.json --markdown tables.md

Host time: one process is rank 0 of 4 on torch's `fake` backend, where collectives return at once. A step is forward, backward
and the gradients of all weights. "plain" is the same arithmetic on local tensors of the same shapes, without collectives.
The implementations are interleaved in every round (see measure.py); figures are minima. Losses are compared before timing.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as dt
import torch.nn.functional as F
from measure import Call, interleaved
from report import environment, environment_line, markdown, show, write_json, write_markdown
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh as init_torch_mesh

import shardmesh as sm
from shardmesh import P

WORLD, LAYERS, TOKENS, WIDTH = 4, 4, 16, 64
TOLERANCE = 1e-4

Weights = list[tuple[Tensor, Tensor, Tensor]]


def weights(place: Callable[[Tensor, int | None], Tensor], layers: int = LAYERS, width: int = WIDTH) -> Weights:
    """Return norm, up and down projection of each block; up is sharded by output features, down by input features."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(layers):
        up, down = torch.randn(4 * width, width, generator=generator) / 8, torch.randn(width, 4 * width, generator=generator) / 16
        made.append((place(torch.ones(width), None), place(up, 0), place(down, 1)))
    return [tuple(w.requires_grad_() for w in block) for block in made]  # type: ignore[misc]


def forward(x: Tensor, blocks: Weights, whole: Callable[[Tensor], Tensor]) -> Tensor:
    for norm, up, down in blocks:
        x = x + whole(F.linear(F.silu(F.linear(F.rms_norm(x, norm.shape, norm), up)), down))
    return x.square().mean()


def step_of(blocks: Weights, whole: Callable[[Tensor], Tensor], compute: Callable[..., Tensor] = forward) -> Callable[[Tensor], Any]:
    """Return a function that runs forward and backward, and returns the loss and the gradients."""
    leaves = [w for block in blocks for w in block]

    def step(x: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        loss = compute(x, blocks, whole)
        loss.backward()
        found = [w.grad for w in leaves]
        for w in leaves:
            w.grad = None
        return loss.detach(), found

    return step


def host_time(rounds: int) -> dict[str, float]:
    """Return the microseconds of a step by implementation."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    theirs, ours = init_torch_mesh("cpu", (WORLD,), mesh_dim_names=("tp",)), sm.init_device_mesh("cpu", (WORLD,), axis_names=("tp",))
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    plain = weights(lambda w, dim: w if dim is None else w.chunk(WORLD, dim)[0].clone())
    theirs_w = weights(lambda w, d: dt.distribute_tensor(w, theirs, [dt.Replicate() if d is None else dt.Shard(d)], src_data_rank=None))
    ours_w = weights(lambda w, dim: sm.distribute_tensor(w, ours, [sm.Replicate() if dim is None else sm.Shard(dim)], src_data_rank=None))
    x_dt = dt.DTensor.from_local(x, theirs, [dt.Replicate()])
    x_sm = sm.device_put(x, ours, P(), src_data_rank=None)

    def to_replicated(y: Any) -> Any:
        return y.redistribute(placements=[dt.Replicate()])

    compiled = torch.compile(forward, fullgraph=True, dynamic=False)
    eager = step_of(ours_w, lambda y: y)
    steps: dict[str, Call] = {
        "plain, eager": _bound(step_of(plain, lambda y: y), x),
        "plain, torch.compile": _bound(step_of(plain, _same, compiled), x),
        "DTensor, eager": _bound(step_of(theirs_w, to_replicated), x_dt),
        "DTensor, torch.compile": _bound(step_of(theirs_w, to_replicated, torch.compile(forward, dynamic=False)), x_dt),
        "ours, eager": _bound(eager, x_sm),
        "ours, sm.jit, eager backend": _bound(sm.jit(eager, backend="eager"), x_sm),
        "ours, sm.jit, Inductor": _bound(sm.jit(eager, backend="inductor"), x_sm),
    }
    losses = {name: _value(step()[0]) for name, step in steps.items()}
    check({name: loss for name, loss in losses.items() if not name.startswith("plain")})
    for step in steps.values():
        for _ in range(3):
            step()
    found = {name: times.best * 1e6 for name, times in interleaved(steps, rounds=rounds).items()}
    found["sm.jit that does nothing, 200 parameters"] = call_overhead(rounds)
    return found


def _same(y: Tensor) -> Tensor:
    return y


def call_overhead(rounds: int) -> float:
    """Return the microseconds of a call of an empty function with 200 parameters."""
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(100)])
    f = sm.jit(lambda module: None, backend="eager")
    return interleaved({"empty": lambda: f(model)}, rounds=rounds)["empty"].best * 1e6


def _bound(step: Callable[[Any], Any], x: Any) -> Call:
    return lambda: step(x)


def _value(loss: Any) -> float:
    return (loss.full_tensor() if hasattr(loss, "full_tensor") else loss).item()


def check(losses: dict[str, float]) -> None:
    """Raise unless the losses are equal."""
    low, high = min(losses.values()), max(losses.values())
    if high - low > TOLERANCE * abs(high):
        raise SystemExit(f"the losses differ between implementations: {losses}")


# -- processes ---------------------------------------------------------------------------------------------------------


def on_processes(layers: int, width: int, rounds: int, inductor: bool) -> dict[str, float]:
    """Return the milliseconds of a training step of ours on the slowest rank; runs in every process."""
    mesh = sm.init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), axis_names=("tp",))
    x = sm.device_put(torch.randn(64, width, generator=torch.Generator().manual_seed(1)), mesh, P("tp"), src_data_rank=None)
    steps, losses = {}, {}
    backends = {"ours, eager": None, "ours, sm.jit, eager backend": "eager"} | ({"ours, sm.jit, Inductor": "inductor"} if inductor else {})
    for name, backend in backends.items():
        specs = {None: P(), 0: P("tp"), 1: P(None, "tp")}
        placed = weights(lambda w, dim: sm.device_put(w, mesh, specs[dim], src_data_rank=None), layers, width)  # noqa: B023
        leaves = [w for block in placed for w in block]
        leaves = [w.detach().requires_grad_() for w in leaves]
        blocks: Any = [tuple(leaves[i : i + 3]) for i in range(0, len(leaves), 3)]
        optimizer = torch.optim.AdamW(leaves, lr=1e-3)

        def step(x: Any, blocks: Any = blocks, optimizer: Any = optimizer) -> Any:
            loss = forward(x, blocks, lambda y: y.redistribute(P("tp")))  # type: ignore[attr-defined]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        steps[name] = step if backend is None else sm.jit(step, backend=backend)
        losses[name] = [_value(steps[name](x)) for _ in range(4)][-1]
    check(losses)
    group, found = mesh.group(), {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            group.barrier()
            start = time.perf_counter()
            step(x)
            found[name].append(time.perf_counter() - start)
    return {name: max(group.all_gather_object(min(times))) * 1e3 for name, times in found.items()}


# -- the command -------------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--processes", type=int, default=0, help="train on this many gloo processes instead of measuring host time")
    parser.add_argument("--layers", type=int, default=12, help="number of blocks, with --processes")
    parser.add_argument("--width", type=int, default=256, help="width of the blocks, with --processes")
    parser.add_argument("--inductor", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json")
    parser.add_argument("--markdown")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    torch.set_num_threads(1)
    if options.processes:
        arguments_of_ranks = options.layers, options.width, options.rounds, options.inductor
        found, unit = sm.launch(on_processes, options.processes, args=arguments_of_ranks)[0], "ms"
    else:
        found, unit = host_time(options.rounds), "us"
    env = environment()
    rows = [(name, f"{value:,.1f}") for name, value in found.items()]
    show("A step as one graph", ("implementation", unit), rows)
    print(environment_line(env))
    if options.json:
        write_json(options.json, {"environment": env, "unit": unit, "steps": found})
    if options.markdown:
        write_markdown(options.markdown, f"{markdown(('implementation', unit), rows)}\n\n{environment_line(env)}")


if __name__ == "__main__":
    main()
