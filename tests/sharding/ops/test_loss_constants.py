"""Losses that hold plain constants, next to the sharded outputs of a model, as in MONAI: weights of
classes, one-hot labels, kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import distribute_module, fully_shard, parallelize
from tests.device import DEVICE
from tests.sharding.ranks import every_rank, on_mesh

F64 = torch.float64
IMAGES = torch.linspace(-1, 1, 6 * 3 * 16, dtype=F64).sin().view(6, 3, 4, 4)  # uneven over 4 ranks
LABELS = torch.arange(6 * 16).remainder(4).view(6, 1, 4, 4)
CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 1.5], dtype=F64)


def one_hot(labels: Tensor, classes: int) -> Tensor:
    """As MONAI's: zeros that are plain, into which sharded labels are scattered."""
    shape = [labels.shape[0], classes, *labels.shape[2:]]
    return torch.zeros(shape, dtype=F64, device=labels.device).scatter_(1, labels.long(), 1)


class Dice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("class_weight", CLASS_WEIGHTS.clone())

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x, target = x.softmax(1), one_hot(labels, 4)
        axes = torch.arange(2, x.ndim).tolist()
        both = (target * x).sum(axes)
        return ((1 - 2 * both / (target.sum(axes) + x.sum(axes))) * self.class_weight).mean()


class Focal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = CLASS_WEIGHTS.to(DEVICE)  # an attribute, no buffer

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        target = F.one_hot(labels[:, 0], x.shape[1]).movedim(-1, 1).to(x.dtype)
        log_p = F.log_softmax(x, 1)
        weight = self.weight.view(1, -1, 1, 1).to(x)
        return -((1 - log_p.exp()).square() * log_p * target * weight).sum() / weight.sum()


class WeightedCrossEntropy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss(weight=CLASS_WEIGHTS.clone())

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(x, labels[:, 0])


class CatAndWhere(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.full((1, 4, 1, 1), -0.1, dtype=F64))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        y = torch.where(x > self.low, x, self.low)
        y = torch.cat([torch.zeros(6, 1, 4, 4, dtype=F64, device=x.device), y], 1)
        return (y * torch.arange(5, dtype=F64, device=x.device)[:, None, None]).square().mean()


class Distances(nn.Module):
    """As in a Wasserstein Dice: rows of a plain matrix, by sharded labels."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = torch.arange(16, dtype=F64, device=DEVICE).view(4, 4).cos()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        rows = self.matrix[labels.flatten(1)]
        return torch.einsum("bsc,bcs->bs", rows, x.softmax(1).flatten(2)).mean()


class Edges(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        kernel = torch.arange(36, dtype=F64).sin().view(4, 1, 3, 3)
        self.register_buffer("kernel", kernel)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.conv2d(x, self.kernel, padding=1, groups=4).square().mean()  # type: ignore[arg-type]


LOSSES: list[type[nn.Module]] = [Dice, Focal, WeightedCrossEntropy, CatAndWhere, Distances, Edges]
PREPARED: dict[str, Callable[[nn.Module, Any], Any]] = {
    "implicit_replication": lambda loss, mesh: loss,
    "parallelize": lambda loss, mesh: parallelize(loss, mesh, {}),
    "distribute_module": distribute_module,
}


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 4, 1)
    return nn.Sequential(*layers).double().to(DEVICE)


@pytest.mark.parametrize("how", PREPARED)
@pytest.mark.parametrize("kind", LOSSES, ids=lambda kind: kind.__name__)
def test_constants_that_are_equal_on_all_ranks(kind: type[nn.Module], how: str) -> None:
    reference = net()
    expected = kind().to(DEVICE)(reference(IMAGES.to(DEVICE)), LABELS.to(DEVICE))
    expected.backward()

    def program(mesh: Any) -> None:
        model, loss = fully_shard(net(), mesh), PREPARED[how](kind().to(DEVICE), mesh)
        images, labels = (sm.device_put(x.to(DEVICE), mesh, P("a")) for x in (IMAGES, LABELS))
        is_block = how == "implicit_replication"
        with sm.ops.implicit_replication() if is_block else nullcontext():
            value = loss(model(images), labels)
        value.backward()
        torch.testing.assert_close(value.full_tensor(), expected)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)

    on_mesh((4,), program)


@every_rank(4)
def test_elsewhere_the_error_says_what_to_write(mesh: Any) -> None:
    model, loss = fully_shard(net(), mesh), Focal().to(DEVICE)
    images, labels = (sm.device_put(x.to(DEVICE), mesh, P("a")) for x in (IMAGES, LABELS))
    with pytest.raises(RuntimeError, match=r"implicit_replication\(\).*parallelize\(module, mesh"):
        loss(model(images), labels)


@every_rank(4)
def test_constants_that_differ_between_ranks(mesh: Any) -> None:
    model, loss = fully_shard(net(), mesh), Focal().to(DEVICE)
    loss.weight = loss.weight + mesh.get_rank()
    images, labels = (sm.device_put(x.to(DEVICE), mesh, P("a")) for x in (IMAGES, LABELS))
    with pytest.raises(sm.errors.ReplicaError):
        parallelize(loss, mesh, {})(model(images), labels)
