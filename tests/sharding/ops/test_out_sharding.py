"""`call`: an operator whose result is wanted in a given layout, at no more bytes than by moving the
result alone.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.ops import out_sharding
from shardmesh.sharding.ops.out_sharding import apply
from tests.device import DEVICE
from tests.sharding.ranks import every_rank, on_mesh

LEFT = [P(), P("a"), P(None, "b"), P("a", "b"), P(None, ("a", "b")), P(unreduced={"a"})]
RIGHT = [P(), P("b"), P(None, "a"), P("b", "a"), P(("b", "a"))]
RESULT = [
    P(),
    P("a"),
    P(None, "a"),
    P("b", "a"),
    P(("a", "b")),
    P(None, ("b", "a")),
    P("a", unreduced={"b"}),
]


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(x, whole):
    torch.testing.assert_close(x.full_tensor(), whole)


# -- which way is taken ----------------------------------------------------------------------------


@pytest.mark.one_in(4)
@pytest.mark.parametrize("sizes", [(8, 12, 4), (5, 3, 7)])
def test_products_of_all_layouts(sizes):
    m, k, n = sizes
    left, right = numbers(m, k), numbers(k, n, seed=1)

    def program(mesh):
        for one, other, wanted in product(LEFT, RIGHT, RESULT):
            x = sm.distribute_tensor(left, mesh, one, src_data_rank=None)
            w = sm.distribute_tensor(right, mesh, other, src_data_rank=None)
            with sm.debug.comm_budget() as alone:
                torch.matmul(x, w).redistribute(wanted)
            with sm.ops.implicit_comm("forbid"), sm.debug.comm_budget() as used:
                y = apply(torch.matmul, x, w, out_sharding=wanted)
            assert sm.typeof(y) is sm.Layout.of(mesh, wanted, (m, n), torch.float64)
            close(y, left @ right)
            found.append((one, other, wanted, alone.bytes_received, used.bytes_received))

    found: list = []
    on_mesh((2, 2), program)
    busiest: dict = {}
    for *case, alone, used in found:
        before = busiest.get(tuple(case), (0, 0))
        busiest[tuple(case)] = max(before[0], alone), max(before[1], used)
    assert not {case for case, (alone, used) in busiest.items() if used > alone}
    assert sum(used < alone for alone, used in busiest.values()) > 20


@every_rank(4)
def test_sharded_contraction_is_reduced_into_the_requested_sharding(mesh):
    x, w = sm.rand((16, 32), mesh, P(None, "a")), sm.rand((32, 8), mesh, P("a"))
    for wanted in (P("a"), P(None, "a")):
        with (
            sm.ops.implicit_comm("forbid"),
            sm.debug.comm_budget(bytes=3 * 32 * 4, launches=1) as used,
        ):
            apply(torch.matmul, x, w, out_sharding=wanted)
        assert used.by_op == {"reduce_scatter": (1, 384)}
        assert used.by_operator == {"matmul": (1, 384)}


@every_rank(4)
def test_operands_are_moved_first_if_cheaper(mesh):
    """The result is much larger than what goes into it."""
    x, w = sm.rand((400, 8), mesh, P(None, "a")), sm.rand((8, 100), mesh, P("a"))
    with sm.debug.comm_budget() as alone:
        torch.matmul(x, w).redistribute(P("a"))
    with sm.debug.comm_budget() as used:
        y = apply(torch.matmul, x, w, out_sharding=P("a"))
    assert alone.by_op == {"reduce_scatter": (1, 3 * 100 * 100 * 4)}
    assert used.by_op == {"all_to_all": (1, 3 * 100 * 2 * 4), "all_gather": (1, 3 * 2 * 100 * 4)}
    torch.testing.assert_close(y.full_tensor(), x.full_tensor() @ w.full_tensor())


@every_rank(4)
def test_result_is_moved_if_cheaper(mesh):
    x, w = sm.rand((8, 400), mesh, P("a")), sm.rand((400, 4), mesh, P())
    with sm.debug.comm_budget(launches=1) as used:
        apply(torch.matmul, x, w, out_sharding=P())
    assert used.by_op == {"all_gather": (1, 3 * 2 * 4 * 4)}


@every_rank(4)
def test_replicated_operands_are_sliced_first(mesh):
    x, w = sm.rand((16, 32), mesh, P()), sm.rand((32, 8), mesh, P())
    apply(torch.matmul, x, w, out_sharding=P("a"))  # on meta tensors, too, to find out what comes
    with sm.debug.comm_budget(launches=0), FlopCounterMode(display=False) as flops:
        y = apply(torch.matmul, x, w, out_sharding=P("a"))
    assert flops.get_total_flops() == 2 * 4 * 32 * 8
    assert y.spec == P("a", None)


@every_rank(2, 2)
def test_choice_is_cached(mesh):
    x, w = sm.rand((4, 8), mesh, P("a", "b")), sm.rand((8, 4), mesh, P("b"))
    for _ in range(3):
        apply(torch.matmul, x, w, out_sharding=P("a", "b"))
    assert len(sm.typeof(x).caches[out_sharding._known]) == 1


# -- other operators -------------------------------------------------------------------------------


@every_rank(2, 2)
def test_other_operators(mesh):
    t, w, b = numbers(4, 6, 8), numbers(10, 8, seed=1), numbers(10, seed=2)
    for where in (P("a", None, "b"), P(("a", "b")), P(None, "b", "a"), P(unreduced={"b"})):
        x, weight, bias = (
            sm.distribute_tensor(v, mesh, s) for v, s in ((t, where), (w, P("a")), (b, P()))
        )
        with sm.ops.implicit_comm("forbid"):
            close(apply(F.linear, x, weight, bias, out_sharding=P("a", "b")), F.linear(t, w, b))
            close(
                apply(F.linear, x, weight, bias=bias, out_sharding=P(None, None, "b")),
                F.linear(t, w, b),
            )
            close(
                apply(torch.einsum, "bsk,nk->nsb", x, weight, out_sharding=P("b", "a")),
                torch.einsum("bsk,nk->nsb", t, w),
            )
            close(apply(torch.softmax, x, -1, out_sharding=P("a", "b")), t.softmax(-1))
            close(apply(torch.reshape, x, (24, 8), out_sharding=P("b", "a")), t.reshape(24, 8))
            close(apply(torch.sum, x, 1, out_sharding=P("a", "b")), t.sum(1))
            close(apply(torch.relu, x, out_sharding=P(None, "a")), t.relu())
            close(apply(torch.cat, [x, x], 1, out_sharding=P("b")), torch.cat([t, t], 1))
            close(
                apply(
                    torch.index_select,
                    x,
                    1,
                    sm.device_put(torch.tensor([3, 0, 3]), mesh),
                    out_sharding=P("a"),
                ),
                t[:, [3, 0, 3]],
            )
            largest = apply(torch.max, x, 2, out_sharding=P("b"))
            assert isinstance(largest, torch.return_types.max)
            close(largest.values, t.max(2).values)
            assert largest.indices.spec == P("b", None)
            largest = apply(torch.max, x, 2, out_sharding=(P("b"), P()))
            assert isinstance(largest, torch.return_types.max)
            assert [y.spec for y in largest] == [P("b", None), P(None, None)]
            first, second = apply(torch.chunk, x, 2, 1, out_sharding=(P("a"), P("b")))
            close(first, t.chunk(2, 1)[0])
            assert (first.spec, second.spec) == (P("a", None, None), P("b", None, None))


@every_rank(2, 2)
def test_equals_redistributing_the_result(mesh):
    """Pending values of every kind and parts of any sizes, wanted of operators that are linear, or
    not, or have a form.
    """
    t = numbers(6, 4)
    ragged = P("a", "b", sizes={"a": (1, 5), "b": (3, 1)})
    before = [
        P(unreduced={"a": "max"}),
        P("b", unreduced={"a": "avg"}),
        P(unreduced={"a": "product"}),
        ragged,
    ]
    after = [
        P("b", "a"),
        P("b", unreduced={"a": "avg"}),
        P(unreduced={"a": "max"}),
        P("a", sizes={"a": (6, 0)}),
    ]
    for where, wanted in product(before, after):
        x = sm.distribute_tensor(t, mesh, where)
        for func, args in (
            (torch.relu, ()),
            (torch.mul, (2.5,)),
            (torch.cumsum, (0,)),
            (torch.roll, (1, 0)),
        ):
            y = apply(func, x, *args, out_sharding=wanted)
            assert sm.typeof(y) is sm.typeof(func(x, *args).redistribute(wanted))
            close(y, func(t, *args))
        close(apply(torch.mul, x, x, out_sharding=wanted), t * t)


@every_rank(2)
def test_ragged_empty_and_small(mesh):
    t, w = numbers(5, 3), numbers(3, 2, seed=1)
    x = sm.distribute_tensor(t, mesh, P("a", sizes={"a": (0, 5)}))
    for wanted in (P("a", sizes={"a": (4, 1)}), P(None, "a"), P("a")):
        y = apply(torch.matmul, x, sm.device_put(w, mesh, P("a")), out_sharding=wanted)
        assert sm.typeof(y) is sm.Layout.of(mesh, wanted, (5, 2), torch.float64)
        close(y, t @ w)
    scalar = apply(torch.sum, x, out_sharding=P())
    assert scalar.spec == P()
    close(scalar, t.sum())
    close(apply(torch.matmul, x[:0], sm.device_put(w, mesh), out_sharding=P("a")), t[:0] @ w)
    half = apply(
        torch.matmul, x.bfloat16(), sm.device_put(w, mesh, P("a")).bfloat16(), out_sharding=P("a")
    )
    assert half.dtype is torch.bfloat16
    across = apply(torch.matmul, x.T, x, out_sharding=P("a"))
    close(across, t.T @ t)


@every_rank(2, 1)
def test_an_axis_of_one_rank(mesh):
    y = apply(
        torch.matmul,
        sm.ones((4, 4), mesh, P("b", "a")),
        sm.ones((4, 4), mesh, P("a")),
        out_sharding=P("a", "b"),
    )
    assert y.spec == P("a", "b")
    assert torch.equal(y.full_tensor(), torch.full((4, 4), 4.0))


@every_rank(2, 2)
def test_gradients(mesh):
    for one, other, wanted in [
        (P("a", "b"), P("b"), P("a", "b")),
        (P(), P("a"), P("b")),
        (P("a"), P("a"), P(None, "a")),
        (P(None, "a"), P(None, "b"), P()),
    ]:
        left, right = numbers(6, 4).requires_grad_(), numbers(4, 5, seed=1).requires_grad_()
        x, w = (
            sm.distribute_tensor(t.detach(), mesh, s).requires_grad_()
            for t, s in ((left, one), (right, other))
        )
        apply(torch.matmul, x, w, out_sharding=wanted).square().sum().backward()
        (left @ right).square().sum().backward()
        for t, reference in ((x, left), (w, right)):
            assert t.grad.spec == t.spec
            torch.testing.assert_close(t.grad.full_tensor(), reference.grad)


@every_rank(2)
def test_plain_tensors_with_implicit_replication(mesh):
    t, w = numbers(4, 6), numbers(6, 2, seed=1)
    with sm.ops.implicit_replication():
        close(
            apply(torch.matmul, sm.device_put(t, mesh, P(None, "a")), w, out_sharding=P("a")), t @ w
        )


@every_rank(2)
def test_custom_function_is_redistributed_afterwards(mesh):
    x = sm.ones((4, 4), mesh, P("a"))
    y = apply(lambda t: t.relu() + 1, x, out_sharding=P(None, "a"))
    assert y.spec == P(None, "a")
    assert torch.equal(y.full_tensor(), torch.full((4, 4), 2.0))


# -- errors ----------------------------------------------------------------------------------------


def test_errors_are_the_same_on_every_rank_and_move_nothing():
    def program(mesh):
        x, texts = sm.ones((4, 4), mesh, P("a")), []
        elsewhere = sm.ones((4, 4), mesh["a"], P("a"))
        for act, error, text in [
            (
                lambda: apply(torch.add, torch.ones(2), 1, out_sharding=P()),
                TypeError,
                "no ShardedTensor among the arguments",
            ),
            (lambda: apply(torch.add, x, 1, out_sharding=P("z")), ValueError, "names axis 'z'"),
            (
                lambda: apply(torch.add, x, 1, out_sharding=None),
                TypeError,
                r"apply\(add, ...\): out_sharding: expected P\(...\) or a list of placements",
            ),
            (
                lambda: apply(torch.matmul, x, x, out_sharding=P("a", "b", None)),
                ValueError,
                "3 entries but the tensor has 2",
            ),
            (
                lambda: apply(torch.max, x, 1, out_sharding=(P(),)),
                ValueError,
                "out_sharding: expected .* for a max of 2; got a tuple of 1",
            ),
            (
                lambda: apply(torch.Tensor.add_, x, 1, out_sharding=P()),
                ValueError,
                "writes into a tensor, which already has a layout",
            ),
            (
                lambda: apply(torch.add, x, 1, out=x, out_sharding=P()),
                ValueError,
                "writes into a tensor, which already has a layout",
            ),
            (
                lambda: apply(F.relu, x, inplace=True, out_sharding=P()),
                ValueError,
                "writes into a tensor, which already has a layout",
            ),
            (
                lambda: apply(torch.numel, x, out_sharding=P()),
                TypeError,
                "the result is 16, which has no layout; call numel itself",
            ),
            (
                lambda: apply(torch.matmul, x, torch.ones(4, 4), out_sharding=P()),
                RuntimeError,
                "mixes a plain tensor",
            ),
            (
                lambda: apply(torch.matmul, x, elsewhere, out_sharding=P()),
                ValueError,
                "operands are on two meshes",
            ),
            (
                lambda: apply(torch.matmul, x, sm.ones((3, 3), mesh), out_sharding=P()),
                RuntimeError,
                "same reduction dim",
            ),
        ]:
            with sm.debug.comm_budget(launches=0), pytest.raises(error, match=text) as raised:
                act()
            texts.append(str(raised.value))
        return texts

    texts = on_mesh((2, 2), program)
    assert all(other == texts[0] for other in texts)


@every_rank(2)
def test_implicit_communication_around_it_stays_forbidden(mesh):
    x, w = sm.ones((4, 4), mesh, P("a")), sm.ones((4, 4), mesh, P("a"))
    with sm.ops.implicit_comm("forbid"):
        apply(torch.matmul, x, w, out_sharding=P("a"))
        with pytest.raises(sm.errors.ImplicitCommError, match="by matmul"):
            torch.matmul(x, w)


@every_rank(4)
def test_ranks_outside_the_mesh(everyone):
    mesh = sm.DeviceMesh(DEVICE, [2, 0], axis_names=("x",))
    t, w = numbers(5, 4), numbers(4, 3, seed=1)
    x, weight = sm.distribute_tensor(t, mesh, P(None, "x")), sm.distribute_tensor(w, mesh, P("x"))
    y = apply(torch.matmul, x, weight, out_sharding=P("x"))
    assert sm.typeof(y) is sm.Layout.of(mesh, P("x"), (5, 3), torch.float64)
    torch.testing.assert_close(y.redistribute(everyone, P()).to_local(), t @ w)


def _on_processes():
    mesh = sm.init_device_mesh(DEVICE, (2, 2), axis_names=("a", "b"))
    x = sm.device_put(numbers(8, 6), mesh, P("a", "b"))
    w = sm.device_put(numbers(6, 4, seed=1), mesh, P("b"))
    with sm.ops.implicit_comm("forbid"), sm.debug.comm_budget() as used:
        y = apply(torch.matmul, x, w, out_sharding=P("a", "b"))
    return y.spec, list(used.by_op), y.full_tensor()


def test_in_processes(world4):
    for spec, ops, whole in world4(_on_processes):
        assert (spec, ops) == (P("a", "b"), ["reduce_scatter"])
        torch.testing.assert_close(whole, numbers(8, 6) @ numbers(6, 4, seed=1))
