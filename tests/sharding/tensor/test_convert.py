"""Between plain and sharded: from_local, to_local, full_tensor, distribute_tensor, redistribute,
and meshes of some ranks.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh import P, Partial, Replicate, Shard
from tests.device import DEVICE
from tests.mesh.comm.collectives import DTYPES, as_bytes, rank_values
from tests.sharding.ranks import collectives, every_rank, launched, on_mesh, place, same_error

X = torch.arange(15.0, dtype=torch.float64).view(5, 3) / 7 - 1


def part(mesh, spec, whole=X):
    """Return a copy of this rank's box of the tensor."""
    layout = sm.Layout.of(mesh, spec, whole.shape, whole.dtype)
    return whole[tuple(slice(*interval) for interval in layout.box)].clone()


# -- from_local ------------------------------------------------------------------------------------


@pytest.mark.one_in(7)
@pytest.mark.parametrize("mesh_shape", [(2, 2), (3, 2), (2, 3), (4, 1)])
@pytest.mark.parametrize(
    "spec",
    [P(), P("a"), P("b"), P(None, "a"), P("a", "b"), P("b", "a"), P(("a", "b")), P(("b", "a"))],
)
def test_from_local_finds_the_global_shape(mesh_shape, spec):
    """Parts of five rows and three columns, even or not; at most one exchange of shapes, among the
    ranks that share.
    """

    def program(mesh):
        local = part(mesh, spec)
        with collectives() as records:
            x = sm.from_local(local, mesh, spec)
        assert x.shape == (5, 3)
        assert sm.typeof(x) is sm.Layout.of(mesh, spec, (5, 3), torch.float64)
        assert torch.equal(x.full_tensor(), X)
        assert x.to_local().data_ptr() == local.data_ptr()
        splits = any(mesh.size(axis) > 1 for axis in spec.axes)
        assert launched(records) == ["all_gather_object"] * splits
        with collectives() as records:
            assert sm.typeof(sm.from_local(local, mesh, x.placements, shape=(5, 3))) is sm.typeof(x)
        assert records == []

    on_mesh(mesh_shape, program)


@every_rank(2)
def test_from_local_shares_memory(mesh):
    local = part(mesh, P("a"))
    x = sm.from_local(local, mesh, [Shard(0)])
    x.mul_(2)
    assert torch.equal(local, 2 * part(mesh, P("a")))


@pytest.mark.parametrize(
    ("shapes", "spec", "words"),
    [
        (
            [(2, 3), (3, 3)],
            P("a"),
            ["rank 0: f64[2, 3], rank 1: f64[3, 3]", "[5, 3]", "[[3, 3], [2, 3]]", "torch.chunk"],
        ),
        ([(2, 3), (2, 4)], P("a"), ["rank 1: f64[2, 4]", "pass parts of these shapes"]),
        ([(1,), (0,), (1,)], P("a"), ["[2]", "[[1], [1], [0]]"]),
        ([(2, 3), (2, 3, 1)], P("a"), ["number of dims", "rank 1: f64[2, 3, 1]"]),
    ],
)
def test_from_local_with_incompatible_parts_raises(shapes, spec, words):
    def program(mesh):
        sm.from_local(torch.zeros(shapes[mesh.world.rank], dtype=torch.float64), mesh, spec)

    text = same_error((len(shapes),), program, ValueError, silent=False)
    for word in words:
        assert word in text


def test_from_local_of_parts_of_different_dtypes():
    def program(mesh):
        sm.from_local(
            torch.zeros(2, dtype=[torch.float32, torch.int64][mesh.world.rank]), mesh, [Shard(0)]
        )

    assert "rank 0: f32[2], rank 1: i64[2]" in same_error((2,), program, ValueError, silent=False)


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (
            lambda m: sm.from_local(torch.zeros(4), m, [Shard(0)], shape=(9,)),
            ValueError,
            ["[4]", "f32[9]", "[5]"],
        ),
        (
            lambda m: sm.from_local(torch.zeros(4), m, [Shard(1)]),
            ValueError,
            ["Shard(1)", "1 dims"],
        ),
        (
            lambda m: sm.from_local(torch.zeros(4), m, [Shard(0)] * 2),
            ValueError,
            ["2 placements", "1 axes"],
        ),
        (lambda m: sm.from_local(torch.zeros(4), m, P("z")), ValueError, ["'z'", "('a',)"]),
        (
            lambda m: sm.from_local(torch.zeros(4, dtype=torch.int64), m, [Partial("avg")]),
            ValueError,
            ["average", "i64"],
        ),
        (
            lambda m: sm.from_local(place(m, X), m),
            TypeError,
            ["plain tensor", "ShardedTensor f64[5, 3]"],
        ),
    ],
)
def test_from_local_errors(make, kind, words):
    def program(mesh):
        make(mesh)

    if "[5]" in words:  # only the rank whose part does not fit the given shape can know
        with pytest.raises(kind) as caught:
            on_mesh((2,), program)
        text = str(caught.value)
    else:
        text = same_error((2,), program, kind)
    for word in words:
        assert word in text


def test_gradient_of_a_replicated_local_is_the_sum():
    """A replicated local is one logical value: its gradient is reduced and equal on every rank."""

    def program(mesh):
        w = X.T.clone().requires_grad_()
        x = place(mesh, X, Shard(0))
        (x @ sm.from_local(w, mesh)).sum().backward()
        return w.grad

    w = X.T.clone().requires_grad_()
    (X @ w).sum().backward()
    for grad in on_mesh((3,), program):
        torch.testing.assert_close(grad, w.grad, rtol=1e-12, atol=0)


def test_grad_placements_of_from_local():
    """With Partial the share of each rank arrives as it is, without communication."""

    def program(mesh):
        w = torch.ones(2, dtype=torch.float64, requires_grad=True)
        y = sm.from_local(w, mesh, [Replicate()], grad_placements=[Partial()])
        scale = sm.from_local(
            torch.tensor([1.0 + mesh.world.rank] * 2, dtype=torch.float64), mesh, [Partial()]
        )
        (scale * y).sum().backward()
        return w.grad.tolist()

    assert on_mesh((2,), program) == [[1.0, 1.0], [2.0, 2.0]]


@pytest.mark.parametrize("spec", [P("a"), P(None, "a"), P(unreduced={"a"})])
def test_gradients_of_sharded_and_pending_locals(spec):
    weight = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def program(mesh):
        local = part(mesh, P(*spec.dims)).requires_grad_()
        x = sm.from_local(local, mesh, spec)
        (x.redistribute(P()) * place(mesh, weight)).sum().backward()
        torch.testing.assert_close(
            local.grad, part(mesh, P(*spec.dims), weight), rtol=1e-12, atol=0
        )

    on_mesh((2,), program)


# -- to_local and full_tensor ----------------------------------------------------------------------


@every_rank(2)
def test_to_local_shares_memory_and_graph(mesh):
    x = place(mesh, X, Shard(0), grad=True)
    local = x.to_local()
    assert type(local) is torch.Tensor
    assert local.requires_grad
    assert local.data_ptr() == x.detach().to_local().data_ptr()
    assert not x.detach().to_local().requires_grad
    with torch.no_grad():
        assert not x.to_local().requires_grad


@pytest.mark.parametrize("spec", [P("a"), P(None, ("b", "a")), P("b", "a"), P()])
def test_the_gradient_of_full_tensor(spec):
    """The gradients of all ranks are the same by default, or parts of a sum."""
    weight = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def program(mesh):
        x = sm.device_put(X, mesh, spec).requires_grad_()
        (x.full_tensor() * weight).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), weight, rtol=1e-12, atol=1e-12)
        x.grad = None
        (x.full_tensor(grad_placements=P(unreduced={"a", "b"})) * weight).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), 4 * weight, rtol=1e-12, atol=1e-12)

    on_mesh((2, 2), program)


def test_gradients_that_differ_between_replicas_raise_on_every_rank():
    def program(mesh):
        w = place(mesh, X, grad=True)
        (w.to_local() * (1 + mesh.world.rank)).sum().backward()

    text = same_error((3,), program, RuntimeError, silent=False)
    assert "axes ('a',) of f64[5, 3] @ P(None, None) on (a=3)" in text
    assert "to_local(grad_placements=" in text


@pytest.mark.parametrize(
    ("fill", "change"),
    [
        (1.0, lambda f: f[4].fill_(1.01)),
        (1.0, lambda f: f[2, 1].fill_(float("nan"))),
        (0.0, lambda f: f[2, 1].fill_(float("nan"))),
        (0.0, lambda f: f[0, 0].fill_(float("inf"))),
        (float("nan"), lambda f: f[0, 0].fill_(0.0)),
        (1.0, lambda f: f.copy_(f.flip(0).cumsum(0) / 3)),
    ],
)
def test_gradients_that_differ_in_one_element_or_are_not_finite_raise(fill, change):
    def program(mesh):
        w = place(mesh, X, grad=True)
        factor = torch.full_like(X, fill)
        if mesh.world.rank == 1:
            change(factor)
        (w.to_local() * factor).sum().backward()

    assert "differ" in same_error((2,), program, RuntimeError, silent=False)


@every_rank(2)
def test_equal_gradients_of_every_kind_pass_the_check(mesh):
    for fill in (0.0, 1e-300, 1e300, float("inf"), float("nan")):
        w = place(mesh, X, grad=True)
        (w.to_local() * fill).sum().backward()
        torch.testing.assert_close(
            w.grad.to_local(), torch.full_like(X, fill), equal_nan=True, rtol=1e-12, atol=0
        )


def checks_of(mesh, steps, **how):
    """Return the number of replica checks in each backward pass, for two uses in a loop."""
    found = []
    for step in steps:
        w = place(mesh, X, grad=True)
        loss = sum((w.to_local(**how) * step(mesh)).sum() for _ in range(2))
        with collectives() as records:
            loss.backward()
        found.append(
            sum(
                record.bytes_received == 152 * 2 * (mesh.size() - 1) // mesh.size()
                for record in records
            )
        )
    return found


def test_replicas_are_compared_when_a_signature_is_first_seen():
    """Each use in a loop by itself; another line that leads here is another signature."""

    def program(mesh):
        assert checks_of(mesh, [lambda mesh: 2.0] * 3) == [2, 0, 0]
        assert checks_of(mesh, [lambda mesh: 3.0] * 2) == [2, 0]
        assert checks_of(mesh, [lambda mesh: 2.0] * 2, check="always") == [2, 2]
        assert checks_of(mesh, [lambda mesh: 1.0 + mesh.world.rank], check=False) == [0]

    on_mesh((2,), program)


@pytest.mark.parametrize("check", [True, "always"])
def test_other_uses_are_compared_too(check):
    """At another line always; at the same one where asked."""

    def program(mesh):
        checks_of(mesh, [lambda mesh: 2.0], check=check)
        if check is True:
            checks_of(mesh, [lambda mesh: 1.0 + mesh.world.rank])
        checks_of(mesh, [lambda mesh: 2.0, lambda mesh: 1.0 + mesh.world.rank], check=check)

    assert "differ between the replicas" in same_error((2,), program, RuntimeError, silent=False)


def test_failed_comparison_is_repeated():
    def program(mesh):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="differ between the replicas"):
                checks_of(mesh, [lambda mesh: 1.0 + mesh.world.rank])

    on_mesh((2,), program)


def test_another_check():
    text = same_error((2,), lambda mesh: place(mesh, X).to_local(check="first"), ValueError)
    assert text == "to_local(check='first'): write one of True, False, 'always'"


# -- distribute_tensor -----------------------------------------------------------------------------


@pytest.mark.parametrize("source", [0, 1, 3, None])
@pytest.mark.parametrize(
    "spec",
    [P(), P("a"), P("b", "a"), P(("b", "a")), P(unreduced={"a"}), P("b", unreduced={"a": "max"})],
)
def test_distribute_tensor_takes_the_data_of_one_rank(source, spec):
    def program(mesh):
        mine = X + mesh.world.rank
        with collectives() as records:
            x = sm.distribute_tensor(mine, mesh, spec, src_data_rank=source)
        assert sm.typeof(x) is sm.Layout.of(mesh, spec, X.shape, X.dtype)
        assert len(records) == (source is not None)
        if source is None:
            assert (
                torch.equal(x.to_local(), part(mesh, P(*spec.dims), mine)) or sm.typeof(x).pending
            )
        else:
            torch.testing.assert_close(x.full_tensor(), X + source, rtol=1e-15, atol=0)

    on_mesh((2, 2), program)


def test_src_data_rank_is_a_position_in_the_mesh():
    def program():
        mesh = sm.DeviceMesh(DEVICE, [[3, 2], [1, 0]], axis_names=("a", "b"))
        mine = torch.full((4,), float(mesh.world.rank))
        return sm.distribute_tensor(mine, mesh, P("a"), src_data_rank=1).full_tensor().tolist()

    assert sm.simulate(4)(program)() == [[2.0] * 4] * 4


@every_rank(2)
def test_result_is_a_leaf_with_its_own_memory(mesh):
    for source in (0, None):
        whole = X.clone().requires_grad_()
        x = sm.distribute_tensor(whole, mesh, [Replicate()], src_data_rank=source)
        assert x.is_leaf
        assert x.requires_grad
        assert x.to_local().data_ptr() != whole.data_ptr()
        (x * 2).sum().backward()
        assert whole.grad is None
        assert not sm.distribute_tensor(X, mesh).requires_grad
        assert not isinstance(sm.distribute_tensor(nn.Parameter(X), mesh), nn.Parameter)


@every_rank(2)
def test_distribute_a_sharded_tensor_redistributes_it(mesh):
    x = place(mesh, X, Shard(0), grad=True)
    y = sm.distribute_tensor(x, mesh, [Shard(1)])
    assert y.placements == (Shard(1),)
    y.sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.ones_like(X))


@every_rank(2, 2)
def test_awkward_inputs(mesh):
    """Transposed, expanded, sliced, conjugated, 0-d and without elements."""
    wide = torch.arange(48.0).view(4, 12)
    inputs = [
        wide.T,
        wide[:, ::3],
        wide[1:3, 2:7],
        torch.tensor([1.0, 2.0]).expand(3, 2),
        torch.complex(wide, wide + 1).conj(),
        torch.tensor(3.0),
        torch.zeros(0),
        torch.zeros(3, 0, 2),
        torch.zeros(0, 4),
    ]
    for whole in inputs:
        specs = [P(), P(("a", "b")) if whole.ndim else P(), P("b", "a") if whole.ndim > 1 else P()]
        for spec in specs:
            for source in (0, None):
                x = sm.distribute_tensor(whole, mesh, spec, src_data_rank=source)
                assert x.shape == whole.shape
                assert torch.equal(x.full_tensor(), whole)
                assert x.to_local().is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_moves(dtype):
    """In, between layouts, and out again, bit for bit."""
    whole = rank_values(1, (5, 3), dtype)

    def program(mesh):
        for spec in (P(), P("a"), P(None, "b"), P(("b", "a"))):
            x = sm.device_put(whole, mesh, spec)
            for target in (P(), P("b"), P("a", "b"), P(None, ("a", "b"))):
                y = x.redistribute(target)
                assert y.dtype == dtype
                assert torch.equal(as_bytes(y.full_tensor()), as_bytes(whole))

    on_mesh((2, 2), program)


UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # torch does not add or compare these
REDUCED = [(d, k) for d in DTYPES for k in ("sum", "max") if d.itemsize > 1 and d not in UNSIGNED]


@pytest.mark.parametrize(
    ("dtype", "kind"), [(d, k) for d, k in REDUCED if k == "sum" or not d.is_complex]
)
def test_every_dtype_reduces(dtype, kind):
    parts = [rank_values(rank, (5, 3), dtype) for rank in range(3)]
    expected = sum(parts[1:], parts[0]) if kind == "sum" else torch.stack(parts).amax(0)

    def program(mesh):
        x = sm.from_local(parts[mesh.world.rank].clone(), mesh, [Partial(kind)])
        for target in (P(), P("a"), P(None, "a")):
            assert torch.equal(x.redistribute(target).full_tensor(), expected)

    on_mesh((3,), program)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda m: sm.distribute_tensor(X, m, [Shard(0)]),
            ["1 placements", "2 axes", "('a', 'b')"],
        ),
        (lambda m: sm.distribute_tensor(X, m, [Shard(0), Shard(5)]), ["Shard(5)", "2 dims"]),
        (lambda m: sm.distribute_tensor(X, m, P("a", None, "b")), ["3 entries", "2 dims"]),
        (lambda m: sm.distribute_tensor(X, m, P("q")), ["'q'", "('a', 'b')"]),
        (
            lambda m: sm.distribute_tensor(X.long(), m, P(unreduced={"a": "avg"})),
            ["average", "'a'", "i64", "Partial('sum')"],
        ),
        (lambda m: sm.distribute_tensor(X, m, src_data_rank=4), ["src_data_rank 4", "4 ranks"]),
        (lambda m: sm.distribute_tensor(X, m, src_data_rank=-1), ["src_data_rank -1", "4 ranks"]),
        (
            lambda m: place(m, X).redistribute(m["a"], [Shard(0)]),
            ["DeviceMesh(cpu, a=2)", "between layouts on one mesh"],
        ),
        (lambda m: place(m, X).redistribute([Shard(0)]), ["1 placements", "2 axes"]),
        (lambda m: place(m, X).redistribute(P("a"), P("b")), ["a mesh and placements"]),
        (lambda m: place(m, X.long()).redistribute(P(unreduced={"a": "avg"})), ["average", "i64"]),
        (
            lambda m: sm.debug.plan(sm.typeof(place(m, X)), sm.typeof(place(m, X.float()))),
            ["dtype", "float64", "float32"],
        ),
    ],
)
def test_invalid_placements_raise(make, words):
    text = same_error((2, 2), make, Exception)
    for word in words:
        assert word in text


# -- redistribute ----------------------------------------------------------------------------------


@every_rank(2, 2)
def test_mesh_and_placement_arguments(mesh):
    x = place(mesh, X, Shard(0), Replicate())
    ways = [
        x.redistribute([Replicate(), Shard(1)]),
        x.redistribute(mesh, [Replicate(), Shard(1)]),
        x.redistribute(placements=[Replicate(), Shard(1)]),
        x.redistribute(device_mesh=mesh, placements=P(None, "b")),
        x.redistribute(None, P(None, "b")),
        sm.redistribute(x, P(None, "b")),
        sm.reshard(x, P(None, "b")),
        sm.device_put(x, mesh, P(None, "b")),
    ]
    assert {sm.typeof(y) for y in ways} == {sm.Layout.of(mesh, P(None, "b"), X.shape, X.dtype)}
    assert x.redistribute(x.placements) is x
    assert x.redistribute() is x


@every_rank(2)
def test_communication_dtypes(mesh):
    """Cast before communication, forward and backward."""
    x = place(mesh, X, Shard(0), grad=True)
    with collectives() as records:
        y = x.redistribute(
            [Replicate()], forward_dtype=torch.float32, backward_dtype=torch.bfloat16
        )
    assert y.dtype == records[0].dtype == torch.float32
    with collectives() as records:
        y.sum().backward()
    assert {record.dtype for record in records} == {torch.bfloat16}
    assert x.grad.dtype == torch.float64
    assert torch.equal(x.grad.full_tensor(), torch.ones_like(X))
    assert x.redistribute([Shard(0)], forward_dtype=torch.float32).dtype == torch.float32


# -- meshes of some ranks --------------------------------------------------------------------------


def some_ranks():
    return sm.DeviceMesh(DEVICE, [1, 2], axis_names=("x",))


def test_ranks_outside_the_mesh_skip_everything():
    """They hold empty parts, take part in no collective, and go through a whole training step."""

    def program():
        mesh = some_ranks()
        outside = mesh.coordinate is None
        with collectives() as records:
            x = sm.distribute_tensor(X, mesh, [Shard(0)])
            w = nn.Parameter(sm.distribute_tensor(X.T, mesh))
            optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9)
            y = (x @ w).relu()
            loss = nn.functional.mse_loss(y, torch.zeros_like(y))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            first, second = torch.autograd.grad((x @ w).sum(), [w, w])
            results = [
                y,
                y.redistribute([Shard(1)]),
                y.T,
                y.max(0).values,
                sm.randn(3, 4, device_mesh=mesh),
                first,
                second,
            ]
            results += [copy.deepcopy(w), w.double(), nn.functional.dropout(y, 0.5), *y.split(1, 1)]
            parts = [r.to_local() for r in results]
        assert (records == []) == outside
        assert y.shape == (5, 5)
        assert loss.shape == ()
        assert w.requires_grad
        assert all(p.shape == (0,) for p in parts) == outside
        assert all(r.full_tensor().numel() == 0 for r in results) == outside
        repr(y)
        return None if outside else w.detach().full_tensor()

    results = sm.simulate(4)(program)()
    assert results[0] is None
    assert results[3] is None
    assert torch.equal(results[1], results[2])
    plain = nn.Parameter(X.T.clone())
    optimizer = torch.optim.SGD([plain], lr=0.1, momentum=0.9)
    (X @ plain).relu().square().mean().backward()
    optimizer.step()
    torch.testing.assert_close(results[1], plain.detach(), rtol=1e-12, atol=1e-12)


def test_values_outside_the_mesh_raise():
    def program():
        x = sm.distribute_tensor(X, some_ranks(), [Shard(0)])
        texts = []
        for ask in (
            lambda: x.sum().item(),
            lambda: float(x.sum()),
            lambda: bool((x == x).all()),
            x.tolist,
            x.numpy,
        ):
            try:
                ask()
            except RuntimeError as error:
                texts.append(str(error))
        return texts

    for rank, texts in enumerate(sm.simulate(4)(program)()):
        expected = f"rank {rank} is outside DeviceMesh(cpu, x=2) and holds no part of this tensor"
        assert texts == ([expected] * 5 if rank in (0, 3) else [])


def test_from_local_outside_the_mesh():
    def program():
        mesh = some_ranks()
        x = sm.from_local(torch.ones(2, 3), mesh, [Shard(1)])
        y = sm.from_local(torch.ones(2, 3), mesh, [Shard(1)], shape=(2, 6))
        assert y.shape == (2, 6)
        assert (x + y.detach() if mesh.coordinate else x).ndim == 2
        return tuple(y.to_local().shape)

    assert sm.simulate(4)(program)() == [(0,), (2, 3), (2, 3), (0,)]


def test_scalar_results_outside_the_mesh_are_0d():
    """As in torch: a program that reads `loss.to_local()` on all ranks gets the same shape
    everywhere, with a gradient.
    """

    def program():
        mesh = some_ranks()
        x = sm.from_local(torch.ones(2, 3, requires_grad=True), mesh, [Shard(0)], shape=(4, 3))
        total = x.sum().to_local()
        total.backward()
        counts = [(x > 0).sum().to_local(), x.detach().amax().to_local(), x.detach().to_local()]
        return (
            total.shape,
            total.item(),
            total.requires_grad,
            [c.dtype for c in counts],
            [tuple(c.shape) for c in counts],
        )

    for rank, (shape, value, differentiable, dtypes, shapes) in enumerate(
        sm.simulate(4)(program)()
    ):
        outside = rank in (0, 3)
        assert (shape, value, differentiable) == ((), 0.0 if outside else 6.0, True)
        assert dtypes == [torch.int64, torch.float32, torch.float32]
        assert shapes == [(), (), (0,) if outside else (2, 3)]


def test_two_disjoint_meshes():
    """Half of the ranks work on one tensor, half on another; then all of them on a third."""

    def program():
        halves = [sm.DeviceMesh(DEVICE, ranks, axis_names=("x",)) for ranks in ([0, 1], [2, 3])]
        tensors = [
            sm.distribute_tensor(X * (i + 1), half, [Shard(0)]) for i, half in enumerate(halves)
        ]
        sums = [t.sum() for t in tensors]
        mine = next(s.item() for s in sums if s.mesh.coordinate is not None)
        world = sm.init_device_mesh(DEVICE, (4,), axis_names=("w",))
        return sm.from_local(torch.tensor(mine), world, [Partial()]).item()

    for total in sm.simulate(4)(program)():
        assert total == pytest.approx(2 * (X.sum() + 2 * X.sum()).item(), rel=1e-6)


# -- device_put of what is no tensor ---------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [np.arange(10.0).reshape(5, 2), np.array([True, False]), np.float32(2.5), 3.0, 7, True]
)
def test_device_put_takes_arrays_and_numbers(value):
    """As a tensor of the same numbers; those of rank 0 count."""
    expected = torch.tensor(value)

    def program(mesh):
        given = value if mesh.get_rank() == 0 else torch.zeros_like(expected).numpy()
        x = sm.device_put(given, mesh, P("a") if expected.ndim else P())
        assert x.dtype == expected.dtype
        assert torch.equal(x.full_tensor().cpu(), expected)
        assert torch.equal(
            sm.device_put(value, mesh, src_data_rank=None).to_local().cpu(), expected
        )

    on_mesh((3,), program)


def test_device_put_copies_an_array():
    def program(mesh):
        array = np.ones(4)
        x = sm.device_put(array, mesh, P("a"), src_data_rank=None)
        array[:] = 0
        assert x.full_tensor().tolist() == [1.0] * 4

    on_mesh((2,), program)


@pytest.mark.parametrize("value", ["text", {"x": "text"}, [torch.ones(2), object()]])
def test_device_put_of_other_objects_raises(value):
    text = same_error((2,), lambda mesh: sm.device_put(value, mesh, P()), TypeError)
    assert "device_put takes tensors, NumPy arrays and numbers, or a tree of them, got" in text
