"""Error messages of the functional API for invalid calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardmesh as sm
from shardmesh import P
from tests.sharding.functional.helpers import put, values
from tests.sharding.ranks import every_rank, on_mesh, same_error

X = values(6, 4)


def refused(
    f: Any,
    kind: type[Exception] = sm.errors.ShardingTypeError,
    in_specs: Any = P("a"),
    out_specs: Any = P("a"),
    **kwargs: Any,
) -> str:
    """Return the text of the error of f(x), the same on every rank."""

    def program(mesh: sm.DeviceMesh) -> None:
        sm.shard_map(
            lambda x, **more: f(mesh, x, **more), mesh=mesh, in_specs=in_specs, out_specs=out_specs
        )(X, **kwargs)

    return same_error((2,), program, kind)


@pytest.mark.parametrize("name", [0, None, (0,), 1.5])
def test_invalid_axis_names(name: Any) -> None:
    text = refused(lambda mesh, x: sm.psum(x, name), TypeError)
    assert text.startswith(
        f"axis_name={name!r}: a collective takes the name of a mesh axis, or a tuple of names"
    )
    assert "['a']" in text
    with pytest.raises(sm.errors.UnboundAxisError):
        sm.psum(X, name)


def test_specs_that_are_too_long_or_name_no_axis() -> None:
    for more, where in [
        ({"in_specs": P(None, None, "a")}, "argument 0"),
        ({"out_specs": P(None, None, "a")}, "result"),
    ]:
        text = same_error(
            (2,), lambda mesh, more=more: _identity(mesh, **more)(X), ValueError, silent=False
        )
        assert text == (
            f"shard_map(identity): {where}: P(None, None, 'a') has 3 entries but the tensor has 2 "
            "dims; drop the extra entries"
        )
    text = same_error((2,), lambda mesh: _identity(mesh, in_specs=P("q"))(X), ValueError)
    assert text.startswith("shard_map(identity): argument 0: P('q') names axis 'q'")


def _identity(mesh: sm.DeviceMesh, **specs: Any) -> Any:
    def identity(x: Any) -> Any:
        return x

    return sm.shard_map(identity, mesh=mesh, **{"in_specs": P("a"), "out_specs": P("a"), **specs})


def test_error_for_a_loss_of_varying_weights() -> None:
    def own(mesh: sm.DeviceMesh, x: Any) -> Any:
        w = sm.pcast(torch.ones(4, dtype=torch.float64), "a", to="varying")
        return sm.grad(lambda w: (x * w).sum())(w)

    text = refused(own)
    assert (
        "psum(loss, 'a') for their sum; then the gradient of a varying value, as the arguments "
        "are, is that of each rank's own" in text
    )


@every_rank(2)
def test_each_ranks_own_gradient_is_that_of_the_sum(mesh: sm.DeviceMesh) -> None:
    def own(x: Any) -> Any:
        w = sm.pcast(torch.ones(4, dtype=torch.float64), "a", to="varying")
        return sm.grad(lambda w: sm.psum((x * w).sum(), "a"))(w)[None]

    found = sm.shard_map(own, mesh=mesh, in_specs=P("a"), out_specs=P("a"))(X)
    torch.testing.assert_close(
        found.full_tensor(), torch.stack([part.sum(0) for part in X.chunk(2)])
    )


@every_rank(2)
def test_error_for_results_that_are_not_tensors(mesh: sm.DeviceMesh) -> None:
    x = put(mesh, X, P("a"))
    (value, nothing), (tangent, neither) = sm.jvp(lambda x: (x * 2, None), (x,), (x,))
    assert nothing is neither is None
    torch.testing.assert_close(tangent.full_tensor(), value.full_tensor())
    (_, none), back = sm.vjp(lambda x: (x * 2, None), x)
    assert none is None
    torch.testing.assert_close(back((x, None))[0].full_tensor(), 2 * X)


def test_error_for_mismatched_tangents() -> None:
    assert same_error((2,), lambda mesh: sm.jvp(torch.sin, (X,), (None,)), ValueError) == (
        "jvp: tangents [None] for primals [*]; pass a tree like that of the primals"
    )
    text = same_error((2,), lambda mesh: sm.jvp(torch.sin, (X,), (X[0],)), ValueError)
    assert text == "jvp: a tangent of shape [4] for a primal of shape [6, 4]"


def test_a_plain_number_that_requires_grad() -> None:
    def program(mesh: sm.DeviceMesh) -> None:
        put(mesh, X) * torch.ones((), requires_grad=True)

    assert "make it a ShardedTensor with device_put(t, mesh, P())" in same_error(
        (2,), program, RuntimeError
    )

    def right(mesh: sm.DeviceMesh) -> float:
        factor = torch.ones((), requires_grad=True)
        (put(mesh, X, P("a")) * sm.device_put(factor, mesh, P())).sum().backward()
        return factor.grad.item()  # type: ignore[union-attr]

    for found in on_mesh((2,), right):
        assert found == pytest.approx(X.sum().item())
