"""Adding in place to pending values: nothing is reduced, nothing is added twice, and gradients are
those of one process.
"""

from __future__ import annotations

import pytest
import torch

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.ops.rules.check import place, prove
from shardmesh.sharding.ops.rules.propagation import CannotKeep
from tests.sharding.ops.rules.table import f, i
from tests.sharding.ranks import collectives, launched, on_mesh, same_error

X, Y = f(4, 3), f(4, 3, seed=3)


def added(x, y):
    x = x * 1
    x += y
    return x


def subtracted(x, y):
    x = x * 1
    x -= y
    return x


def with_coefficient(x, y):
    return (x * 1).add_(y, alpha=-3).sub_(2 * y)


def with_itself(x, y):
    x = x * y
    return x.add_(x, alpha=0.5).subtract_(y)


def with_numbers(x):
    x = x * 1
    x += 1.5
    x -= 2
    return x.add_(other=3, alpha=2).subtract_(torch.tensor(0.5))


@pytest.mark.one_in(5, each=["mesh", "change", "y"])
@pytest.mark.parametrize("mesh", [(3,), (2, 2)])
@pytest.mark.parametrize("change", [added, subtracted, with_coefficient, with_itself])
@pytest.mark.parametrize(
    "y", [Y, f(3, seed=1), f(4, 1, seed=2), f(seed=4)], ids=["matrix", "row", "column", "number"]
)
def test_sums_in_all_layouts_of_both(mesh, change, y):
    """A product with one keeps every layout, so that all that is tried is written; a layout that is
    refused fails here.
    """
    assert prove(change, [X, y], meshes=[mesh], most=40) >= 8


@pytest.mark.parametrize("mesh", [(3,), (2, 2)])
@pytest.mark.parametrize("kind", ["sum", "avg"])
def test_numbers_in_all_layouts(mesh, kind):
    assert prove(with_numbers, [X], kinds=[kind], meshes=[mesh]) >= 4


@pytest.mark.parametrize("mesh", [(3,), (2, 2)])
def test_averages_in_all_layouts_of_both(mesh):
    assert prove(added, [X, Y], kinds=["avg"], meshes=[mesh], most=40) >= 8


def test_integers_and_bools():
    assert prove(with_numbers_only, [i(4, 3)], meshes=[(3,), (2, 2)]) > 8

    def program(mesh):
        x = sm.from_local(
            torch.tensor([mesh.world.rank == 1, False, False]), mesh, P(unreduced={"a": "max"})
        )
        x += sm.distribute_tensor(torch.tensor([False, True, False]), mesh)
        return x.full_tensor().tolist()

    assert on_mesh((2,), program) == [[True, True, False]] * 2


def with_numbers_only(x):
    x = x * 1
    x += 2
    x -= 7
    return x


FREE = {
    "replicated": lambda x, y: x.add_(y["replicated"]),
    "split": lambda x, y: x.sub_(y["split"]),
    "pending over the same axes": lambda x, y: x.add_(y["same"]),
    "pending over one of them": lambda x, y: x.add_(y["one"], alpha=2),
    "number": lambda x, y: x.sub_(2.5),
}


@pytest.mark.parametrize("name", FREE)
def test_no_communication_and_unchanged_layout(name):
    def program(mesh):
        x = place(X, mesh, P(unreduced={"a", "b"}))
        specs = {
            "replicated": P(),
            "split": P("a", "b"),
            "same": P(unreduced={"a", "b"}),
            "one": P(unreduced={"b"}),
        }
        addends = {key: place(Y, mesh, spec, 5) for key, spec in specs.items()}
        with collectives() as records:
            FREE[name](x, addends)
        assert not records
        assert sm.typeof(x).pending == {"a": "sum", "b": "sum"}

    on_mesh((2, 2), program)


def test_addend_is_reduced_over_axes_where_the_target_is_not_pending():
    """`loss += coefficient * aux`."""

    def program(mesh):
        loss, aux = place(X, mesh, P(unreduced={"a"})), place(Y, mesh, P(unreduced={"a", "b"}), 5)
        with collectives() as records:
            loss += 0.5 * aux
        assert launched(records) == ["all_reduce"]
        assert sm.typeof(loss).pending == {"a": "sum"}
        torch.testing.assert_close(loss.full_tensor(), X + 0.5 * Y)

    on_mesh((2, 2), program)


@pytest.mark.parametrize("kind", ["max", "min"])
def test_extremes_are_shifted(kind):
    """By what is replicated along their axes; its gradient is that of the single process."""

    def program(mesh):
        x = place(X, mesh, P("b", unreduced={"a": kind}), 1).requires_grad_()
        r = sm.distribute_tensor(Y, mesh).requires_grad_()
        s = place(Y, mesh, P("b")).requires_grad_()
        total = torch.cat([x])  # a copy that stays pending
        with collectives() as records:
            total += r * 2
            total -= s
            total += 1.5
            total.sub_(torch.tensor(0.5))
        assert not records
        assert sm.typeof(total).pending == {"a": kind}
        value = total.redistribute(P())
        (value * sm.distribute_tensor(X, mesh)).sum().backward()
        return value.detach().full_tensor(), r.grad.full_tensor(), s.grad.full_tensor()

    for value, of_r, of_s in on_mesh((2, 2), program):
        torch.testing.assert_close(value, X + 2 * Y - Y + 1.5 - 0.5)
        torch.testing.assert_close(of_r, 2 * X)
        torch.testing.assert_close(of_s, -X)


def test_pending_extremes_cannot_be_added():
    def program(mesh):
        x = place(X, mesh, P(unreduced={"a": "max"}))
        y = place(Y, mesh, P(unreduced={"a": "max"}), 5)
        x += y

    assert "would have to change its layout" in same_error((2,), program, CannotKeep)


@pytest.mark.parametrize("spec", [P("a"), P(unreduced={"a": "sum"}), P(unreduced={"a": "min"})])
def test_pending_extreme_with_a_varying_addend_raises(spec):
    def program(mesh):
        x = place(X, mesh, P(unreduced={"a": "max"}))
        x += place(Y, mesh, spec, 5)

    same_error((2,), program, CannotKeep)


def test_adding_to_a_pending_product_raises():
    def program(mesh):
        x = place(X, mesh, P(unreduced={"a": "product"}))
        x += 1.0

    same_error((2,), program, CannotKeep)


def test_out_of_place_sums_are_reduced_first():
    def program(mesh):
        x, r = place(X, mesh, P(unreduced={"a"})), sm.distribute_tensor(Y, mesh)
        assert not sm.typeof(x + r).pending
        assert not sm.typeof(x - 1).pending

    on_mesh((2,), program)


def test_in_place_on_a_leaf_raises_on_every_rank():
    def program(mesh):
        x = place(X, mesh, P(unreduced={"a"})).requires_grad_()
        x += 1.0

    assert "leaf" in same_error((3,), program, RuntimeError)
