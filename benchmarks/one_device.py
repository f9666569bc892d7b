"""A training step on one device: FSDP next to FSDP2, TP + SP next to DTensor, eager and compiled.

    python benchmarks/one_device.py                              on the GPU, some minutes
    python benchmarks/one_device.py --no-inductor                without what Inductor compiles
    python benchmarks/one_device.py --device cpu --quick         a tiny model on the CPU
    python benchmarks/one_device.py --json figures.json --markdown tables.md

One process is rank 0 of 4 on torch's `fake` backend, where collectives return at once and move
nothing. So a step is what a rank does apart from communication: the host's work and the device's
kernels. The values are not those of a training; `train.py` compares losses. The model is that of
`train.py`, with AdamW. The implementations take turns in every round (measure.py); times are
medians.

    step ms    until the device has done its part
    host ms    until the call returns; where it is about the step's, the host is what limits
    peak MB    the most memory of the device that the implementation has allocated during a step
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import torch
import torch.distributed as dist
from compiled_steps import EAGER_BACKEND, FORMS, INDUCTOR, OURS, Form, Steps
from measure import interleaved
from report import environment, environment_line, markdown, show, write_json, write_markdown
from torch.testing._internal.distributed.fake_pg import FakeStore
from train_implementations import Setup
from train_model import Size

RANKS, FIRST_STEPS = 4, 3
FULL = Size(layers=6, d=1024, heads=16, f=2752, s=512, b=8)
QUICK = Size(layers=2, d=16, heads=4, f=32, s=8, b=4, vocabulary=32)
GRAPHS = "ours, sm.jit, CUDA graphs"
COLUMNS = ("implementation", "step ms", "host ms", "peak MB", "ours / this")


@dataclass
class Timed:
    """An implementation, or why it failed; times in seconds, one for each round."""

    failure: str = ""
    step: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    peak: int = 0


def makers(form: Form, setup: Setup, inductor: bool) -> dict[str, Callable[[], Steps]]:
    """Return what makes each implementation of a form."""
    by_name: dict[str, Callable[[], Steps]] = {
        name: lambda make=make: Steps(make(setup))
        for name, make in form.theirs.items()
        if inductor or name != form.peer
    }
    by_name[OURS] = lambda: Steps(form.ours(setup))
    backends = {EAGER_BACKEND: "eager"} | ({INDUCTOR: "inductor"} if inductor else {})
    by_name |= {
        name: lambda backend=backend: Steps(form.ours(setup), backend)
        for name, backend in backends.items()
    }
    if inductor and setup.device == "cuda":
        by_name[GRAPHS] = lambda: Steps(form.ours(setup), "inductor", cudagraphs=True)
    return by_name


def measure(form: Form, setup: Setup, rounds: int, inductor: bool) -> dict[str, Timed]:
    """Time all implementations of a form; one that fails has the error's text, and the others go
    on.
    """
    on_cuda = setup.device == "cuda"
    synchronize = torch.cuda.synchronize if on_cuda else lambda: None
    times: dict[str, Timed] = {}
    calls: dict[str, Callable[[], None]] = {}
    for name, make in makers(form, setup, inductor).items():
        timed = times[name] = Timed()
        before = torch.cuda.memory_allocated() if on_cuda else 0
        try:
            steps = make()
            for _ in range(FIRST_STEPS):
                steps.step()
            synchronize()
            if on_cuda:
                torch.cuda.reset_peak_memory_stats()
                steps.step()
                timed.peak = torch.cuda.max_memory_allocated() - before
        except Exception as error:
            timed.failure = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            continue
        calls[name] = _timed(steps, timed, synchronize)
    interleaved(calls, rounds=rounds, batch_s=0, together=synchronize)
    return times


def _timed(steps: Steps, timed: Timed, synchronize: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        start = time.perf_counter()
        steps.step()
        timed.host.append(time.perf_counter() - start)
        synchronize()
        timed.step.append(time.perf_counter() - start)

    return call


def rows_of(times: dict[str, Timed]) -> list[list[str]]:
    """Return the rows of a table; in the last column ours, eager, next to the eager ones, and ours
    compiled next to the compiled.
    """
    middle = {name: statistics.median(one.step) for name, one in times.items() if one.step}
    rows = []
    for name, one in times.items():
        if one.failure:
            rows.append([name, "failed", "", "", one.failure])
            continue
        ours = OURS if "eager" in name else INDUCTOR
        ratio = (
            ""
            if name.startswith("ours") or ours not in middle
            else f"{middle[ours] / middle[name]:.2f}"
        )
        host, peak = statistics.median(one.host) * 1e3, f"{one.peak / 1e6:.0f}" if one.peak else "-"
        rows.append([name, f"{middle[name] * 1e3:.2f}", f"{host:.2f}", peak, ratio])
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny model, two rounds")
    parser.add_argument("--rounds", type=int, help="20, with --quick 2")
    parser.add_argument(
        "--inductor",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also what Inductor compiles",
    )
    parser.add_argument("--json")
    parser.add_argument("--markdown")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    setup = Setup(QUICK if options.quick else FULL, RANKS, device=options.device)
    times: dict[str, dict[str, Timed]] = {}
    for form in FORMS:
        times[form.name] = measure(
            form, setup, options.rounds or (2 if options.quick else 20), options.inductor
        )
        show(
            f"{form.name}, one of {RANKS} ranks on {options.device}",
            COLUMNS,
            rows_of(times[form.name]),
        )
        torch.compiler.reset()
    env = environment()
    print(environment_line(env))
    write_json(
        options.json,
        {
            "environment": env,
            "forms": {
                name: {k: asdict(v) for k, v in each.items()} for name, each in times.items()
            },
        },
    )
    tables = [f"**{name}**\n\n{markdown(COLUMNS, rows_of(each))}" for name, each in times.items()]
    write_markdown(options.markdown, "\n\n".join([*tables, environment_line(env)]))


if __name__ == "__main__":
    main()
