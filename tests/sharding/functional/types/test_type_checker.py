"""The type checker of mapped functions: rejected functions, and the reported line where a value
began to vary.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import shardmesh as sm
from shardmesh import P
from tests.sharding.autograd_functions import Double
from tests.sharding.functional.helpers import leaf, put, same, values
from tests.sharding.ranks import on_mesh, same_error

X, W = values(6, 4), values(4, 4, seed=1)


def line_of(marker: str) -> int:
    """Return the number of the line of this file that ends with this comment."""
    lines = inspect.getsource(sys.modules[__name__]).splitlines()
    return next(i for i, line in enumerate(lines, 1) if line.endswith(f"# {marker}"))


def over(mesh, f, out_specs=P(), **more):
    """Map `f(x, w)` over rows of x, with w replicated."""
    return sm.shard_map(f, mesh=mesh, in_specs=(P("a"), P()), out_specs=out_specs, **more)


def refused(f: Callable[..., Any], out_specs: Any = P(), **more: Any) -> str:
    """Return the text of the ShardingTypeError of f(x, w), the same on every rank and at every
    call.
    """

    def program(mesh):
        mapped = over(mesh, f, out_specs, **more)
        for _ in range(2):
            with pytest.raises(sm.errors.ShardingTypeError):
                mapped(put(mesh, X, P("a")), put(mesh, W))
        mapped(put(mesh, X, P("a")), put(mesh, W))

    return same_error((3,), program, sm.errors.ShardingTypeError, silent=False)


def accepted(f: Callable[..., Any], out_specs: Any = P(), **more: Any) -> list[Any]:
    """Return every rank's part of the result of f(x, w), in the second call."""

    def program(mesh):
        mapped = over(mesh, f, out_specs, **more)
        mapped(put(mesh, X, P("a")), put(mesh, W))
        return mapped(put(mesh, X, P("a")), put(mesh, W)).full_tensor().detach()

    return on_mesh((3,), program)


# -- where it began --------------------------------------------------------------------------------


def of_an_argument(x, w):
    y = x.exp()  # of an argument
    return (y * 2).sum()


def of_a_meeting(x, w):
    y = w * 2
    z = y + x.sum()  # of a meeting, of a sum
    return z.sin()


def of_axis_index(x, w):
    i = sm.axis_index("a")  # of axis index
    return w * i


def of_a_scatter(x, w):
    y = sm.psum_scatter(w.repeat(3, 1), "a", tiled=True)  # of a scatter
    return y.sum()


def of_a_permutation(x, w):
    y = sm.ppermute(w, "a", [(0, 1)])  # of a permutation
    return y + 1


def of_pcast(x, w):
    y = sm.pcast(w, "a", to="varying")  # of pcast
    return y + 1


def of_random_numbers(x, w):
    y = torch.rand(4)  # of random numbers
    return w + y


def of_dropout(x, w):
    return F.dropout(w, 0.5)  # of dropout


def of_random_in_place(x, w):
    y = torch.empty(4)
    y.normal_()  # of random in place
    return y


def of_item(x, w):
    n = x.sum().item()  # of item
    return w * n


def of_a_condition(x, w):
    if x.sum() > 1e9:  # of a condition
        w = w + 1
    return w * 2


def of_an_index(x, w):
    i = int(sm.axis_index("a"))  # of an index
    return w[i]


def of_a_list(x, w):
    n = x.tolist()  # of a list
    return torch.tensor(n).sum()


def of_numpy(x, w):
    n = x.numpy()  # of numpy
    return torch.from_numpy(np.exp(n)).sum()


def of_a_write(x, w):
    y = torch.zeros(4, dtype=torch.float64)
    y[:2] = x.sum()  # of a write
    return y + w


def of_a_write_through_a_view(x, w):
    y = torch.zeros(4, 4, dtype=torch.float64)
    row = y[1]
    row.add_(x.sum())  # of a write through a view
    return y


def of_out(x, w):
    y = torch.zeros(4, dtype=torch.float64)
    torch.sum(x, 0, out=y)  # of out
    return y


def of_a_copy(x, w):
    y = torch.empty(x.shape, dtype=x.dtype)
    y.copy_(x)  # of a copy
    return y.sum()


def of_a_list_of_tensors(x, w):
    y = torch.cat([w, x[:1]])  # of a list of tensors
    return y.sum()


BEGAN = {
    f.__name__.replace("_", " "): f
    for f in (
        of_an_argument,
        of_axis_index,
        of_a_scatter,
        of_a_permutation,
        of_pcast,
        of_random_numbers,
        of_dropout,
        of_random_in_place,
        of_item,
        of_a_condition,
        of_an_index,
        of_a_list,
        of_numpy,
        of_a_write,
        of_a_write_through_a_view,
        of_out,
        of_a_copy,
        of_a_list_of_tensors,
    )
}


@pytest.mark.parametrize("name", BEGAN)
def test_error_names_the_line_that_made_a_value_vary(name):
    text = refused(BEGAN[name])
    assert f"result varies over 'a', and out_specs P({'' if 'P()' in text else 'None'}" in text
    assert f"test_type_checker.py:{line_of(name)}" in text, text
    assert f"shard_map({BEGAN[name].__name__})" in text


def test_error_names_the_argument():
    text = refused(of_an_argument)
    assert re.search(r"exp at \S+test_type_checker.py:\d+, of argument 0", text), text
    meeting = refused(of_a_meeting)
    assert f"test_type_checker.py:{line_of('of a meeting, of a sum')}" in meeting
    assert "sum at" in meeting


def test_error_names_the_argument_in_a_tree():
    def program(mesh):
        mapped = sm.shard_map(
            lambda tree: tree["x"][1] * 2,
            mesh=mesh,
            in_specs=({"x": (P(), P("a")), "y": P()},),
            out_specs=P(),
        )
        mapped({"x": (X, X), "y": X})

    assert "argument 0['x'][1]" in same_error(
        (2,), program, sm.errors.ShardingTypeError, silent=False
    )


def test_error_names_the_result_in_a_tree():
    assert "result [1]['y']" in refused(lambda x, w: (w, {"y": x}), P())


def test_an_argument_returned_unchanged():
    assert "argument 0" in refused(lambda x, w: x)


# -- other errors ----------------------------------------------------------------------------------


def test_pending_values():
    assert "is pending over 'a'" in refused(lambda x, w: sm.pcast(w, "a", to="unreduced"))
    assert "is pending over 'a'" in refused(
        lambda x, w: sm.pcast(w, "a", to="unreduced") * 2, P("a")
    )
    text = refused(lambda x, w: sm.pcast(w, "a", to="unreduced").exp())
    assert "exp of a value that is pending over 'a'" in text
    assert "psum(x, 'a') first" in text
    refused(lambda x, w: sm.pcast(w, "a", to="unreduced") + w, P(unreduced="a"))
    refused(lambda x, w: sm.pcast(w, "a", to="unreduced").sum().item())
    assert "copy_ of a value that" in refused(
        lambda x, w: w.clone().copy_(sm.pcast(w, "a", to="unreduced")), P(unreduced="a")
    )
    refused(lambda x, w: sm.pmax(sm.pcast(w, "a", to="unreduced"), "a"))


def test_a_replicated_result_is_not_a_pending_sum():
    assert "declare it a sum over 'a'" in refused(lambda x, w: w, P(unreduced="a"))
    assert torch.equal(
        accepted(lambda x, w: sm.pcast(w, "a", to="unreduced"), P(unreduced="a"))[0], W
    )


def test_linear_operators_take_pending_values():
    for result in accepted(
        lambda x, w: (2 * sm.pcast(w, "a", to="unreduced") @ w).sum(0), P(unreduced="a")
    ):
        torch.testing.assert_close(result, (2 * W @ W).sum(0))
    for result in accepted(lambda x, w: sm.psum(sm.pcast(w, "a", to="unreduced"), "a")):
        torch.testing.assert_close(result, W)


def test_reading_a_replicated_value_does_not_change_types():
    for result in accepted(
        lambda x, w: w * w.sum().item() + (1 if w.sum() > 0 else 2) + torch.tensor(w.tolist()).sum()
    ):
        torch.testing.assert_close(result, W * W.sum() + (1 if W.sum() > 0 else 2) + W.sum())
    for result in accepted(
        lambda x, w: w[int(sm.axis_size("a")) - 1] * sm.psum(x, "a").sum().item()
    ):
        torch.testing.assert_close(result, W[2] * X.sum())


def test_a_collective_after_a_read_is_replicated():
    def f(x, w):
        n = x.shape[0] + 0 * x.sum().item()
        return sm.psum(w * n, "a")

    for result in accepted(f):
        torch.testing.assert_close(result, W * 6)


def test_a_choice_between_replicated_values():
    def f(x, w):
        other = w * 2
        return w if sm.axis_index("a") == 1 else other

    assert "by its type it is the same on every rank" in refused(f)


def test_results_after_a_read_may_vary():
    for result in accepted(lambda x, w: x * x.sum().item(), P("a")):
        torch.testing.assert_close(result, torch.cat([part * part.sum() for part in X.chunk(3)]))


# -- autograd inside -------------------------------------------------------------------------------


def test_custom_functions():
    assert "varies over 'a'" in refused(lambda x, w: Double.apply(x).sum())

    def program(mesh):
        mapped = over(mesh, lambda x, w: sm.psum(Double.apply(x @ Double.apply(w)).sum(), "a"))
        for _ in range(2):
            x, w, pw = put(mesh, X, P("a"), grad=True), put(mesh, W, grad=True), leaf(W)
            mapped(x, w).backward()
            (4 * (X @ pw).sum()).backward()
            same(w.grad, pw.grad)

    on_mesh((3,), program)


def unseen(x):
    """Return a tensor that requires grad and whose operator was not tracked."""
    with torch._C.DisableTorchFunction():
        return x * 2


def test_untracked_tensors_that_require_grad():
    captured = leaf(W)
    text = refused(lambda x, w: sm.psum(unseen((x @ w).detach().requires_grad_()).sum(), "a"))
    assert "that requires grad and is not an argument" in text
    assert "test_type_checker.py:" in text
    for result in accepted(lambda x, w: sm.psum((x @ captured.detach()).sum(), "a")):
        torch.testing.assert_close(result, (X @ W).sum())


def losses_inside(how):
    def f(x, w):
        w = w.detach().requires_grad_()
        return how(x, w)

    return f


def varying_loss(x, w):
    (g,) = torch.autograd.grad((x @ w).square().sum(), [w])
    return sm.psum(g, "a")


def backward_of_a_varying_loss(x, w):
    (x @ w).square().sum().backward()
    return sm.psum(w.grad, "a")


def replicated_loss(x, w):
    return torch.autograd.grad(sm.psum((x @ w).square().sum(), "a"), [w])[0]


def backward_of_a_replicated_loss(x, w):
    sm.psum((x @ w).square().sum(), "a").backward()
    return w.grad


def test_gradients_of_varying_losses():
    plain = leaf(W)
    (X @ plain).square().sum().backward()
    for how in (varying_loss, backward_of_a_varying_loss):
        for result in accepted(losses_inside(how)):
            torch.testing.assert_close(result, plain.grad)


@pytest.mark.parametrize("how", [replicated_loss, backward_of_a_replicated_loss])
def test_gradients_of_replicated_losses_would_be_too_large(how):
    text = refused(losses_inside(how))
    assert "of a loss that is replicated over 'a'" in text
    assert "sm.value_and_grad" in text


def test_gradients_of_replicated_values_are_pending():
    unreduced = losses_inside(lambda x, w: torch.autograd.grad((x @ w).square().sum(), [w])[0])
    assert "is pending over 'a'" in refused(unreduced)
    plain = leaf(W)
    (X @ plain).square().sum().backward()
    torch.testing.assert_close(accepted(unreduced, P(unreduced="a"))[0], plain.grad)
