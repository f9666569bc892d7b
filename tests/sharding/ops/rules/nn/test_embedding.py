"""Tables with sharded rows are not moved: lookups are pending sums, gradients are local."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import shardmesh as sm
from shardmesh import P
from tests.sharding.ops.rules.table import f, i
from tests.sharding.ranks import collectives, launched, on_mesh

TABLE, WORDS = f(7, 3), i(4, 5, high=7)


def table_on(mesh, spec, table=TABLE):
    return sm.distribute_tensor(table, mesh, spec, src_data_rank=None).requires_grad_()


def words_on(mesh, spec=None, words=WORDS):
    return sm.distribute_tensor(words, mesh, spec or P(), src_data_rank=None)


LOOKUPS = {
    "embedding": lambda words, table: F.embedding(words, table),
    "padding": lambda words, table: F.embedding(words, table, padding_idx=3),
    "sums": lambda words, table: F.embedding_bag(words, table, mode="sum"),
    "means": lambda words, table: F.embedding_bag(words, table, padding_idx=3),
    "rows": lambda words, table: table[words[0, :4]],
    "index_select": lambda words, table: table.index_select(0, words[0]),
}


@pytest.mark.parametrize("name", LOOKUPS)
@pytest.mark.parametrize(
    "spec", [P(("b", "a")), P("b", "a"), P(("a", "b"), sizes={("a", "b"): (0, 4, 0, 3)})], ids=str
)
def test_lookup_is_pending(name, spec):
    look = LOOKUPS[name]
    plain = TABLE.clone().requires_grad_()
    expected = look(WORDS, plain)
    weight = f(*expected.shape, seed=5)
    (expected * weight).sum().backward()

    def program(mesh):
        table = table_on(mesh, spec)
        with collectives() as records:
            rows = look(words_on(mesh), table)
        assert launched(records) == []
        split = [axis for axis in spec.dims[0] if mesh.size(axis) > 1]
        assert sm.typeof(rows).pending == dict.fromkeys(split, "sum")
        loss = (rows * sm.distribute_tensor(weight, mesh, src_data_rank=None)).sum()
        with collectives() as records:
            loss.backward()
        assert launched(records) == []
        assert sm.typeof(table.grad) is sm.typeof(table)
        torch.testing.assert_close(rows.detach().full_tensor(), expected.detach())
        torch.testing.assert_close(table.grad.full_tensor(), plain.grad)

    on_mesh((2, 2), program)


def test_indices_sharded_over_the_same_axis():
    """They are gathered, not the table."""

    def program(mesh):
        table = table_on(mesh, P("a"), f(4000, 3))
        with collectives() as records:
            rows = F.embedding(words_on(mesh, P("a")), table)
        assert sum(r.bytes_received for r in records) <= WORDS.numel() * 8
        assert torch.equal(rows.detach().full_tensor(), F.embedding(WORDS, f(4000, 3)))

    on_mesh((4,), program)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize(
    "call",
    [F.embedding, lambda words, table: table[words], lambda words, table: table[:, 0].take(words)],
)
def test_holes_infinities_and_signs_of_zero(call, dtype):
    """Values of other rows do not affect a row that is looked up, whose bits are unchanged."""
    table = torch.tensor(
        [[math.nan, math.inf], [-0.0, 1.0], [0.0, -0.0], [-math.inf, 2.0], [3.0, math.nan]]
    ).to(dtype)
    words = torch.tensor([[1, 2, 1], [4, 3, 0]])
    expected = call(words, table)

    def program(mesh):
        made = call(
            words_on(mesh, words=words), table_on(mesh, P("a"), table).detach()
        ).full_tensor()
        torch.testing.assert_close(made, expected, rtol=0, atol=0, equal_nan=True)
        if not dtype.is_complex:
            assert torch.equal(
                made.signbit() & ~made.isnan(), expected.signbit() & ~expected.isnan()
            )

    on_mesh((3,), program)


@pytest.mark.parametrize("number", [7, -1])
def test_index_out_of_range_raises(number):
    words = torch.tensor([1, number])

    def program(mesh):
        table = table_on(mesh, P("a", sizes={"a": (4, 0, 3)}))
        with pytest.raises(IndexError):
            F.embedding(words_on(mesh, words=words), table)

    on_mesh((3,), program)


def test_gradients_scaled_by_frequency():
    """All indices count, on whichever rank they are."""
    plain = TABLE.clone().requires_grad_()
    F.embedding(WORDS, plain, scale_grad_by_freq=True).sum().backward()

    def program(mesh):
        table = table_on(mesh, P("a"))
        F.embedding(words_on(mesh, P("b")), table, scale_grad_by_freq=True).sum().backward()
        torch.testing.assert_close(table.grad.full_tensor(), plain.grad)

    on_mesh((2, 2), program)


def test_double_backward():
    def squares(look, table):
        (grad,) = torch.autograd.grad((look(table) ** 3).sum(), table, create_graph=True)
        return (grad**2).sum()

    plain = TABLE.clone().requires_grad_()
    squares(lambda t: F.embedding(WORDS, t), plain).backward()

    def program(mesh):
        table, words = table_on(mesh, P("a")), words_on(mesh)
        squares(lambda t: F.embedding(words, t), table).backward()
        torch.testing.assert_close(table.grad.full_tensor(), plain.grad)

    on_mesh((3,), program)


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"sparse": True}])
@pytest.mark.parametrize("call", [F.embedding, F.embedding_bag])
def test_unsupported_arguments_raise(call, options):
    def program(mesh):
        with (
            collectives() as records,
            pytest.raises(
                NotImplementedError, match="not supported on ShardedTensors; clip the rows"
            ),
        ):
            call(words_on(mesh), table_on(mesh, P("a")), **options)
        assert not records

    on_mesh((2,), program)


def test_the_module():
    """nn.Embedding with a sharded weight."""
    plain = torch.nn.Embedding(7, 3, padding_idx=2)
    expected = plain(WORDS)
    expected.square().sum().backward()

    def program(mesh):
        layer = torch.nn.Embedding(7, 3, padding_idx=2)
        layer.weight = torch.nn.Parameter(
            sm.distribute_tensor(plain.weight.detach(), mesh, P("a"), src_data_rank=None)
        )
        made = layer(words_on(mesh))
        made.square().sum().backward()
        torch.testing.assert_close(made.detach().full_tensor(), expected.detach())
        torch.testing.assert_close(layer.weight.grad.full_tensor(), plain.weight.grad)

    on_mesh((3,), program)
