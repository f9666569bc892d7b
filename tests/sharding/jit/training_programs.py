"""Random training programs for `sm.jit`: modules whose forwards are lines drawn from a table, among
them shapes that depend on values, Python branches on values, Python state, and random numbers.

    Program(seed)
    ├─ form      how parameters and rows are laid out on the ranks
    ├─ blocks    lines of each block's forward, in the order in which they were drawn
    └─ step      accumulation, clipping, what Python does with the loss

Each rank has rows of its own where a form splits the batch, so that ranks read other values, and
take other branches.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import data_parallel, fully_shard, parallelize
from tests.device import DEVICE
from tests.sharding.jit.test_values import package

D, STEPS = 4, 6
FORMS = ("one process", "data_parallel", "fully_shard", "parallelize", "sharded rows")
JITTED = ("step", "model", "blocks", "loss")
PLAN = {"*.up.weight": P("a"), "*.up.bias": P("a"), "*.down.weight": P(None, "a")}

RECORDED = (  # what a graph repeats
    "x = x + self.mlp(x)",
    "x = x + self.mlp(self.norm(x))",
    "x = x + self.shared(x).tanh()",
    "x = self.norm(x)",
    "x = self.drop(x)",
    "x = x * self.scale",
    "x = x + x.softmax(-1)",
    "x = x.tanh() * 2",
    "x = x.masked_fill(x > 1, 0.5)",
    "y = x.clone(); y[:, 0] = 0.5; x = x + y",
    "y = x * 1; y.mul_(0.5); x = x + y",
    "self.total.add_(x.detach().abs().sum() * 0 + 1); x = x + self.total * 0.01",
    "x = x + checkpoint(self.mlp, x, use_reentrant=False)",
    "x = x + torch.where(x > 0, x, x * 0.1)",
    "x = x * x.detach().abs().mean().item()",
    "x = x + torch.rand(x.shape[-1], device=x.device) if not is_sharded(x) else x",
)
SELECTED = (  # what an installed package reads
    "x = masked(x, x.detach() > self.limit)",
    "x = branches(x, x.detach() < 3 * self.limit)",
    "x = masked(x, mask)",
)
BREAKS = (
    "x = x / 2 if x.sum() > 0 else x",
    "x = x * (1 + float(x.detach().mean()))",
    "x = x + x[x > 0].sum()",
    "x = x + x[x.detach().sum((1, 2)) > 0].sum() * 0.1",
    "x = x / (1 + len(x.detach().flatten().round().unique()))",
    "x = x + 0.1 * (x > 0).nonzero().shape[0]",
    "for _ in range(int(x.detach().abs().sum() * 10) % 3): x = x.tanh()",
    "x = x * int(x.detach().abs().max() + 1)",
    "self.calls += 1; x = x + self.calls * 0.1",
    "self.seen.append(x.detach().mean()); x = x + self.seen[-2] if len(self.seen) > 2 else x",
    "x = x if self.last is None else x + self.last * 0.1; self.last = x.detach().mean()",
    "x = x * max(x.detach().flatten().tolist()[:3])",
)
MOST_LINES = 5


def is_sharded(x: Any) -> bool:
    return isinstance(x, sm.ShardedTensor)


class Mlp(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    """A block whose forward is a function of these lines.

    Args:
        shared: a layer of several blocks.
    """

    def __init__(self, lines: list[str], shared: nn.Module) -> None:
        super().__init__()
        self.mlp, self.norm, self.drop = Mlp(), nn.LayerNorm(D), nn.Dropout(0.1)
        self.scale = nn.Parameter(torch.full((D,), 0.9))
        self.register_buffer("total", torch.zeros(()))
        self.shared = shared
        self.limit, self.calls, self.last = 0.3, 0, None
        self.seen: list[Any] = []
        body = "\n    ".join(lines)
        scope: dict[str, Any] = {
            "torch": torch,
            "checkpoint": checkpoint,
            "is_sharded": is_sharded,
            "masked": package("masked"),
            "branches": package("branches"),
        }
        exec(
            compile(f"def run(self, x, mask):\n    {body}\n    return x", "<stdin>", "exec"), scope
        )
        self.run = scope["run"]

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.run(self, x, mask)


class Model(nn.Module):
    """Blocks, and a break between two of them if there is one."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        shared = nn.Linear(D, D)
        self.blocks = nn.ModuleList([Block(lines, shared) for lines in program.blocks])
        self.head = nn.Linear(D, 1)
        self.breaks_after = program.breaks_after

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x, mask)
            if i == self.breaks_after and x.abs().max() > 1:
                x = x / 2
        return self.head(x).square().mean()


class Program:
    """A program drawn from a seed.

    Attributes:
        jitted: what is under `sm.jit`: the whole step, the model, its blocks, or the loss.
        blocks: the lines of each block.
        breaks_after: the number of the block after which the model has a break; -1 for none.
        lengths: of the sequences in each step, the same on all ranks or not.
    """

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.seed = seed
        self.form, self.jitted = rng.choice(FORMS), rng.choice(JITTED)
        kinds = [RECORDED] * 5 + [SELECTED] + [BREAKS] * 2
        self.blocks = [
            [rng.choice(rng.choice(kinds)) for _ in range(rng.randint(1, MOST_LINES))]
            for _ in range(rng.randint(1, 3))
        ]
        self.breaks_after = rng.choice([-1, -1, 0])
        self.accumulates = rng.choice([1, 1, 2])
        self.clips, self.branches_on_loss = rng.random() < 0.5, rng.random() < 0.2
        self.logs, self.schedules = rng.random() < 0.2, rng.random() < 0.3
        self.evaluates = rng.random() < 0.3
        self.differs = rng.random() < 0.3  # lengths of ranks
        self.lengths = [rng.choice([2, 2, 3]) for _ in range(2 * STEPS)]

    def __str__(self) -> str:
        blocks = "".join(f"\n  block {i}: {lines}" for i, lines in enumerate(self.blocks))
        return f"program {self.seed}: {vars(self) | {'blocks': blocks}}"

    @property
    def ranks(self) -> int:
        return 1 if self.form == "one process" else 2

    def model(self, mesh: sm.DeviceMesh) -> Model:
        torch.manual_seed(0)
        model = Model(self).to(DEVICE)
        if self.form == "data_parallel":
            data_parallel(model, mesh)
        elif self.form == "fully_shard":
            fully_shard(model, mesh, units=["Block"])
        elif self.form in ("parallelize", "sharded rows"):
            parallelize(model, mesh, PLAN if self.form == "parallelize" else {})
        return model

    def batch(self, mesh: sm.DeviceMesh, step: int, micro: int) -> tuple[Any, Any]:
        """Return rows [b, s, d] and a mask of theirs."""
        generator = torch.Generator().manual_seed(100 * step + micro)
        rank = mesh.get_rank()
        splits = self.form in ("data_parallel", "fully_shard")
        at = step + STEPS * rank if splits and self.differs else step
        x = torch.randn(4, self.lengths[at], D, generator=generator)
        mask = torch.ones(x.shape, dtype=torch.bool)
        mask[:, :, 0] = step % 2 == 0
        if splits:
            x, mask = x.chunk(2)[rank], mask.chunk(2)[rank]
            if rank and step % 3 == 0:
                mask = torch.ones_like(mask)
        elif self.form in ("parallelize", "sharded rows"):
            spec = P() if self.form == "parallelize" else P("a")
            return sm.device_put(x.to(DEVICE), mesh, spec), sm.device_put(
                mask.to(DEVICE), mesh, spec
            )
        return x.to(DEVICE), mask.to(DEVICE)

    def run(self, mesh: sm.DeviceMesh, jit: Callable[..., Any] | None) -> tuple[list[Tensor], int]:
        """Train, under `jit` if there is one. Return losses and parameters, and how many graphs
        there are.
        """
        model = self.model(mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        rates = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        functions: list[Any] = []
        logged: list[Tensor] = []

        def wrapped(what: str, f: Any) -> Any:
            if jit is None or self.jitted != what:
                return f
            functions.append(jit(f))
            return functions[-1]

        for i, block in enumerate(model.blocks):
            model.blocks[i] = wrapped("blocks", block)
        called = wrapped("model", model)

        def loss_of(x: Any, mask: Any) -> Any:
            loss = called(x, mask) / self.accumulates
            return loss * 2 if self.branches_on_loss and loss > 0.5 else loss

        loss_of = wrapped("loss", loss_of)

        def step(batches: list[tuple[Any, Any]]) -> Any:
            total = None
            for x, mask in batches:
                loss = loss_of(x, mask)
                loss.backward()
                total = loss.detach() if total is None else total + loss.detach()
            if self.clips:
                sm.training.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            if self.logs:
                logged.append(total)
            return total

        step = wrapped("step", step)
        results = []
        for i in range(STEPS):
            torch.manual_seed(i)
            sm.random.manual_seed(i)
            results.append(step([self.batch(mesh, i, k) for k in range(self.accumulates)]))
            if self.schedules:
                rates.step()
            if self.evaluates and i % 3 == 1:
                model.eval()
                with torch.no_grad():
                    results.append(called(*self.batch(mesh, i, 9)))
                model.train()
        values = [*results, *logged, *model.parameters(), *model.buffers()]
        numbers = [torch.tensor(float(block.calls)) for block in model.blocks]
        graphs = sum(len(f.recorded) for f in functions)
        whole = [getattr(x, "full_tensor", lambda x=x: x)() for x in values]
        return [*(x.detach().clone() for x in whole), *numbers], graphs
