"""Communication of a step in each form: calls and bytes equal closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import MixedPrecisionPolicy, data_parallel, fully_shard
from shardmesh.sharding.parallel.data.grads import grad_bucketing
from shardmesh.sharding.parallel.data.grads.grad_places import GradWriter
from shardmesh.sharding.parallel.data.unit import Unit, unit_of
from tests.sharding.parallel.data.training import on_ranks
from tests.sharding.ranks import collectives, launched

D, F, BLOCKS, ITEM = 8, 16, 3, 8
BLOCK = D * F + F * D  # parameters of a block, and of the outermost unit
ROOT = D * D
UNITS = BLOCKS + 1
ALL = BLOCKS * BLOCK + ROOT  # nothing is lost between even rows


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(D, F, bias=False), nn.Linear(F, D, bias=False)

    def forward(self, x):
        return x + self.b(torch.tanh(self.a(x)))


def _model():
    return nn.Sequential(nn.Linear(D, D, bias=False), *[_Block() for _ in range(BLOCKS)]).double()


def _step(made, micro_batches=1):
    x = torch.linspace(-1, 1, 2 * D, dtype=torch.float64).view(2, D)
    if micro_batches == 1:
        made(x).square().mean().backward()
        return
    with sm.accumulate_grads():
        for _ in range(micro_batches):
            made(x).square().mean().backward()


def _used(shape, shard, steps=1, micro_batches=1):
    """Return calls and bytes received of each operation, in a step after the first."""

    def program(mesh):
        made = _model()
        shard(made, mesh)
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        for step in range(2):
            with sm.debug.comm_budget() as used:
                for _ in range(steps):
                    _step(made, micro_batches)
                    optimizer.step()
                    optimizer.zero_grad()
            if step:
                return used.by_op
        return None

    found = on_ranks(shape, program)
    assert all(one == found[0] for one in found)
    return found[0]


def _gathered(n, elements=ALL):
    return elements * ITEM * (n - 1) // n


def _reduced(n, elements=ALL):
    return elements * ITEM * (n - 1) // n


def _summed(n, elements=ALL):
    return 2 * _gathered(n, elements)


N = 4
TABLE = {
    # form: all_gathers, reduce_scatters, all_reduces as (calls, elements)
    # What is around the blocks, which are small and are summed together.
    "ddp": ({}, (0, 0), (0, 0), (2, ALL)),
    "zero1": ({"optimizer": "dp"}, (UNITS, ALL), (UNITS, ALL), (0, 0)),
    "zero2": ({"optimizer": "dp", "gradient": "dp"}, (UNITS, ALL), (UNITS, ALL), (0, 0)),
    "fsdp": (
        {"optimizer": "dp", "gradient": "dp", "parameter": "dp"},
        (UNITS + BLOCKS, ALL + BLOCKS * BLOCK),
        (UNITS, ALL),
        (0, 0),
    ),
}


def _expected(gathers, reduces, sums, n=N):
    found = {
        "all_gather": (gathers[0], _gathered(n, gathers[1])),
        "reduce_scatter": (reduces[0], _reduced(n, reduces[1])),
        "all_reduce": (sums[0], _summed(n, sums[1])),
    }
    return {op: one for op, one in found.items() if one[0]}


@pytest.mark.parametrize("form", TABLE)
def test_a_step(form):
    axes, *numbers = TABLE[form]
    assert _used((N,), lambda m, mesh: data_parallel(m, mesh, units=_Block, **axes)) == _expected(
        *numbers
    )


@pytest.mark.parametrize(("reshard", "again"), [(None, BLOCKS), (True, BLOCKS), (False, 0)])
def test_fully_shard(reshard, again):
    """Units freed after forward are gathered again for backward, except the outermost one: its
    input needs no gradient.
    """
    expected = _expected((UNITS + again, ALL + again * BLOCK), (UNITS, ALL), (0, 0))
    assert (
        _used(
            (N,), lambda m, mesh: fully_shard(m, mesh, units=_Block, reshard_after_forward=reshard)
        )
        == expected
    )


def test_reshard_after_forward_to_part_of_the_mesh():
    """In backward, gathered over two ranks only."""
    expected = {
        "all_gather": (UNITS + BLOCKS, _gathered(4) + _gathered(2, BLOCKS * BLOCK)),
        "reduce_scatter": (UNITS, _reduced(4)),
    }
    assert (
        _used(
            (2, 2),
            lambda m, mesh: fully_shard(
                m, mesh, axes=("dp", "fsdp"), units=_Block, reshard_after_forward=2
            ),
        )
        == expected
    )


def test_hsdp():
    """Within `fsdp` as fully_shard; then each rank's part of the gradients is summed over `dp`."""
    expected = {
        "all_gather": (UNITS + BLOCKS, _gathered(2, ALL + BLOCKS * BLOCK)),
        "reduce_scatter": (UNITS, _reduced(2)),
        "all_reduce": (UNITS, _summed(2, ALL // 2)),
    }
    assert _used((2, 2), lambda m, mesh: fully_shard(m, mesh, units=_Block)) == expected


def test_hybrid():
    """Parameters sharded over `fsdp`, the optimizer over both: one more gather of a part over `dp`
    after each step.
    """
    expected = {
        "all_gather": (
            2 * UNITS + BLOCKS,
            _gathered(2, ALL // 2) + _gathered(2, ALL + BLOCKS * BLOCK),
        ),
        "reduce_scatter": (UNITS, _reduced(4)),
    }
    axes = {"parameter": "fsdp", "optimizer": ("dp", "fsdp"), "gradient": ("dp", "fsdp")}
    assert _used((2, 2), lambda m, mesh: data_parallel(m, mesh, units=_Block, **axes)) == expected


@pytest.mark.parametrize("form", TABLE)
def test_micro_batches(form):
    """FSDP and ZeRO-2 sum gradients per microbatch, DDP and ZeRO-1 once. FSDP gathers per
    microbatch.
    """
    axes, gathers, reduces, sums = TABLE[form]
    times = 3
    if form == "fsdp":
        gathers, reduces = (times * gathers[0], times * gathers[1]), (times * UNITS, times * ALL)
    if form == "zero2":
        reduces = (times * UNITS, times * ALL)
    if form == "ddp":
        sums = (1, ALL)  # at the end of the block
    found = _used(
        (N,), lambda m, mesh: data_parallel(m, mesh, units=_Block, **axes), micro_batches=times
    )
    assert found == _expected(gathers, reduces, sums)


def test_frozen_parameters_are_not_reduced():
    """With a frozen base and small trained parts, the base is gathered and only the gradients of
    the rest are summed.
    """
    rank = 2

    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(D, F, bias=False).requires_grad_(False)
            self.down, self.up = nn.Linear(D, rank, bias=False), nn.Linear(rank, F, bias=False)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    def program(mesh):
        made = fully_shard(Adapted().double(), mesh)
        with sm.debug.comm_budget() as used:
            made(torch.ones(2, D, dtype=torch.float64)).sum().backward()
        assert made.base.weight.grad is None
        return used.by_op

    adapters = rank * (D + F)
    assert on_ranks((2,), program)[0] == {
        "all_gather": (2, _gathered(2, D * F + adapters)),
        "reduce_scatter": (1, _reduced(2, adapters)),
    }


def test_bytes_of_other_dtypes():
    """Gathered in bfloat16, summed in float32: a quarter and a half of the bytes of float64."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = _used((N,), lambda m, mesh: fully_shard(m, mesh, units=_Block, mp_policy=policy))
    assert found == {
        "all_gather": (UNITS + BLOCKS, _gathered(N, ALL + BLOCKS * BLOCK) // 4),
        "reduce_scatter": (UNITS, _reduced(N) // 2),
    }


def test_evaluation_gathers_once():
    def program(mesh):
        made = fully_shard(_model(), mesh, units=_Block, reshard_after_forward=False)
        with torch.no_grad(), sm.debug.comm_budget() as used:
            for _ in range(3):
                made(torch.ones(1, D, dtype=torch.float64))
        return used.by_op

    assert on_ranks((N,), program)[0] == _expected((UNITS, ALL), (0, 0), (0, 0))


def test_uneven_rows_cost_as_much_as_the_longest_piece():
    """Per unit, a piece exceeds its share by at most one row of d and one of f."""
    d, f, n = 5, 7, 4

    def program(mesh):
        made = fully_shard(nn.Sequential(nn.Linear(d, f), nn.Linear(f, d)).double(), mesh)
        with sm.debug.comm_budget() as used:
            made(torch.ones(1, d, dtype=torch.float64)).sum().backward()
        return used.by_op

    found, elements = on_ranks((n,), program)[0], 2 * d * f + d + f
    assert found["all_gather"][0] == found["reduce_scatter"][0] == 1
    assert found["all_gather"][1] == found["reduce_scatter"][1]
    assert (
        _gathered(n, elements)
        <= found["all_gather"][1]
        <= ITEM * (n - 1) * (math.ceil(elements / n) + d + f)
    )


def test_scalars_are_summed_together():
    """A scalar cannot be sharded: those of all units are summed in one collective."""

    def program(mesh):
        made = nn.Sequential(*[_ScaledByParameters() for _ in range(3)]).double()
        fully_shard(made, mesh, units=_ScaledByParameters)
        with sm.debug.comm_budget() as used:
            made(torch.ones(2, D, dtype=torch.float64)).sum().backward()
        return used.by_op["all_reduce"], made[0].g.spec

    calls, spec = on_ranks((4,), program)[0]
    assert calls == (1, _summed(4, 3))
    assert spec == P()


class _ScaledByParameters(nn.Module):
    def __init__(self):
        super().__init__()
        self.g, self.w = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(D))

    def forward(self, x):
        return x * self.g * self.w


@pytest.mark.parametrize("form", ["ddp", "hsdp"])
def test_all_reduces_overlap_with_backward(form, monkeypatch):
    """A unit's all_reduce is launched before backward reaches the previous units, and is done at
    the end of backward.
    """
    monkeypatch.setattr(grad_bucketing, "FIRST_BUCKET_BYTES", 1)
    monkeypatch.setattr(grad_bucketing, "BUCKET_BYTES", 1)

    def program(mesh):
        made = (
            data_parallel(_model(), mesh, units=_Block)
            if form == "ddp"
            else fully_shard(_model(), mesh, units=_Block)
        )
        x = torch.ones(2, D, dtype=torch.float64)
        with sm.debug.comm_budget() as used:
            y = made[1](made[0](x))
            seen = []
            y.register_hook(lambda _: seen.append(used.by_op.get("all_reduce", (0, 0))[0]))
            made[3](made[2](y)).sum().backward()
        return seen, used.by_op["all_reduce"][0]

    shape = (4,) if form == "ddp" else (2, 2)
    for (before,), after in on_ranks(shape, program):
        assert before >= 1
        assert after == UNITS


def test_small_units_share_an_all_reduce_without_copies(monkeypatch):
    """The first unit is reduced alone once it has enough bytes, the others together; from the
    second backward on they share one buffer.
    """
    monkeypatch.setattr(grad_bucketing, "FIRST_BUCKET_BYTES", 1)

    def made():
        torch.manual_seed(0)
        return _model()

    def program(mesh):
        module, buffers, calls = data_parallel(made(), mesh, units=_Block), [], []
        for _ in range(3):
            module.zero_grad()
            with sm.debug.comm_budget() as used:
                module(torch.ones(2, D, dtype=torch.float64)).sum().backward()
            calls.append(used.by_op["all_reduce"][0])
            of_blocks = [
                p.grad.to_local() for block in list(module)[1:] for p in block.parameters()
            ]
            buffers.append(len({x.untyped_storage().data_ptr() for x in of_blocks}))
        return calls, buffers, [p.grad.full_tensor() for p in module.parameters()]

    plain = made()
    plain(torch.ones(2, D, dtype=torch.float64)).sum().backward()
    for calls, buffers, grads in on_ranks((N,), program):
        assert calls == [3] * 3  # the last block, the others, what is around them
        assert buffers == [2] * 3  # first packed, then put there
        for found, expected in zip(grads, plain.parameters(), strict=True):
            torch.testing.assert_close(found, expected.grad)


class _Headed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.Sequential(*[_Block() for _ in range(BLOCKS)]), nn.Linear(D, D)

    def forward(self, x, hook=None):
        hidden = self.blocks(x)
        if hook is not None:
            hidden.register_hook(hook)
        return {"logits": self.head(hidden)}


def test_the_last_units_gather_overlaps_with_the_head():
    """It is launched when backward begins, not after the backward of what follows the unit in the
    model; without backward, never.
    """

    def program(mesh):
        made = fully_shard(_Headed().double(), mesh, units=_Block)
        x = torch.ones(2, D, dtype=torch.float64)
        seen = []
        for _ in range(2):
            made(x)["logits"].sum().backward()
        with collectives() as records:
            made(x)
            loss = made(x, hook=lambda _: seen.append(launched(records)))["logits"].sum()
            forward = launched(records)
            loss.backward()
        return (
            len(forward),
            [calls[len(forward) :] for calls in seen],
            launched(records)[len(forward) :].count("all_gather"),
        )

    for forward, seen, backward in on_ranks((N,), program):
        assert (forward, seen, backward) == (BLOCKS + 1 + BLOCKS, [["all_gather"]], BLOCKS)


@pytest.mark.parametrize("find", [False, True])
def test_backward_delays_the_next_gather_while_a_reduction_is_pending(find, monkeypatch):
    """During a unit's reduction, the gather waits for half of the next unit's gradients, so that at
    most three unit buffers are alive.

    With `find_unused_parameters` gradients may differ between ranks, so they gather at the start.
    """
    gather, put, logs = Unit.gather, GradWriter.write, {}

    def gathers(unit):
        if torch._C._current_graph_task_id() != -1 and not any(
            bucket.storage.is_gathered for bucket in unit.plan.buckets
        ):
            logs[id(unit.schedule)].append(f"gather {unit.plan.name}")
        gather(unit)

    def puts(placing, number, *given):
        unit = placing._deferred.__self__
        logs[id(unit.schedule)].append(f"gradient of {unit.plan.name}")
        return put(placing, number, *given)

    def program(mesh):
        made = fully_shard(_model(), mesh, units=_Block, find_unused_parameters=find)
        schedule = unit_of(made).schedule
        log = logs[id(schedule)] = []
        for _ in range(2):
            log.clear()
            made(torch.ones(2, D, dtype=torch.float64)).sum().backward()
        return log

    monkeypatch.setattr(Unit, "gather", gathers)
    monkeypatch.setattr(GradWriter, "write", puts)
    for log in on_ranks((N,), program):
        log = [event for at, event in enumerate(log) if event not in log[:at]]
        first = ["gather 3", "gather 2", "gradient of 3"]
        later = ["gather 1", "gradient of 2"] if find else ["gradient of 2", "gather 1"]
        assert log == [*first, *later, "gradient of 1", "gradient of "]


def test_units_in_a_new_order_are_reduced(monkeypatch):
    """Gradients that are no longer adjacent are packed."""
    monkeypatch.setattr(grad_bucketing, "FIRST_BUCKET_BYTES", 1)

    class Shuffled(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList([_Block() for _ in range(BLOCKS)]).double()

        def forward(self, x, order):
            for i in order:
                x = self.blocks[i](x)
            return x.sum()

    orders = [(0, 1, 2), (0, 1, 2), (1, 0, 2), (2, 2, 0), (1,), (0, 1, 2)]
    x = torch.ones(2, D, dtype=torch.float64)

    def program(mesh):
        module, found = data_parallel(Shuffled(), mesh, units=_Block), []
        for order in orders:
            module.zero_grad()
            module(x, order).backward()
            found.append(
                [None if p.grad is None else p.grad.full_tensor() for p in module.parameters()]
            )
        return found

    plain, expected = Shuffled(), []
    for order in orders:
        plain.zero_grad()
        plain(x, order).backward()
        expected.append([None if p.grad is None else p.grad.clone() for p in plain.parameters()])
    for found in on_ranks((2,), program):
        torch.testing.assert_close(found, expected)


def test_penalty_on_parameters_outside_the_units():
    """Gradients that reach a parameter outside of its unit, or from several forwards, are added to
    those that the unit reduces.
    """

    def program(mesh, split):
        torch.manual_seed(0)
        made = _model()
        if split:
            data_parallel(made, mesh, units=_Block)
        x = torch.ones(2, D, dtype=torch.float64)
        total = sum(p.square().sum() for p in made.parameters())
        total = total.to_local() if split else total
        (made(x).sum() + made(2 * x).sum() + total).backward()
        return [p.grad.full_tensor() if split else p.grad for p in made.parameters()]

    for found, expected in zip(
        on_ranks((2,), program, True), on_ranks((2,), program, False), strict=True
    ):
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y)
