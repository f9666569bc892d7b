"""`loss_parallel`: losses of logits split by classes, with plain and sharded targets, against one
process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import shardmesh as sm
from shardmesh.compat import DTensor, Partial, Replicate, Shard, distribute_tensor, loss_parallel
from tests.sharding.ranks import collectives, every_rank, on_mesh

ROWS, CLASSES = 6, 10  # 10 classes over 4 ranks: uneven
LOGITS = torch.randn(ROWS, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([1, 9, -100, 0, 4, 9])
WEIGHT = torch.linspace(0.5, 2, CLASSES, dtype=torch.float64)

OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"ignore_index": 9},
    {"label_smoothing": 0.1},
    {"weight": WEIGHT},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("form", ["function", "module", "nll_loss"])
def test_plain_targets(options: dict[str, Any], form: str) -> None:
    if form == "nll_loss" and "label_smoothing" in options:
        pytest.skip("nll_loss has no label_smoothing")

    labels = LABELS.where(LABELS >= 0, options.get("ignore_index", -100))

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        if form == "function":
            return F.cross_entropy(x, labels, **options)
        if form == "module":
            given = dict(options)
            loss = torch.nn.CrossEntropyLoss(weight=given.pop("weight", None), **given)
            return loss(x, labels)
        return F.nll_loss(F.log_softmax(x, -1), labels, **options)

    x = LOGITS.clone().requires_grad_()
    expected = loss_of(x)
    expected.sum().backward()

    def program(mesh: sm.DeviceMesh) -> None:
        logits = distribute_tensor(LOGITS, mesh, [Shard(1)]).requires_grad_()
        with loss_parallel():
            loss = loss_of(logits)
            loss.sum().backward()
        torch.testing.assert_close(loss.full_tensor(), expected.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(logits.grad.full_tensor(), x.grad, rtol=1e-12, atol=1e-12)

    on_mesh((4,), program)


def test_logits_are_not_gathered() -> None:
    rows, classes = 8, 4096

    def program(mesh: sm.DeviceMesh) -> int:
        logits = sm.randn(rows, classes, device_mesh=mesh, placements=[Shard(1)]).requires_grad_()
        with collectives() as records, loss_parallel():
            F.cross_entropy(logits, torch.arange(rows)).backward()
        return sum(record.bytes_sent for record in records)

    # A maximum, a sum of exponentials and a logit for each row; gathering would send 3/4 of the
    # logits, 98,304 bytes.
    assert max(on_mesh((4,), program)) <= 8 * rows * 4 * 2


@every_rank(2, 2)
def test_split_rows(mesh: sm.DeviceMesh) -> None:
    x = LOGITS.clone().requires_grad_()
    F.cross_entropy(x, LABELS).backward()
    logits = distribute_tensor(LOGITS, mesh, [Shard(0), Shard(1)]).requires_grad_()
    with loss_parallel():
        with pytest.raises(
            ValueError,
            match=r"axes \['a'\] split the rows of the logits .* whole target or this rank's part",
        ):
            F.cross_entropy(logits, LABELS)
        loss = F.cross_entropy(logits, distribute_tensor(LABELS, mesh, [Shard(0), Replicate()]))
        loss.backward()
    torch.testing.assert_close(logits.grad.full_tensor(), x.grad, rtol=1e-12, atol=1e-12)
    replicated = distribute_tensor(LOGITS, mesh, [Replicate(), Shard(1)])
    with loss_parallel():
        assert F.cross_entropy(replicated, LABELS).item() == pytest.approx(
            F.cross_entropy(LOGITS, LABELS).item(), rel=1e-12
        )


@every_rank(2)
def test_only_losses_and_only_in_the_block(mesh: sm.DeviceMesh) -> None:
    logits = distribute_tensor(LOGITS, mesh, [Shard(1)])
    with loss_parallel():
        assert F.cross_entropy(LOGITS, LABELS).ndim == 0  # plain logits are left alone
        with pytest.raises(Exception, match="plain"):
            logits + LOGITS
    with pytest.raises(Exception, match="plain"):
        F.cross_entropy(logits, LABELS)
    with pytest.raises(ZeroDivisionError), loss_parallel():
        1 / 0
    with pytest.raises(Exception, match="plain"):
        F.cross_entropy(logits, LABELS)
    pending = DTensor.from_local(LOGITS / 2, mesh, [Partial()])
    with loss_parallel():
        assert F.cross_entropy(pending, LABELS).item() == pytest.approx(
            F.cross_entropy(LOGITS, LABELS).item(), rel=1e-12
        )
