"""Forms of calls: operators, attributes, lists, numbers, and unsupported functions."""

from __future__ import annotations

import operator
import warnings

import pytest
import torch
import torch.nn.functional as F

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.ops import strategy
from shardmesh.sharding.ops.rules.check import check_rule, place, prove
from tests.sharding.ops.rules.table import b, f, i, pos
from tests.sharding.ranks import collectives, on_mesh

X, ROW = f(4, 3), f(3)
BINARY = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.lt,
    operator.le,
    operator.eq,
    operator.ne,
]
SMALL = {"meshes": [(3,), (2, 2)], "most": 8}


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "op", [*BINARY, operator.gt, operator.ge, operator.pow, operator.mod, operator.floordiv]
)
def test_binary_operators(op):
    prove(op, (pos(4, 3), pos(3)), **SMALL)
    prove(lambda x: op(x, 2), (pos(4, 3),), **SMALL)
    prove(lambda x: op(2, x), (pos(4, 3),), **SMALL)


@pytest.mark.parametrize("op", [operator.and_, operator.or_, operator.xor])
def test_bool_operators(op):
    prove(op, (b(4, 3), b(3)), **SMALL)
    prove(lambda x: op(x, True), (b(4, 3),), **SMALL)


def test_unary_operators_and_attributes():
    for func in (
        operator.neg,
        operator.pos,
        operator.abs,
        lambda x: x.T,
        lambda x: x.mT,
        lambda x: x.H,
        lambda x: x.mH,
    ):
        prove(func, (X,), **SMALL)
    prove(operator.invert, (b(4, 3),), **SMALL)
    prove(lambda x: x.real + x.imag, (torch.complex(f(4, 3), f(4, 3)),), **SMALL)
    prove(lambda x: x.real, (X,), **SMALL)


@pytest.mark.parametrize("op", [operator.iadd, operator.isub, operator.imul, operator.itruediv])
def test_in_place_operators(op):
    def program(mesh):
        x = sm.distribute_tensor(X, mesh, P("a"))
        y = x
        y = op(y, sm.distribute_tensor(ROW, mesh, P("a")))
        assert y is x
        torch.testing.assert_close(x.full_tensor(), op(X.clone(), ROW))

    on_mesh((3,), program)


def test_iteration_and_membership():
    def program(mesh):
        x = sm.distribute_tensor(X, mesh, P("a"))
        assert [row.tolist() for row in x] == X.tolist()
        assert X[1, 2].item() in x
        assert len(x) == 4
        first, *rest = x.split(2)
        assert torch.equal(first.full_tensor(), X[:2])
        assert len(rest) == 1

    on_mesh((3,), program)


# -- numbers ---------------------------------------------------------------------------------------


def test_plain_numbers():
    two = torch.tensor(2.0, dtype=torch.float64)
    for func in (
        lambda x: x * two,
        lambda x: two - x,
        lambda x: torch.where(x > two, x, two),
        lambda x: x.masked_fill(x > 0, two),
        lambda x: x.clamp(max=two),
        lambda x: torch.add(x, two, alpha=2),
        lambda x: x[torch.tensor(1)],
        lambda x: x[:, torch.tensor(-1)],
    ):
        prove(func, (X,), **SMALL)


def test_zero_is_distinguished_from_other_numbers():
    """A call with 0 may be linear where the same call with another number is not."""

    def program(mesh):
        x, mask = place(X, mesh, P(unreduced={"a"})), sm.distribute_tensor(X > 0, mesh)
        for value in (0.0, -1.5, 0, 2, 0.0):
            torch.testing.assert_close(
                x.masked_fill(mask, value).full_tensor(), X.masked_fill(X > 0, value)
            )
            torch.testing.assert_close(
                torch.where(mask, x, value).full_tensor(), torch.where(X > 0, X, value)
            )
            torch.testing.assert_close(
                F.pad(x, (1, 1), value=value).full_tensor(), F.pad(X, (1, 1), value=value)
            )

    on_mesh((2,), program)


def test_mixing_plain_and_sharded_tensors_raises():
    def program(mesh):
        x = sm.distribute_tensor(X, mesh, P("a"))
        for call in (
            lambda: x + ROW,
            lambda: torch.cat([x, X]),
            lambda: x[i(2)],
            lambda: F.linear(x, f(5, 3)),
            lambda: X @ x.T,
        ):
            with pytest.raises(RuntimeError, match=r"plain tensor .* distribute_tensor"):
                call()
        with sm.ops.implicit_replication():
            assert torch.equal((x + ROW).full_tensor(), X + ROW)

    on_mesh((2,), program)


# -- without a rule --------------------------------------------------------------------------------


@pytest.fixture
def warned(monkeypatch):
    """The functions that ran gathered."""
    found = set()
    monkeypatch.setattr(strategy, "_warned", found)
    return found


GATHERED = {
    "mask of rows": (torch.Tensor.__getitem__, (X, (b(4), slice(1, None)))),
    "repeats": (torch.repeat_interleave, (X, i(4, low=1, high=3), 0)),
    "change of size": (lambda x: x.view(torch.int32), (X,)),
}


@pytest.mark.parametrize("name", GATHERED)
def test_gathered(name, warned):
    """Correct, also in backward, and warned once."""
    func, args = GATHERED[name]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*has no sharding rule")
        prove(func, args, **SMALL)
    assert warned


def test_warning_names_operator_and_bytes_once(warned):
    def program(mesh):
        x = sm.distribute_tensor(X, mesh, P("a"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            x.view(torch.int32)
            (x * 2).view(torch.int32)
        return [str(w.message) for w in caught]

    first, second = on_mesh((2,), program)
    assert len(first + second) == 1
    assert "view has no sharding rule" in (first + second)[0]
    assert "(96 bytes here)" in (first + second)[0]


@pytest.mark.filterwarnings("ignore:.*has no sharding rule")
def test_random_functions_are_equal_on_every_rank_and_mesh():
    """On every rank and every mesh: they run gathered, from one seed."""
    p = torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.25, 0.25], [0.3, 0.3, 0.4], [0.8, 0.1, 0.1]])

    def program(mesh):
        sm.random.manual_seed(3)
        torch.manual_seed(mesh.world.rank)
        x = sm.distribute_tensor(p, mesh, P("a"))
        before = torch.get_rng_state()
        drawn = [
            torch.multinomial(x, 2),
            torch.bernoulli(x),
            torch.normal(x, 1.0),
            F.alpha_dropout(x, 0.5, True),
            F.gumbel_softmax(x),
            torch.poisson(x),
        ]
        assert torch.equal(before, torch.get_rng_state())
        return [y.full_tensor() for y in drawn]

    everywhere = [drawn for shape in ((1,), (2,), (2, 2)) for drawn in on_mesh(shape, program)]
    for drawn in everywhere[1:]:
        assert all(torch.equal(x, y) for x, y in zip(drawn, everywhere[0], strict=True))


# -- refused ---------------------------------------------------------------------------------------


def refusals(x):
    yield (
        NotImplementedError,
        "works on the memory of a tensor",
        lambda: x.as_strided((2, 2), (1, 1)),
    )
    yield RuntimeError, "memory", lambda: x.untyped_storage()
    yield NotImplementedError, "works on the memory of a tensor", lambda: x.resize_(2, 2)
    yield NotImplementedError, "no sharding rule and writes in place", lambda: x.unsqueeze_(0)
    yield NotImplementedError, "would change the shape", lambda: x.redistribute(P()).unsqueeze_(0)
    yield NotImplementedError, "max_norm", lambda: F.embedding((x * 0).long(), x, max_norm=1.0)
    yield NotImplementedError, "sparse", lambda: F.embedding((x * 0).long(), x, sparse=True)
    yield ValueError, "num_classes", lambda: F.one_hot((x * 0).long())
    yield ValueError, "reduction=", lambda: F.mse_loss(x, x, size_average=False)
    yield ValueError, "not a valid value", lambda: F.cross_entropy(x, x, reduction="avg")
    yield ValueError, "make a mesh of device type 'cuda'", lambda: x.to("cuda")
    yield ValueError, "make a mesh of device type 'cuda'", lambda: x.cuda()
    yield ValueError, "running statistics", lambda: F.batch_norm(x, x.sum(0), None, training=True)
    yield RuntimeError, "must be either a floating point or complex", lambda: x.long().mean()
    yield RuntimeError, "mixes|same size|match|broadcast|size of tensor", lambda: x + x.T
    yield RuntimeError, "inner dim|shapes cannot be multiplied|reduction dim", lambda: x @ x
    yield IndexError, "out of range|out of bounds", lambda: x.sum(2)
    yield IndexError, "out of range|out of bounds", lambda: x[7]
    yield TypeError, "argument", lambda: torch.exp(x, x, x)


@pytest.mark.filterwarnings("ignore:size_average and reduce")
def test_unsupported_calls_raise_before_communication():
    def program(mesh):
        x = sm.distribute_tensor(X, mesh, P("a"))
        for kind, words, call in refusals(x):
            if "redistribute" not in call.__code__.co_names:
                with collectives() as records, pytest.raises(kind, match=words):
                    call()
                assert not records
            else:
                with pytest.raises(kind, match=words):
                    call()

    on_mesh((2,), program)


def test_two_meshes_raise():
    def program(mesh):
        x, y = (sm.distribute_tensor(X, m, P(m.axis_names[0])) for m in (mesh["a"], mesh["b"]))
        with pytest.raises(ValueError, match="are on two meshes"):
            x + y

    on_mesh((2, 2), program)


def test_a_rule_for_a_users_own_operator():
    """A custom operator of torch.library, with one line."""
    library = torch.library.Library("shardmesh_test", "DEF")
    library.define("scaled_product(Tensor x, Tensor w) -> Tensor")
    library.impl("scaled_product", lambda x, w: 2 * x @ w, "CompositeImplicitAutograd")
    func = torch.ops.shardmesh_test.scaled_product
    sm.ops.register_rule(func, "m k, k n -> m n", linear=((0,), (1,)))
    assert check_rule(func, X, f(3, 5)) == 236
