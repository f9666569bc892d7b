"""Time of a step as one graph (`sm.jit`), next to eager code and torch.compile.

    python benchmarks/compiled.py                     host time: four tensor-parallel MLP blocks, no
                                                      communication, about two minutes
    python benchmarks/compiled.py --processes 4       12 layers on gloo processes: TP + SP next to
                                                      DTensor, FSDP next to FSDP2, and that with a
                                                      mixture of experts in each layer
    python benchmarks/compiled.py --processes 4 --form "FSDP, mixture of experts"
                                                      one of the three
    python benchmarks/compiled.py --processes 4 --no-inductor
                                                      without Inductor, which compiles for minutes
    python benchmarks/compiled.py --quick             that it runs: tiny, without Inductor; with or
                                                      without --processes
    python benchmarks/compiled.py --json figures.json --markdown tables.md

Host time: one process is rank 0 of 4 on torch's `fake` backend, where collectives return at once. A
step is forward, backward and the gradients of all weights. "plain" is the same arithmetic on local
tensors of the same shapes, without collectives. The implementations are interleaved in every round
(see measure.py); figures are minima. Losses are compared before timing.

On processes a step is that of the language model of `train.py` (forward, backward, AdamW), see
compiled_steps.py. Times are medians; ratios of times are medians of the rounds' ratios. "recording"
is the call in which `sm.jit` records a graph, runs its passes and compares them between ranks,
without compiling it. "start" is what the first four steps took longer than four later ones:
recording and compiling, with an empty folder for what Inductor keeps on disk, which the ranks
share.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as dt
import torch.nn.functional as F
from compiled_steps import EAGER_BACKEND, FORMS, INDUCTOR, OURS, Form, Found, on_process
from measure import Call, interleaved
from report import environment, environment_line, markdown, show, write_json, write_markdown
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh as init_torch_mesh
from train_model import Size

import shardmesh as sm
from shardmesh import P

WORLD, LAYERS, TOKENS, WIDTH = 4, 4, 16, 64
TOLERANCE = 1e-4

Weights = list[tuple[Tensor, Tensor, Tensor]]


def weights(
    place: Callable[[Tensor, int | None], Tensor], layers: int = LAYERS, width: int = WIDTH
) -> Weights:
    """Return norm, up and down projection of each block; up is sharded by output features, down by
    input features.
    """
    generator = torch.Generator().manual_seed(0)
    values = []
    for _ in range(layers):
        up = torch.randn(4 * width, width, generator=generator) / 8
        down = torch.randn(width, 4 * width, generator=generator) / 16
        values.append((place(torch.ones(width), None), place(up, 0), place(down, 1)))
    return [tuple(w.requires_grad_() for w in block) for block in values]  # type: ignore[misc]


def forward(x: Tensor, blocks: Weights, whole: Callable[[Tensor], Tensor]) -> Tensor:
    for norm, up, down in blocks:
        x = x + whole(F.linear(F.silu(F.linear(F.rms_norm(x, norm.shape, norm), up)), down))
    return x.square().mean()


def step_of(
    blocks: Weights, whole: Callable[[Tensor], Tensor], compute: Callable[..., Tensor] = forward
) -> Callable[[Tensor], Any]:
    """Return a function that runs forward and backward, and returns the loss and the gradients."""
    leaves = [w for block in blocks for w in block]

    def step(x: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        loss = compute(x, blocks, whole)
        loss.backward()
        grads = [w.grad for w in leaves]
        for w in leaves:
            w.grad = None
        return loss.detach(), grads

    return step


def host_time(rounds: int, inductor: bool) -> dict[str, float]:
    """Return the microseconds of a step by implementation.

    Args:
        inductor: whether to measure what compiles.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    theirs = init_torch_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    ours = sm.init_device_mesh("cpu", (WORLD,), axis_names=("tp",))
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    plain = weights(lambda w, dim: w if dim is None else w.chunk(WORLD, dim)[0].clone())
    theirs_w = weights(
        lambda w, d: dt.distribute_tensor(
            w, theirs, [dt.Replicate() if d is None else dt.Shard(d)], src_data_rank=None
        )
    )
    ours_w = weights(
        lambda w, dim: sm.distribute_tensor(
            w, ours, [sm.Replicate() if dim is None else sm.Shard(dim)], src_data_rank=None
        )
    )
    x_dt = dt.DTensor.from_local(x, theirs, [dt.Replicate()])
    x_sm = sm.device_put(x, ours, P(), src_data_rank=None)

    def to_replicated(y: Any) -> Any:
        return y.redistribute(placements=[dt.Replicate()])

    compiled = torch.compile(forward, fullgraph=True, dynamic=False)
    in_cpp = torch.compile(forward, fullgraph=True, dynamic=False, options={"cpp_wrapper": True})
    eager = step_of(ours_w, lambda y: y)
    steps: dict[str, Call] = {
        "plain, eager": _bound(step_of(plain, lambda y: y), x),
        "plain, torch.compile": _bound(step_of(plain, _same, compiled), x),
        "plain, torch.compile, cpp_wrapper": _bound(step_of(plain, _same, in_cpp), x),
        "DTensor, eager": _bound(step_of(theirs_w, to_replicated), x_dt),
        "DTensor, torch.compile": _bound(
            step_of(theirs_w, to_replicated, torch.compile(forward, dynamic=False)), x_dt
        ),
        "ours, eager": _bound(eager, x_sm),
        "ours, sm.jit, eager backend": _bound(sm.jit(eager, backend="eager"), x_sm),
        "ours, sm.jit, Inductor": _bound(sm.jit(eager, backend="inductor"), x_sm),
        "ours, sm.jit, Inductor, cpp_wrapper": _bound(
            sm.jit(eager, compiler_options={"cpp_wrapper": True}), x_sm
        ),
    }
    if not inductor:
        steps = {name: steps[name] for name in _WITHOUT_INDUCTOR}
    losses = {name: _value(step()[0]) for name, step in steps.items()}
    check({name: loss for name, loss in losses.items() if not name.startswith("plain")})
    for step in steps.values():
        for _ in range(3):
            step()
    times_us = {name: times.best * 1e6 for name, times in interleaved(steps, rounds=rounds).items()}
    return times_us | call_overhead(rounds)


_WITHOUT_INDUCTOR = ("plain, eager", "DTensor, eager", "ours, eager", "ours, sm.jit, eager backend")


def _same(y: Tensor) -> Tensor:
    return y


def call_overhead(rounds: int) -> dict[str, float]:
    """Return the microseconds of a call of an empty function with 200 parameters, with and without
    the comparison of its state.
    """
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(100)])
    calls: dict[str, Call] = {}
    for check_state in (True, False):
        f = sm.jit(lambda module: None, backend="eager", check_state=check_state)
        name = "sm.jit that does nothing, 200 parameters"
        calls[name if check_state else f"{name}, check_state=False"] = _bound(f, model)
        f(model)
    return {name: times.best * 1e6 for name, times in interleaved(calls, rounds=rounds).items()}


def _bound(step: Callable[[Any], Any], x: Any) -> Call:
    return lambda: step(x)


def _value(loss: Any) -> float:
    return (loss.full_tensor() if hasattr(loss, "full_tensor") else loss).item()


def check(losses: dict[str, float]) -> None:
    """Raise unless the losses are equal."""
    low, high = min(losses.values()), max(losses.values())
    if high - low > TOLERANCE * abs(high):
        raise SystemExit(f"the losses differ between implementations: {losses}")


# -- processes -------------------------------------------------------------------------------------

COLUMNS = (
    "implementation",
    "step ms",
    "calls",
    "MB received",
    "peak MB",
    "recording s",
    "start s",
)
RATIO_COLUMNS = ("sm.jit compared with", "ratio", "goal")
LONGEST_RECORDING = 10  # eager steps that a recording should take at most


def rows_of(by_name: dict[str, Found]) -> list[list[str]]:
    return [
        [
            f"{name} (wrong losses)" if x.is_wrong else name,
            f"{x.times.median * 1e3:.1f}",
            str(x.calls),
            f"{x.received / 1e6:.2f}",
            f"{x.peak / 1e6:.2f}",
            f"{x.recording:.2f}",
            f"{x.start:.2f}",
        ]
        for name, x in by_name.items()
    ]


def ratios_of(form: Form, by_name: dict[str, Found]) -> list[tuple[str, float, float]]:
    """Return what `sm.jit` is compared with, the ratio, and what it should be at most."""
    ours, eager = by_name[INDUCTOR if INDUCTOR in by_name else EAGER_BACKEND], by_name[OURS]
    goals = [
        (name, goal)
        for name, goal in zip((form.peer, OURS), form.goals, strict=True)
        if name in by_name
    ]
    rows = [(f"time: {name}", _ratio(ours, by_name[name]), goal) for name, goal in goals]
    rows += [
        (f"{what}: {OURS}", getattr(ours, what) / getattr(eager, what), 1.0)
        for what in ("calls", "received", "peak")
    ]
    return [
        *rows,
        (
            f"recording: a step of {OURS}",
            by_name[EAGER_BACKEND].recording / eager.times.median,
            LONGEST_RECORDING,
        ),
    ]


def _ratio(ours: Found, other: Found) -> float:
    """The middle one of the rounds' ratios: what the machine did in a round, it did to both."""
    return statistics.median(
        a / b for a, b in zip(ours.times.rounds, other.times.rounds, strict=True)
    )


def on_processes(options: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    """Measure, print and return tables and figures of all forms."""
    size = Size(
        options.layers,
        options.width,
        heads=4,
        f=-(-options.width * 8 // 48) * 16,
        s=64,
        b=options.processes,
    )
    quiet = {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}
    forms = [form for form in FORMS if options.form in (None, form.name)]
    with tempfile.TemporaryDirectory() as cache:
        names = tuple(form.name for form in forms)
        arguments = size, options.rounds, options.inductor, cache, names
        results = sm.launch(on_process, options.processes, arguments, env=quiet)[0]
    tables, figures = [], {}
    for form in forms:
        rows, ratios = rows_of(results[form.name]), ratios_of(form, results[form.name])
        ratio_rows = [(what, f"{ratio:.2f}", f"{goal:.2f}") for what, ratio, goal in ratios]
        show(
            f"{form.name}: {options.layers} layers, {options.processes} gloo processes",
            COLUMNS,
            rows,
        )
        show(form.name, RATIO_COLUMNS, ratio_rows)
        tables += [f"**{form.name}**", markdown(COLUMNS, rows), markdown(RATIO_COLUMNS, ratio_rows)]
        figures[form.name] = {
            "implementations": {name: asdict(x) for name, x in results[form.name].items()},
            "ratios": ratios,
        }
    return tables, figures


# -- the command -----------------------------------------------------------------------------------


def host_times(options: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    """Measure, print and return a table and the figures of host time."""
    times_us = host_time(options.rounds, options.inductor)
    rows = [(name, f"{value:,.1f}") for name, value in times_us.items()]
    show("A step as one graph", ("implementation", "us"), rows)
    return [markdown(("implementation", "us"), rows)], {"unit": "us", "steps": times_us}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--processes",
        type=int,
        default=0,
        help="train on this many gloo processes instead of measuring host time",
    )
    parser.add_argument("--rounds", type=int, help="40 for host time, 10 on processes")
    parser.add_argument("--layers", type=int, help="on processes; 12")
    parser.add_argument("--width", type=int, help="of the model, on processes; 256")
    parser.add_argument("--form", choices=[form.name for form in FORMS], help="on processes")
    parser.add_argument(
        "--inductor", action=argparse.BooleanOptionalAction, help="also what compiles; yes"
    )
    parser.add_argument("--quick", action="store_true", help="two rounds, tiny, without Inductor")
    parser.add_argument("--json")
    parser.add_argument("--markdown")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (2 if options.quick else 10 if options.processes else 40)
    options.layers = options.layers or (2 if options.quick else 12)
    options.width = options.width or (16 if options.quick else 256)
    if options.inductor is None:
        options.inductor = not options.quick
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    torch.set_num_threads(1)
    tables, figures = (on_processes if options.processes else host_times)(options)
    env = environment()
    print(environment_line(env))
    write_json(options.json, {"environment": env, **figures})
    write_markdown(options.markdown, "\n\n".join([*tables, environment_line(env)]))


if __name__ == "__main__":
    main()
