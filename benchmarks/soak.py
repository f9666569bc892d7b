"""What a long job keeps: memory, open files and objects of training and of serving.

    python benchmarks/soak.py --steps 5000 --requests 2000      about half an hour on two cores
    python benchmarks/soak.py --figure docs/images/soak.png --json soak.json
    python benchmarks/soak.py --redraw soak.json --figure docs/images/soak.png     of an earlier run

Training is `fully_shard` and AdamW on four gloo processes: each batch has a random number of rows
and a random length, the loss of a fixed batch is computed every 100 steps, and a checkpoint is
saved every 500. Serving is the engine of examples/serve.py without HTTP: a tiny Llama with random
weights under tensor parallelism, eight requests at a time, each of a random length and with a
random number of new tokens (the extra `serve`).

Every 100 steps, or requests that have been answered, each rank counts after a collection of
garbage: its resident memory, its open file descriptors, the objects that Python's collector knows,
and the tensors among them.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardmesh as sm

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from report import environment, environment_line, markdown, show, write_json, write_markdown

VOCABULARY, WIDTH = 128, 64
LONGEST, MOST_ROWS = 64, 4  # of a batch on each rank
AT_ONCE = 8  # requests
KINDS = {"training": "step", "serving": "request"}


@dataclass(frozen=True)
class Sample:
    """What one rank holds after this many steps or requests."""

    count: int
    resident_mib: float
    open_files: int
    objects: int
    tensors: int


LABELS = {
    "resident_mib": "resident memory, MiB",
    "open_files": "open file descriptors",
    "objects": "Python objects",
    "tensors": "tensors",
}


def take_sample(count: int) -> Sample:
    """Return what this process holds now, after a collection of garbage."""
    gc.collect()
    objects = gc.get_objects()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Sample(
        count,
        round(pages * os.sysconf("SC_PAGESIZE") / 2**20, 1),
        len(os.listdir("/proc/self/fd")),
        len(objects),
        sum(issubclass(type(one), Tensor) for one in objects),
    )


class Samples:
    """The samples of a rank, one every `every` counts; rank 0 prints its own."""

    def __init__(self, kind: str, every: int) -> None:
        self.taken: list[Sample] = []
        self._kind, self._every, self._start = kind, every, time.perf_counter()

    def after(self, count: int) -> None:
        """Take a sample if there is none for this hundred yet."""
        if count // self._every < len(self.taken):
            return
        sample = take_sample(count)
        self.taken.append(sample)
        if os.environ["RANK"] == "0":
            held = "  ".join(
                f"{LABELS[name]} {value}"
                for name, value in asdict(sample).items()
                if name in LABELS
            )
            seconds = time.perf_counter() - self._start
            print(f"{KINDS[self._kind]} {count}  {held}  after {seconds:.0f} s", flush=True)


# -- training --------------------------------------------------------------------------------------


class Block(nn.Module):
    """A transformer's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


def language_model() -> nn.Module:
    """Return a language model with 2 layers, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), Block(), Block(), nn.Linear(WIDTH, VOCABULARY)
    )


def next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the cross entropy of each next token."""
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def train(steps: int, every: int, save_every: int, folder: str) -> list[Sample]:
    """Train for this many steps; return the samples of this rank."""
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    mesh = sm.init_device_mesh("cpu", (ranks,), axis_names=("dp",))
    model = sm.parallel.fully_shard(language_model(), mesh, units=Block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lengths, tokens = random.Random(0), torch.Generator().manual_seed(rank)
    test_ids = torch.randint(VOCABULARY, (4, 33), generator=torch.Generator().manual_seed(99))
    samples = Samples("training", every)
    samples.after(0)
    for step in range(1, steps + 1):
        sm.monitor.mark_step(step)
        rows, length = lengths.randint(1, MOST_ROWS), lengths.randint(2, LONGEST)
        loss = next_token_loss(model, torch.randint(VOCABULARY, (rows, length), generator=tokens))
        loss.backward()
        sm.training.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % every == 0:
            model.eval()
            with torch.no_grad():
                next_token_loss(model, test_ids).item()
            model.train()
        if step % save_every == 0:
            state = sm.checkpoint.state_dict(model, optimizer)
            sm.checkpoint.save(state, folder, step=step, keep=2)
        samples.after(step)
    return samples.taken


# -- serving ---------------------------------------------------------------------------------------


def serve(requests: int, every: int) -> list[Sample]:
    """Answer this many requests; return the samples of this rank."""
    import serve as example

    mesh = sm.init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), axis_names=("tp",))
    model = sm.parallel.parallelize(example.tiny_model().eval(), mesh, "auto")
    engine = example.Engine(model, example.forward_of(model), [])
    scheduler = example.Scheduler([2])
    is_front, draw = mesh.get_rank() == 0, random.Random(0)
    samples = Samples("serving", every)
    asked = answered = 0

    def send(token: example.Token) -> None:
        nonlocal answered
        answered += token is None

    total = torch.zeros(1, dtype=torch.int64)
    for turn_number in itertools.count():
        sm.monitor.mark_step(turn_number)
        total[0] = answered
        mesh.group().broadcast(total, 0)
        samples.after(int(total))
        turn = None
        if is_front:
            while asked < requests and asked - answered < AT_ONCE:
                prompt = [draw.randrange(3, VOCABULARY) for _ in range(draw.randint(1, LONGEST))]
                request = example.Request(asked, prompt, max_new_tokens=draw.randint(1, 16))
                scheduler.inbox.put((request, send))
                asked += 1
            if answered == requests:
                scheduler.inbox.put(None)
            turn = scheduler.next_turn(engine.batches)
        turn = example.broadcast_turn(turn, mesh)
        if turn.is_last:
            return samples.taken
        logits = engine.run(turn)
        if is_front:
            scheduler.deliver(logits)
    raise AssertionError


# -- figures ---------------------------------------------------------------------------------------


def rows_of(samples: dict[str, list[list[Sample]]]) -> list[list[str]]:
    """Return a row for each quantity: its range over the ranks at a fifth, at half, at the end."""
    rows = []
    for kind, ranks in samples.items():
        last = len(ranks[0]) - 1
        at = [last // 5, last // 2, last]
        for name, label in LABELS.items():
            cells = []
            for index in at:
                values = [getattr(rank[index], name) for rank in ranks]
                least, most = min(values), max(values)
                cells.append(f"{least:g}" if least == most else f"{least:g} to {most:g}")
            rows.append([f"{kind}, {label}", *cells])
    return rows


def draw(samples: dict[str, list[list[Sample]]], path: str) -> None:
    """Draw a panel for each quantity of each job, with a line for each rank."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2 * len(LABELS)), layout="constrained")
    panels = figure.subplots(len(LABELS), len(samples), sharex="col", squeeze=False)
    for column, (kind, ranks) in enumerate(samples.items()):
        panels[0, column].set_title(kind)
        panels[-1, column].set_xlabel(f"{KINDS[kind]}s")
        for row, (name, label) in enumerate(LABELS.items()):
            panel = panels[row, column]
            for rank, taken in enumerate(ranks):
                panel.plot(
                    [one.count for one in taken],
                    [getattr(one, name) for one in taken],
                    linewidth=1,
                    label=f"rank {rank}",
                )
            panel.set_ylim(0, 1.1 * panel.get_ylim()[1])
            panel.grid(alpha=0.3)
            panel.set_ylabel(label if column == 0 else "")
            panel.spines[["top", "right"]].set_visible(False)
    panels[0, 0].legend(fontsize="small")
    figure.savefig(path, dpi=100)


def main(arguments: Sequence[str]) -> None:
    """Run both jobs, print a table, and write what is asked for."""
    parser = argparse.ArgumentParser(description="What a long job keeps")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--every", type=int, default=100, help="steps or requests between samples")
    parser.add_argument("--save-every", type=int, default=500, help="steps between checkpoints")
    parser.add_argument("--json", help="file to write the samples to")
    parser.add_argument("--markdown", help="file to write the table to")
    parser.add_argument("--figure", help="picture to draw (needs matplotlib)")
    parser.add_argument(
        "--redraw", metavar="JSON", nargs="+", help="take the samples from these files, do not run"
    )
    options = parser.parse_args(arguments)
    samples: dict[str, list[list[Sample]]] = {}
    env = environment()
    for path in options.redraw or ():
        results = json.loads(Path(path).read_text())
        env = results["environment"]
        for kind, ranks in results["samples"].items():
            samples[kind] = [[Sample(*one) for one in rank] for rank in ranks]
    if not options.redraw:
        if options.steps:
            with tempfile.TemporaryDirectory() as folder:
                run_options: Any = (options.steps, options.every, options.save_every, folder)
                samples["training"] = sm.launch(train, options.ranks, run_options)
        if options.requests:
            samples["serving"] = sm.launch(serve, options.ranks, (options.requests, options.every))
        env = environment()
    columns = ("", "after a fifth", "after a half", "at the end")
    rows = rows_of(samples)
    show("What each rank holds", columns, rows)
    counts = {kind: ranks[0][-1].count for kind, ranks in samples.items()}
    done = " and ".join(f"{count} {KINDS[kind]}s" for kind, count in counts.items())
    write_markdown(
        options.markdown, f"{markdown(columns, rows)}\n\n{done}, {environment_line(env)}."
    )
    write_json(
        options.json,
        {
            "fields": [field.name for field in fields(Sample)],
            "samples": {
                kind: [[astuple(one) for one in rank] for rank in ranks]
                for kind, ranks in samples.items()
            },
            "environment": env,
        },
    )
    if options.figure:
        draw(samples, options.figure)


if __name__ == "__main__":
    main(sys.argv[1:])
