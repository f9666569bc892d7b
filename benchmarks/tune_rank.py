"""The order of predicted step times next to that of measured ones: 30 forms on gloo processes.

    python benchmarks/tune_rank.py            30 forms in four processes, about ten minutes
    python benchmarks/tune_rank.py --quick    four forms of a tiny model

First the ranks of this machine are measured together, as they run: products, attention, a norm with
a gated activation, and the shortest operator, forward and backward, and sums in bfloat16;
`sm.topology.calibrate` measures links. These price every form, and nothing is fitted to the steps.
There may be more ranks than cores: one that waits leaves its core to the others.

Then the printed programs run in rounds: in each, four processes start once and run all forms one
after the other, in another order, so that a slow minute of the machine does not meet the same form
twice. A form's time is the median of its rounds, and its spread that of the fastest and the slowest
one. A form that fails, or does not end, is left out, and the round goes on with the others.

What is printed is Spearman's rank correlation of both orders, and how much longer than the fastest
form the one takes that is predicted to be the fastest. The machine should do nothing else.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardmesh as sm
from shardmesh import P
from shardmesh.mesh.launch.local_processes import LaunchError
from shardmesh.mesh.topology import Topology
from shardmesh.sharding.jit.inspection.flops import attention_flops
from shardmesh.sharding.tune.counts import OperatorCounts, Phase
from shardmesh.sharding.tune.description import Description
from shardmesh.sharding.tune.devices import Device
from shardmesh.sharding.tune.form import Form, why_not
from shardmesh.sharding.tune.measure import time_steps
from shardmesh.sharding.tune.prices import Prices
from shardmesh.sharding.tune.program import hugging_face_build, program_text
from shardmesh.sharding.tune.step_time import StepTimes

RANKS = 4
WHOLE: dict[str, Any] = {"width": 256, "layers": 8, "positions": 256, "rows": 16, "rounds": 4}
QUICK: dict[str, Any] = {"width": 64, "layers": 2, "positions": 32, "rows": 8, "rounds": 2}
_BUDGET_S = 540.0  # after which no round begins
_FORM_S = 120  # in which a form of a round ends
_STEPS = 1  # of a form in a round, after one that is not timed


@dataclass(frozen=True)
class Rates:
    """What a rank reaches while all others compute, too, forward and backward, in bfloat16.

    Attributes:
        flops: of matrix products, per second.
        attention: of attention.
        bandwidth: bytes per second that a norm and a gated activation read and write.
        launch: seconds of the shortest operator of a program, on sharded tensors.
        sums: of collectives that sum, the time in bfloat16 over that in float32 for as many bytes.
        topology: links, as `calibrate` measures them in float32.
    """

    flops: float
    attention: float
    bandwidth: float
    launch: float
    sums: dict[str, float]
    topology: Topology


def forms(quick: bool) -> list[Form]:
    """Return the forms, for `RANKS` ranks and the rows of the batch."""
    rows = (QUICK if quick else WHOLE)["rows"]
    few = [
        Form(fsdp=4, rows=rows // 4),
        Form(dp=4, rows=rows // 4),
        Form(tp=4, rows=rows),
        Form(pp=4, rows=rows // 4, microbatches=4),
    ]
    if quick:
        return few
    two: dict[str, Any] = {"rows": rows // 2}
    half: dict[str, Any] = {"rows": rows // 4, "microbatches": 2}
    return [
        *few,
        Form(fsdp=4, rows=rows // 8, microbatches=2),
        Form(fsdp=4, rows=rows // 16, microbatches=4),
        Form(fsdp=4, rows=rows // 4, recompute="full"),
        Form(fsdp=4, rows=rows // 4, recompute="selective"),
        Form(fsdp=4, rows=rows // 4, zero=2),
        Form(fsdp=4, rows=rows // 4, zero=1),
        Form(fsdp=4, rows=rows // 16, microbatches=4, zero=1),
        Form(dp=4, rows=rows // 8, microbatches=2),
        Form(dp=4, rows=rows // 4, recompute="full"),
        Form(dp=2, fsdp=2, rows=rows // 4),
        Form(dp=2, fsdp=2, rows=rows // 8, microbatches=2),
        Form(fsdp=2, tp=2, **two),
        Form(fsdp=2, tp=2, sequence_parallel=True, **two),
        Form(fsdp=2, tp=2, sequence_parallel=True, **half),
        Form(fsdp=2, tp=2, sequence_parallel=True, recompute="full", **two),
        Form(dp=2, tp=2, **two),
        Form(tp=4, sequence_parallel=True, rows=rows),
        Form(tp=4, sequence_parallel=True, rows=rows // 2, microbatches=2),
        Form(cp=4, rows=rows),
        Form(fsdp=2, cp=2, **two),
        Form(pp=4, rows=rows // 8, microbatches=8),
        Form(pp=4, rows=rows // 4, microbatches=4, schedule="gpipe"),
        Form(pp=4, rows=rows // 4, microbatches=4, schedule="zb_h1"),
        Form(pp=2, fsdp=2, rows=rows // 8, microbatches=4),
        Form(pp=2, fsdp=2, rows=rows // 8, microbatches=4, gather="step"),
        Form(pp=2, tp=2, rows=rows // 4, microbatches=4),
    ]


def rates(width: int, rows: int, positions: int) -> Rates:
    """Return the rates of this rank, measured on all ranks at the same time."""
    mesh = sm.init_device_mesh("cpu", (RANKS,), axis_names=("x",))
    topology = sm.topology.calibrate(mesh)
    tokens = rows * positions
    x = torch.randn(tokens, width, dtype=torch.bfloat16, requires_grad=True)
    hidden = torch.randn(tokens, 3 * width, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(3 * width, width, dtype=torch.bfloat16, requires_grad=True)
    scale = torch.ones(width, dtype=torch.bfloat16, requires_grad=True)
    heads = (rows, 4, positions, width // 4)
    query = torch.randn(heads, dtype=torch.bfloat16, requires_grad=True)
    small = sm.device_put(torch.ones(RANKS), mesh, P("x")).requires_grad_()

    def product() -> Tensor:
        return F.linear(x, weight)

    def attention() -> Tensor:
        return F.scaled_dot_product_attention(query, query, query, is_causal=True)

    def others() -> Tensor:
        wide = x.float()
        norm = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        gated = F.silu(hidden) * hidden
        return (scale * norm.to(x.dtype) + x).sum() + gated.sum()

    def shortest() -> Tensor:
        out = small
        for _ in range(20):
            out = out * small
        return out

    shapes = (heads, heads, heads)
    of_attention = sum(
        attention_flops(*shapes, is_causal=True, is_backward=is_backward)
        for is_backward in (False, True)
    )
    return Rates(
        6 * tokens * width * 3 * width / _seconds(product),
        of_attention / _seconds(attention),
        _counted(others).traffic / _seconds(others),
        _seconds(shortest) / sum(_counted(shortest).kernels.values()),
        {op: _sums_in_bfloat16(mesh, op) for op in ("all_reduce", "reduce_scatter")},
        topology,
    )


def _backward(operator: Any) -> None:
    out: Any = operator()
    out.backward(torch.ones_like(out))


def _counted(operator: Any) -> Phase:
    """Return what an operator and its backward compute and move, as `sm.tune` counts it."""
    with OperatorCounts([]) as counts:
        _backward(operator)
    return counts.phase


def _seconds(operator: Any) -> float:
    """Return the seconds of an operator and its backward, on average over half a second."""
    for _ in range(3):
        _backward(operator)
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < 0.5:
        _backward(operator)
        count += 1
    return (time.perf_counter() - start) / count


def _sums_in_bfloat16(mesh: sm.DeviceMesh, op: str) -> float:
    """Return how much longer a collective of a megabyte takes in bfloat16 than in float32."""
    group = mesh.group("x")
    seconds = []
    for dtype in (torch.bfloat16, torch.float32):
        whole = torch.zeros(2**20 // dtype.itemsize, dtype=dtype)
        part = torch.zeros(whole.numel() // RANKS, dtype=dtype)
        run = partial(group.all_reduce, whole)
        if op == "reduce_scatter":
            run = partial(group.reduce_scatter, part, whole)
        run()
        group.barrier()
        start = time.perf_counter()
        for _ in range(20):
            run()
        seconds.append(time.perf_counter() - start)
    return seconds[0] / seconds[1]


def device_of_rates(measured: Rates) -> Device:
    """Return a device with measured rates, of which programs reach all."""
    local = measured.topology.local
    attention = measured.attention / measured.flops
    return Device(
        "cpu",
        measured.flops,
        1e12,
        measured.bandwidth,
        local,
        measured.topology.network,
        matmul=1.0,
        attention=attention,
        attention_backward=attention,
        traffic=1.0,
        launch=measured.launch,
        is_host=True,
        sharing=max(1.0, RANKS / len(os.sched_getaffinity(0))),
        sums=measured.sums,
        occupied=1.0,  # the cores that compute also move what gloo sends
        source="measured by benchmarks/tune_rank.py",
    )


def rank_correlation(one: list[float], other: list[float]) -> float:
    """Return Spearman's rank correlation of two lists without equal values."""
    n = len(one)
    places = []
    for values in (one, other):
        order = sorted(range(n), key=lambda i: values[i])
        place = [0] * n
        for rank, i in enumerate(order):
            place[i] = rank
        places.append(place)
    squares = sum((a - b) ** 2 for a, b in zip(*places, strict=True))
    return 1 - 6 * squares / (n * (n**2 - 1))


def run_programs(texts: Sequence[tuple[int, str]], file: str, folder: str) -> None:
    """Run programs one after the other as one rank, and note the seconds of each in a file.

    A program that does not end ends the process, by the signal of an alarm.
    """
    import transformers  # here, so that no program's time begins with it

    del transformers
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with open(f"{file}-{os.environ['RANK']}", "a") as lines:
        for number, text in texts:
            signal.alarm(_FORM_S)
            print(json.dumps([number, None]), file=lines, flush=True)
            seconds, _ = time_steps(text, "cpu", _STEPS, folder)
            print(json.dumps([number, seconds]), file=lines, flush=True)
            gc.collect()
    signal.alarm(0)


def run_round(texts: dict[int, str], folder: Path) -> tuple[dict[int, float], dict[int, str]]:
    """Run all programs once, in a random order.

    Returns:
        The seconds of each, of its slowest rank; and for those that did not run, why.
    """
    waiting = random.sample(sorted(texts), len(texts))
    seconds: dict[int, float] = {}
    failed: dict[int, str] = {}
    while waiting:
        with tempfile.TemporaryDirectory(dir=folder) as notes:
            file = f"{notes}/rank"
            programs = [(number, texts[number]) for number in waiting]
            error: LaunchError | None = None
            try:
                sm.launch(run_programs, RANKS, (programs, file, os.getcwd()))
            except LaunchError as raised:
                error = raised
            begun, ended = _noted(file)
        seconds |= ended
        waiting = [number for number in waiting if number not in ended]
        if error is not None:
            stopped = next((number for number in waiting if number in begun), None)
            if stopped is None:
                raise error  # before the first program
            failed[stopped] = (error.traceback.strip().splitlines() or [str(error)])[-1]
            waiting.remove(stopped)
    return seconds, failed


def _noted(file: str) -> tuple[set[int], dict[int, float]]:
    """Return which programs began on a rank, and the seconds of those that ended on all."""
    begun: set[int] = set()
    by_rank: list[dict[int, float]] = []
    for rank in range(RANKS):
        path = Path(f"{file}-{rank}")
        lines = path.read_text().splitlines() if path.exists() else []
        entries = [json.loads(line) for line in lines]
        begun |= {number for number, _ in entries}
        by_rank.append({number: value for number, value in entries if value is not None})
    everywhere = set(by_rank[0]).intersection(*by_rank[1:])
    return begun, {number: max(one[number] for one in by_rank) for number in everywhere}


@dataclass(frozen=True)
class Row:
    """A form that ran: seconds of a step, as predicted, and as measured in each round."""

    form: Form
    predicted: float
    rounds: tuple[float, ...]

    @property
    def measured(self) -> float:
        """The median of the rounds."""
        return median(self.rounds)


def run(quick: bool) -> tuple[list[Row], list[str]]:
    """Return the forms that ran, and why others did not."""
    import transformers

    sizes = QUICK if quick else WHOLE
    width, positions, rows = sizes["width"], sizes["positions"], sizes["rows"]
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=max(RANKS, sizes["layers"]),
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=8 * width,
        max_position_embeddings=positions,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    described = Description(model, torch.empty(rows, positions, dtype=torch.int64, device="meta"))
    of_ranks = sm.launch(rates, RANKS, (width, rows // RANKS, positions))
    slowest = min(of_ranks, key=lambda measured: measured.flops)
    device = device_of_rates(slowest)
    times = StepTimes(described, Prices(device, slowest.topology, RANKS))
    chosen = forms(quick)
    for form in chosen:
        reason = why_not(form, described)
        if reason is not None:
            raise ValueError(f"{form}: {reason}")
    random.seed(0)
    rounds: list[dict[int, float]] = []
    failed: dict[int, str] = {}
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config.to_dict()))
        build = hugging_face_build(folder)
        texts = {
            number: program_text(form, described, build, node=RANKS)
            for number, form in enumerate(chosen)
        }
        while len(rounds) < sizes["rounds"] and time.perf_counter() - start < _BUDGET_S:
            seconds, why = run_round(texts, Path(folder))
            rounds.append(seconds)
            failed |= why
            texts = {number: text for number, text in texts.items() if number not in failed}
            minutes = (time.perf_counter() - start) / 60
            print(f"round {len(rounds)}: {minutes:.1f} minutes", file=sys.stderr)
    rows = [
        Row(chosen[n], times.of(chosen[n], simulate=True).total, tuple(one[n] for one in rounds))
        for n in texts
    ]
    return rows, [f"{chosen[number]}: {why}" for number, why in failed.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="four forms of a tiny model")
    rows, failed = run(parser.parse_args().quick)
    print("| form | predicted, s | measured, s | fastest and slowest round |")
    print("|---|---|---|---|")
    for row in sorted(rows, key=lambda row: row.measured):
        spread = f"{min(row.rounds):.3f} to {max(row.rounds):.3f}"
        print(f"| {row.form} | {row.predicted:.3f} | {row.measured:.3f} | {spread} |")
    for line in failed:
        print(f"did not run: {line}")
    correlation = rank_correlation([row.predicted for row in rows], [row.measured for row in rows])
    chosen = min(rows, key=lambda row: row.predicted).measured
    fastest = min(row.measured for row in rows)
    print(
        f"\nrank correlation {correlation:.3f} of {len(rows)} forms; the form predicted to be "
        f"the fastest takes {chosen / fastest - 1:.0%} more than the fastest"
    )


if __name__ == "__main__":
    main()
