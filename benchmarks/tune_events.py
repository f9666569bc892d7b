"""The order of events that `sm.tune` predicts, next to what the ranks of the programs do.

    python benchmarks/tune_events.py            4 and 8 gloo processes, all forms
    python benchmarks/tune_events.py --ranks 4

Each form's printed program runs two steps on processes that communicate by gloo. Of the second step
each rank records in which order it runs the blocks of the model, forward and backward, and which
collectives it launches, over which axes, and which messages of the pipeline it sends and posts.
`Tuning.events` predicts that. A line says "exact" if all ranks do what is predicted, or what is
different first. Collectives of up to 64 bytes, of the loss and the norm of gradients, are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardmesh as sm
from shardmesh.mesh.comm.current_world import current_world
from shardmesh.mesh.comm.group import CollectiveRecord
from shardmesh.sharding.tensor.sharded_tensor import local_of
from shardmesh.sharding.tune.description import Description
from shardmesh.sharding.tune.events import step_events
from shardmesh.sharding.tune.form import AXES, Form
from shardmesh.sharding.tune.program import hugging_face_build, program_text

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 64,
}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROWS, POSITIONS = 16, 64
_FEW = 64  # bytes of a collective of a few numbers

FORMS = [
    Form(fsdp=4, rows=4),
    Form(fsdp=2, tp=2, sequence_parallel=True, rows=8, recompute="selective"),
    Form(pp=2, fsdp=2, rows=2, microbatches=4, schedule="zb_h1"),
    Form(pp=2, fsdp=2, rows=2, microbatches=4, gather="step", schedule="interleaved", stages=2),
    Form(fsdp=4, rows=1, microbatches=4),
    Form(fsdp=4, rows=4, recompute="full"),
    Form(dp=4, rows=4),
    Form(dp=4, rows=2, microbatches=2),
    Form(dp=2, fsdp=2, rows=4),
    Form(dp=2, fsdp=2, rows=2, microbatches=2),
    Form(fsdp=4, rows=4, zero=2),
    Form(fsdp=4, rows=2, microbatches=2, zero=2),
    Form(fsdp=4, rows=2, microbatches=2, zero=1),
    Form(tp=4, rows=16),
    Form(tp=4, sequence_parallel=True, rows=8, microbatches=2),
    Form(dp=2, tp=2, rows=8),
    Form(fsdp=2, tp=2, rows=8),
    Form(fsdp=2, tp=2, sequence_parallel=True, rows=8),
    Form(fsdp=2, tp=2, sequence_parallel=True, rows=4, microbatches=2, zero=1),
    Form(cp=4, rows=16),
    Form(fsdp=2, cp=2, rows=8),
    Form(fsdp=2, cp=2, rows=8, balanced=True),
    Form(fsdp=2, cp=2, rows=8, recompute="full"),
    Form(fsdp=2, cp=2, rows=8, recompute="selective"),
    Form(pp=4, rows=4, microbatches=4),
    Form(pp=4, rows=2, microbatches=8, schedule="zb_h1"),
    Form(pp=2, fsdp=2, rows=2, microbatches=4),
    Form(pp=2, fsdp=2, rows=2, microbatches=4, recompute="full"),
    Form(pp=2, fsdp=2, rows=2, microbatches=4, schedule="gpipe"),
    Form(pp=2, fsdp=2, rows=2, microbatches=4, schedule="interleaved", stages=2),
    Form(pp=2, fsdp=2, rows=2, microbatches=4, gather="step"),
    Form(pp=2, fsdp=2, rows=2, microbatches=4, gather="step", schedule="zb_h1"),
    Form(pp=2, dp=2, rows=2, microbatches=4),
    Form(pp=2, tp=2, rows=4, microbatches=4),
    Form(dp=2, fsdp=2, tp=2, rows=4),
    Form(fsdp=2, cp=2, tp=2, sequence_parallel=True, rows=8),
    Form(pp=4, fsdp=2, rows=1, microbatches=8),
    Form(pp=2, fsdp=2, tp=2, sequence_parallel=True, rows=2, microbatches=4),
]
# of a model with experts
MIXTURES = [
    Form(fsdp=2, ep=2, rows=4),
    Form(ep=4, rows=4),
    Form(dp=2, ep=2, rows=4),
    Form(fsdp=2, ep=2, rows=2, microbatches=2),
    Form(fsdp=2, ep=2, rows=2, microbatches=2, zero=1),
    Form(fsdp=4, ep=2, rows=2),
    Form(pp=2, fsdp=2, ep=2, rows=1, microbatches=4),
    Form(ep=2, tp=2, sequence_parallel=True, rows=8),
    Form(dp=2, ep=2, tp=2, rows=4),
    Form(pp=2, ep=2, tp=2, sequence_parallel=True, rows=2, microbatches=4),
    Form(fsdp=2, cp=2, ep=2, rows=4),
]


def config(*, has_experts: bool = False) -> Any:
    """Return the configuration of a small Llama or Mixtral."""
    import transformers

    if has_experts:
        return transformers.MixtralConfig(**SIZES, **EXPERTS)
    return transformers.LlamaConfig(**SIZES)


def description(*, has_experts: bool = False) -> Description:
    """Return the description of the model, for `ROWS` rows."""
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config(has_experts=has_experts))
    ids = torch.empty(ROWS, POSITIONS, dtype=torch.int64, device="meta")
    return Description(model, ids, imbalance=1)


def programs(forms: list[Form], folder: Path, *, has_experts: bool = False) -> list[str]:
    """Return the texts of programs, for a configuration that is written to the folder."""
    folder.mkdir(exist_ok=True)
    values = config(has_experts=has_experts).to_dict()
    (folder / "config.json").write_text(json.dumps(values))
    model = description(has_experts=has_experts)
    build = hugging_face_build(str(folder))
    return [program_text(form, model, build, node=8) for form in forms]


class Recorder:
    """Records the order of events of the second step of a program, on this rank."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._events: list[str] = []
        self._is_on = False

    def run(self, text: str) -> list[str]:
        """Run two steps of a program, and return the events of the second."""
        names: dict[str, Any] = {"__name__": "train"}
        exec(compile(text, "train.py", "exec"), names)
        build, rows_of = names["build"], names["rows_of"]

        def watched() -> nn.Module:
            model = build()
            for index, block in enumerate(model.model.layers):
                self._watch(index, block)
            return model

        def begin(step: int, mesh: Any) -> Any:
            self._is_on = step == 1
            return rows_of(step, mesh)

        names.update(build=watched, rows_of=begin)
        observers = current_world().observers
        observers.append(self._observe)
        try:
            names["main"](device="cpu", steps=2)
        finally:
            observers.remove(self._observe)
        return self._events

    def _add(self, event: str) -> None:
        if self._is_on:
            self._events.append(event)

    def _watch(self, index: int, block: nn.Module) -> None:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            x: Tensor = local_of(output[0] if isinstance(output, tuple) else output)
            if x.requires_grad:
                x.register_hook(lambda _: self._add(f"backward of block {index}"))

        block.register_forward_pre_hook(lambda *_: self._add(f"block {index}"))
        block.register_forward_hook(after)

    def _observe(self, record: CollectiveRecord) -> None:
        moved = max(record.bytes_received, record.bytes_sent)
        if record.op == "all_reduce" and 0 < moved <= _FEW:
            return
        ranks = record.ranks
        axes = ",".join(_axes_of(self._form, ranks))
        op = record.op
        if axes == "pp":
            op = "send" if record.bytes_sent else "receive"
        self._add(f"{op} {axes}")


def _axes_of(form: Form, ranks: tuple[int, ...]) -> list[str]:
    """Return the axes along which the coordinates of ranks differ."""
    strides: dict[str, int] = {}
    stride = 1
    for axis in reversed(AXES):
        strides[axis] = stride
        stride *= getattr(form, axis)
    return [
        axis
        for axis in AXES
        if len({rank // strides[axis] % getattr(form, axis) for rank in ranks}) > 1
    ]


def predicted(form: Form, model: Description, rank: int) -> list[str]:
    """Return what `sm.tune` predicts for a rank of the pipeline, as `Recorder` writes it."""
    events = step_events(form, model, rank)
    lines = [f"{event.op} {event.axis}" if event.op else event.of for event in events]
    return [line for line in lines if line != "optimizer"]


def compare(form: Form, model: Description, recorded: list[list[str]]) -> str:
    """Return "exact", with the number of events, or the first difference of a rank."""
    counts = []
    for place in range(form.pp):
        expected = predicted(form, model, place)
        counts.append(len(expected))
        inner = form.devices // form.pp
        for rank in range(place * inner, (place + 1) * inner):
            pairs = zip_longest(expected, recorded[rank], fillvalue="nothing")
            for number, (one, other) in enumerate(pairs):
                if one != other:
                    return f"rank {rank}, event {number}: predicted {one}, recorded {other}"
    return f"exact, {' + '.join(map(str, counts))} events"


def _record(texts: list[tuple[Form, str]], folder: str) -> list[list[str]]:
    os.chdir(folder)
    torch.set_num_threads(1)
    return [Recorder(form).run(text) for form, text in texts]


def main() -> None:
    """Run all forms."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, choices=(4, 8))
    chosen = parser.parse_args().ranks
    wrong = 0
    for has_experts, forms in ((False, FORMS), (True, MIXTURES)):
        model = description(has_experts=has_experts)
        with tempfile.TemporaryDirectory() as folder:
            texts = programs(forms, Path(folder), has_experts=has_experts)
            for ranks in (4, 8) if chosen is None else (chosen,):
                own = [pair for pair in zip(forms, texts, strict=True) if pair[0].devices == ranks]
                by_rank: list[list[list[str]]] = sm.launch(_record, ranks, (own, folder))
                for number, (form, _) in enumerate(own):
                    result = compare(form, model, [events[number] for events in by_rank])
                    wrong += not result.startswith("exact")
                    print(f"{ranks} processes  {form!s:60} {result}", flush=True)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
