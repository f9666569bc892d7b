"""Writes and reads at indices of a sharded dim: the indexed tensor never moves, and keeps its
layout.
"""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.ops.rules.check import prove
from tests.sharding.ops.rules.table import b, f, i
from tests.sharding.ranks import collectives, launched, on_mesh

X = f(9, 4)
ROWS, CELLS = torch.tensor([8, 0, 3, 0]), torch.tensor([[8, 0, 3, 1], [0, 8, 2, 2]])
ORDERED = torch.tensor([8, 0, 3, 5])

WRITES = {
    "a row": lambda x, v: x.__setitem__(-2, 1.5),
    "a slice": lambda x, v: x.__setitem__(slice(2, 8, 3), 0.0),
    "a slice of values": lambda x, v: x.__setitem__(slice(1, 9, 2), v(f(4, 4, seed=1))),
    "a row of values": lambda x, v: x.__setitem__((5, slice(1, 3)), v(f(2))),
    "a column": lambda x, v: x.__setitem__((slice(None), 1), v(f(9))),
    "rows by number": lambda x, v: x.__setitem__(v(ORDERED), v(f(4, 4, seed=1))),
    "cells by number": lambda x, v: x.__setitem__((v(ORDERED), slice(1, 3)), v(f(4, 2))),
    "cells by two": lambda x, v: x.__setitem__((v(ORDERED), v(i(4, high=4))), v(f(4))),
    "a list": lambda x, v: x.__setitem__([3, -1], 2.0),
    "a mask": lambda x, v: x.__setitem__(v(X > 0), 0.0),
    "a mask of values": lambda x, v: x.__setitem__(v(X > 0), v(f(int((X > 0).sum())))),
    "a mask of rows": lambda x, v: x.__setitem__(v(b(9)), v(f(int(b(9).sum()), 4))),
    "index_put_": lambda x, v: x.index_put_((v(ROWS), v(i(4, high=4))), v(f(4)), accumulate=True),
    "index_add_": lambda x, v: x.index_add_(0, v(ROWS), v(f(4, 4)), alpha=2),
    "index_copy_": lambda x, v: x.index_copy_(0, v(ORDERED), v(f(4, 4))),
    "index_fill_": lambda x, v: x.index_fill_(0, v(ROWS), 3.0),
    "index_reduce_": lambda x, v: x.index_reduce_(0, v(ROWS), v(f(4, 4)), "prod"),
    "scatter_": lambda x, v: x.scatter_(0, v(CELLS), v(f(2, 4))),
    "scatter_ a number": lambda x, v: x.scatter_(0, v(CELLS), 7.0),
    "scatter_add_": lambda x, v: x.scatter_add_(0, v(CELLS), v(f(2, 4))),
    "scatter_ along the other dim": lambda x, v: x.scatter_(1, v(CELLS % 4), v(f(2, 4))),
    "scatter_reduce_": lambda x, v: x.scatter_reduce_(
        0, v(CELLS), v(f(2, 4)), "amax", include_self=False
    ),
    "put_": lambda x, v: x.put_(v(torch.tensor([35, -30, 0])), v(f(3))),
    "masked_fill_": lambda x, v: x.masked_fill_(v(X > 0), 0.0),
    "masked_scatter_": lambda x, v: x.masked_scatter_(v(X > 0), v(f(40))),
}


@pytest.mark.one_in(7)
@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize(
    "spec", [P("a"), P("b", "a"), P(("b", "a"), sizes={("b", "a"): (0, 5, 0, 4)})], ids=str
)
def test_written_tensor_does_not_move(name, spec):
    """With replicated values nothing is communicated; memory and layout are unchanged."""
    expected = X.clone()
    WRITES[name](expected, lambda value: value)

    def program(mesh):
        x = sm.distribute_tensor(X, mesh, spec, src_data_rank=None)
        layout, memory = sm.typeof(x), x.to_local().data_ptr()
        with collectives() as records:
            WRITES[name](x, lambda value: sm.distribute_tensor(value, mesh, src_data_rank=None))
        assert launched(records) == []
        assert sm.typeof(x) is layout
        assert x.to_local().data_ptr() == memory
        assert torch.equal(x.full_tensor(), expected)

    on_mesh((2, 2), program)


DIFFERENTIABLE = [name for name in WRITES if name not in ("scatter_reduce_", "masked_fill_")]


@pytest.mark.one_in(5)
@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_of_the_written_tensor_and_the_values(name):
    """Also on ranks where nothing is written; every rank runs the same reductions."""

    def run(x, given):
        leaves = []

        def value(t):
            t = given(t)
            if t.is_floating_point():
                leaves.append(t.requires_grad_())
            return t

        y = x * 2
        WRITES[name](y, value)
        return y, leaves

    plain = X.clone().requires_grad_()
    written, leaves = run(plain, torch.clone)
    weight = f(9, 4, seed=3)
    wanted = torch.autograd.grad(written, [plain, *leaves], weight)

    def program(mesh):
        for values in (P(), P("a")):
            x = sm.distribute_tensor(X, mesh, P("a"), src_data_rank=None).requires_grad_()
            y, leaves = run(
                x, lambda t, where=values: sm.distribute_tensor(t, mesh, where, src_data_rank=None)
            )
            grads = torch.autograd.grad(
                y, [x, *leaves], sm.distribute_tensor(weight, mesh, y.spec, src_data_rank=None)
            )
            for got, want in zip(grads, wanted, strict=True):
                torch.testing.assert_close(got.full_tensor(), want)

    on_mesh((4,), program)


def test_in_place_on_a_leaf_raises_on_every_rank():
    """As in torch; also on ranks that would write nothing."""

    def program(mesh):
        for write in (
            lambda x: x.__setitem__(0, 1.0),
            lambda x: x.__setitem__(slice(0, 1), 1.0),
            lambda x: x.__setitem__([0], 1.0),
        ):
            x = sm.distribute_tensor(X, mesh, P("a"), src_data_rank=None).requires_grad_()
            with pytest.raises(RuntimeError, match="leaf Variable"):
                write(x)

    on_mesh((3,), program)


def test_products_for_other_ranks_do_not_overflow_into_gradients():
    source = torch.full((9, 1), 1e30)

    def program(mesh):
        x = sm.distribute_tensor(torch.ones(9, 1), mesh, P("a"), src_data_rank=None)
        values = sm.distribute_tensor(source, mesh, src_data_rank=None).requires_grad_()
        places = sm.distribute_tensor(torch.arange(9)[:, None], mesh, src_data_rank=None)
        x.scatter_reduce(0, places, values, "prod").sum().backward()
        assert torch.equal(values.grad.full_tensor(), torch.ones(9, 1))

    on_mesh((3,), program)


SLICES = {
    "one row on": ((slice(1, None),), (39, 4), 2 * 4 * 8),
    "every other": ((slice(None, None, 2), slice(None)), (20, 4), 20 * 4 * 8),
    "few rows": ((slice(18, 22), slice(1, 3)), (4, 2), 4 * 2 * 8),
    "broadcast": ((slice(1, None),), (39, 1), 2 * 8),
    "one dim less": ((slice(2, 6), 1), (4,), 4 * 8),
    "one dim more": ((slice(2, 6), 1), (1, 4), 4 * 8),
}


@pytest.mark.parametrize("name", SLICES)
def test_sharded_values_are_sent_to_where_they_are_written(name):
    index, shape, most = SLICES[name]
    plain, value = f(40, 4).requires_grad_(), f(*shape, seed=2).requires_grad_()
    written = plain * 1
    written[index] = value
    weight = f(40, 4, seed=3)
    wanted = torch.autograd.grad(written, [plain, value], weight)

    def program(mesh):
        x, v = (
            sm.distribute_tensor(t.detach(), mesh, P("a"), src_data_rank=None).requires_grad_()
            for t in (plain, value)
        )
        y = x * 1
        with collectives() as records:
            y[index] = v
        assert sum(r.bytes_received for r in records) <= most
        assert sm.typeof(y) is sm.typeof(x)
        assert torch.equal(y.detach().full_tensor(), written)
        grads = torch.autograd.grad(
            y, [x, v], sm.distribute_tensor(weight, mesh, P("a"), src_data_rank=None)
        )
        for got, want in zip(grads, wanted, strict=True):
            torch.testing.assert_close(got.full_tensor(), want)

    on_mesh((4,), program)


def test_sharded_values_of_the_wrong_shape_raise():
    def program(mesh):
        x, v = (sm.distribute_tensor(t, mesh, P("a"), src_data_rank=None) for t in (X, f(4, 4)))
        with collectives() as records, pytest.raises(RuntimeError, match=r"shape|size"):
            x[1:4] = v
        assert not records

    on_mesh((3,), program)


READS = {
    "index_select": lambda x, v: x.index_select(0, v(ROWS)),
    "rows": lambda x, v: x[v(ROWS)],
    "rows from the end": lambda x, v: x[v(ROWS - 9)],
    "cells": lambda x, v: x[v(ROWS), v(i(4, high=4))],
    "columns of rows": lambda x, v: x[v(ROWS)[:, None], v(torch.tensor([1, 0]))],
    "gather": lambda x, v: x.gather(0, v(CELLS)),
    "take": lambda x, v: x.take(v(CELLS)),
    "take_along_dim": lambda x, v: torch.take_along_dim(x, v(CELLS), 0),
}


@pytest.mark.one_in(7)
@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.int32, torch.uint8, torch.bool, torch.complex128]
)
def test_reads_do_not_gather_the_tensor(name, dtype):
    values = (X * 3).to(torch.int32).abs().to(dtype)
    expected = READS[name](values, lambda t: t)

    def program(mesh):
        x = sm.distribute_tensor(values, mesh, P(("b", "a")), src_data_rank=None)
        with collectives() as records:
            made = READS[name](x, lambda t: sm.distribute_tensor(t, mesh, src_data_rank=None))
        assert launched(records) == []
        assert set(sm.typeof(made).pending) == {"a", "b"}
        assert torch.equal(made.full_tensor(), expected)

    on_mesh((2, 2), program)


def test_many_reads_of_a_small_tensor_gather_it():
    """Leaving that many results pending would cost more."""

    def program(mesh):
        x = sm.distribute_tensor(X, mesh, P("a"), src_data_rank=None)
        with collectives() as records:
            made = x.index_select(0, sm.distribute_tensor(i(100, high=9), mesh, src_data_rank=None))
        assert launched(records) == ["all_gather"]
        assert not sm.typeof(made).pending

    on_mesh((3,), program)


@pytest.mark.parametrize("kind", ["max", "min", "avg"])
def test_reads_of_other_pending_kinds(kind):
    prove(torch.index_select, (X, 0, ROWS), {}, meshes=[(2, 2)], kinds=("sum", kind), most=40)
    prove(torch.Tensor.__getitem__, (X, ROWS), {}, meshes=[(2, 2)], kinds=("sum", kind), most=40)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, v: x[v(torch.tensor([9]))],
        lambda x, v: x.index_select(0, v(torch.tensor([-1]))),
        lambda x, v: x.take(v(torch.tensor([36]))),
        lambda x, v: x.index_add(0, v(torch.tensor([9])), v(f(1, 4))),
        lambda x, v: x.scatter(0, v(torch.tensor([[9]])), 1.0),
        lambda x, v: x.put_(v(torch.tensor([36])), v(f(1))),
        lambda x, v: x.__setitem__(v(torch.tensor([-10])), 1.0),
    ],
)
def test_indices_out_of_range(call):
    """torch raises on every rank."""

    def program(mesh):
        x = sm.distribute_tensor(X, mesh, P("a", sizes={"a": (4, 0, 5)}), src_data_rank=None)
        with pytest.raises((IndexError, RuntimeError), match=r"out of|index"):
            call(x, lambda t: sm.distribute_tensor(t, mesh, src_data_rank=None))

    on_mesh((3,), program)


# -- how much there is -----------------------------------------------------------------------------


def test_selected_elements_stay_on_their_ranks():
    """Only the lengths of the parts are gathered."""

    def program(mesh):
        x = sm.distribute_tensor(X, mesh, P("a"), src_data_rank=None).requires_grad_()
        with collectives() as records:
            chosen = x[x > 0]
        assert sum(r.bytes_received for r in records) == 2 * 8
        assert chosen.spec.dims == (("a",),)
        assert torch.equal(chosen.detach().full_tensor(), X[X > 0])
        (chosen**2).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), torch.where(X > 0, 2 * X, 0))
        assert torch.equal((x > 0).nonzero().full_tensor(), (X > 0).nonzero())

    on_mesh((3,), program)


def test_counts_of_distinct_values_with_holes():
    values = torch.tensor([1.0, math.nan, 1.0, 2.0, math.nan, 2.0, 1.0])

    def program(mesh):
        x = sm.distribute_tensor(values, mesh, P("a"), src_data_rank=None)
        both = (t.unique(return_inverse=True, return_counts=True) for t in (x, values))
        for got, want in zip(*both, strict=True):
            torch.testing.assert_close(got.full_tensor(), want, equal_nan=True)

    on_mesh((3,), program)


def test_bincount_and_histc_are_reduced_not_gathered():
    """Sorted sequences, tables and histograms are summed, not gathered."""
    steps = torch.arange(900.0)

    def program(mesh):
        sequence, x = (
            sm.distribute_tensor(t, mesh, P("a"), src_data_rank=None) for t in (steps, steps % 7)
        )
        probes = sm.distribute_tensor(
            torch.tensor([-1.0, 3.5, 450.0, 1e9]), mesh, src_data_rank=None
        )
        with collectives() as records:
            found = [
                torch.searchsorted(sequence, probes),
                torch.bucketize(probes, sequence, right=True),
                torch.isin(probes, sequence),
                torch.histc(x, 5),
                torch.bincount(x.long()),
            ]
            whole = [y.full_tensor() for y in found]
        assert sum(r.bytes_received for r in records) < 1000
        plain = torch.tensor([-1.0, 3.5, 450.0, 1e9])
        assert torch.equal(whole[0], torch.searchsorted(steps, plain))
        assert torch.equal(whole[1], torch.bucketize(plain, steps, right=True))
        assert torch.equal(whole[2], torch.isin(plain, steps))
        assert torch.equal(whole[3], torch.histc(steps % 7, 5))
        assert torch.equal(whole[4], torch.bincount((steps % 7).long()))

    on_mesh((3,), program)


def test_negative_numbers_raise():
    def program(mesh):
        x = sm.distribute_tensor(torch.tensor([1, 2, 3, -4]), mesh, P("a"), src_data_rank=None)
        with pytest.raises(RuntimeError, match="-4 is among these"):
            torch.bincount(x)

    on_mesh((2,), program)


MASKS = [
    lambda m: m,
    lambda m: (slice(None), m[0]),
    lambda m: (Ellipsis, m[0]),
    lambda m: (m[:, 0], slice(None)),
]


@pytest.mark.parametrize("index", MASKS)
def test_masks_need_no_gather_and_no_warning(index):
    mask = X > 0

    def program(mesh):
        for spec in (P("a"), P(None, "a")):
            x, given = (sm.distribute_tensor(t, mesh, spec, src_data_rank=None) for t in (X, mask))
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert torch.equal(x[index(given)].full_tensor(), X[index(mask)])

    on_mesh((3,), program)


@pytest.mark.parametrize("spec", [P(), P("a"), P(None, "a")], ids=str)
@pytest.mark.parametrize(
    "targets",
    [[0, 5, 11, 17, 3, 19], [0, 5, 11, 17, 1], [0, 1, 2, 3]],
    ids=["many", "one each", "head"],
)
def test_adaptive_log_softmax_like_one_process(targets, spec):
    """A cluster with one row is written at an index without dims."""
    module = torch.nn.AdaptiveLogSoftmaxWithLoss(8, 20, [4, 10, 15], div_value=2.0).double()
    state = {name: p.detach().clone() for name, p in module.named_parameters()}
    x, target = f(len(targets), 8), torch.tensor(targets)

    def run(params, x, target):
        own = copy.deepcopy(module)  # ranks are threads, and functional_call writes to the module
        out = torch.func.functional_call(own, params, (x, target))
        out.loss.backward()
        grads = [p.grad for p in params.values() if p.grad is not None]
        return [out.output.detach(), out.loss.detach(), x.grad, *grads]

    expected = run(
        {name: p.clone().requires_grad_() for name, p in state.items()},
        x.clone().requires_grad_(),
        target,
    )

    def program(mesh):
        params = {
            name: sm.distribute_tensor(p.clone(), mesh).requires_grad_()
            for name, p in state.items()
        }
        rows = P(*spec.dims[:1])
        results = run(
            params, sm.device_put(x, mesh, spec).requires_grad_(), sm.device_put(target, mesh, rows)
        )
        for result, other in zip(results, expected, strict=True):
            torch.testing.assert_close(result.full_tensor(), other)

    on_mesh((2,), program)


@pytest.mark.parametrize("kind", ["sum", "avg", "max", "min", "product"])
def test_fill_diagonal_of_a_pending_tensor(kind):
    def program(mesh):
        x = sm.device_put(X, mesh, P()).redistribute(P(unreduced={"a": kind}))
        x.fill_diagonal_(3.0)
        assert sm.typeof(x).pending == {"a": kind}
        torch.testing.assert_close(x.full_tensor(), X.clone().fill_diagonal_(3.0))

    on_mesh((3,), program)
