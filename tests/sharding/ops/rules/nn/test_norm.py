"""Normalization: bytes over sharded dims, second gradients, running statistics, and modules."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import distribute_module, shard_parameter
from shardmesh.sharding.ops.rules.check import place
from tests.device import DEVICE
from tests.sharding.ranks import collectives, launched, on_mesh, same_error

X = torch.randn(6, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
IMAGE = torch.randn(4, 6, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
WEIGHT = torch.arange(1.0, 11, dtype=torch.float64)
OPERATORS = {
    "layer_norm": (lambda x, w: F.layer_norm(x, (10,), w, w), X, WEIGHT),
    "rms_norm": (lambda x, w: F.rms_norm(x, (10,), w), X, WEIGHT),
    "group_norm": (lambda x, w: F.group_norm(x, 3, w, w), IMAGE, WEIGHT[:6]),
    "batch_norm": (lambda x, w: F.batch_norm(x, None, None, w, w, True), IMAGE, WEIGHT[:6]),
    "instance_norm": (lambda x, w: F.instance_norm(x, weight=w), IMAGE, WEIGHT[:6]),
    "local_response_norm": (
        lambda x, w: F.local_response_norm(x, 3) * w[:, None, None],
        IMAGE,
        WEIGHT[:6],
    ),
    "normalize": (lambda x, w: F.normalize(x) * w, X, WEIGHT),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize(
    "spec", [P(None, "a"), P("b", "a"), P(None, ("b", "a")), P("a", None, unreduced={"b"})], ids=str
)
def test_values_and_second_gradients(name, spec):
    call, value, weight = OPERATORS[name]

    def second(x, w):
        y = call(x, w)
        grads = torch.autograd.grad((y * y.detach().cos()).sum(), (x, w), create_graph=True)
        again = torch.autograd.grad(sum((g * g).sum() for g in grads), (x, w))
        return y.detach(), *[g.detach() for g in grads], *again

    wanted = second(value.clone().requires_grad_(), weight.clone().requires_grad_())

    def program(mesh):
        leaves = (
            place(value, mesh, spec).requires_grad_(),
            place(weight, mesh, P("a")).requires_grad_(),
        )
        for got, want in zip(second(*leaves), wanted, strict=True):
            torch.testing.assert_close(got.full_tensor(), want)

    on_mesh((4, 2), program)


@pytest.mark.parametrize(
    ("name", "spec", "numbers"),
    [
        ("layer_norm", P(None, "a"), [6, 6]),
        ("rms_norm", P(None, "a"), [6]),
        ("normalize", P(None, "a"), [6]),
        ("batch_norm", P("a"), [6, 6]),
        ("batch_norm", P(None, None, "a"), [6, 6]),
        ("batch_norm", P(None, "a"), []),
        ("instance_norm", P(None, None, "a"), [24, 24]),
        ("instance_norm", P("a"), []),
        ("group_norm", P("a"), []),
        ("group_norm", P(None, None, "a"), [12, 12]),
    ],
)
def test_only_statistics_are_communicated(name, spec, numbers):
    """One all_reduce for each; none if every rank has what it needs. The weight is replicated."""
    call, value, weight = OPERATORS[name]

    def program(mesh):
        x, w = place(value, mesh, spec), place(weight, mesh, P())
        with collectives() as records:
            call(x, w)
        assert launched(records) == ["all_reduce"] * len(numbers)
        assert [r.bytes_received for r in records] == [2 * n * 8 // 2 for n in numbers]

    on_mesh((2,), program)


def test_groups_across_ranks_only_communicate_sums():
    """6 channels in 2 groups on 3 ranks: less than a tenth of the image is received."""

    def program(mesh):
        x = place(IMAGE.repeat(1, 1, 4, 4), mesh, P(None, "a"))
        with collectives() as records:
            F.group_norm(x, 2)
        assert sum(r.bytes_received for r in records) < x.to_local().nbytes / 10

    on_mesh((3,), program)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_accumulates_in_float32(dtype):
    x = (torch.randn(3, 400, generator=torch.Generator().manual_seed(0)) + 3).to(dtype)

    def program(mesh):
        split = place(x, mesh, P(None, "a"))
        for call in (
            lambda x: F.layer_norm(x, (400,)),
            lambda x: F.rms_norm(x, (400,)),
            lambda x: F.rms_norm(x * 1e-3, (400,), eps=1e-5),
        ):
            got, want = call(split), call(x)
            assert got.dtype is dtype
            torch.testing.assert_close(
                got.full_tensor(), want, rtol=torch.finfo(dtype).eps, atol=1e-4
            )

    on_mesh((4,), program)


# -- modules ---------------------------------------------------------------------------------------

MODULES = {
    "BatchNorm2d": (lambda: nn.BatchNorm2d(6), IMAGE),
    "BatchNorm2d, momentum None": (lambda: nn.BatchNorm2d(6, momentum=None), IMAGE),
    "BatchNorm2d, not tracked": (lambda: nn.BatchNorm2d(6, track_running_stats=False), IMAGE),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(10, momentum=0.3), X),
    "BatchNorm1d of sequences": (lambda: nn.BatchNorm1d(6), IMAGE[..., 0]),
    "GroupNorm": (lambda: nn.GroupNorm(2, 6), IMAGE),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(6, affine=True), IMAGE),
    "InstanceNorm2d, tracked": (
        lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True),
        IMAGE,
    ),
    "LayerNorm": (lambda: nn.LayerNorm(10), X),
    "RMSNorm": (lambda: nn.RMSNorm(10), X),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(3), IMAGE),
    "weight_norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(10, 6)), X),
}


def trained(model, x, optimizer):
    """Run two training steps, then evaluation; return the result and the state."""
    for step in (1.0, 2.0):
        loss = (model(x * step) ** 3).mean()
        loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    return model(x).detach(), model.state_dict()


def optimizer_of(model):
    parameters = list(model.parameters())
    return torch.optim.SGD(parameters, lr=0.1) if parameters else None


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("spec", [P("a"), P(None, "a"), P("a", "b"), P("b", None)], ids=str)
def test_modules_train_as_in_one_process(name, spec):
    make, value = MODULES[name]
    torch.manual_seed(0)
    plain = make().double()
    start = copy.deepcopy(plain.state_dict())
    want, state = trained(plain, value.clone().requires_grad_(), optimizer_of(plain))

    def program(mesh):
        model = make().double()
        model.load_state_dict(start)
        distribute_module(model, mesh)
        x = sm.distribute_tensor(value, mesh, spec, src_data_rank=None).requires_grad_()
        got, ours = trained(model, x, optimizer_of(model))
        torch.testing.assert_close(got.full_tensor(), want)
        for key, entry in ours.items():
            torch.testing.assert_close(entry.full_tensor(), state[key])

    on_mesh((3, 2), program)


def test_sharded_running_statistics():
    """They are sharded like the channels, and updated in place."""
    plain = nn.BatchNorm2d(6).double()
    plain(IMAGE)

    def program(mesh):
        model = nn.BatchNorm2d(6).double()
        for name in ("weight", "bias", "running_mean", "running_var"):
            shard_parameter(model, name, mesh, P("b"))
        distribute_module(model, mesh)
        with collectives() as records:
            model(place(IMAGE, mesh, P("a", "b")))
        assert launched(records).count("all_gather") == 0
        assert model.running_mean.spec == P("b")
        torch.testing.assert_close(model.running_var.full_tensor(), plain.running_var)

    on_mesh((2, 2), program)


def test_invalid_shapes_raise_on_every_rank():
    def program(mesh):
        F.layer_norm(place(X, mesh, P(None, "a")), (10,), place(WEIGHT[:1], mesh, P()))

    assert "weight" in same_error((2,), program, RuntimeError)


def test_one_value_per_channel_raises_in_training():
    def program(mesh):
        F.batch_norm(place(X[:1], mesh, P("a")), None, None, training=True)

    assert "more than 1 value per channel" in same_error((2,), program, ValueError)


# -- outside ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*OPERATORS, "softmax", "cross_entropy", "attention"])
def test_ranks_outside_the_mesh_have_the_same_graph(name):
    """The result is moved to a mesh of another rank, and its gradient back."""
    more = {
        "softmax": (lambda x, w: x.softmax(1) * w, X, WEIGHT),
        "cross_entropy": (
            lambda x, w: F.cross_entropy(x, w.detach().long()[:6] - 1) * w,
            X,
            WEIGHT,
        ),
        "attention": (
            lambda x, w: F.scaled_dot_product_attention(x, x * w, x, is_causal=True),
            X,
            WEIGHT,
        ),
    }
    call, value, weight = (OPERATORS | more)[name]
    leaf = value.clone().requires_grad_()
    call(leaf, weight).square().sum().backward()

    def program():
        here = sm.DeviceMesh(DEVICE, [0, 1], axis_names=("a",))
        there = sm.DeviceMesh(DEVICE, [2], axis_names=("b",))
        x = sm.distribute_tensor(value, here, P(None, "a"), src_data_rank=None).requires_grad_()
        y = call(x, sm.distribute_tensor(weight, here, P(), src_data_rank=None))
        y.redistribute(there, P()).square().sum().backward()
        if here.coordinate is not None:
            torch.testing.assert_close(x.grad.full_tensor(), leaf.grad)

    sm.simulate(3)(program)()
