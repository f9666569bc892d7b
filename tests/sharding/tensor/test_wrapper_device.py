"""The device of wrappers in C++: clipping, optimizers, grouping, and what else reads it there."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

import shardmesh as sm
from shardmesh import P
from shardmesh.compat import ColwiseParallel, RowwiseParallel, parallelize_module
from tests.device import DEVICE
from tests.sharding.ranks import every_rank, on_mesh

SPECS = {(5, 3): P("a"), (4,): P(), (2, 6): P(None, "a"), (1, 3): P("a"), (): P()}


def _values(shape, k=0.0):
    return torch.linspace(-1.0 - k, 2.0, math.prod(shape), dtype=torch.float64).reshape(shape)


def _parameters(mesh):
    """Return sharded parameters with gradients, and the same as plain ones."""
    sharded = [
        nn.Parameter(sm.distribute_tensor(_values(shape), mesh, spec, src_data_rank=None))
        for shape, spec in SPECS.items()
    ]
    plain = [nn.Parameter(_values(shape)) for shape in SPECS]
    for parameters in (sharded, plain):
        sum((p**3).sum() for p in parameters).backward()
    return sharded, plain


def _grads(parameters):
    return [p.grad for p in parameters]


def _whole(x):
    return x.full_tensor() if isinstance(x, sm.ShardedTensor) else x


def _assert_equal(sharded, plain):
    for x, y in zip(sharded, plain, strict=True):
        torch.testing.assert_close(_whole(x), y, rtol=1e-12, atol=1e-14)


def _device_in_cpp(x):
    (device, _), *_ = torch._C._group_tensors_by_device_and_dtype([[x]], False)
    return device.type


@every_rank(2)
def test_what_enters_a_program_has_the_device_of_its_part(mesh):
    x = sm.distribute_tensor(_values((5, 3)), mesh, P("a"), src_data_rank=None)
    p = nn.Parameter(x * 2)
    (p * p).sum().backward()
    pending = nn.Parameter(sm.distribute_tensor(_values((4,)), mesh, P(), src_data_rank=None))
    with sm.accumulate_grads():
        (pending * pending).sum().backward()
        assert pending.grad.spec.unreduced
        assert _device_in_cpp(pending.grad) == DEVICE
    (g,) = torch.autograd.grad((p * p).sum(), [p])
    for y in (
        x,
        p,
        p.grad,
        g,
        p.data,
        p.detach(),
        copy.deepcopy(p),
        pending.grad,
        sm.ones(3, device_mesh=mesh),
    ):
        assert _device_in_cpp(y) == y.device.type == DEVICE
        assert y.is_cuda == (DEVICE == "cuda")
        assert not y.is_meta
    groups = _group_tensors_by_device_and_dtype([[p, pending], [p.grad, pending.grad]])
    assert [len(tensors) for tensors, _ in groups.values()] == [2]
    p.grad = g = p.detach() * 3  # a result of an operator
    assert p.grad is g
    assert _device_in_cpp(g) == DEVICE
    assert torch.equal(g.full_tensor(), 3 * p.detach().full_tensor())


@every_rank(2)
def test_operations_past_the_dispatch_still_raise(mesh):
    p, g = (f(sm.ones(4, device_mesh=mesh, placements=P("a"))) for f in (nn.Parameter, lambda x: x))
    p.sum().backward()
    for x in (p, p.grad, g):
        with (
            torch._C.DisableTorchFunctionSubclass(),
            pytest.raises(RuntimeError, match="called on the wrapper of a ShardedTensor"),
        ):
            torch.ops.aten.mul.Tensor(x, 2)


@pytest.mark.parametrize("foreach", [None, True, False])
def test_norms_and_clipping_of_torch(foreach):
    def program(mesh):
        for ord in (2, 1, 0, 3, math.inf):
            sharded, plain = _parameters(mesh)
            total = get_total_norm(_grads(sharded), ord, foreach=foreach)
            expected = get_total_norm(_grads(plain), ord, foreach=foreach)
            _assert_equal([total], [expected])
            clip_grads_with_norm_(sharded, 0.5, total, foreach)
            clip_grads_with_norm_(plain, 0.5, expected, foreach)
            _assert_equal(_grads(sharded), _grads(plain))
        for form in (
            lambda parameters: clip_grad_norm_(parameters, 0.5, foreach=foreach),
            lambda parameters: clip_grad_norm_(iter(parameters), 0.5, math.inf, foreach=foreach),
            lambda parameters: clip_grad_value_(parameters, 0.25, foreach),
            lambda parameters: clip_grads_with_norm_(
                parameters,
                0.5,
                _whole(get_total_norm(_grads(parameters), foreach=foreach)),
                foreach,
            ),
        ):
            sharded, plain = _parameters(mesh)
            form(sharded), form(plain)
            _assert_equal(_grads(sharded), _grads(plain))
        assert get_total_norm([], foreach=foreach) == 0
        assert clip_grad_norm_([nn.Parameter(sharded[0].detach())], 1.0, foreach=foreach) == 0
        sharded[0].grad = sharded[0].detach() / 0
        with pytest.raises(RuntimeError, match="is non-finite"):
            get_total_norm(_grads(sharded), error_if_nonfinite=True, foreach=foreach)

    on_mesh((3,), program)


@pytest.mark.parametrize("foreach", [None, True])
def test_clipping_of_plain_and_sharded_gradients_on_several_meshes(foreach):
    def program(mesh):
        sharded, plain = _parameters(mesh["a"])
        others, more = _parameters(
            sm.DeviceMesh(mesh.device_type, mesh.ranks.reshape(-1), axis_names=("a",))
        )
        extra = [nn.Parameter(_values((3,))) for _ in range(2)]
        for p in extra:
            p.grad = _values((3,), 2.0)
        for order in ([*sharded, extra[0]], [extra[0], *sharded]):
            total = get_total_norm(_grads(order), foreach=foreach)
            expected = get_total_norm([*_grads(plain), extra[0].grad])
            _assert_equal([total], [expected])
        clip_grad_norm_([*sharded, extra[0]], 0.5, foreach=foreach)
        clip_grad_norm_([*plain, extra[1]], 0.5, foreach=foreach)
        _assert_equal(_grads([*sharded, extra[0]]), _grads([*plain, extra[1]]))
        with pytest.raises(ValueError, match="operands are on two meshes"):  # as torch's DTensors
            clip_grad_norm_([*sharded, *others], 0.25, foreach=foreach)
        total = sm.training.clip_grad_norm_([*sharded, *others], 0.25)
        torch.testing.assert_close(
            total, clip_grad_norm_([*plain, *more], 0.25), rtol=1e-12, atol=0
        )
        _assert_equal(_grads([*sharded, *others]), _grads([*plain, *more]))

    on_mesh((2, 2), program)


@every_rank(3)
def test_norm_of_pending_gradients(mesh):
    sharded, plain = _parameters(mesh)
    for p in sharded:
        p.grad = None
    with sm.accumulate_grads():
        sum((p**3).sum() for p in sharded).backward()
        for foreach in (None, True, False):
            _assert_equal(
                [get_total_norm(_grads(sharded), foreach=foreach)], [get_total_norm(_grads(plain))]
            )


@every_rank(2)
def test_modules_move_and_change_dtype(mesh):
    module = nn.Linear(3, 4, bias=False, dtype=torch.float64)
    module.weight = nn.Parameter(
        sm.distribute_tensor(_values((4, 3)), mesh, P("a"), src_data_rank=None)
    )
    weight = module.weight
    (weight * weight).sum().backward()
    module.float()
    assert module.weight is weight
    assert weight._local.dtype is weight.grad._local.dtype is torch.float32
    assert {dtype for _, dtype in _group_tensors_by_device_and_dtype([[weight, weight.grad]])} == {
        torch.float32
    }
    module.zero_grad()
    (module.weight * module.weight).sum().backward()
    assert torch.equal(weight.grad.full_tensor(), 2 * weight.detach().full_tensor())
    assert _device_in_cpp(module.to("meta").weight) == "meta"
    module.to_empty(device=DEVICE)
    assert isinstance(module.weight, sm.ShardedTensor)
    assert isinstance(module.weight, nn.Parameter)
    assert module.weight.spec == P("a", None)
    assert _device_in_cpp(module.weight) == module.weight._local.device.type == DEVICE


@every_rank(2)
def test_data_is_assigned_between_kinds_of_wrappers(mesh):
    p = nn.Parameter(sm.distribute_tensor(_values((4, 3)), mesh, P("a"), src_data_rank=None))
    result = p.detach() * 2
    for x, y in itertools.product(
        (p, result), (p.detach() * 3, p.detach().clone().detach(), p.data)
    ):
        expected = y.full_tensor()
        x.data = y
        assert torch.equal(x.detach().full_tensor(), expected)
    p.data = sm.ones(6, 2, device_mesh=mesh, placements=P(None, "a"))
    assert p.shape == (6, 2)
    assert p.spec == P(None, "a")
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        p.data = sm.ones(6, 2, device_mesh=mesh).to("meta")
    assert _device_in_cpp(p) == DEVICE


@every_rank(2)
def test_swapped_tensors_and_references(mesh):
    x, y = (
        sm.distribute_tensor(_values(shape), mesh, spec, src_data_rank=None)
        for shape, spec in [((4, 3), P("a")), ((6,), P(None))]
    )
    torch.utils.swap_tensors(x, y)
    assert x.shape == (6,)
    assert torch.equal(y.full_tensor(), _values((4, 3)))
    p = nn.Parameter(y)
    (p * p).sum().backward()
    references = [weakref.ref(p), weakref.ref(p._local), weakref.ref(p.grad)]
    del p
    gc.collect()
    assert [r() for r in references] == [None] * 3


# -- custom functions with plain results -----------------------------------------------------------


class _Filled(torch.autograd.Function):
    """A function that fills a plain buffer, as a kernel of the user's would."""

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        out = torch.empty(x.shape, dtype=x.dtype)
        return out.copy_(x.full_tensor() * 2)

    @staticmethod
    def backward(ctx, grad):
        return torch.full(ctx.shape, 2.0, dtype=grad.dtype) * grad


class _PlainGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x * 2 + torch.zeros(x.shape, dtype=x.dtype)

    @staticmethod
    def backward(ctx, grad):
        return torch.full(ctx.shape, 2.0, dtype=grad.dtype) * 3


@pytest.mark.parametrize("spec", [P(), P("a"), P(None, "a")])
def test_a_plain_result_of_a_custom_function_passes_its_gradient_to_the_parameter(spec):
    def program(mesh):
        p = nn.Parameter(sm.distribute_tensor(_values((5, 3)), mesh, spec, src_data_rank=None))
        q = nn.Parameter(_values((5, 3)))
        calls = []
        p.register_post_accumulate_grad_hook(lambda x: calls.append(x.grad.full_tensor().clone()))
        for scale in (1.0, 2.0):
            ((_Filled.apply(p) ** 2).sum() * scale).backward()
            ((2 * q) ** 2).sum().mul(scale).backward()
            assert torch.allclose(p.grad.full_tensor(), q.grad, rtol=1e-12)
        assert p.grad.spec == p.spec
        assert [
            torch.allclose(p.grad.full_tensor() * share, call)
            for share, call in zip((1 / 3, 1), calls, strict=True)
        ] == [True] * 2
        ((_Filled.apply(p) ** 2).sum() + (p * p).sum().full_tensor()).backward()
        ((2 * q) ** 2).sum().add((q * q).sum()).backward()
        assert torch.allclose(p.grad.full_tensor(), q.grad, rtol=1e-12)

    on_mesh((2,), program)


@every_rank(2)
def test_plain_gradients_of_a_custom_function_under_implicit_replication(mesh):
    for spec, factor in itertools.product((P(), P("a")), (1, 3)):
        p = nn.Parameter(sm.distribute_tensor(_values((5, 3)), mesh, spec, src_data_rank=None))
        with sm.ops.implicit_replication():
            y = _PlainGradient.apply(p if factor == 1 else p * factor).sum()
        y.backward()
        assert torch.equal(
            p.grad.full_tensor(), torch.full((5, 3), 6.0 * factor, dtype=torch.float64)
        )
    with pytest.raises(RuntimeError, match="returned a Tensor as the gradient"):
        (_Plain.apply(p)).sum().backward()


class _Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return torch.ones(grad.shape)


# -- inference mode --------------------------------------------------------------------------------


@every_rank(2)
def test_modules_are_prepared_in_inference_mode(mesh):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)).double()
    x = _values((2, 4))
    expected = module(x).detach()
    twin = copy.deepcopy(module)
    with torch.inference_mode():
        parallelize_module(module, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        torch.testing.assert_close(_whole(module(x)), expected, rtol=1e-12, atol=1e-12)
        sm.parallel.parallelize(twin, mesh, {"0": "colwise", "1": "rowwise"})
        torch.testing.assert_close(_whole(twin(x)), expected, rtol=1e-12, atol=1e-12)


@every_rank(2)
def test_leaves_that_inference_mode_meets_are_trained_afterwards(mesh):
    for spec in (P(), P("a")):
        x = sm.distribute_tensor(_values((4, 3)), mesh, spec, src_data_rank=None)
        with torch.inference_mode():
            p = nn.Parameter(x)
            x.requires_grad_()
            q = nn.Parameter(sm.distribute_tensor(_values((4, 3)), mesh, spec, src_data_rank=None))
            assert torch.equal((q + q).full_tensor(), 2 * _values((4, 3)))
        for leaf in (x, p):
            (leaf * leaf).sum().backward()
            assert torch.equal(leaf.grad.full_tensor(), 2 * _values((4, 3)))
        with pytest.raises(RuntimeError):  # an inference tensor, as in torch
            (q * q).sum().backward()
