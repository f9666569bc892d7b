"""Derivatives of every order across the boundary between plain and sharded tensors."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import functional

import shardmesh as sm
from shardmesh import P, Partial
from tests.sharding import crossings
from tests.sharding.ranks import collectives, every_rank, launched, on_mesh, place, same_error

X = torch.arange(1.0, 7.0, dtype=torch.float64) / 3
DIRECTION = torch.arange(6.0, 0.0, -1.0, dtype=torch.float64)


# -- random programs -------------------------------------------------------------------------------


def check_programs(seeds: range) -> None:
    for seed in seeds:
        expected, shape = crossings.expected_of(seed), crossings.CrossingProgram(seed).mesh_shape
        on_mesh(
            shape,
            lambda mesh, seed=seed, expected=expected: crossings.check(seed, None, mesh, expected),
        )


@pytest.mark.one_in(10)
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_random_programs_differentiated_three_times(first: int) -> None:
    check_programs(range(first, first + 20))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(200, 5200, 100))
def test_many_random_programs_differentiated_three_times(first: int) -> None:
    check_programs(range(first, first + 100))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
def test_random_programs_on_processes(world4: Any, mesh_shape: tuple[int, ...]) -> None:
    world4(crossings.check_on_this_rank, list(range(8)), mesh_shape)


# -- ways to ask for derivatives -------------------------------------------------------------------


def cube(mesh: sm.DeviceMesh) -> Any:
    """Return x**3, by a mapped function of a plain argument."""
    return sm.shard_map(lambda x: x**3, mesh=mesh, in_specs=P("a"), out_specs=P("a"))


@every_rank(2)
def test_nested_grad_of_a_plain_argument(mesh: sm.DeviceMesh) -> None:
    f = cube(mesh)
    first = sm.grad(lambda x: f(x).sum())
    second = sm.grad(lambda x: first(x).sum())
    third = sm.grad(lambda x: second(x).sum())
    for found, wanted in [
        (first(X), 3 * X**2),
        (second(X), 6 * X),
        (third(X), torch.full_like(X, 6)),
    ]:
        torch.testing.assert_close(found, wanted)


@every_rank(3)
def test_forward_derivatives_with_plain_primals(mesh: sm.DeviceMesh) -> None:
    f = cube(mesh)
    value, tangent = sm.jvp(f, (X,), (DIRECTION,))
    torch.testing.assert_close(value.full_tensor(), X**3)
    torch.testing.assert_close(tangent.full_tensor(), 3 * X**2 * DIRECTION)
    slope = sm.grad(lambda x: f(x).sum())
    torch.testing.assert_close(sm.jvp(slope, (X,), (DIRECTION,))[1], 6 * X * DIRECTION)


@every_rank(2)
def test_the_functions_of_torch_autograd_functional(mesh: sm.DeviceMesh) -> None:
    f = cube(mesh)

    def loss(x: Tensor) -> Tensor:
        return f(x).sum().full_tensor()

    torch.testing.assert_close(functional.hessian(loss, X), torch.diag(6 * X))
    torch.testing.assert_close(functional.hvp(loss, X, DIRECTION)[1], 6 * X * DIRECTION)
    torch.testing.assert_close(functional.vhp(loss, X, DIRECTION)[1], 6 * X * DIRECTION)
    torch.testing.assert_close(
        functional.jvp(lambda x: f(x).full_tensor(), X, DIRECTION)[1], 3 * X**2 * DIRECTION
    )


BOUNDARIES = {
    "mapped": lambda mesh, x: cube(mesh)(x).full_tensor(),
    "from_local": lambda mesh, x: (
        sm.from_local(x, mesh, P()).redistribute(P("a")).pow(3).full_tensor()
    ),
    "device_put": lambda mesh, x: (sm.device_put(x, mesh, P("a")) ** 3).full_tensor(),
    "implicit": lambda mesh, x: _implicit(place(mesh, X.sin(), sm.Shard(0)), x).full_tensor(),
    "to_local": lambda mesh, x: (
        sm.from_local(sm.device_put(x, mesh, P()).to_local() ** 3, mesh, P())
        .redistribute(P("a"))
        .full_tensor()
    ),
}


def _implicit(sharded: Any, x: Tensor) -> Any:
    with sm.ops.implicit_replication():
        return (sharded * x).sin()


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_gradients_of_gradients_by_differences(boundary: str) -> None:
    def program(mesh: sm.DeviceMesh) -> None:
        x = X.clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda x: BOUNDARIES[boundary](mesh, x), x)
        assert torch.autograd.gradgradcheck(lambda x: BOUNDARIES[boundary](mesh, x), x)

    on_mesh((2,), program)


def _adapted_loss(w: Tensor, score: Any) -> Tensor:
    """Return the loss after an inner training step, as in meta-learning."""
    inner = w - 0.1 * sm.grad(score)(w)
    return score(inner).square()


def test_meta_learning() -> None:
    w = torch.tensor([0.5, -1.0], dtype=torch.float64)
    data = X.view(3, 2)
    expected = sm.grad(lambda w: _adapted_loss(w, lambda w: (data @ w).sin().sum()))(w)

    def program(mesh: sm.DeviceMesh) -> None:
        by_rank = sm.shard_map(
            lambda w, x: sm.psum((x @ w).sin().sum(), "a"),
            mesh=mesh,
            in_specs=(P(), P("a")),
            out_specs=P(),
        )
        x = place(mesh, data, sm.Shard(0))
        torch.testing.assert_close(
            sm.grad(lambda w: _adapted_loss(w, lambda w: by_rank(w, x).full_tensor()))(w), expected
        )
        torch.testing.assert_close(
            sm.grad(lambda w: _adapted_loss(w, lambda w: by_rank(w, x)))(w), expected
        )

    on_mesh((3,), program)


@every_rank(2)
def test_a_gradient_penalty_by_backward(mesh: sm.DeviceMesh) -> None:
    """With a plain input and a sharded parameter, both get a `.grad`."""

    def penalty(w: Any, x: Tensor) -> Any:
        (slope,) = torch.autograd.grad((w @ x).sin().sum(), x, create_graph=True)
        return (slope.norm() - 1).square()

    weight = torch.arange(12.0, dtype=torch.float64).view(2, 6) / 10
    plain, x = weight.clone().requires_grad_(), X.clone().requires_grad_()
    penalty(plain, x).backward()
    sharded, ours = place(mesh, weight, sm.Shard(1), grad=True), X.clone().requires_grad_()
    with sm.ops.implicit_replication():
        penalty(sharded, ours).backward()
    torch.testing.assert_close(sharded.grad.full_tensor(), plain.grad)
    torch.testing.assert_close(ours.grad, x.grad)


# -- what is odd -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sum", "avg", "max", "min", "product"])
def test_pending_parts_of_any_kind(kind: str) -> None:
    """Each rank's part has its own gradients, to every order."""
    parts = torch.tensor([[1.0, 2.0, 3.0], [2.0, 1.0, 4.0]], dtype=torch.float64)
    combine = {
        "sum": torch.sum,
        "avg": torch.mean,
        "max": torch.amax,
        "min": torch.amin,
        "product": torch.prod,
    }[kind]

    def three(loss: Any, by: Tensor) -> list[Tensor]:
        found = []
        for _ in range(3):
            (g,) = torch.autograd.grad(loss, by, create_graph=True)
            found.append(g.detach())
            loss = g.sin().sum()
        return found

    plain = parts.clone().requires_grad_()
    expected = three((combine(plain, 0) ** 3).sum(), plain)

    def program(mesh: sm.DeviceMesh) -> None:
        rank = mesh.get_rank()
        part = parts[rank].clone().requires_grad_()
        loss = (sm.from_local(part, mesh, [Partial(kind)]).redistribute(P()) ** 3).sum()
        for found, wanted in zip(three(loss, part), expected, strict=True):
            torch.testing.assert_close(found, wanted[rank])

    on_mesh((2,), program)


def test_gradient_that_ranks_use_differently_raises() -> None:
    """The gradient of a plain tensor is one value for all ranks, as the tensor is."""

    def program(mesh: sm.DeviceMesh) -> None:
        x = X.clone().requires_grad_()
        (slope,) = torch.autograd.grad(cube(mesh)(x).sum(), x, create_graph=True)
        (slope * (1 + mesh.get_rank())).sum().backward()

    text = same_error((2,), program, RuntimeError, silent=False)
    assert "is to be differentiated, and each rank used it differently" in text
    assert "axes ('a',)" in text


@every_rank(2)
def test_gradient_use_is_compared_once(mesh: sm.DeviceMesh) -> None:
    f, found = cube(mesh), []
    for _ in range(3):
        x = X.clone().requires_grad_()
        (slope,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        with collectives() as records:
            torch.autograd.grad(slope.sum(), x)
        found.append(launched(records))
    assert found == [["all_reduce", "all_gather"], ["all_gather"], ["all_gather"]]


def test_ranks_outside_of_the_mesh() -> None:
    def program() -> list[list[float]]:
        mesh = sm.DeviceMesh(crossings.DEVICE, [1, 2], axis_names=("a",))
        first = sm.grad(lambda w: (sm.device_put(w, mesh, P("a")) ** 4).sum())
        ones = torch.ones(3, dtype=torch.float64)
        return [first(ones).tolist(), sm.grad(lambda w: first(w).sum())(ones).tolist()]

    inside, outside = [[4.0] * 3, [12.0] * 3], [[0.0] * 3] * 2
    assert sm.simulate(4)(program)() == [outside, inside, inside, outside]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.complex128], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    def two(loss: Any, x: Tensor) -> list[Tensor]:
        (first,) = torch.autograd.grad(loss.abs(), x, create_graph=True)
        return [first.detach(), *torch.autograd.grad(first.abs().sum(), x)]

    plain = torch.tensor([1, 2, 3], dtype=dtype, requires_grad=True)
    expected = two((plain**3).sum(), plain)

    def program(mesh: sm.DeviceMesh) -> None:
        x = torch.tensor([1, 2, 3], dtype=dtype, requires_grad=True)
        for found, wanted in zip(
            two((sm.from_local(x, mesh, P()).redistribute(P("a")) ** 3).sum(), x),
            expected,
            strict=True,
        ):
            torch.testing.assert_close(found, wanted)

    on_mesh((2,), program)


# -- device_put and distribute_tensor --------------------------------------------------------------


@pytest.mark.parametrize("source", [0, 1, None])
@pytest.mark.parametrize(
    "spec", [P(), P("a"), P("b"), P(("b", "a")), P(unreduced={"a"}), P("b", unreduced={"a": "max"})]
)
def test_device_put_is_differentiable(spec: P, source: int | None) -> None:
    """Every rank's tensor gets the whole gradient, although the values come from one rank."""

    def program(mesh: sm.DeviceMesh) -> None:
        given = X if source in (None, mesh.get_rank()) else torch.zeros_like(X)
        w = given.clone().requires_grad_()
        y = sm.device_put(w, mesh, spec, src_data_rank=source)
        assert not y.is_leaf
        assert sm.typeof(y) is sm.Layout.of(mesh, spec, X.shape, X.dtype)
        (y.redistribute(P()) ** 3).sum().backward()
        torch.testing.assert_close(w.grad, 3 * X**2)
        assert not sm.device_put(w.detach(), mesh, spec).requires_grad

    on_mesh((2, 2), program)


@every_rank(2)
def test_device_put_of_a_computed_tensor(mesh: sm.DeviceMesh) -> None:
    found = sm.grad(lambda w: (sm.device_put(w * 2, mesh, P("a")) ** 2).sum())(X)
    torch.testing.assert_close(found, 8 * X)


def test_distribute_tensor_of_a_differentiated_tensor_raises() -> None:
    """It makes a leaf, and the gradient would be zero."""

    def program(mesh: sm.DeviceMesh) -> None:
        sm.grad(lambda w: (sm.distribute_tensor(w, mesh, P("a")) ** 2).sum())(X)

    assert "use device_put(t, mesh, placements) to stay in the graph" in same_error(
        (2,), program, RuntimeError
    )


@every_rank(2)
def test_backward_with_a_graph_into_a_plain_leaf(mesh: sm.DeviceMesh) -> None:
    x = X.clone().requires_grad_()
    with warnings.catch_warnings(action="ignore"):  # a reference cycle
        cube(mesh)(x).sum().backward(create_graph=True)
    slope, x.grad = x.grad, None
    slope.sum().backward()
    torch.testing.assert_close(x.grad, 6 * X)
