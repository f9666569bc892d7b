"""The check of gradients of replicas: which differences it detects, which it takes for rounding,
and how often it misses one.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import shardmesh as sm
from shardmesh.sharding.replicas import gradients
from tests.device import DEVICE
from tests.sharding.ranks import every_rank, on_mesh, place, same_error

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
ROW = 1 << 14


def _used_differently(shape, dtype, use):
    """Return the error of a program whose ranks multiply a replicated value by different random
    numbers.
    """

    def program(mesh):
        w = place(mesh, torch.zeros(shape, dtype=dtype), grad=True)
        factor = torch.randn(shape, generator=torch.Generator().manual_seed(mesh.get_rank())).to(
            DEVICE, dtype
        )
        (use(w.to_local()) * factor).sum().backward()

    return same_error((2,), program, RuntimeError, silent=False)


USES = {
    "product": lambda y: y,
    "softmax": lambda y: torch.softmax(y, -1),
    "log_softmax": lambda y: torch.log_softmax(y, -1),
    "mean removed": lambda y: y - y.mean(),
    "normalized": lambda y: F.layer_norm(y, y.shape[-1:]),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("shape", [(2, 8), (128, 64), (300, 200)], ids=str)
def test_gradients_whose_sums_cancel(dtype, use, shape):
    assert "differ between the replicas" in _used_differently(shape, dtype, USES[use])


def test_the_gradient_of_a_router():
    """Each rank computes the loss of tokens of its own, which torch's promise of `to_local` does
    not cover.
    """

    def program(mesh):
        w = place(mesh, torch.zeros(16, 8, dtype=torch.bfloat16), grad=True)
        generator = torch.Generator().manual_seed(mesh.get_rank())
        tokens = torch.randn(64, 16, generator=generator)
        experts = torch.randint(8, (64,), generator=generator)
        F.cross_entropy(
            tokens.to(DEVICE, torch.bfloat16) @ w.to_local(), experts.to(DEVICE)
        ).backward()

    assert "differ between the replicas" in same_error((4,), program, RuntimeError, silent=False)


def _projected(x):
    sums, norm, _ = gradients._projections(x.flatten())
    return sums, norm


PATTERNS = {
    "one element": lambda n: F.one_hot(torch.tensor(n // 2), n),
    "two elements": lambda n: F.one_hot(torch.tensor(1), n) - F.one_hot(torch.tensor(n - 1), n),
    "constant": lambda n: torch.ones(n),
    "alternating": lambda n: 1 - 2 * (torch.arange(n) % 2),
    "two opposite rows": lambda n: torch.cat([torch.ones(n // 2), -torch.ones(n // 2)]),
    "half zero": lambda n: torch.arange(n) % 2,
}


@pytest.mark.parametrize("n", [6, ROW, 2 * ROW, 5 * ROW + 2], ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_projections_of_structured_tensors_are_as_large_as_their_norm(pattern, n):
    """Structured differences are where sums with weights of ones, ramps or signs cancel."""
    sums, norm = _projected(PATTERNS[pattern](n).double())
    assert norm.item() == pytest.approx(PATTERNS[pattern](n).double().norm().item())
    assert sums.abs().max() > 0.5 * norm
    assert sums.square().mean().sqrt() < 3 * norm
    assert len(set(sums.tolist())) == gradients.PROJECTIONS


@pytest.mark.parametrize("n", [500, ROW + 3])
def test_projections_of_random_tensors_are_distributed_as_the_documentation_says(n):
    """A projection has variance 1, and is below t of the norm with a probability of about 0.8 t."""
    x = torch.randn(400, n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    relative = torch.stack([sums / norm for sums, norm in map(_projected, x)]).abs()
    assert relative.square().mean().item() == pytest.approx(1, abs=0.1)
    for t in (0.05, 0.1, 0.2):
        assert (relative < t).double().mean().item() == pytest.approx(0.8 * t, abs=0.3 * t)
    cross = torch.corrcoef(torch.stack([_projected(row)[0] for row in x]).T) - torch.eye(
        gradients.PROJECTIONS
    )
    assert cross.abs().max() < 0.25


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_in_another_order_pass(dtype):
    """Their rounding differs: in this test the gradients are not equal bit for bit."""

    def program(mesh):
        x = torch.randn(512, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
        pull = torch.randn(512, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
        w = place(mesh, torch.zeros(64, 32, dtype=dtype), grad=True)
        y = w.to_local()
        order = torch.randperm(512, generator=torch.Generator().manual_seed(mesh.get_rank()))
        loss = sum((x[i] @ y * pull[i]).sum() for i in order.view(8, 64))
        loss.backward()
        return w.grad.to_local()

    one, other = on_mesh((2,), program)
    assert not torch.equal(one, other)


def test_tolerance_is_that_of_the_dtype_in_which_autocast_computes():
    def program(mesh, enabled, difference):
        w = place(mesh, torch.ones(64, 64), grad=True)
        with torch.autocast(mesh.device_type, torch.bfloat16, enabled=enabled):
            y = w.to_local()
        (
            y * torch.linspace(-1, 1, 64, device=DEVICE) * (1 + difference * mesh.get_rank())
        ).sum().backward()

    on_mesh((2,), lambda mesh: program(mesh, True, 0.01))
    for enabled, difference in ((False, 0.01), (True, 0.5)):
        run = lambda mesh, e=enabled, d=difference: program(mesh, e, d)  # noqa: E731
        assert "differ between the replicas" in same_error((2,), run, RuntimeError, silent=False)


@every_rank(2)
def test_layouts_of_memory_and_kinds_of_gradient(mesh):
    """Expanded, transposed, complex, empty and 0-d gradients that are equal pass."""
    for shape, dtype in (
        ((4, 6), torch.complex128),
        ((0, 3), torch.float64),
        ((), torch.float32),
        ((4, 6), torch.float64),
    ):
        for use in (lambda y: y.sum(), lambda y: (y.mT if y.ndim else y).square().sum()):
            w = place(mesh, torch.ones(shape, dtype=dtype), grad=True)
            use(w.to_local(check="always")).abs().backward()


def test_complex_gradients_that_differ():
    def program(mesh):
        w = place(mesh, torch.ones(8, 8, dtype=torch.complex64), grad=True)
        (w.to_local() * (1j ** mesh.get_rank())).sum().real.backward()

    assert "differ between the replicas" in same_error((2,), program, RuntimeError, silent=False)


@every_rank(2)
def test_weights_are_the_same_under_a_mode_of_fake_tensors(mesh):
    from torch._subclasses.fake_tensor import FakeTensorMode

    gradients._of_elements.cache_clear()
    with FakeTensorMode():
        weights = gradients._of_elements(torch.device("cpu"))
    assert type(weights) is torch.Tensor
    assert isinstance(sm.device_put(torch.ones(2), mesh), sm.ShardedTensor)
