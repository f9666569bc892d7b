"""Calls of mapped functions: communication, errors, and state after the call."""

from __future__ import annotations

import pytest
import torch

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.autograd.named_axes import current_axis_env
from tests.device import DEVICE
from tests.sharding.functional.helpers import leaf, put, same, same_gradients, values
from tests.sharding.ranks import collectives, every_rank, launched, on_mesh, same_error

X, W = values(6, 4), values(4, 5, seed=1)


def mean_loss(x, w):
    return sm.psum((x @ w).square().sum(), "a")


# -- communication ---------------------------------------------------------------------------------


@every_rank(2)
def test_a_cached_call_adds_no_communication(mesh):
    mapped = sm.shard_map(mean_loss, mesh=mesh, in_specs=(P("a"), P()), out_specs=P())
    x, w = put(mesh, X, P("a"), grad=True), put(mesh, W, grad=True)
    counts = []
    for _ in range(3):
        with collectives() as records:
            loss = mapped(x, w)
        counts.append(launched(records))
        with collectives() as records:
            loss.backward()
        assert launched(records) == ["all_reduce", "all_reduce"], (
            "of the psum; of the gradient of w"
        )
    assert counts[1:] == [["all_reduce"]] * 2
    assert len(counts[0]) == 2, "the shapes of the results too"


@every_rank(2)
def test_check_false_exchanges_shapes_once(mesh):
    mapped = sm.shard_map(
        lambda x: x.exp(), mesh=mesh, in_specs=P("a"), out_specs=P("a"), check=False
    )
    for expected in (1, 0, 0):
        with collectives() as records:
            same_later = mapped(put(mesh, X, P("a")))
        assert len(records) == expected
        same(same_later, X.exp())


@every_rank(2)
def test_arguments_with_other_layouts_are_redistributed(mesh):
    mapped = sm.shard_map(mean_loss, mesh=mesh, in_specs=(P("a"), P()), out_specs=P())
    for _ in range(2):
        x = put(mesh, X, P(None, "a"), grad=True)
        w = put(mesh, W, P("a"), grad=True)
        px = leaf(X)
        pw = leaf(W)
        same_gradients([x, w], [px, pw], mapped(x, w), (px @ pw).square().sum())
    identity = sm.shard_map(lambda x: x, mesh=mesh, in_specs=P("a"), out_specs=P("a"))
    identity(put(mesh, X))
    same(identity(put(mesh, X, P(None, "a"))), X)
    with sm.debug.comm_budget(bytes=3 * 2 * 8, launches=1) as used:  # the other half of my rows
        identity(put(mesh, X, P(None, "a")))
    assert used.by_operator == {"shard_map(<lambda>)": (1, 48)}


@every_rank(2)
def test_several_arguments_are_redistributed_in_one_bucket(mesh):
    mapped = sm.shard_map(
        lambda x, y, w: (x + y) @ w, mesh=mesh, in_specs=(P("a"), P("a"), P()), out_specs=P("a")
    )
    given = [put(mesh, X, P(None, "a")), put(mesh, 2 * X, P(None, "a")), put(mesh, W)]
    mapped(*given)
    with collectives() as records:
        y = mapped(*given)
    assert len(records) == 1
    same(y, 3 * X @ W)


@every_rank(2)
def test_redistribution_of_arguments_is_implicit(mesh):
    mapped = sm.shard_map(mean_loss, mesh=mesh, in_specs=(P("a"), P()), out_specs=P())
    x, w = put(mesh, X, P(None, "a")), put(mesh, W)
    for _ in range(2):
        with sm.ops.implicit_comm("forbid"), collectives() as records:
            with pytest.raises(
                sm.errors.ImplicitCommError, match=r"shard_map\(mean_loss\)"
            ) as caught:
                mapped(x, w)
            assert not records
        for words in ("test_calls.py:", "argument 0", "P('a'"):
            assert words in str(caught.value)
        mapped(x, w)
    with sm.ops.implicit_comm("forbid"):
        # What f itself calls is explicit.
        same(mapped(put(mesh, X, P("a")), w), (X @ W).square().sum())


# -- errors ----------------------------------------------------------------------------------------


def identity(mesh, in_specs=P("a"), out_specs=P("a"), **more):
    def f(*xs):
        return xs[0] if len(xs) == 1 else xs

    return sm.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **more)


WRONG = {
    "another check": (lambda m: identity(m, check="sometimes"), ValueError, "check='sometimes'"),
    "specs for fewer arguments": (
        lambda m: identity(m, (P("a"),))(X, X),
        ValueError,
        "shard_map(f): in_specs has 1 entry and the function got 2 arguments: write one P for each",
    ),
    "specs for more arguments": (
        lambda m: identity(m, (P("a"), P()))(X),
        ValueError,
        "in_specs has 2 entries and the function got 1 argument: write one P for each",
    ),
    "specs of another tree": (
        lambda m: identity(m, ({"x": P()},))([X]),
        ValueError,
        "for a list of 1; got a dict with keys ['x']",
    ),
    "another key": (
        lambda m: identity(m, ({"x": P()},))({"y": X}),
        ValueError,
        "for a dict with keys ['y']; got a dict with keys ['x']",
    ),
    "no spec": (lambda m: identity(m, ("a",))(X), TypeError, "for a Tensor; got 'a'"),
    "a sharding": (
        lambda m: identity(m, (sm.NamedSharding(m, P("a")),))(X),
        TypeError,
        "in_specs[0]: NamedSharding(",
    ),
    "an axis that the mesh has not": (lambda m: identity(m, P("z"))(X), ValueError, "'z'"),
    "more dims than the argument has": (
        lambda m: identity(m, P(None, None, "a"))(X),
        ValueError,
        "",
    ),
    "a sharded tensor as static": (
        lambda m: identity(m, (None,))(put(m, X, P("a"))),
        TypeError,
        "argument 0 is sharded",
    ),
    "sharded, in a tree": (
        lambda m: identity(m, ({"w": None},))({"w": put(m, X)}),
        TypeError,
        "argument 0['w'] is sharded",
    ),
    "a pending maximum": (
        lambda m: identity(m, P(unreduced={"a": "max"}))(X),
        ValueError,
        "a max is pending over 'a'",
    ),
    "another mesh": (
        lambda m: identity(m)(put(sm.init_device_mesh(DEVICE, (2,), axis_names=("b",)), X)),
        ValueError,
        "argument 0 is on",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_calls_raise(name):
    program, kind, text = WRONG[name]
    assert text in same_error((2,), program, kind)


WRONG_RESULTS = {
    "specs for fewer results": (
        lambda m: identity(m, P("a"), (P("a"),))(X, X),
        ValueError,
        "for a tuple of 2; got a tuple of 1",
    ),
    "another tree": (
        lambda m: identity(m, P("a"), {"y": P("a")})(X),
        ValueError,
        "for a Tensor; got a dict with keys ['y']",
    ),
    "an axis that the mesh has not": (lambda m: identity(m, P("a"), P("z"))(X), ValueError, "'z'"),
    "a tensor without a spec": (
        lambda m: identity(m, P("a"), None)(X),
        TypeError,
        "is a tensor, and its out_specs are None",
    ),
    "in a tree": (
        lambda m: identity(m, P("a"), (P("a"), None))(X, X),
        TypeError,
        "result [1] is a tensor",
    ),
}


@pytest.mark.parametrize("name", WRONG_RESULTS)
def test_invalid_out_specs_raise(name):
    program, kind, text = WRONG_RESULTS[name]
    assert text in same_error((2,), program, kind, silent=False)


@every_rank(2)
def test_a_captured_tensor_as_a_result(mesh):
    captured = put(mesh, X, P("a"))
    mapped = sm.shard_map(lambda x: captured, mesh=mesh, in_specs=P("a"), out_specs=P("a"))
    same(mapped(X), X)
    same(mapped(X), X)


def test_unbound_axes():
    def outside(mesh):
        sm.psum(X, "a")

    assert "unbound axis name 'a'" in same_error((2,), outside, sm.errors.UnboundAxisError)

    def unknown(mesh):
        sm.shard_map(lambda x: sm.psum(x, "z"), mesh=mesh, in_specs=P("a"), out_specs=P())(X)

    text = same_error((2,), unknown, sm.errors.UnboundAxisError)
    assert "'z'" in text
    assert "['a']" in text


def test_ranks_outside_the_mesh():
    def program(mesh):
        half = sm.DeviceMesh(DEVICE, [0, 1], axis_names=("x",))
        mapped = sm.shard_map(
            lambda x: sm.psum(x.sum(), "x"), mesh=half, in_specs=P("x"), out_specs=P()
        )
        if half.coordinate is None:
            with pytest.raises(RuntimeError, match=r"rank \d is not in"):
                mapped(X)
        else:
            same(mapped(X), X.sum())

    on_mesh((4,), program)


@every_rank(2)
def test_results_whose_shape_depends_on_the_data(mesh):
    mapped = sm.shard_map(lambda x: x[x[:, 0] > 0], mesh=mesh, in_specs=P("a"), out_specs=P("a"))
    positive = X.abs()
    same(mapped(put(mesh, positive, P("a"))), positive)
    with pytest.raises(TypeError, match=r"result .*has the local shape \[0, 4\], and had \[3, 4\]"):
        mapped(put(mesh, -positive, P("a")))
    same(mapped(put(mesh, positive, P("a"))), positive)


@every_rank(2)
def test_results_unlike_the_previous_calls_raise(mesh):
    what = []
    mapped = sm.shard_map(lambda x: what[-1](x), mesh=mesh, in_specs=P("a"), out_specs=P("a"))
    x = put(mesh, X, P("a"))
    what.append(lambda x: x + 1)
    same(mapped(x), X + 1)
    what.append(lambda x: (x, x))
    with pytest.raises(TypeError, match="returned 2 results, and 1 in the previous call"):
        mapped(x)
    what.append(lambda x: x > 0)
    same(mapped(x), X > 0)  # another dtype needs no one else


# -- state after a call ----------------------------------------------------------------------------


@every_rank(2)
def test_an_exception_resets_state(mesh):
    fail = [True]

    @sm.shard_map(mesh=mesh, in_specs=(P("a"), P()), out_specs=P())
    def f(x, w):
        if fail[0]:
            raise KeyError("mine")
        return mean_loss(x, w)

    x, w = put(mesh, X, P("a")), put(mesh, W)
    for _ in range(2):
        fail[0] = True
        for _ in range(2):
            with pytest.raises(KeyError, match="mine"):
                f(x, w)
            assert current_axis_env() is None
            assert not torch.overrides._get_current_function_mode_stack()
            with pytest.raises(sm.errors.UnboundAxisError):
                sm.psum(X, "a")
        fail[0] = False
        same(f(x, w), (X @ W).square().sum())


@every_rank(2)
def test_a_type_error_is_raised_at_every_call(mesh):
    mapped = sm.shard_map(lambda x: x.sum(), mesh=mesh, in_specs=P("a"), out_specs=P())
    texts = []
    for _ in range(2):
        with pytest.raises(sm.errors.ShardingTypeError) as caught:
            mapped(put(mesh, X, P("a")))
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


@every_rank(2)
def test_shapes_in_alternation(mesh):
    mapped = sm.shard_map(
        lambda x, w: ((x @ w).exp(), mean_loss(x, w)),
        mesh=mesh,
        in_specs=(P("a"), P()),
        out_specs=(P("a"), P()),
    )
    for rows, dtype in [
        (6, torch.float64),
        (5, torch.float64),
        (6, torch.float32),
        (1, torch.float64),
    ] * 2:
        whole, weight = values(rows, 4, dtype=dtype), W.to(dtype)
        x = put(mesh, whole, P("a"), grad=True)
        w = put(mesh, weight, grad=True)
        px = leaf(whole)
        pw = leaf(weight)
        y, loss = mapped(x, w)
        same(y, (whole @ weight).exp())
        same_gradients([x, w], [px, pw], loss, (px @ pw).square().sum())


@every_rank(2)
def test_autocast_on_and_off(mesh):
    mapped = sm.shard_map(lambda x, w: x @ w, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a"))
    whole, weight = X.float(), W.float()
    x, w = put(mesh, whole, P("a")), put(mesh, weight)
    for dtype in (torch.float32, torch.bfloat16) * 2:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
            y = mapped(x, w)
            same(y, whole @ weight)
            assert y.dtype is dtype


@every_rank(2)
def test_with_and_without_grad(mesh):
    mapped = sm.shard_map(mean_loss, mesh=mesh, in_specs=(P("a"), P()), out_specs=P())
    for how in (torch.no_grad, torch.enable_grad, torch.inference_mode, torch.enable_grad):
        x, w, px, pw = put(mesh, X, P("a"), grad=True), put(mesh, W, grad=True), leaf(X), leaf(W)
        with how():
            loss = mapped(x, w)
        assert loss.requires_grad == (how is torch.enable_grad)
        if loss.requires_grad:
            same_gradients([x, w], [px, pw], loss, (px @ pw).square().sum())
        else:
            same(loss, (X @ W).square().sum())
    with torch.inference_mode():
        same(
            sm.shard_map(mean_loss, mesh=mesh, in_specs=(P("a"), P()), out_specs=P())(
                x.detach(), w
            ),
            (X @ W).square().sum(),
        )


def test_evaluation_first():
    """A call without grad is no precedent for one with grad, in which a captured parameter becomes
    an argument.
    """

    @every_rank(2)
    def program(mesh):
        w = leaf(W)
        mapped = sm.shard_map(lambda x: mean_loss(x, w), mesh=mesh, in_specs=P("a"), out_specs=P())
        with torch.no_grad():
            for _ in range(2):
                same(mapped(put(mesh, X, P("a"))), (X @ W).square().sum())
        mapped(put(mesh, X, P("a"))).backward()
        plain = leaf(W)
        (X @ plain).square().sum().backward()
        torch.testing.assert_close(w.grad, plain.grad)

    program()


@every_rank(2)
def test_an_exception_in_backward(mesh):
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            raise KeyError("mine")

    fails = sm.shard_map(
        lambda x, w: mean_loss(Failing.apply(x), w),
        mesh=mesh,
        in_specs=(P("a"), P()),
        out_specs=P(),
    )
    works = sm.shard_map(mean_loss, mesh=mesh, in_specs=(P("a"), P()), out_specs=P())
    for _ in range(2):
        x, w, px, pw = put(mesh, X, P("a"), grad=True), put(mesh, W, grad=True), leaf(X), leaf(W)
        with pytest.raises(KeyError, match="mine"):
            fails(x, w).backward()
        x.grad = w.grad = None
        same_gradients([x, w], [px, pw], works(x, w), (px @ pw).square().sum())


@every_rank(2)
def test_double_backward(mesh):
    mapped = sm.shard_map(
        lambda x, w: mean_loss(x, w.sin()), mesh=mesh, in_specs=(P("a"), P()), out_specs=P()
    )
    for _ in range(2):
        x, w, px, pw = put(mesh, X, P("a"), grad=True), put(mesh, W, grad=True), leaf(X), leaf(W)
        (g,) = torch.autograd.grad(mapped(x, w), [w], create_graph=True)
        (pg,) = torch.autograd.grad((px @ pw.sin()).square().sum(), [pw], create_graph=True)
        same_gradients([x, w], [px, pw], g.square().sum(), pg.square().sum())


@every_rank(2)
def test_in_place_writes_reach_the_argument(mesh):
    mapped = sm.shard_map(lambda x: x.mul_(2), mesh=mesh, in_specs=P("a"), out_specs=P("a"))
    x = put(mesh, X.clone(), P("a"))
    for factor in (2, 4):
        same(mapped(x), factor * X)
        same(x, factor * X)


@every_rank(2)
def test_the_gradient_of_an_unused_result(mesh):
    mapped = sm.shard_map(
        lambda x, w: (x * w, sm.psum(x.sum(), "a")),
        mesh=mesh,
        in_specs=(P("a"), P()),
        out_specs=(P("a"), P()),
    )
    for _ in range(2):
        x, w = put(mesh, X, P("a"), grad=True), put(mesh, X[:1], grad=True)
        mapped(x, w)[1].backward()
        same(x.grad, torch.ones_like(X))
        assert w.grad is None
