"""`x[i] += y` where the selection has to move: x and the slice change as in one process."""

from __future__ import annotations

import operator
import weakref

import pytest
import torch

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.ops.rules.check import prove
from tests.sharding.ops.rules.table import f, i
from tests.sharding.ranks import collectives, every_rank, launched, on_mesh, same_error

X = f(5, 4)
INDICES = {
    "row": 0,
    "last row": -1,
    "rows": slice(1, 4),
    "steps": slice(None, None, 2),
    "no rows": slice(2, 2),
    "column": (slice(None), 2),
    "rest": (..., slice(1, None)),
    "element": (3, 1),
    "block": (slice(1, 4), slice(1, 3)),
    "new dim": (None, 1),
    "list": ([0, 3],),
}
OPERATORS = {
    "add": operator.iadd,
    "sub": operator.isub,
    "mul": operator.imul,
    "div": operator.itruediv,
}


def assigned(index, apply):
    def change(x, y):
        x = x * 1
        x[index] = apply(x[index], y)  # what Python runs for an augmented assignment
        return x

    return change


@pytest.mark.one_in(7)
@pytest.mark.parametrize("apply", OPERATORS)
@pytest.mark.parametrize("index", INDICES)
def test_every_index_in_all_layouts_with_gradients(index, apply):
    """Values and gradients of both, also with uneven and empty parts."""
    change = assigned(INDICES[index], OPERATORS[apply])
    y = f(*X[INDICES[index]].shape, seed=5) + 3
    assert prove(change, [X, y], kinds=[], most=5) >= 6


@pytest.mark.parametrize("index", [name for name in INDICES if name != "list"])
def test_integers(index):
    """Operators without gradients; numbers, which communicate no operand."""

    def change(x):
        x = x * 1
        x[INDICES[index]] //= 2
        x[INDICES[index]] <<= 1
        x[INDICES[index]] |= 5
        x[INDICES[index]] %= 7
        x[INDICES[index]] ^= 2
        return x

    prove(change, [i(5, 4, high=9)], kinds=[], most=4)


@pytest.mark.parametrize("spec", [P("a"), P(None, "a"), P()], ids=str)
def test_masks(spec):
    mask = X > 0

    def program(mesh):
        x, here = (
            sm.distribute_tensor(t, mesh, spec, src_data_rank=None) for t in (X.clone(), mask)
        )
        plain = X.clone()
        for t, m in ((x, here), (plain, mask)):
            t[m] += 1
            t[m] *= 2
        assert torch.equal(x.full_tensor(), plain)

    on_mesh((3,), program)


def test_pending_values_stay_pending():
    def change(x):
        x = x * 1
        x[1] += 2.0
        x[2:4] *= 3
        return x

    prove(change, [X], meshes=[(2, 2)], most=20)


@every_rank(3)
def test_writes_through_other_names(mesh):
    """Regardless of writes in between: to x, through another slice, to x untracked."""

    def change(x):
        row, rows = x[1], x[1:4]
        row += 1
        rows *= 2
        row -= 3
        x[2] = 0
        rows += row * 2
        x.data[3] = 5
        rows += 1
        x[4] = rows[1]
        row *= 3
        x[0] = row
        x[0] += row
        return row, rows, x

    x = sm.distribute_tensor(X, mesh, P("a"), src_data_rank=None)
    plain = X.clone()
    for made, wanted in zip(change(x), change(plain), strict=True):
        if made is not x:
            made += 0  # slices read before the last write are as old as all copies
        torch.testing.assert_close(made.full_tensor(), wanted + 0)
    torch.testing.assert_close(x.full_tensor(), plain)


@every_rank(4)
def test_communication(mesh):
    """A row comes to all ranks, and every rank then has what it writes; rows go there and back,
    once.
    """
    x = sm.distribute_tensor(f(8, 3), mesh, P("a"), src_data_rank=None)
    with collectives() as read:
        x[5]
    with collectives() as records:
        x[5] += 1
    assert launched(records) == launched(read)
    with collectives() as read:
        x[1:5]
    with collectives() as records:
        x[1:5] += 1
    assert len(records) == 2 * len(read)


@every_rank(3)
def test_parameters_without_gradients_recorded(mesh):
    x = sm.distribute_tensor(X, mesh, P("a"), src_data_rank=None).requires_grad_()
    with torch.no_grad():
        x[0] += 1
        x[1:3] *= 2
    expected = X.clone()
    expected[0] += 1
    expected[1:3] *= 2
    assert torch.equal(x.detach().full_tensor(), expected)
    x.sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.ones_like(X))


def _sharded(mesh, grad=False):
    return sm.distribute_tensor(X, mesh, P("a"), src_data_rank=None).requires_grad_(grad)


def _with_a_leaf(x):
    x[0] += 1


def _without_a_base(x):
    row = (x * 2)[0]
    row += 1


def _in_a_slice_of_a_slice(x):
    x[1:4][0] += 1


def _by_a_method(x):
    x[0].add_(1)


def _by_a_method_later(x):
    row = x[0]
    row += 1
    row.add_(1)


def _to_a_view(x):
    row = x[1:3][0]
    row += 1


@every_rank(3)
def test_a_slice_of_a_slice(mesh):
    """Where both had to move, and the outer one is still there."""
    x, plain = _sharded(mesh), X.clone()
    for one in (x, plain):
        _in_a_slice_of_a_slice(one)
        rows = one[1:4]
        rows[0].fill_(5)
    assert torch.equal(x.full_tensor(), plain)


@pytest.mark.parametrize(
    ("write", "grad", "words"),
    [
        (_with_a_leaf, True, "leaf"),
        (_without_a_base, False, "base would not change"),
        (_by_a_method, False, "base would not change"),
        (_by_a_method_later, False, "base would not change"),
        (_to_a_view, False, "base would not change"),
    ],
)
def test_lost_writes_raise(write, grad, words):
    assert words in same_error(
        (3,), lambda mesh: write(_sharded(mesh, grad)), RuntimeError, silent=False
    )


@every_rank(3)
def test_after_an_error_nothing_is_written(mesh):
    x = _sharded(mesh)
    row = x[0]
    with pytest.raises((RuntimeError, TypeError)):
        row += torch.ones(7)
    with pytest.raises(RuntimeError, match="base would not change"):
        row.add_(1)
    assert torch.equal(x.full_tensor(), X)
    row += 1
    assert torch.equal(x.full_tensor()[0], X[0] + 1)


@every_rank(3)
def test_unrelated_assignment_is_not_the_write_back(mesh):
    x = _sharded(mesh)
    row = x[0]
    row += 1
    x[1] = row
    x[0] = 0.0
    x[0] = row
    assert torch.equal(x.full_tensor()[:2], torch.stack([X[0] + 1, X[0] + 1]))


def test_a_copy_does_not_keep_its_base():
    def program(mesh):
        x = _sharded(mesh)
        row, alive = x[0], weakref.ref(x)
        del x
        assert alive() is None
        assert torch.equal(row.full_tensor(), X[0])

    on_mesh((2,), program)


def test_ranks_outside_the_mesh_run_backward():
    """Backward through the other mesh takes the ranks of both: each has the same graph."""

    def program(mesh):
        sub = sm.DeviceMesh("cpu", [0, 1], axis_names=("a",))
        x = sm.distribute_tensor(X, sub, P("a"), src_data_rank=None).requires_grad_()
        y = x * 1
        y[0] += x[1]
        y[1:3] *= 2
        (y * y).sum().backward()
        return None if sub.coordinate is None else x.grad.full_tensor()

    plain = X.clone().requires_grad_()
    y = plain * 1
    y[0] += plain[1]
    y[1:3] *= 2
    (y * y).sum().backward()
    first, second, outside = on_mesh((3,), program)
    torch.testing.assert_close(first, plain.grad)
    torch.testing.assert_close(second, plain.grad)
    assert outside is None


VIEWS = {
    "row": lambda x: x[0],
    "element": lambda x: x[3, 1],
    "column": lambda x: x[:, 2],
    "flat": lambda x: x.view(-1),
}
WRITES = {
    "copy_": lambda view: view.copy_(view * 2 + 1),
    "copy_ of a number": lambda view: view.copy_(torch.tensor(7.0, dtype=X.dtype)),
    "fill_": lambda view: view.fill_(3),
    "zero_": lambda view: view.zero_(),
    "assignment": lambda view: view.__setitem__(..., view * 5),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("spec", [P("a"), P(None, "a"), P()], ids=str)
def test_writes_to_views(spec, view, write):
    """x and the view change as in one process, the second time, too."""

    def program(mesh):
        x, plain = sm.distribute_tensor(X.clone(), mesh, spec, src_data_rank=None), X.clone()
        views = VIEWS[view](x), VIEWS[view](plain)
        for _ in range(2):
            for one in views:
                WRITES[write](one)
            assert torch.equal(x.full_tensor(), plain)
            assert torch.equal(views[0].full_tensor(), views[1])

    on_mesh((3,), program)
