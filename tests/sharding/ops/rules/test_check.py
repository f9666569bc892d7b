"""`check_rule` finds wrong rules, names the layouts, and counts what it tried."""

from __future__ import annotations

import pytest
import torch

from shardmesh.sharding.ops.rules.check import RuleError, check_rule, prove
from shardmesh.sharding.ops.rules.elementwise.pointwise import broadcast
from shardmesh.sharding.ops.rules.notation import einrule
from shardmesh.sharding.ops.rules.reductions.reduction import reduction
from shardmesh.sharding.ops.rules.registry import DECOMPOSITIONS, RULES
from tests.sharding.ops.rules.table import b, f, i, pos

X, Y = f(4, 3), f(3, 5)


def wrong(monkeypatch, func, maker, *args, match, **kwargs):
    monkeypatch.setitem(RULES, func, maker)
    monkeypatch.delitem(DECOMPOSITIONS, func, raising=False)
    with pytest.raises(RuleError, match=match):
        check_rule(func, *args, **kwargs)


def test_number_of_combinations():
    """Two dims: replicated, split in either, pending; on (2, 2) every pair, and both orders where
    they split one dim.

    With one axis, also each operand once in parts of given sizes.
    """
    assert check_rule(torch.exp, X) == 4 + 1 + 4 + 1 + 18
    assert check_rule(torch.matmul, X, Y) == 16 + 2 + 16 + 2 + 200
    assert prove(torch.matmul, (X, Y), meshes=[(3,)], most=5) == 5


def test_a_nonlinear_operator_called_linear(monkeypatch):
    wrong(
        monkeypatch, torch.exp, lambda x: broadcast(x, linear=((0,),)), X, match="unreduced={'a'}"
    )


def test_a_wrong_kind_of_reduction(monkeypatch):
    wrong(
        monkeypatch,
        torch.prod,
        lambda x, dim: reduction(x, dim, False),
        pos(4, 3),
        0,
        match=r"P\('a', None\)",
    )


def test_dim_that_must_be_unsharded(monkeypatch):
    wrong(monkeypatch, torch.softmax, lambda x, dim: broadcast(x), X, 0, match=r"P\('a', None\)")


def test_result_declared_with_the_wrong_dim(monkeypatch):
    wrong(monkeypatch, torch.t, lambda x: einrule("m n -> m n", x), X, match="rule of t gives dims")
    wrong(
        monkeypatch,
        torch.t,
        lambda x: einrule("m n -> m n", x),
        f(4, 4),
        match="t returned a local tensor of .* its rule is wrong|not close",
    )


def test_a_wrong_gradient_alone(monkeypatch):
    def maker(x):
        return broadcast(x, local=lambda local: local.detach() + 0 * local)

    wrong(monkeypatch, torch.clone, maker, X, match="gradient in layout")


def test_an_operator_that_changes_its_input(monkeypatch):
    maker = lambda x: broadcast(x, local=lambda local: local.detach().neg_())  # noqa: E731
    wrong(monkeypatch, torch.neg, maker, i(4, 3), match="changed an input")


def test_the_message_names_function_and_layouts(monkeypatch):
    monkeypatch.setitem(RULES, torch.softmax, lambda x, dim: broadcast(x))
    monkeypatch.delitem(DECOMPOSITIONS, torch.softmax)
    with pytest.raises(RuleError) as caught:
        check_rule(torch.softmax, X, 0)
    assert "softmax is wrong for tensors laid out as\n  f64[4, 3] @ P('a', None) on (a=2)" in str(
        caught.value
    )


def test_in_place_operator_may_raise_but_not_be_wrong():
    assert 0 < check_rule(torch.Tensor.atan2_, X, f(3)) < check_rule(torch.atan2, X, f(3))
    assert check_rule(torch.Tensor.exp_, X) == 3 + 1 + 3 + 1 + 11


@pytest.mark.slow
def test_any_function_of_tensors():
    def block(x, w, v, mask):
        return torch.nn.functional.gelu(x @ w).masked_fill(mask, 0).sum(-1, keepdim=True) * v

    check_rule(block, f(2, 4, 3), f(3, 5), f(4, 1), b(4, 5))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", ["avg", "max", "min", "product"])
def test_other_pending_kinds(kind):
    for func, args in {
        torch.exp: (X,),
        torch.t: (X,),
        torch.reshape: (f(4, 6), (2, 12)),
        torch.mul: (X, f(3)),
        torch.sum: (X, 0),
        torch.cat: ([X, f(2, 3)],),
        torch.amax: (X, 1),
        torch.Tensor.__getitem__: (X, (slice(None), 1)),
    }.items():
        prove(func, args, meshes=[(3,), (2, 2)], kinds=(kind,), most=30)


EVERY = {
    torch.add: (X, f(3)),
    torch.matmul: (X, Y),
    torch.nn.functional.embedding: (i(5, high=4), X),
    torch.nn.functional.layer_norm: (X, (3,), f(3)),
    torch.gather: (X, 1, i(4, 2, high=3)),
    torch.cat: ([X, f(2, 3)],),
}


@pytest.mark.one_in(11)
@pytest.mark.parametrize("func", EVERY)
def test_every_combination_on_two_axes(func):
    assert prove(func, EVERY[func], meshes=[(2, 2)], most=10**6) >= 144


def test_calls_with_many_tensors_are_sampled():
    """Too many combinations to be numbered by a machine integer."""
    assert (
        prove(
            lambda *tensors: torch.stack(tensors).sum(0),
            [f(4, 3, seed=n) for n in range(26)],
            meshes=[(2, 2)],
            most=3,
        )
        == 3
    )
