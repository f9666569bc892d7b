"""The order of predicted step times next to that of measured ones: 30 forms on gloo processes.

    python benchmarks/tune_rank.py            30 forms, each in four processes
    python benchmarks/tune_rank.py --quick    four forms of a tiny model

First the ranks of this machine are measured together, as they run: products in bfloat16, copies
and the shortest operator, and `sm.topology.calibrate` measures links. These price every form, and
nothing is fitted to the steps. Then the printed program of each form runs. What is printed is
Spearman's rank correlation of both orders, and how much longer than the fastest form the one takes
that is predicted to be the fastest.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import shardmesh as sm
from shardmesh.mesh.topology import Topology
from shardmesh.sharding.tune.description import Description
from shardmesh.sharding.tune.devices import Device
from shardmesh.sharding.tune.form import Form, why_not
from shardmesh.sharding.tune.measure import measure_program
from shardmesh.sharding.tune.prices import Prices
from shardmesh.sharding.tune.program import hugging_face_build, program_text
from shardmesh.sharding.tune.step_time import StepTimes

RANKS = 4
WHOLE: dict[str, Any] = {"width": 256, "layers": 8, "positions": 256, "rows": 16, "steps": 3}
QUICK: dict[str, Any] = {"width": 64, "layers": 2, "positions": 32, "rows": 8, "steps": 1}


@dataclass(frozen=True)
class Rates:
    """What a rank reaches while all others compute, too.

    Attributes:
        flops: of matrix products in bfloat16, per second.
        bandwidth: bytes per second that copies read and write.
        launch: seconds of the shortest operator.
        topology: links, as `calibrate` measures them.
    """

    flops: float
    bandwidth: float
    launch: float
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


def rates(width: int, tokens: int) -> Rates:
    """Return the rates of this rank, measured on all ranks at the same time."""
    mesh = sm.init_device_mesh("cpu", (RANKS,), axis_names=("x",))
    topology = sm.topology.calibrate(mesh)
    a = torch.randn(tokens, width, dtype=torch.bfloat16)
    b = torch.randn(width, 4 * width, dtype=torch.bfloat16)
    x = torch.randn(tokens * 4 * width)
    small = torch.zeros(8)
    product = _seconds(lambda: a @ b)
    copy = _seconds(lambda: x * 2.0)
    shortest = _seconds(lambda: small + small)
    return Rates(
        2 * tokens * width * 4 * width / product,
        2 * x.numel() * x.element_size() / copy,
        shortest,
        topology,
    )


def _seconds(operator: Any) -> float:
    """Return the seconds of an operator, on average over half a second."""
    for _ in range(3):
        operator()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < 0.5:
        result: Tensor = operator()
        count += 1
    del result
    return (time.perf_counter() - start) / count


def device_of_rates(measured: Rates) -> Device:
    """Return a device with measured rates, of which programs reach all."""
    local = measured.topology.local
    return Device(
        "cpu",
        measured.flops,
        1e12,
        measured.bandwidth,
        local,
        measured.topology.network,
        matmul=1.0,
        attention=1.0,
        traffic=1.0,
        launch=measured.launch,
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


def run(quick: bool) -> tuple[list[tuple[Form, float, float]], list[str]]:
    """Return (form, predicted seconds, measured seconds) of what ran, and why others did not."""
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
    of_ranks = sm.launch(rates, RANKS, (width, rows * positions // RANKS))
    slowest = min(of_ranks, key=lambda measured: measured.flops)
    device = device_of_rates(slowest)
    times = StepTimes(described, Prices(device, slowest.topology, RANKS))
    results: list[tuple[Form, float, float]] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config.to_dict()))
        for form in forms(quick):
            reason = why_not(form, described)
            if reason is not None:
                raise ValueError(f"{form}: {reason}")
            predicted = times.of(form, simulate=True).total
            text = program_text(form, described, hugging_face_build(folder), node=RANKS)
            print(form, file=sys.stderr)
            measured = measure_program(text, RANKS, device="cpu", steps=sizes["steps"])
            if measured.seconds is None:
                failed.append(f"{form}: {measured.error}")
            else:
                results.append((form, predicted, measured.seconds))
    return results, failed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="four forms of a tiny model")
    results, failed = run(parser.parse_args().quick)
    print("| form | predicted, s | measured, s |")
    print("|---|---|---|")
    for form, predicted, measured in sorted(results, key=lambda row: row[2]):
        print(f"| {form} | {predicted:.3f} | {measured:.3f} |")
    for line in failed:
        print(f"did not run: {line}")
    correlation = rank_correlation([row[1] for row in results], [row[2] for row in results])
    chosen = min(results, key=lambda row: row[1])[2]
    fastest = min(row[2] for row in results)
    print(
        f"\nrank correlation {correlation:.3f} of {len(results)} forms; the form predicted to be "
        f"the fastest takes {chosen / fastest - 1:.0%} more than the fastest"
    )


if __name__ == "__main__":
    main()
