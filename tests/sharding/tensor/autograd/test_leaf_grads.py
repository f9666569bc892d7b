"""Gradients: seeds, the reduction at the end of backward, accumulation, higher derivatives."""

from __future__ import annotations

import pytest
import torch

import shardmesh as sm
from shardmesh import P, Partial, Replicate, Shard
from tests.sharding.ranks import collectives, every_rank, launched, on_mesh, place, same_error
from tests.sharding.reference import equal, plain_grad

X = torch.arange(15.0, dtype=torch.float64).view(5, 3) / 7 - 1
W = torch.arange(12.0, dtype=torch.float64).view(3, 4) / 5 - 1

EVERY_PLACE = [
    P(),
    P("a"),
    P(None, "a"),
    P("b"),
    P("a", "b"),
    P(("a", "b")),
    P(("b", "a")),
    P(None, ("b", "a")),
]


# -- seeds -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh_shape", "spec"),
    [
        *[(shape, spec) for shape in [(2,), (3,)] for spec in EVERY_PLACE if "b" not in spec.axes],
        *[(shape, spec) for shape in [(2, 2), (3, 2)] for spec in EVERY_PLACE],
    ],
)
def test_backward_of_a_scalar(mesh_shape, spec):
    """For any loss, pending or replicated on some or all axes, the gradient is that of one
    process.
    """
    (expected,) = plain_grad(lambda x: (x**3).sum(), X)

    def program(mesh):
        for finish in (lambda loss: loss, lambda loss: loss.redistribute(P())):
            x = sm.device_put(X, mesh, spec).requires_grad_()
            finish((x**3).sum()).backward()
            assert sm.typeof(x.grad) is sm.typeof(x)
            equal(x.grad.full_tensor(), expected)

    on_mesh(mesh_shape, program)


def test_the_seed_of_a_replicated_loss_is_its_share():
    """1/n on each of n replicas; 1 where the loss is pending."""

    def program(mesh):
        replicated = place(mesh, torch.tensor(2.0), grad=True)
        replicated.register_hook(lambda grad: seen.append(grad.to_local().item()))
        pending = sm.from_local(torch.tensor(1.0), mesh, [Partial()]).requires_grad_()
        pending.register_hook(lambda grad: seen.append(grad.to_local().item()))
        seen = []
        replicated.backward()
        pending.backward()
        assert replicated.grad.item() == pending.grad.item() == 1
        return seen

    for seen in on_mesh((3,), program):
        assert seen == pytest.approx([1 / 3, 1], rel=1e-6)


@pytest.mark.parametrize("reduce", [torch.amax, torch.amin, torch.prod, torch.mean])
def test_a_loss_that_is_pending_with_another_kind(reduce):
    (expected,) = plain_grad(reduce, X)

    def program(mesh):
        x = place(mesh, X, Shard(0), Shard(1), grad=True)
        reduce(x).backward()
        equal(x.grad.full_tensor(), expected)
        y = place(mesh, X, Shard(0), Shard(1), grad=True)
        equal(torch.autograd.grad(reduce(y), y)[0].full_tensor(), expected)

    on_mesh((3, 2), program)


@every_rank(2)
def test_a_loss_of_one_sharded_element(mesh):
    x = place(mesh, torch.ones(1), Shard(0), grad=True)
    (x * 3).backward()
    assert torch.equal(x.grad.full_tensor(), torch.tensor([3.0]))


@every_rank(2, 2)
def test_explicit_gradients(mesh):
    """Any layout, or a plain tensor that is the same on every rank."""
    for spec in (P("a", "b"), P(), P(unreduced={"a", "b"})):
        for gradient in (
            X,
            *[sm.device_put(X, mesh, at) for at in (P(), P("b"), P(None, ("b", "a")))],
        ):
            x = place(mesh, X, Shard(0), Replicate(), grad=True)
            (x * 2).redistribute(spec).backward(gradient)
            equal(x.grad.full_tensor(), 2 * X)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (
            lambda x: (x * 2).backward(),
            ["needs a scalar", "f64[5, 3] @ P('a', None) on (a=2)", "gradient="],
        ),
        (lambda x: (x * 2).backward(X[:4]), ["[4, 3]", "[5, 3]"]),
        (lambda x: (x * 2).backward(place(x.mesh, X[:4])), ["[4, 3]", "[5, 3]"]),
        (lambda x: (x.to(torch.complex128) * 2).sum().backward(), ["real scalar", "c128[]"]),
        (lambda x: x.detach().sum().backward(), ["does not require grad"]),
        (lambda x: torch.autograd.grad(x.sum(), x, is_grads_batched=True), ["is_grads_batched"]),
    ],
)
def test_invalid_backward_raises(program, words):
    text = same_error((2,), lambda mesh: program(place(mesh, X, Shard(0), grad=True)), Exception)
    for word in words:
        assert word in text


# -- the reduction at the end ----------------------------------------------------------------------


@every_rank(2)
def test_replicated_parameter_is_reduced_once(mesh):
    w = place(mesh, W, grad=True)
    x = place(mesh, X, Shard(0))
    with collectives() as records:
        loss = sum(((x * i) @ w).tanh().sum() for i in range(5))
        assert launched(records) == []
        loss.backward()
    assert launched(records) == ["all_reduce"]
    assert records[0].bytes_received == W.numel() * 8
    (expected,) = plain_grad(lambda w: sum(((X * i) @ w).tanh().sum() for i in range(5)), W)
    assert sm.typeof(w.grad) is sm.typeof(w)
    equal(w.grad.to_local(), expected)


@every_rank(2, 2)
def test_one_bucket_per_set_of_axes_and_dtype(mesh):
    """Seven leaves: all axes in two dtypes, axis b alone, and one that is sharded on both."""
    x = place(mesh, X, Shard(0), Shard(1))
    whole = [place(mesh, X, grad=True) for _ in range(3)]
    single = [place(mesh, X.float(), grad=True) for _ in range(2)]
    rows = [place(mesh, X, Shard(0), Replicate(), grad=True)]
    both = place(mesh, X, Shard(0), Shard(1), grad=True)
    leaves = [whole[0], single[0], rows[0], whole[1], both, single[1], whole[2]]
    loss = sum((leaf * x).sum() for leaf in leaves)
    with collectives() as records:
        loss.backward()
    assert launched(records) == ["all_reduce"] * 3
    assert sorted(len(record.ranks) for record in records) == [2, 4, 4]
    for leaf in leaves:
        torch.testing.assert_close(leaf.grad.full_tensor().double(), X)


@every_rank(2)
def test_reading_grad_never_communicates(mesh):
    w = place(mesh, W, grad=True)
    (place(mesh, X, Shard(0)) @ w).sum().backward()
    with collectives() as records:
        assert w.grad is w.grad
        assert w.grad.spec == P(None, None)
    assert records == []


@every_rank(2)
def test_backward_twice_accumulates(mesh):
    """Over one retained graph, and over two forward passes."""
    w = place(mesh, W, grad=True)
    x = place(mesh, X, Shard(0))
    loss = (x @ w).tanh().sum()
    (once,) = plain_grad(lambda w: (X @ w).tanh().sum(), W)
    loss.backward(retain_graph=True)
    equal(w.grad.full_tensor(), once)
    loss.backward()
    equal(w.grad.full_tensor(), 2 * once)
    (x @ w).tanh().sum().backward()
    equal(w.grad.full_tensor(), 3 * once)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("spec", [P("a", "b"), P("a"), P(), P(("b", "a"))])
def test_grad_is_one_mutable_tensor(spec):
    """As in torch: the same object each time, and what is done to it is done to the gradient."""

    def program(mesh):
        x = sm.device_put(X, mesh, spec).requires_grad_()
        assert x.grad is None
        (x * 2).sum().backward()
        assert x.grad is x.grad
        x.grad.mul_(10)
        (x * 3).sum().backward()
        equal(x.grad.full_tensor(), torch.full_like(X, 23))
        x.grad = given = sm.device_put(X, mesh, spec)
        assert x.grad is given
        (x * 3).sum().backward()
        equal(x.grad.full_tensor(), X + 3)
        x.grad = sm.device_put(X.float(), mesh, P())
        assert x.grad.dtype is torch.float32
        assert x.grad.spec == x.spec
        x.grad = None
        x.sum().backward()
        equal(x.grad.full_tensor(), torch.ones_like(X))
        seen = []
        x.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.full_tensor()))
        (x * 4).sum().backward()
        equal(seen[0], torch.full_like(X, 5))

    on_mesh((2, 2), program)


@every_rank(2)
def test_frozen_and_unused_parameters(mesh):
    used, frozen, unused = place(mesh, W, grad=True), place(mesh, W), place(mesh, W, grad=True)
    with collectives() as records:
        (place(mesh, X, Shard(0)) @ used @ frozen.T).sum().backward()
    assert launched(records) == ["all_reduce"]
    assert frozen.grad is None
    assert unused.grad is None
    used.requires_grad_(False)
    assert not (place(mesh, X, Shard(0)) @ used).requires_grad
    used.requires_grad_()
    used.grad = None
    (place(mesh, X, Shard(0)) @ used).sum().backward()
    equal(used.grad.full_tensor(), plain_grad(lambda w: (X @ w).sum(), W)[0])


@every_rank(2)
def test_activations_may_be_leaves(mesh):
    x = place(mesh, X, Shard(0))
    middle = (x * 2).detach().requires_grad_()
    (middle**2).sum().backward()
    equal(middle.grad.full_tensor(), 4 * X)


@every_rank(2)
def test_inputs_of_backward(mesh):
    """Only the named tensors get a gradient; an intermediate one reads as its share."""
    v, w = place(mesh, W, grad=True), place(mesh, W, grad=True)
    x = place(mesh, X, Shard(0))
    y = x @ w
    ((y @ v.T) ** 2).sum().backward(inputs=[v])
    assert w.grad is None
    equal(v.grad.full_tensor(), plain_grad(lambda v: ((X @ W @ v.T) ** 2).sum(), W)[0])
    y = x @ w
    (y**2).sum().backward(inputs=y)
    assert w.grad is None
    equal(y.grad.full_tensor(), 2 * X @ W)


# -- accumulation over microbatches ---------------------------------------------------------------


def micro_batches(mesh):
    return [place(mesh, X * i, Shard(0)) for i in range(1, 5)]


def accumulated():
    return plain_grad(lambda w: sum(((X * i) @ w).tanh().sum() for i in range(1, 5)), W)[0]


@every_rank(2)
def test_accumulate_grads_reduces_once(mesh):
    w = place(mesh, W, grad=True)
    batches = micro_batches(mesh)
    with collectives() as records:
        with sm.accumulate_grads():
            for i, batch in enumerate(batches):
                (batch @ w).tanh().sum().backward()
                assert sm.typeof(w.grad).pending == {"a": "sum"}, i
            assert launched(records) == []
        assert launched(records) == ["all_reduce"]
    assert sm.typeof(w.grad) is sm.typeof(w)
    equal(w.grad.full_tensor(), accumulated())


@every_rank(2)
def test_grad_is_correct_inside_accumulate_grads(mesh):
    """Also where a reduced gradient was there before."""
    w = place(mesh, W, grad=True)
    first, *rest = micro_batches(mesh)
    (first @ w).tanh().sum().backward()
    with sm.accumulate_grads():
        for batch in rest:
            (batch @ w).tanh().sum().backward()
        with collectives() as records:
            inside = w.grad
        assert records == []
        equal(inside.full_tensor(), accumulated())
    equal(w.grad.full_tensor(), accumulated())


@every_rank(2)
def test_nested_blocks_reduce_at_the_outermost_end(mesh):
    w = place(mesh, W, grad=True)
    with collectives() as records:
        with sm.accumulate_grads():
            for batch in micro_batches(mesh):
                with sm.accumulate_grads():
                    (batch @ w).tanh().sum().backward()
            assert launched(records) == []
    assert launched(records) == ["all_reduce"]
    equal(w.grad.full_tensor(), accumulated())


@every_rank(2)
def test_exception_inside_accumulate_grads(mesh):
    """It comes out without communication; the gradients so far are there, and can be dropped or
    added to.
    """
    w = place(mesh, W, grad=True)
    first, *rest = micro_batches(mesh)
    with collectives() as records:
        with pytest.raises(KeyError), sm.accumulate_grads():
            (first @ w).tanh().sum().backward()
            raise KeyError("mine")
    assert records == []
    assert sm.typeof(w.grad).pending
    for batch in rest:
        (batch @ w).tanh().sum().backward()
    assert sm.typeof(w.grad) is sm.typeof(w)
    equal(w.grad.full_tensor(), accumulated())
    w.grad = None
    (first @ w).tanh().sum().backward()
    equal(w.grad.full_tensor(), plain_grad(lambda w: (X @ w).tanh().sum(), W)[0])


@every_rank(2)
def test_gradients_cleared_inside_accumulate_grads_stay_cleared(mesh):
    w = place(mesh, W, grad=True)
    first, *rest = micro_batches(mesh)
    with sm.accumulate_grads():
        (place(mesh, X, Shard(0)) @ w).sum().backward()
        w.grad = None
        for batch in (first, *rest):
            (batch @ w).tanh().sum().backward()
    equal(w.grad.full_tensor(), accumulated())


# -- higher derivatives ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("spec", [P(), P("a"), P("a", "b"), P(None, ("b", "a"))])
def test_create_graph(spec):
    """A gradient penalty: backward through .grad, and through torch.autograd.grad."""

    def penalty(w):
        (first,) = torch.autograd.grad((w**3).sum(), w, create_graph=True)
        return (first * first).sum() + (w**2).sum()

    (expected,) = plain_grad(penalty, W)

    def program(mesh):
        w = sm.device_put(W, mesh, spec).requires_grad_()
        penalty(w).backward()
        equal(w.grad.full_tensor(), expected)
        v = sm.device_put(W, mesh, spec).requires_grad_()
        (v**3).sum().backward(create_graph=True)
        first = v.grad
        assert first.requires_grad
        v.grad = None
        ((first * first).sum() + (v**2).sum()).backward()
        equal(v.grad.detach().full_tensor(), expected)

    on_mesh((2, 2), program)


@every_rank(2)
def test_autograd_grad(mesh):
    """Each gradient comes reduced, in its input's layout; `.grad` stays as it is."""
    w = place(mesh, W, grad=True)
    v = place(mesh, X, Shard(0), grad=True)
    unused = place(mesh, W, grad=True)
    loss = (v @ w).tanh().sum()
    expected_w, expected_v = plain_grad(lambda w, v: (v @ w).tanh().sum(), W, X)
    grads = torch.autograd.grad(loss, [w, v], retain_graph=True)
    assert [sm.typeof(g) for g in grads] == [sm.typeof(w), sm.typeof(v)]
    equal(grads[0].full_tensor(), expected_w)
    equal(grads[1].full_tensor(), expected_v)
    assert w.grad is None
    assert v.grad is None
    assert torch.autograd.grad(loss, [unused, w], retain_graph=True, allow_unused=True)[0] is None
    zeros, _ = torch.autograd.grad(loss, [unused, w], retain_graph=True, materialize_grads=True)
    assert torch.equal(zeros.full_tensor(), torch.zeros_like(W))
    y = v @ w
    (g,) = torch.autograd.grad(y, w, torch.ones_like(y))
    equal(g.full_tensor(), plain_grad(lambda w: (X @ w).sum(), W)[0])
    with pytest.raises(RuntimeError, match="allow_unused"):
        torch.autograd.grad(loss, unused)


@every_rank(2)
def test_autograd_backward(mesh):
    """The function does what the method does, for several tensors, sharded and plain together."""
    w, v = place(mesh, W, grad=True), W.clone().requires_grad_()
    x = place(mesh, X, Shard(0))
    with collectives() as records:
        torch.autograd.backward([(x @ w).sum(), (X @ v).sum()])
    assert launched(records) == ["all_reduce"]
    expected = plain_grad(lambda w: (X @ w).sum(), W)[0]
    equal(w.grad.full_tensor(), expected)
    equal(v.grad, expected)
    y = x @ w
    torch.autograd.backward(y, torch.ones_like(y), inputs=[w])
    equal(w.grad.full_tensor(), 2 * expected)


@every_rank(2)
def test_autograd_functional(mesh):
    x = place(mesh, X, Shard(0))
    value, grad = torch.autograd.functional.vjp(lambda t: (t * t).sum(), x)
    assert value.item() == pytest.approx((X * X).sum().item(), rel=1e-12)
    equal(grad.full_tensor(), 2 * X)
    _, tangent = torch.autograd.functional.jvp(lambda t: (t * t).sum(), x, torch.ones_like(x))
    assert tangent.item() == pytest.approx((2 * X).sum().item(), rel=1e-12)
