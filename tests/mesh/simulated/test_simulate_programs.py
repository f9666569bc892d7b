"""Random programs of collectives give the values of a plain computation, and every run is
the same.
"""

from __future__ import annotations

import doctest
import importlib
import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import shardmesh as sm
from shardmesh import P
from shardmesh.mesh import CollectiveMismatchError, Group, current_world, simulate

OPS = ("sum", "max", "gather", "scatter", "exchange", "ring", "broadcast", "draw", "backward")


class GroupStep(NamedTuple):
    """One collective, or none, in every group of a partition of the ranks."""

    op: str
    groups: list[list[int]]
    seed: int


def steps(seed: int, n: int, count: int = 25) -> Iterator[GroupStep]:
    choose = random.Random(seed)
    for _ in range(count):
        ranks = choose.sample(range(n), n)
        cuts = sorted(choose.sample(range(1, n), choose.randint(0, n - 1)))
        groups = [sorted(ranks[a:b]) for a, b in zip([0, *cuts], [*cuts, n], strict=True)]
        yield GroupStep(choose.choice(OPS), groups, choose.randrange(1000))


def splits(seed: int, size: int, length: int) -> list[list[int]]:
    """Return how many elements each rank of a group sends to each other: uneven, some zero,
    `length` in total per rank.
    """
    choose = random.Random(seed)
    table = []
    for _ in range(size):
        cuts = sorted(choose.randint(0, length) for _ in range(size - 1))
        table.append([b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True)])
    return table


def spread(x: Tensor, length: int) -> Tensor:
    """Repeat or truncate x to a length, so that all values keep affecting the result."""
    return x.repeat(-(-length // max(1, x.numel())))[:length] if x.numel() else x.new_ones(length)


class SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        ctx.group, y = group, x.clone()
        group.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        y = grads[0].clone()
        ctx.group.all_reduce(y)
        return y, None


def collective(step: GroupStep, x: Tensor, group: Group) -> Tensor:
    """Run the step on one rank."""
    n, k = group.size, x.numel()
    if step.op in ("sum", "max"):
        group.all_reduce(x := x.clone(), step.op)
    elif step.op == "gather":
        group.all_gather(out := x.new_empty(n * k), x)
        return out[::n].clone()
    elif step.op == "scatter":
        group.reduce_scatter(out := x.clone(), x.repeat_interleave(n))
        return out
    elif step.op == "exchange":
        table = splits(step.seed, n, k)
        received = [row[group.rank] for row in table]
        group.all_to_all(out := x.new_empty(sum(received)), x, received, table[group.rank])
        return spread(out, k)
    elif step.op == "ring" and n > 1:
        group.permute(out := x.clone(), x, dst=(group.rank + 1) % n, src=(group.rank - 1) % n)
        return out
    elif step.op == "broadcast":
        group.broadcast(x := x.clone(), step.seed % n)
    return x


def one_rank(program: list[GroupStep], trace: list[tuple[int, str]]) -> Tensor:
    world = current_world()
    x = torch.arange(6.0) + world.rank
    for step in program:
        group = world.group(next(g for g in step.groups if world.rank in g))
        trace.append((world.rank, step.op))
        if step.op == "draw":
            x = x + torch.rand(6)
        elif step.op == "backward":
            leaf = x.clone().requires_grad_()
            (SumOver.apply(leaf, group) * (1 + world.rank)).sum().backward()
            x = x + leaf.grad
        else:
            x = collective(step, x, group)
        x = x.remainder(17)
    return x


def reference_step(step: GroupStep, xs: list[Tensor], ranks: list[int]) -> list[Tensor]:
    """Compute the step's result from all of a group's tensors."""
    n, k = len(xs), xs[0].numel()
    if step.op in ("sum", "max"):
        return [sum(xs[1:], xs[0]) if step.op == "sum" else torch.stack(xs).amax(0)] * n
    if step.op == "gather":
        return [torch.cat(xs)[::n]] * n
    if step.op == "scatter":
        return list(
            sum((x.repeat_interleave(n) for x in xs[1:]), xs[0].repeat_interleave(n)).chunk(n)
        )
    if step.op == "exchange":
        parts = [x.split(row) for x, row in zip(xs, splits(step.seed, n, k), strict=True)]
        return [spread(torch.cat(column), k) for column in zip(*parts, strict=True)]
    if step.op == "ring":
        return xs[-1:] + xs[:-1]
    if step.op == "broadcast":
        return [xs[step.seed % n]] * n
    return [x + sum(1.0 + r for r in ranks) for x in xs]  # backward


def reference(program: list[GroupStep], n: int) -> list[Tensor]:
    xs = [torch.arange(6.0) + r for r in range(n)]
    for step in program:
        drawn = torch.rand(6) if step.op == "draw" else None
        for ranks in step.groups:
            mine = [xs[r] for r in ranks]
            after = (
                [x + drawn for x in mine]
                if drawn is not None
                else reference_step(step, mine, ranks)
            )
            for r, x in zip(ranks, after, strict=True):
                xs[r] = x.remainder(17)
    return xs


@pytest.mark.parametrize("seed", range(12))
def test_random_programs(seed: int) -> None:
    n = 2 + seed % 6
    program = list(steps(seed, n))
    runs = []
    for _ in range(2):
        torch.manual_seed(seed)
        trace: list[tuple[int, str]] = []
        runs.append((simulate(n)(one_rank)(program, trace), trace))
    torch.manual_seed(seed)
    expected = reference(program, n)
    assert runs[0][1] == runs[1][1]
    assert len(runs[0][1]) == n * len(program)
    for x, again, plain in zip(runs[0][0], runs[1][0], expected, strict=True):
        assert torch.equal(x, again)
        assert torch.equal(x, plain)


def test_64_ranks_train_a_model() -> None:
    torch.manual_seed(0)
    x, weights = torch.randn(64, 64), [torch.randn(64, 64) / 8 for _ in range(4)]

    def step(y: Tensor, parameters: list[Tensor]) -> float:
        optimizer, first = torch.optim.AdamW(parameters, lr=1e-2), y
        for _ in range(2):
            y = first
            for w in parameters:
                y = y + torch.nn.functional.linear(y, w).tanh()
            loss = y.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item()

    def rank() -> float:
        mesh = sm.init_device_mesh("cpu", (8, 8), axis_names=("dp", "tp"))
        parameters = [sm.device_put(w, mesh, P("tp")).requires_grad_() for w in weights]
        return step(sm.device_put(x, mesh, P("dp")), parameters)

    found = simulate(64)(rank)()
    assert len(set(found)) == 1
    assert found[0] == pytest.approx(
        step(x, [w.clone().requires_grad_() for w in weights]), rel=1e-4
    )


def test_modules_run_like_functions() -> None:
    class Documented(torch.nn.Module):
        """Doc."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            mesh = sm.init_device_mesh("cpu", (2,), axis_names=("a",))
            w, b = (sm.device_put(p, mesh, P("a")) for p in (self.linear.weight, self.linear.bias))
            return torch.nn.functional.linear(sm.device_put(x, mesh, P()), w, b).full_tensor()

    model, x = Documented(), torch.randn(5, 4)
    for y in simulate(2)(model)(x):
        torch.testing.assert_close(y, model.linear(x))


def test_mapped_functions_run_and_errors_show_their_lines() -> None:
    def part(x: Tensor, stray: bool) -> Tensor:
        if stray and sm.axis_index("a") == 1:
            sm.pmax(x.sum(), "a")
        return sm.psum(x.sum(), "a")

    def rank(stray: bool) -> float:
        mesh = sm.init_device_mesh("cpu", (4,), axis_names=("a",))
        mapped = sm.shard_map(part, mesh=mesh, in_specs=(P("a"), None), out_specs=P())
        return mapped(sm.device_put(torch.arange(8.0), mesh, P("a")), stray).full_tensor().item()

    assert simulate(4)(rank)(False) == [28.0] * 4
    first = part.__code__.co_firstlineno
    with pytest.raises(CollectiveMismatchError) as caught:
        simulate(4)(rank)(True)
    said = " ".join(str(caught.value).split())  # lines break where the path is long
    assert (
        f"ranks [0, 2, 3] call all_reduce(sum, float32, 1 elements) at {__file__}:{first + 3}"
        in said
    )
    assert f"ranks [1] call all_reduce(max, float32, 1 elements) at {__file__}:{first + 2}" in said


def test_the_docstrings_example() -> None:
    results = doctest.testmod(importlib.import_module(simulate.__module__))
    assert (results.failed, results.attempted > 0) == (0, True)
