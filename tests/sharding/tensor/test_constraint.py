"""with_sharding_constraint: trees of tensors laid out by trees of specs."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch

import shardmesh as sm
from shardmesh import P, Replicate, Shard
from shardmesh.sharding.tensor.constraint import with_sharding_constraint
from tests.device import DEVICE
from tests.sharding.ranks import every_rank, on_mesh

Pair = namedtuple("Pair", "left right")


def numbers(*shape):
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)


@every_rank(2, 2)
def test_one_tensor(mesh):
    whole = numbers(5, 6)
    x = sm.distribute_tensor(whole, mesh, P("a"))
    for spec in (
        P("b"),
        P(None, ("a", "b")),
        P(),
        [Shard(1), Replicate()],
        P("a", sizes={"a": (1, 4)}),
    ):
        y = with_sharding_constraint(x, spec)
        assert sm.typeof(y) is sm.typeof(x).replace(spec)
        assert torch.equal(y.full_tensor(), whole)
    assert with_sharding_constraint(x, P("a", None)) is x


@every_rank(2, 2)
def test_tree_with_prefix_specs(mesh):
    w, b, c = (sm.distribute_tensor(numbers(4, 2 + i), mesh, P("a")) for i in range(3))
    tree = {"w": w, "layers": [(b, None), Pair(c, w)]}
    same = with_sharding_constraint(tree, P("b"))
    assert [x.spec for x in (same["w"], same["layers"][0][0], *same["layers"][1])] == [
        P("b", None)
    ] * 4
    assert same["layers"][0][1] is None
    mixed = with_sharding_constraint(
        tree, {"w": P(None, "b"), "layers": [P(), Pair(P("a"), [Shard(0), Shard(1)])]}
    )
    assert mixed["w"].spec == P(None, "b")
    assert mixed["layers"][0][0].spec == P(None, None)
    assert mixed["layers"][1].left is c
    assert mixed["layers"][1].right.spec == P("a", "b")
    for out, given in ((mixed["w"], w), (mixed["layers"][0][0], b), (mixed["layers"][1].right, w)):
        assert torch.equal(out.full_tensor(), given.full_tensor())
    assert with_sharding_constraint([], P()) == []


@every_rank(4)
def test_tensors_are_moved_together_and_explicitly(mesh):
    tree = [sm.ones((4, 4), mesh, P("a")) for _ in range(3)]
    with sm.ops.implicit_comm("forbid"), sm.debug.comm_budget(launches=1, bytes=3 * 48) as used:
        out = with_sharding_constraint(tree, P())
    assert used.by_operator == {"with_sharding_constraint": (1, 144)}
    assert all(sm.typeof(x).is_fully_replicated for x in out)
    with sm.debug.comm_budget(launches=0):
        assert all(
            a is b for a, b in zip(with_sharding_constraint(tree, P("a")), tree, strict=True)
        )


@every_rank(2, 2)
def test_gradients(mesh):
    plain = [numbers(4, 3).requires_grad_(), numbers(6).requires_grad_()]
    sharded = [sm.distribute_tensor(t.detach(), mesh, P("a")).requires_grad_() for t in plain]
    x, y = with_sharding_constraint(sharded, [P(None, "b"), P()])
    (x.square().sum() * y.prod().log()).backward()
    (plain[0].square().sum() * plain[1].prod().log()).backward()
    for t, reference in zip(sharded, plain, strict=True):
        assert t.grad.spec == t.spec
        torch.testing.assert_close(t.grad.full_tensor(), reference.grad)


@every_rank(2)
def test_double_backward(mesh):
    x = sm.distribute_tensor(numbers(4), mesh, P("a")).requires_grad_()
    (grad,) = torch.autograd.grad(
        (with_sharding_constraint(x, P()) ** 3).sum(), x, create_graph=True
    )
    (second,) = torch.autograd.grad(grad.sum(), x)
    torch.testing.assert_close(second.full_tensor(), 6 * numbers(4))


def test_errors_are_the_same_on_every_rank():
    def program(mesh):
        x, texts = sm.ones((4, 4), mesh, P("a")), []
        for tree, spec, error, text in [
            (
                torch.ones(2),
                P(),
                TypeError,
                "expected a ShardedTensor, got Tensor; place it on a mesh first",
            ),
            (
                {"w": [x, torch.ones(2)]},
                P(),
                TypeError,
                r"expected a ShardedTensor at \['w'\]\[1\], got Tensor",
            ),
            ([x, 3], P(), TypeError, r"expected a ShardedTensor at \[1\], got int"),
            (
                x,
                None,
                TypeError,
                r"spec: expected P\(...\) or a list of placements \(P\(\) for replicated\) for a "
                "ShardedTensor; got None",
            ),
            ([x], ["a"], TypeError, r"spec\[0\]: expected .* for a ShardedTensor; got 'a'"),
            (
                {"w": x},
                {"b": P()},
                ValueError,
                r"for a dict with keys \['w'\]; got a dict with keys \['b'\]",
            ),
            ([x, x], [P()], ValueError, "for a list of 2; got a list of 1"),
            ([x, x], {"w": P()}, ValueError, "for a list of 2; got a dict with keys"),
            (x, [P()], ValueError, "for a ShardedTensor; got a list of 1"),
            ([x, x], [P(), P("z")], ValueError, "names axis 'z'"),
            (x, P("a", "b", "c"), ValueError, "names axis 'c'"),
        ]:
            with sm.debug.comm_budget(launches=0), pytest.raises(error, match=text) as raised:
                with_sharding_constraint(tree, spec)
            texts.append(str(raised.value))
        return texts

    texts = on_mesh((2, 2), program)
    assert all(other == texts[0] for other in texts)


@every_rank(4)
def test_ranks_outside_the_mesh(everyone):
    mesh = sm.DeviceMesh(DEVICE, [2, 0], axis_names=("x",))
    x = sm.distribute_tensor(numbers(5), mesh, P("x"))
    y, z = with_sharding_constraint((x, x), (P(), P("x")))
    assert z is x
    assert torch.equal(y.redistribute(everyone, [Replicate()]).to_local(), numbers(5))
