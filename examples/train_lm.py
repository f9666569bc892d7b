"""Train a byte-level GPT on the source code of Python's standard library, sharded over a 2-D mesh
of processes.

    python examples/train_lm.py                           4 local processes, mesh (fsdp=2, tp=2)
    torchrun --nproc-per-node 4 examples/train_lm.py      the same, started by torchrun
    python examples/train_lm.py --single                  the model and data in one process, no mesh
    python examples/train_lm.py --compare                 both, with their losses side by side
    torchrun --nproc-per-node 8 examples/train_lm.py --mesh fsdp=2,tp=4 --size small --device cuda
    python examples/train_lm.py --parallel dp=2,fsdp=2    with the library's parallel layers:
                                                          dp, zero1, zero2, fsdp, tp, sp, pp
    python examples/train_lm.py --parallel pp=2,fsdp=2    in stages, one on each rank along pp
    python examples/train_lm.py --parallel tp=4 --save out/checkpoints --resume
                                                          from the newest checkpoint, of any mesh
    python examples/train_lm.py --jit inductor            compile the step with Inductor;
                                                          --no-jit runs every step eagerly

The model is plain PyTorch. With `--mesh`, sharding is written by hand: a table gives the layout in
which each weight is stored (`STORED`), and calls of `reshard(x, spec)` change the layout where
needed. Everything else follows from the layouts of the operands: what each rank computes, what is
pending, and what backward communicates. With `--parallel`, the library's layers shard an unchanged
model: see `parallelize_model`. On a mesh, a whole step (forward, backward, clipping, optimizer) is
one graph under `sm.jit`; one process runs eagerly.

Tensor names end in one letter per dim: b batch, s position, t token (b and s together), d width of
the residual stream, h head, e width of a head, f width of the MLP, v byte value.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import train_lm_report as report
from torch import Tensor, nn

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import (
    data_parallel,
    distribute_module,
    fully_shard,
    parallelize,
    pipeline,
    prepare_outputs,
    sequence_parallel,
    shard_parameter,
)

TOLERANCE = 1e-4  # of the relative difference between a loss on the mesh and in one process
VOCABULARY = 256
CORPUS_BYTES = 3_000_000
MAX_NORM = 1.0  # gradients are clipped to this norm
# a shorter warm-up works too, but amplifies rounding errors and so the difference between runs
WARM_UP_STEPS = 25


@dataclass(frozen=True)
class Size:
    """Shapes of the model and of a batch; `lr` is the peak learning rate."""

    layers: int
    d: int
    heads: int
    f: int
    s: int
    b: int
    lr: float


SIZES = {
    "tiny": Size(layers=2, d=32, heads=4, f=64, s=32, b=8, lr=1e-2),
    "demo": Size(layers=3, d=128, heads=4, f=352, s=128, b=8, lr=2e-3),
    "small": Size(layers=6, d=384, heads=8, f=1024, s=256, b=32, lr=1e-3),
    "medium": Size(layers=12, d=768, heads=12, f=2048, s=1024, b=64, lr=6e-4),
}

# -- layouts of the model --------------------------------------------------------------------------

# Every weight is sharded over both axes. Over tp: either its rows, so that each tp rank computes
# some output features of `F.linear`, or its columns, so that each sums over some input features.
# Over fsdp: always rows, minor to those of tp, so that the parts received by a gather are in memory
# order and need no copy.
STORED = {
    "embedding": P("fsdp", "tp"),  # [v, d]
    "w_qkv": P(("tp", "fsdp")),  # [h 3 e, d]
    "w_out": P("fsdp", "tp"),  # [d, h e]
    "w_gate_up": P(("tp", "fsdp")),  # [f 2, d]
    "w_down": P("fsdp", "tp"),  # [d, f]
    # The norms' weights are small and stay replicated.
}

# For use, a weight is gathered over fsdp (the embedding over both axes); it is freed after its
# backward.
SPLIT_OUTPUTS, SPLIT_INPUTS, WHOLE = P("tp"), P(None, "tp"), P()

# Activations [b, s, d] between layers: the batch is sharded over fsdp and replicated over tp.
STREAM = P("fsdp")
# Activations [t, d] and targets [t] at the loss: the tokens are sharded over all ranks.
TOKENS = P(("fsdp", "tp"))


Reshard = Callable[[Any, P], Any]


def reshard(x: Tensor, spec: P) -> Tensor:
    """Redistribute a tensor to `spec`. Backward is the dual: the gradient of a gathered weight is
    reduce-scattered.
    """
    return sm.reshard(x, spec)  # type: ignore[arg-type]


def keep_layout(x: Tensor, spec: P) -> Tensor:
    """Return `x` unchanged: `--single` and `--parallel` ignore the layouts written in the model."""
    return x


def place(x: Tensor, mesh: sm.DeviceMesh | None, spec: P) -> Tensor:
    """Shard a tensor that every rank has whole: each rank keeps its part, without communication."""
    return x if mesh is None else sm.device_put(x, mesh, spec, src_data_rank=None)


def place_weights(path: str, module: nn.Module, mesh: sm.DeviceMesh) -> None:
    """Shard a module's own weights as in STORED; `distribute_module` calls this for every
    module.
    """
    for name in [name for name, _ in module.named_parameters(recurse=False)]:
        if name in STORED:
            shard_parameter(module, name, mesh, STORED[name], src_data_rank=None)


# -- the same with the library's layers ------------------------------------------------------------

SPLIT = {
    "*.w_qkv": P("tp"),
    "*.w_out": P(None, "tp"),
    "*.w_gate_up": P("tp"),
    "*.w_down": P(None, "tp"),
}
# Their outputs are pending over tp.
SUMMED = {"*.attention": prepare_outputs(P()), "*.mlp": prepare_outputs(P())}
# With "sp" in place of "tp", the residual stream is sharded by positions outside of attention and
# MLP.
IN_SEQUENCE = {
    **{path: P(*["sp" if axes else None for axes in spec.dims]) for path, spec in SPLIT.items()},
    **{
        f"blocks.*.norm_{part}": [sequence_parallel(1, axis="sp"), prepare_outputs(P(), axis="sp")]
        for part in ("attention", "mlp")
    },
    **{
        f"blocks.*.{part}": prepare_outputs(P(None, "sp"), axis="sp")
        for part in ("attention", "mlp")
    },
}
DATA_AXES = ("dp", "zero1", "zero2", "fsdp")  # axes over which the batch is sharded
LAYERS = (*DATA_AXES, "tp", "sp", "pp")
MICROBATCHES = 4  # of a batch, with pp


def in_stages(model: GPT, mesh: sm.DeviceMesh, size: Size) -> sm.parallel.Pipeline:
    """Return the model in stages over "pp", parallelized inside of these by the other axes."""
    example = torch.empty(size.b // MICROBATCHES, size.s, dtype=torch.int64, device="meta")
    pipe = pipeline(model, mesh, microbatches=MICROBATCHES, example=((example,), {}))
    inner = inner_mesh(mesh)
    if inner is not None:
        parallelize_model(pipe, inner)
    return pipe


def inner_mesh(mesh: sm.DeviceMesh) -> sm.DeviceMesh | None:
    """Return the mesh of the ranks with the same stages; None if each is alone."""
    names = tuple(axis for axis in mesh.axis_names if axis != "pp")
    return mesh[names] if names else None


def parallelize_model(model: nn.Module | sm.parallel.Pipeline, mesh: sm.DeviceMesh) -> None:
    """Parallelize the model in the forms that the mesh's axes are named after."""
    if isinstance(model, sm.parallel.Pipeline):
        shard, replicate = model.fully_shard, model.data_parallel
    else:
        shard, replicate = partial(fully_shard, model), partial(data_parallel, model)
    data_axes = [axis for axis in DATA_AXES if axis in mesh.axis_names]
    for axis, plan in (("tp", SPLIT | SUMMED), ("sp", IN_SEQUENCE)):
        if axis not in mesh.axis_names:
            continue
        if isinstance(model, sm.parallel.Pipeline):
            model.parallelize(plan, mesh, src_data_rank=None)
        else:
            parallelize(model, mesh, plan, src_data_rank=None)
    if "fsdp" in data_axes:
        shard(mesh, axes="fsdp", units=Block, src_data_rank=None)
    else:
        replicate(
            mesh,
            gradient="zero2" if "zero2" in data_axes else (),
            optimizer=tuple(axis for axis in data_axes if axis != "dp"),
            units=Block,
            src_data_rank=None,
        )


def whole(x: Tensor) -> Tensor:
    """Return the full plain tensor, on every rank."""
    return x.full_tensor() if isinstance(x, sm.ShardedTensor) else x


# -- the model -------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, size: Size, reshard: Reshard) -> None:
        super().__init__()
        self.heads, self.reshard = size.heads, reshard
        self.w_qkv = weight(3 * size.d, size.d)
        self.w_out = weight(size.d, size.d, scale=1 / math.sqrt(2 * size.layers))

    def forward(self, x_bsd: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        # n is (h 3 e), so each tp rank has whole heads.
        qkv_bsn = F.linear(x_bsd, self.reshard(self.w_qkv, SPLIT_OUTPUTS))
        q_bhse, k_bhse, v_bhse = (
            qkv_bsn.unflatten(-1, (self.heads, 3, -1)).transpose(1, 2).unbind(-2)
        )
        q_bhse, k_bhse = rotate(q_bhse, rotary), rotate(k_bhse, rotary)
        y_bhse = F.scaled_dot_product_attention(q_bhse, k_bhse, v_bhse, is_causal=True)
        y_bsd = y_bhse.transpose(1, 2).flatten(-2)
        # Each tp rank has summed over its own heads, so the product is pending over tp; STREAM
        # reduces it.
        return self.reshard(F.linear(y_bsd, self.reshard(self.w_out, SPLIT_INPUTS)), STREAM)


class MLP(nn.Module):
    def __init__(self, size: Size, reshard: Reshard) -> None:
        super().__init__()
        self.reshard = reshard
        self.w_gate_up = weight(2 * size.f, size.d)
        self.w_down = weight(size.d, size.f, scale=1 / math.sqrt(2 * size.layers))

    def forward(self, x_bsd: Tensor) -> Tensor:
        gate_up_bsn = F.linear(x_bsd, self.reshard(self.w_gate_up, SPLIT_OUTPUTS))  # n is (f 2)
        gate_bsf, up_bsf = gate_up_bsn.unflatten(-1, (-1, 2)).unbind(-1)
        return self.reshard(
            F.linear(F.silu(gate_bsf) * up_bsf, self.reshard(self.w_down, SPLIT_INPUTS)), STREAM
        )


class Block(nn.Module):
    def __init__(self, size: Size, reshard: Reshard) -> None:
        super().__init__()
        self.norm_attention, self.attention = nn.RMSNorm(size.d), Attention(size, reshard)
        self.norm_mlp, self.mlp = nn.RMSNorm(size.d), MLP(size, reshard)

    def forward(self, x_bsd: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        x_bsd = x_bsd + self.attention(self.norm_attention(x_bsd), rotary)
        return x_bsd + self.mlp(self.norm_mlp(x_bsd))


class GPT(nn.Module):
    def __init__(self, size: Size, reshard: Reshard = keep_layout) -> None:
        super().__init__()
        self.reshard = reshard
        self.embedding = weight(VOCABULARY, size.d)  # tied: used by the first layer and by the head
        self.blocks = nn.ModuleList(Block(size, reshard) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.d)
        angle_se = torch.outer(
            torch.arange(size.s), 1e4 ** -torch.linspace(0, 1, size.d // size.heads // 2)
        )
        self.register_buffer("cos_se", angle_se.cos())
        self.register_buffer("sin_se", angle_se.sin())

    def forward(self, ids_bs: Tensor, last_only: bool = False) -> Tensor:
        """Return logits [t, v] for the byte after each position, or only for the byte after the
        last one.
        """
        embedding_vd = self.reshard(self.embedding, WHOLE)
        x_bsd = F.embedding(ids_bs, embedding_vd)
        for block in self.blocks:
            x_bsd = block(x_bsd, (self.cos_se, self.sin_se))
        x_bsd = x_bsd[:, -1:] if last_only else x_bsd
        # With 256 byte values the head is small, so its tokens are sharded over tp as well, not its
        # vocabulary.
        return F.linear(self.reshard(self.norm(x_bsd).flatten(0, 1), TOKENS), embedding_vd)


def weight(rows: int, columns: int, scale: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) * (0.5 * scale / math.sqrt(columns)))


def rotate(x_bhse: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary position embeddings: rotate each pair of features by an angle proportional to
    the position.
    """
    (a, b), (cos, sin) = x_bhse.chunk(2, dim=-1), rotary
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


# -- the data --------------------------------------------------------------------------------------


def read_corpus() -> tuple[Tensor, Tensor]:
    """Return the modules of the standard library as bytes, for training and (every tenth module)
    for validation.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    modules = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    train = b"".join(text for i, text in enumerate(modules) if i % 10)[:CORPUS_BYTES]
    valid = b"".join(modules[::10])[: CORPUS_BYTES // 10]
    if min(len(train), len(valid)) < 10_000:
        raise SystemExit(
            f"{folder} holds {len(modules)} Python modules, {len(train)} bytes: too few to train on"
        )
    return torch.frombuffer(bytearray(train), dtype=torch.uint8), torch.frombuffer(
        bytearray(valid), dtype=torch.uint8
    )


# -- training --------------------------------------------------------------------------------------


def train_on(
    model: nn.Module, optimizer: torch.optim.Optimizer, parts: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Train on a batch in equal parts, whose gradients are summed; return the mean of their losses.
    Under `sm.jit` this is one graph.
    """
    losses = []
    # Gradients are reduced over the mesh once, after all parts.
    with sm.accumulate_grads() if len(parts) > 1 else contextlib.nullcontext():
        for ids_bs, targets_t in parts:
            loss = F.cross_entropy(model(ids_bs), targets_t) / len(parts)
            loss.backward()
            losses.append(loss.detach())
    sm.training.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses).sum()


def train_in_stages(
    pipe: sm.parallel.Pipeline,
    optimizer: torch.optim.Optimizer,
    parts: Sequence[tuple[Tensor, Tensor]],
) -> Tensor:
    """Do the same with a model in stages."""

    def loss_fn(logits_tv: Tensor, targets_bs: Tensor) -> Tensor:
        return loss_of(logits_tv, targets_bs) / len(parts)

    losses = [pipe.step(ids_bs, targets_bs, loss_fn=loss_fn) for ids_bs, targets_bs in parts]
    sm.training.clip_grad_norm_(pipe, MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses).sum()


def loss_of(logits_tv: Tensor, targets_bs: Tensor) -> Tensor:
    return F.cross_entropy(logits_tv, targets_bs.flatten())


class Trainer:
    """Model, optimizer and data. For the same seed they are equal on every mesh, and without a
    mesh.
    """

    def __init__(self, options: argparse.Namespace, mesh: sm.DeviceMesh | None) -> None:
        self.size = SIZES[options.size]
        self.steps = options.steps
        self.accumulate = options.accumulate
        self.mesh = mesh
        self.device = torch.device(options.device) if mesh is None else mesh.device
        self.stream, self.tokens = STREAM, TOKENS
        torch.manual_seed(options.seed)
        by_hand = mesh is not None and options.parallel is None
        model = GPT(self.size, reshard if by_hand else keep_layout).to(self.device)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.model: Any = model
        self.is_staged = mesh is not None and "pp" in mesh.axis_names
        if mesh is not None and by_hand:
            distribute_module(model, mesh, place_weights, src_data_rank=None)
        elif mesh is not None:
            if self.is_staged:
                self.model = in_stages(model, mesh, self.size)
                self.mesh = inner_mesh(mesh)  # of the data
            else:
                parallelize_model(model, mesh)
            self.stream = self.tokens = P(
                tuple(axis for axis in mesh.axis_names if axis in DATA_AXES) or None
            )
        # The optimizer does not depend on the mesh: its fused kernel updates each rank's part of
        # the weights.
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), self.size.lr, betas=(0.9, 0.95), fused=True
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.lr_share)
        self.train_on: Any = train_in_stages if self.is_staged else train_on
        if mesh is not None and options.jit != "off" and not self.is_staged:
            self.train_on = sm.jit(train_on, backend=options.jit)
        self.train_text, self.valid_text = read_corpus()
        self.random, self.done = torch.Generator().manual_seed(options.seed), 0
        self.batches = self.draw(self.train_text, self.random)

    def lr_share(self, step: int) -> float:
        """Return the fraction of the peak learning rate: warm-up, then cosine decay to a tenth."""
        return min((step + 1) / WARM_UP_STEPS, 0.55 + 0.45 * math.cos(math.pi * step / self.steps))

    def state(self) -> dict[str, Any]:
        """Return everything that a later run needs to continue, on any mesh."""
        trained = sm.checkpoint.state_dict(self.model, self.optimizer)
        return {
            **trained,
            "schedule": self.schedule,
            "random": self.random.get_state(),
            "done": self.done,
        }

    def resume(self, folder: Path) -> None:
        """Continue from the newest checkpoint in a folder."""
        state = sm.checkpoint.load(folder, like=self.state())
        sm.checkpoint.load_state_dict(self.model, state, self.optimizer)
        self.random.set_state(state["random"])
        self.done = state["done"]

    def draw(self, text: Tensor, random: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield random windows of the text: bytes [b, s], and the byte after each of them [t], or
        [b, s] for microbatches.

        Every rank draws the same windows and keeps its part, so distributing data needs no
        communication.
        """
        window_s = torch.arange(self.size.s + 1)
        while True:
            starts_b = torch.randint(len(text) - self.size.s, (self.size.b,), generator=random)
            window = text[starts_b[:, None] + window_s].long().to(self.device)
            following = window[:, 1:] if self.is_staged else window[:, 1:].flatten()
            yield (
                place(window[:, :-1], self.mesh, self.stream),
                place(following, self.mesh, self.tokens),
            )

    def step(self) -> Tensor:
        """Train on the next batch. What changes Python state stays outside of the graph: the data,
        the schedule, the count of steps.
        """
        loss = self.train_on(
            self.model, self.optimizer, [next(self.batches) for _ in range(self.accumulate)]
        )
        self.schedule.step()
        self.done += 1
        return loss

    @torch.no_grad()
    def validate(self, count: int = 2) -> float:
        """Return the mean loss over a few validation batches, the same in every call."""
        batches = itertools.islice(
            self.draw(self.valid_text, torch.Generator().manual_seed(0)), count
        )
        total = 0.0
        for ids_bs, targets in batches:
            if self.is_staged:
                total += self.model.eval(ids_bs, targets, loss_fn=loss_of).item()
            else:
                total += F.cross_entropy(self.model(ids_bs), targets).item()
        return total / count

    def gathered(self) -> GPT:
        """Return a copy of the model with full, plain weights on every rank; of one in stages, on
        rank 0.
        """
        model = GPT(self.size).to(self.device)
        if not self.is_staged:
            state = {name: whole(value) for name, value in self.model.state_dict().items()}
        else:
            state = sm.checkpoint.full_state_dict(self.model.state_dict())
        if state:
            model.load_state_dict(state)
        return model


@torch.no_grad()
def write(model: GPT, text: list[int], length: int = 240, temperature: float = 0.6) -> str:
    """Continue a text byte by byte by sampling from the model; return its end."""
    window, device = len(text), model.embedding.device
    for _ in range(length):
        ids_bs = torch.tensor([text[-window:]], device=device)
        logits_v = model(ids_bs, last_only=True)[0] / temperature
        text.append(int(torch.multinomial(logits_v.softmax(0), 1)))
    continuation = bytes(text[window - 60 :]).decode("utf-8", errors="replace")
    # No control codes on a terminal.
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in continuation
    )


def train(options: argparse.Namespace, mesh: sm.DeviceMesh | None) -> report.Run:
    """Train on a mesh, or without one in this process; rank 0 prints the progress."""
    quiet = mesh is not None and mesh.get_rank() != 0
    say = (lambda text: None) if quiet else (lambda text: print(text, flush=True))
    trainer = Trainer(options, mesh)
    if options.resume and mesh is not None and sm.checkpoint.latest(options.save):
        trainer.resume(options.save)
    name = (
        "one process"
        if mesh is None
        else " ".join(f"{axis}={mesh.size(axis)}" for axis in mesh.axis_names)
    )
    run = report.Run(name, trainer.parameters)
    say(introduction(run, trainer))
    start = since = time.perf_counter()
    with report.progress_bar(name, options.steps, quiet) as advance:
        for step in range(trainer.done + 1, options.steps + 1):
            with sm.debug.comm_budget() as used:
                loss = trainer.step()
            run.collectives = used.by_op
            advance()
            if step % options.every == 0 or step in (1, options.steps):
                done = step - (run.rows[-1].step if run.rows else 0)
                loss = loss.item()  # before the timer is read: on a GPU this waits for the steps
                speed = (
                    done
                    * trainer.accumulate
                    * trainer.size.b
                    * trainer.size.s
                    / (time.perf_counter() - since)
                )
                run.rows.append(report.Row(step, loss, trainer.validate(), speed))
                say(report.line(run.rows[-1]))
                since = time.perf_counter()
            if (
                options.save
                and mesh is not None
                and (step % options.save_every == 0 or step == options.steps)
            ):
                sm.checkpoint.save(trainer.state(), options.save, step=step, keep=2)
    run.seconds = time.perf_counter() - start
    model = trainer.gathered()  # a collective: every rank calls it, rank 0 samples
    if not quiet:
        run.sample = write(model, trainer.valid_text[: trainer.size.s].tolist())
    say(report.ending(run))
    return run


def introduction(run: report.Run, trainer: Trainer) -> str:
    """Return a summary of the model, the layouts of two of its weights, and the plan for using one
    of them.
    """
    share_v = trainer.train_text.bincount(minlength=VOCABULARY) / len(trainer.train_text)
    guesses = (
        f"{math.log(VOCABULARY):.2f} for uniform bytes, {torch.special.entr(share_v).sum():.2f} "
        "for byte frequencies"
    )
    lines = [
        f"\n=== {run.name}: {run.parameters:,} parameters, {len(trainer.train_text):,} bytes",
        f"baseline loss: {guesses}",
    ]
    if trainer.is_staged:
        lines += ["", str(trainer.model.schedule)]
    elif trainer.mesh is not None:
        block: Any = trainer.model.blocks[0]
        pictures = [sm.debug.visualize(block.attention.w_qkv), sm.debug.visualize(block.mlp.w_down)]
        lines += ["\nlayouts of w_qkv and w_down by rank:", *pictures]
        if trainer.model.reshard is reshard:
            lines += [
                "\nplan for using w_down:",
                str(sm.debug.explain(block.mlp.w_down, SPLIT_INPUTS)),
            ]
    return "\n".join([*lines, "", report.header()])


# -- the command -----------------------------------------------------------------------------------


def mesh_axes(text: str) -> dict[str, int]:
    """Parse `fsdp=2,tp=2` into a dictionary; an omitted axis has size 1."""
    pairs = [part.strip().partition("=") for part in text.split(",")]
    axes = {
        name: int(size)
        for name, _, size in pairs
        if name in ("fsdp", "tp") and size.isdecimal() and int(size) > 0
    }
    if len(axes) < len(pairs):
        raise argparse.ArgumentTypeError(
            f"{text!r}: write the sizes of fsdp and tp, such as fsdp=2,tp=2"
        )
    return axes | {name: 1 for name in ("fsdp", "tp") if name not in axes}


def layer_axes(text: str) -> dict[str, int]:
    """Parse `dp=2,fsdp=2` into a dictionary, in that order."""
    pairs = [part.strip().partition("=") for part in text.split(",")]
    axes = {
        name: int(size)
        for name, _, size in pairs
        if name in LAYERS and size.isdecimal() and int(size) > 0
    }
    if len(axes) < len(pairs) or {"tp", "sp"} <= set(axes):
        known = ", ".join(LAYERS)
        raise argparse.ArgumentTypeError(
            f"{text!r}: write sizes of axes among {known}, of tp and sp only one: such as "
            "fsdp=2,tp=2"
        )
    return axes


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--mesh",
        type=mesh_axes,
        default="fsdp=2,tp=2",
        help="sharding by hand: sizes of both axes, major first",
    )
    parser.add_argument(
        "--parallel",
        type=layer_axes,
        help=f"layers: sizes of axes among {', '.join(LAYERS)}, such as dp=2,fsdp=2",
    )
    parser.add_argument(
        "--size", choices=SIZES, default="demo", help="shapes of the model and of a batch"
    )
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--every", type=int, default=10, help="steps between two printed losses")
    parser.add_argument(
        "--accumulate",
        type=int,
        default=1,
        metavar="N",
        help="batches of which a step sums the gradients",
    )
    parser.add_argument(
        "--jit",
        choices=("eager", "inductor", "off"),
        default="eager",
        help="backend of the graph of a step on a mesh",
    )
    parser.add_argument(
        "--no-jit", dest="jit", action="store_const", const="off", help="run every step eagerly"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=devices(), default="cpu")
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="folder for metrics.json and loss.png"
    )
    parser.add_argument("--save", type=Path, help="folder for checkpoints")
    parser.add_argument(
        "--save-every",
        type=int,
        default=50,
        help="steps between two checkpoints; the last step always has one",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue from the newest checkpoint in --save (a flag: no path)",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--single", action="store_true", help="one process with plain tensors")
    which.add_argument(
        "--compare",
        action="store_true",
        help=f"train both ways; fail if losses differ by more than {TOLERANCE}",
    )
    options = parser.parse_args(arguments)
    options.mesh = options.parallel or options.mesh
    problem = find_problem(options)
    return parser.error(problem) if problem else options


def devices() -> list[str]:
    """Return the device types of this machine."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


def find_problem(options: argparse.Namespace) -> str | None:
    """Return what is wrong with the combination of options and what to write instead, or None."""
    size = SIZES[options.size]
    ranks = math.prod(options.mesh.values())
    started = int(os.environ.get("WORLD_SIZE", "0"))
    stages = options.mesh.get("pp", 1)
    tp = math.prod(n for axis, n in options.mesh.items() if axis in ("tp", "sp"))
    data = math.prod(n for axis, n in options.mesh.items() if axis in DATA_AXES)
    named = " x ".join(f"{axis}={n}" for axis, n in options.mesh.items())
    counts = {
        f"--{name.replace('_', '-')}": getattr(options, name)
        for name in ("steps", "every", "save_every", "accumulate")
    }
    if min(counts.values()) < 1:
        return f"{' '.join(f'{name} {n}' for name, n in counts.items())}: all must be at least 1"
    if options.resume and options.save is None:
        return "--resume continues from a checkpoint in the folder of --save: pass --save as well"
    if options.single:
        return (
            "--single is one process: start it with python, not with torchrun"
            if started > 1
            else None
        )
    if size.heads % tp:
        return (
            f"tp={tp} does not divide the {size.heads} heads of --size {options.size}: choose a tp "
            "that does"
        )
    if stages > size.layers:
        return (
            f"pp={stages} is more than the {size.layers} layers of --size {options.size}: choose a "
            "pp of at most that"
        )
    if "pp" in options.mesh and size.b % (data * MICROBATCHES):
        return (
            f"{named} does not divide the batch of {size.b} of --size {options.size} into {data} x "
            f"{MICROBATCHES} microbatches: choose sizes that do"
        )
    if size.b % data:
        return (
            f"{named} does not divide the batch of {size.b} of --size {options.size} into {data}: "
            "choose sizes that do"
        )
    if started and started != ranks:
        start = f"torchrun --nproc-per-node {ranks}, or a --mesh whose sizes multiply to {started}"
        return (
            f"a mesh of {named} needs {ranks} processes, and {started} were started: write {start}"
        )
    return None


def train_on_mesh(options: argparse.Namespace) -> report.Run:
    """Train on one rank; every process of the mesh calls this."""
    mesh = sm.init_device_mesh(
        options.device, tuple(options.mesh.values()), axis_names=tuple(options.mesh)
    )
    return train(options, mesh)


def train_in_processes(options: argparse.Namespace) -> report.Run:
    """Train in the processes that torchrun started, or else launch local ones."""
    if "RANK" not in os.environ:
        return sm.launch(train_on_mesh, math.prod(options.mesh.values()), (options,))[0]
    run = train_on_mesh(options)
    torch.distributed.destroy_process_group()
    return run


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.compare:
        torch.set_num_threads(1)  # as on each rank, so that tokens/s are comparable
    runs = [] if options.single else [train_in_processes(options)]
    if int(os.environ.get("RANK", "0")) > 0:
        return 0
    if options.single or options.compare:
        runs.append(train(options, None))
    difference = report.compare(runs[0], runs[1], TOLERANCE) if options.compare else None
    report.save_metrics(options.out / "metrics.json", vars(options), runs, difference)
    report.save_plot(options.out / "loss.png", runs)
    return 0 if difference is None or difference <= TOLERANCE else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        # `launch` has ended the ranks, including the one whose progress bar hid the cursor.
        print("\ninterrupted" + ("\x1b[?25h" if sys.stdout.isatty() else ""))
        sys.exit(130)
