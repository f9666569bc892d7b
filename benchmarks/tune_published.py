"""Published training runs next to what `sm.tune` computes for their forms: a table in Markdown.

    python benchmarks/tune_published.py

Each run on its own device, with its own form; rates are tokens per second and device, or TFLOP/s
per device by the publication's own count. No constant of the library is fitted to these rows.

torchtitan: benchmarks/llama3_h100_202412_torchtitan.md and llama3-8b/70b of June 2025 in its
repository: H100 of 96 GB, 2.4 TB/s, 500 W; sequences of 8,192. Llama 3: "The Llama 3 herd of
models" (arXiv 2407.21783), table 4: H100 of 80 GB, 700 W. It does not say what its program saves;
that it ran on 80 GB without recomputation says that it gathers activations again, as Megatron does.

Megatron-Core: the table of weak scaling in the README of NVIDIA/Megatron-LM (July 2024, its file
images/model_table.png): GPT on H100, sequences of 4,096, a vocabulary of 131,072. The sizes that it
gives are those of embeddings that are not tied and of MLPs four times as wide as the model. The
flags that it names require the distributed optimizer (`zero=1`) and, with tp, sequence parallelism.
It does not say how many rows a microbatch has, whether anything is recomputed, or how many stages a
rank of the pipeline has: here a microbatch has one row or all four, nothing is recomputed, and the
rows with pipelines are left out. Starcoder2 stands for GPT; its positions are rotary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from shardmesh.sharding.tune.description import Description
from shardmesh.sharding.tune.devices import device_of
from shardmesh.sharding.tune.form import Form, why_not
from shardmesh.sharding.tune.memory import peak_memory
from shardmesh.sharding.tune.prices import Prices
from shardmesh.sharding.tune.step_time import StepTimes, model_flops

SIZES: dict[str, dict[str, Any]] = {
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "70B": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "405B": {
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
    },
}
# Layers and width of GPT; heads have 128 elements.
GPT_SIZES = {
    "GPT 1.7B": (24, 2048),
    "GPT 7.1B": (30, 4096),
    "GPT 16B": (32, 6144),
    "GPT 32B": (48, 7168),
}
SHORT, LONG = 8192, 131072
GIB = 2**30 / 1e9


@dataclass(frozen=True)
class Run:
    """A published run.

    Attributes:
        source: who published it.
        model: the size of Llama 3, or a key of `GPT_SIZES`.
        device: the device's name in `sm.tune`.
        positions: of a row.
        form: the form.
        published: the rate, in tokens/s or TFLOP/s per device.
        unit: "tokens/s" or "TFLOP/s".
        reserved: gigabytes that the allocator had reserved; None if that was not published.
        differs: what the run did that the form does not have.
    """

    source: str
    model: str
    device: str
    positions: int
    form: Form
    published: float
    unit: str
    reserved: float | None = None
    differs: str = ""


_META: dict[str, Any] = {
    "pp": 16,
    "tp": 8,
    "sequence_parallel": True,
    "schedule": "interleaved",
    "stages": 4,
    "gather": "step",
    "compiled": True,  # stands for fused kernels
    "regather": True,
}
RUNS = [
    Run(
        "torchtitan 2024-12",
        "8B",
        "h100-96",
        SHORT,
        Form(fsdp=8, rows=2, recompute="selective"),
        5762,
        "tokens/s",
        82.4 * GIB,
    ),
    Run(
        "torchtitan 2024-12",
        "8B",
        "h100-96",
        SHORT,
        Form(fsdp=8, rows=2, recompute="selective", compiled=True),
        6667,
        "tokens/s",
        77.0 * GIB,
    ),
    Run(
        "torchtitan 2024-12",
        "8B",
        "h100-96",
        SHORT,
        Form(fsdp=128, rows=2, recompute="selective"),
        5605,
        "tokens/s",
        67.0 * GIB,
    ),
    Run(
        "torchtitan 2024-12",
        "8B",
        "h100-96",
        SHORT,
        Form(fsdp=128, rows=2, recompute="selective", compiled=True),
        6514,
        "tokens/s",
        62.0 * GIB,
    ),
    Run(
        "torchtitan 2025-06",
        "8B",
        "h100-96",
        SHORT,
        Form(
            fsdp=8,
            tp=8,
            sequence_parallel=True,
            rows=12,
            recompute="selective",
            compiled=True,
        ),
        4378,
        "tokens/s",
    ),
    Run(
        "torchtitan 2025-06",
        "70B",
        "h100-96",
        SHORT,
        Form(fsdp=32, tp=8, sequence_parallel=True, rows=16, recompute="full", compiled=True),
        597.3,
        "tokens/s",
    ),
    Run(
        "Llama 3, table 4",
        "405B",
        "h100",
        SHORT,
        Form(fsdp=64, microbatches=32, **_META),
        430,
        "TFLOP/s",
    ),
    Run(
        "Llama 3, table 4",
        "405B",
        "h100",
        SHORT,
        Form(fsdp=128, microbatches=16, **_META),
        400,
        "TFLOP/s",
    ),
    Run(
        "Llama 3, table 4",
        "405B",
        "h100",
        LONG,
        Form(fsdp=8, cp=16, microbatches=16, balanced=True, **_META),
        380,
        "TFLOP/s",
        differs="cp by all_gather",
    ),
    *(
        Run(
            "Megatron-Core 2024-07",
            model,
            "h100",
            4096,
            Form(
                fsdp=48,
                tp=tp,
                sequence_parallel=tp > 1,
                rows=rows,
                microbatches=4 // rows,
                compiled=True,  # stands for fused kernels
                regather=tp > 1,
                zero=1,
            ),
            published,
            "TFLOP/s",
            differs="" if tp == 1 else "products hide tp",
        )
        for model, tp, published in (
            ("GPT 1.7B", 1, 408.8),
            ("GPT 7.1B", 2, 465.9),
            ("GPT 16B", 4, 489.1),
            ("GPT 32B", 8, 459.6),
        )
        for rows in (1, 4)
    ),
]


@cache
def described(model: str, positions: int, rows: int) -> Description:
    import transformers

    if model in GPT_SIZES:
        layers, width = GPT_SIZES[model]
        config: Any = transformers.Starcoder2Config(
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=width // 128,
            num_key_value_heads=width // 128,
            vocab_size=131072,
            max_position_embeddings=positions,
            tie_word_embeddings=False,
        )
    else:
        config = transformers.LlamaConfig(
            **SIZES[model],
            num_key_value_heads=8,
            vocab_size=128256,
            max_position_embeddings=positions,
        )
    with torch.device("meta"):
        language_model: Any = transformers.AutoModelForCausalLM.from_config(config)
    ids = torch.empty(rows, positions, dtype=torch.int64, device="meta")
    return Description(language_model, ids)


def row_of(run: Run) -> str:
    """Return a row of the table."""
    form, device = run.form, device_of(run.device)
    rows = form.data * form.rows * form.microbatches
    model = described(run.model, run.positions, rows)
    reason = why_not(form, model)
    if reason is not None:
        raise ValueError(reason)
    prices = Prices(device, device.topology(8), 8)
    seconds = StepTimes(model, prices).of(form, simulate=True).total
    tokens = rows * run.positions
    per_device = seconds * form.devices
    flops = model_flops(model)
    work = tokens if run.unit == "tokens/s" else flops / 1e12
    predicted = work / per_device
    published_seconds = work / run.published / form.devices
    memory = peak_memory(form, model)[1].total / 1e9
    return (
        f"| {run.source} | {run.model}, {run.positions:,} | {form.devices:,} | {form} | "
        f"{run.published:,g} {run.unit} | {predicted:,.0f} {run.unit} | "
        f"{published_seconds:.2f} | {seconds:.2f} | {seconds / published_seconds - 1:+.0%} | "
        f"{'' if run.reserved is None else f'{run.reserved:.0f}'} | {memory:.0f} | "
        f"{run.differs} |"
    )


def main() -> None:
    """Print the table."""
    print(
        "| source | model, positions | devices | form | published | predicted | step in s, "
        "published | predicted | | GB reserved, published | GB, predicted | "
        "what the run did besides |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for run in RUNS:
        print(row_of(run), flush=True)


if __name__ == "__main__":
    main()
