"""The order of predicted step times next to that of measured ones: 30 forms on gloo processes.

    python benchmarks/tune_rank.py            30 forms in four processes, about ten minutes
    python benchmarks/tune_rank.py --quick    four forms of a tiny model

The programs run in rounds: in each, four processes start once and run all forms one after the
other, in another order, so that a slow minute of the machine does not meet the same form twice. A
form's time is the median of its rounds, and its spread that of the fastest and the slowest one.

Before each round the ranks of this machine are measured together, as they run: products, attention,
and a norm with a gated activation, forward and backward; collectives of four and of two ranks; and
the programs of a model with the same operators and next to nothing to compute, whose time is that
of launching them. The medians price every form, and nothing is fitted to its steps. There may be
more ranks than cores: one that waits leaves its core to the others. A form that fails, or does not
end, is left out, and the round goes on with the others.

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
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardmesh as sm
from shardmesh.mesh.launch.local_processes import LaunchError
from shardmesh.mesh.topology import Link
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
_LARGE = 2**20  # elements of a collective whose bandwidth is measured
_CALLS = 16
_TINY_STEPS = 9  # of which the median counts
_MANY = 5  # microbatches, of each rank of a pipeline
_STEPS = 1  # of a form in a round, after one that is not timed


Collectives = dict[str, dict[int, tuple[float, float]]]


@dataclass(frozen=True)
class Rates:
    """What a rank reaches while all others compute, too, forward and backward, in bfloat16.

    Attributes:
        flops: of matrix products, per second.
        attention: of attention.
        bandwidth: bytes per second that a norm and a gated activation read and write.
        launch: seconds of an operator of a program in which it has next to nothing to compute.
        again: the same of one that is computed again, by the kind of recomputation.
        message: seconds of a message of such a program's pipeline, at either end.
        split_backward: by how much an operator of backward takes longer if it runs in two parts.
        sums: of collectives that sum, the time in bfloat16 over that in float32 for as many bytes.
        collectives: latency, and bytes of the whole tensor per second, in float32; see `Device`.
        arrival: by how much a collective takes longer after computation, by the number of ranks.
    """

    flops: float
    attention: float
    bandwidth: float
    launch: float
    again: dict[str, float]
    message: float
    split_backward: float
    sums: dict[str, float]
    collectives: Collectives
    arrival: dict[int, float]


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


@dataclass(frozen=True)
class TinyPrograms:
    """Printed programs of a model with the same operators, which have next to nothing to compute.

    Attributes:
        texts: with "one" and "many" microbatches, of a "pipeline" with one for each rank and with
            many, in a schedule that splits backward, and with recomputation of each kind.
        operators: that a microbatch runs; `of_backward` those of the blocks' backward among them.
        again: those that it computes again, by the kind of recomputation.
    """

    texts: dict[str, str]
    operators: float
    of_backward: float
    again: dict[str, float]


def tiny_programs(config: Any, build: str) -> TinyPrograms:
    """Return the programs for a configuration, of data parallelism and of a pipeline."""
    positions = config.max_position_embeddings

    def text(form: Form) -> str:
        described = _described(config, form.data * form.rows * form.microbatches, positions)
        return program_text(form, described, build, node=RANKS)

    costs = _described(config, RANKS, positions).costs(1)
    layers = config.num_hidden_layers
    passes = costs.block.forward.plus(costs.block.backward)
    passes = costs.edges.forward.plus(costs.edges.backward).plus(passes, layers)
    again = {"selective": costs.block.again, "full": costs.block.again_whole}
    texts = {
        "one": text(Form(dp=RANKS)),
        "many": text(Form(dp=RANKS, microbatches=_MANY)),
        "pipeline": text(Form(pp=RANKS, microbatches=RANKS)),
        "pipeline, many": text(Form(pp=RANKS, microbatches=_MANY * RANKS)),
        "zb_h1, many": text(Form(pp=RANKS, microbatches=_MANY * RANKS, schedule="zb_h1")),
        "selective": text(Form(dp=RANKS, recompute="selective")),
        "full": text(Form(dp=RANKS, recompute="full")),
    }
    return TinyPrograms(
        texts,
        sum(passes.kernels.values()),
        layers * sum(costs.block.backward.kernels.values()),
        {kind: layers * sum(phase.kernels.values()) for kind, phase in again.items()},
    )


def rates(width: int, rows: int, positions: int, tiny: TinyPrograms, folder: str) -> Rates:
    """Return the rates of this rank, measured on all ranks at the same time."""
    mesh = sm.init_device_mesh("cpu", (RANKS,), axis_names=("x",))
    tokens = rows * positions
    x = torch.randn(tokens, width, dtype=torch.bfloat16, requires_grad=True)
    hidden = torch.randn(tokens, 3 * width, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(3 * width, width, dtype=torch.bfloat16, requires_grad=True)
    scale = torch.ones(width, dtype=torch.bfloat16, requires_grad=True)
    heads = (rows, 4, positions, width // 4)
    query = torch.randn(heads, dtype=torch.bfloat16, requires_grad=True)

    def product() -> Tensor:
        return F.linear(x, weight)

    def attention() -> Tensor:
        return F.scaled_dot_product_attention(query, query, query, is_causal=True)

    def others() -> Tensor:
        wide = x.float()
        norm = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        gated = F.silu(hidden) * hidden
        return (scale * norm.to(x.dtype) + x).sum() + gated.sum()

    shapes = (heads, heads, heads)
    of_attention = sum(
        attention_flops(*shapes, is_causal=True, is_backward=is_backward)
        for is_backward in (False, True)
    )
    return Rates(
        6 * tokens * width * 3 * width / _seconds(product),
        of_attention / _seconds(attention),
        _counted(others).traffic / _seconds(others),
        *_launches(tiny, folder),
        {op: _sums_in_bfloat16(mesh, op) for op in ("all_reduce", "reduce_scatter")},
        *_collectives(product),
    )


def _launches(tiny: TinyPrograms, folder: str) -> tuple[float, dict[str, float], float, float]:
    """Return what the host takes: `launch`, `again`, `message` and `split_backward` of `Rates`."""
    seconds = {
        name: time_steps(text, "cpu", _TINY_STEPS, folder)[0] for name, text in tiny.texts.items()
    }
    microbatch = (seconds["many"] - seconds["one"]) / (_MANY - 1)
    again = {kind: (seconds[kind] - seconds["one"]) / n for kind, n in tiny.again.items()}
    # Of a pipeline each rank has a part of a microbatch's operators, and ends of its messages.
    of_pipeline = (seconds["pipeline, many"] - seconds["pipeline"]) / (_MANY - 1) / RANKS
    ends = 4 * (RANKS - 1) / RANKS
    message = max(0.0, of_pipeline - microbatch / RANKS) / ends
    split = max(0.0, seconds["zb_h1, many"] - seconds["pipeline, many"])
    split_backward = split / _MANY / tiny.of_backward  # of so many microbatches on each rank
    return microbatch / tiny.operators, again, message, split_backward


def _collectives(compute: Any) -> tuple[Collectives, dict[int, float]]:
    """Return prices of collectives of all ranks, and of both halves of them; see `Rates`."""
    table: Collectives = {}
    arrival: dict[int, float] = {}
    for shape in ((1, RANKS), (2, RANKS // 2)):
        group = sm.init_device_mesh("cpu", shape, axis_names=("y", "x")).group("x")
        n = group.size
        large = _collective_seconds(group, _LARGE)
        for op, latency in _collective_seconds(group, n).items():
            moved = 4 * _LARGE * (n / (n - 1) if op == "permute" else 1)
            table.setdefault(op, {})[n] = latency, moved / max(1e-9, large[op] - latency)
        both = partial(_in_turn, compute, partial(group.all_reduce, torch.zeros(n)))
        after = _run_seconds(group, both) - _run_seconds(group, compute)
        arrival[n] = max(0.0, after - table["all_reduce"][n][0])
    return table, arrival


def _collective_seconds(group: Any, elements: int) -> dict[str, float]:
    """Return the median seconds of each collective of so many elements, of some runs of several."""
    n = group.size
    part, whole, other = (torch.zeros(size) for size in (elements // n, elements, elements))
    neighbours = {"dst": (group.rank + 1) % n, "src": (group.rank - 1) % n}
    calls = {
        "all_gather": partial(group.all_gather, whole, part),
        "reduce_scatter": partial(group.reduce_scatter, part, whole),
        "all_reduce": partial(group.all_reduce, whole),
        "all_to_all": partial(group.all_to_all, other, whole),
        "permute": partial(group.permute, other, whole, **neighbours),
    }
    return {op: median(_run_seconds(group, call) for _ in range(3)) for op, call in calls.items()}


def _run_seconds(group: Any, call: Any) -> float:
    """Return the mean seconds of some calls."""
    call()
    group.barrier()
    start = time.perf_counter()
    for _ in range(_CALLS):
        call()
    return (time.perf_counter() - start) / _CALLS


def _in_turn(*calls: Any) -> None:
    for call in calls:
        call()


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
        seconds.append(_run_seconds(group, run))
    return seconds[0] / seconds[1]


def median_of(several: Sequence[Any]) -> Any:
    """Return the median of each number of several `Rates`, or of dicts and tuples of numbers."""
    first = several[0]
    if isinstance(first, Rates):
        values = (median_of([getattr(one, f.name) for one in several]) for f in fields(Rates))
        return Rates(*values)
    if isinstance(first, dict):
        return {key: median_of([one[key] for one in several]) for key in first}
    if isinstance(first, tuple):
        return tuple(map(median_of, zip(*several, strict=True)))
    return median(several)


def device_of_rates(measured: Rates) -> Device:
    """Return a device with measured rates, of which programs reach all."""
    attention = measured.attention / measured.flops
    latency, bandwidth = measured.collectives["all_gather"][RANKS]
    link = Link(latency, bandwidth)
    return Device(
        "cpu",
        measured.flops,
        1e12,
        measured.bandwidth,
        link,
        link,
        matmul=1.0,
        attention=attention,
        attention_backward=attention,
        traffic=1.0,
        launch=measured.launch,
        again=measured.again,
        message=measured.message,
        split_backward=measured.split_backward,
        arrival=measured.arrival,
        is_host=True,
        sharing=max(1.0, RANKS / len(os.sched_getaffinity(0))),
        sums=measured.sums,
        occupied=1.0,  # the cores that compute also move what gloo sends
        collectives=measured.collectives,
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


def _config(width: int, positions: int, layers: int) -> Any:
    import transformers

    return transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=8 * width,
        max_position_embeddings=positions,
    )


def _described(config: Any, rows: int, positions: int) -> Description:
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return Description(model, torch.empty(rows, positions, dtype=torch.int64, device="meta"))


def run(quick: bool) -> tuple[list[Row], list[str]]:
    """Return the forms that ran, and why others did not."""
    sizes = QUICK if quick else WHOLE
    width, positions, rows = sizes["width"], sizes["positions"], sizes["rows"]
    layers = max(RANKS, sizes["layers"])
    config, tiny_config = _config(width, positions, layers), _config(16, 16, layers)
    described = _described(config, rows, positions)
    chosen = forms(quick)
    for form in chosen:
        reason = why_not(form, described)
        if reason is not None:
            raise ValueError(f"{form}: {reason}")
    random.seed(0)
    measured: list[Rates] = []
    rounds: list[dict[int, float]] = []
    failed: dict[int, str] = {}
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as small:
        builds = []
        for folder, one in ((whole, config), (small, tiny_config)):
            (Path(folder) / "config.json").write_text(json.dumps(one.to_dict()))
            builds.append(hugging_face_build(folder))
        tiny = tiny_programs(tiny_config, builds[1])
        texts = {
            number: program_text(form, described, builds[0], node=RANKS)
            for number, form in enumerate(chosen)
        }
        while len(rounds) < sizes["rounds"] and time.perf_counter() - start < _BUDGET_S:
            args = (width, rows // RANKS, positions, tiny, os.getcwd())
            measured.append(median_of(sm.launch(rates, RANKS, args)))
            seconds, why = run_round(texts, Path(whole))
            rounds.append(seconds)
            failed |= why
            texts = {number: text for number, text in texts.items() if number not in failed}
            minutes = (time.perf_counter() - start) / 60
            print(f"round {len(rounds)}: {minutes:.1f} minutes", file=sys.stderr)
    device = device_of_rates(median_of(measured))
    times = StepTimes(described, Prices(device, device.topology(RANKS), RANKS))
    result = [
        Row(chosen[n], times.of(chosen[n], simulate=True).total, tuple(one[n] for one in rounds))
        for n in texts
    ]
    return result, [f"{chosen[number]}: {why}" for number, why in failed.items()]


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
