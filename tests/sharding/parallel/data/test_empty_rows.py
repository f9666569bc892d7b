"""Units whose ranks have no rows of a sharded batch: all ranks gather and reduce alike, and
gradients are those of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import fully_shard
from tests.device import DEVICE, on_device


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class First(nn.Module):
    """The first result of a module, or a module of the same input several times."""

    def __init__(self, module: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.module, self.times = module, times

    def forward(self, x):
        out = self.module(*[x] * self.times)
        return out[0] if isinstance(out, tuple) else out


Make = Callable[[], list[nn.Module]]
Case = tuple[Make, tuple[int, ...]]


def _of_images(n: int) -> Iterator[tuple[str, Make]]:
    def named(name: str) -> type[nn.Module]:
        return getattr(nn, name.format(n))

    conv, transposed = named("Conv{}d"), named("ConvTranspose{}d")

    def between(name: str, module: Callable[[], nn.Module]) -> tuple[str, Make]:
        return f"{name}, {n}d", lambda: [conv(4, 4, 1), module(), conv(4, 4, 1)]

    yield f"conv, {n}d", lambda: [conv(4, 4, 3, padding=1), conv(4, 4, 3)]
    yield f"conv without bias, {n}d", lambda: [conv(4, 4, 3, bias=False), conv(4, 4, 3, bias=False)]
    yield (
        f"groups, {n}d",
        lambda: [conv(4, 8, 3, padding="same", groups=2), conv(8, 8, 3, groups=8, stride=2)],
    )
    yield (
        f"transposed, {n}d",
        lambda: [transposed(4, 4, 3, padding=1), transposed(4, 2, 3, stride=2, groups=2)],
    )
    yield between("circular padding", lambda: conv(4, 4, 3, padding=1, padding_mode="circular"))
    for name in ("MaxPool{}d", "AvgPool{}d", "AdaptiveAvgPool{}d", "AdaptiveMaxPool{}d"):
        yield between(name.format(""), lambda name=name: named(name)(2))
    yield between("mean", lambda: named("AdaptiveAvgPool{}d")(1))
    yield between("LPPool", lambda: named("LPPool{}d")(2, 2))
    yield between("BatchNorm", lambda: named("BatchNorm{}d")(4))
    yield between("BatchNorm in eval", lambda: named("BatchNorm{}d")(4).eval())
    yield between("InstanceNorm", lambda: named("InstanceNorm{}d")(4, affine=True))
    yield between(
        "InstanceNorm with averages",
        lambda: named("InstanceNorm{}d")(4, affine=True, track_running_stats=True),
    )
    yield between("GroupNorm", lambda: nn.GroupNorm(2, 4))
    yield between("LayerNorm", lambda: nn.LayerNorm([6] * n))
    yield between("nearest", lambda: Apply(lambda x: F.interpolate(x, scale_factor=2)))
    mode = {1: "linear", 2: "bilinear", 3: "trilinear"}[n]
    yield between("linear", lambda: Apply(lambda x: F.interpolate(x, scale_factor=2, mode=mode)))
    yield between("PReLU", lambda: nn.PReLU(4))
    yield between("LocalResponseNorm", lambda: nn.LocalResponseNorm(2))
    yield between("reflection", lambda: named("ReflectionPad{}d")(1))


def _sampled(x):
    grid = F.affine_grid(x[:, :2, 0, :3], list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def _unpooled(x):
    return F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)


CASES: dict[str, Case] = {
    name: (make, (1, 4, *[6] * n)) for n in (1, 2, 3) for name, make in _of_images(n)
}
for _name, _make in {
    "unfold": lambda: [nn.Conv2d(4, 4, 1), nn.Unfold(2), nn.Conv1d(16, 4, 1)],
    "fold": lambda: [nn.Conv2d(4, 4, 1), nn.Unfold(2), nn.Fold((6, 6), 2), nn.Conv2d(4, 4, 1)],
    "pixel shuffle": lambda: [nn.Conv2d(4, 4, 1), nn.PixelShuffle(2), nn.Conv2d(1, 4, 1)],
    "pixel unshuffle": lambda: [nn.Conv2d(4, 4, 1), nn.PixelUnshuffle(2), nn.Conv2d(16, 4, 1)],
    "unpool": lambda: [nn.Conv2d(4, 4, 1), Apply(_unpooled), nn.Conv2d(4, 4, 1)],
    "grid_sample": lambda: [nn.Conv2d(4, 4, 1), Apply(_sampled), nn.Conv2d(4, 4, 1)],
    "flattened": lambda: [nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(144, 3)],
}.items():
    CASES[_name] = _make, (1, 4, 6, 6)
for _name, _make in {
    "LSTM": lambda: [First(nn.LSTM(6, 6, batch_first=True)), nn.Linear(6, 2)],
    "GRU": lambda: [First(nn.GRU(6, 6, 2, bidirectional=True, batch_first=True)), nn.Linear(12, 2)],
    "RNN": lambda: [First(nn.RNN(6, 6, batch_first=True)), nn.Linear(6, 2)],
    "Bilinear": lambda: [First(nn.Bilinear(6, 6, 4), 2), nn.Linear(4, 2)],
    "attention": lambda: [First(nn.MultiheadAttention(6, 2, batch_first=True), 3), nn.Linear(6, 2)],
}.items():
    CASES[_name] = _make, (1, 4, 6)
CASES["GRUCell"] = lambda: [nn.GRUCell(6, 6), nn.Linear(6, 2)], (1, 6)


def _built(name, frozen):
    make, shape = CASES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, x = nn.Sequential(*make()).double(), torch.randn(shape, dtype=torch.float64)
    if frozen:
        model[-1].requires_grad_(False)
    return model, x


def _gradients(model, x, second_order):
    trained = [p for p in model.parameters() if p.requires_grad]
    loss = model(x).sin().square().mean()
    if second_order:
        loss = loss + sum(
            g.square().sum() for g in torch.autograd.grad(loss, trained, create_graph=True)
        )
    loss.backward()
    return [p.grad for p in trained]


@pytest.mark.one_in(4, each=["name"])
@pytest.mark.parametrize("form", ["units", "one unit", "frozen", "second order"])
@pytest.mark.parametrize("name", CASES)
def test_a_rank_without_rows(name, form):
    frozen, second_order = form == "frozen", form == "second order"

    def rank():
        with on_device():
            mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("dp",))
            model, x = _built(name, frozen)
            kind = (
                None
                if form == "one unit"
                else lambda _, inner: any(inner is child for child in model)
            )
            kinds = kind and (
                lambda path, inner: kind(path, inner) and bool(list(inner.parameters()))
            )
            fully_shard(model, mesh, units=kinds)
            sharded = sm.distribute_tensor(x, mesh, P("dp"))
            return [g.full_tensor().cpu() for g in _gradients(model, sharded, second_order)]

    wanted = _gradients(*_built(name, frozen), second_order)
    for found in sm.simulate(2)(rank)():
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
