"""Metrics of torchmetrics that are updated with sharded outputs and labels: values are those of one
process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardmesh as sm
from shardmesh import P

torchmetrics = pytest.importorskip("torchmetrics")

pytestmark = pytest.mark.timeout(420)
IMPORT_S = 180.0  # of torchmetrics, by four processes of a busy machine

CLASSES = 4
GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(3, 10, CLASSES, generator=GENERATOR)
LABELS = torch.randint(0, CLASSES, (3, 10), generator=GENERATOR)
SCORES = torch.rand(3, 10, generator=GENERATOR)
IS_TRUE = torch.randint(0, 2, (3, 10), generator=GENERATOR)

CLASSIFIED = (LOGITS, LABELS)
# metric, arguments of its updates
METRICS: dict[str, tuple[str, dict[str, Any], tuple[Tensor, ...]]] = {
    "accuracy": ("Accuracy", {"task": "multiclass", "num_classes": CLASSES}, CLASSIFIED),
    "top 2": (
        "Accuracy",
        {"task": "multiclass", "num_classes": CLASSES, "top_k": 2},
        CLASSIFIED,
    ),
    "binary accuracy": ("Accuracy", {"task": "binary"}, (SCORES, IS_TRUE)),
    "mean": ("MeanMetric", {}, (SCORES,)),
    "sum": ("SumMetric", {}, (SCORES,)),
    "AUROC": ("AUROC", {"task": "multiclass", "num_classes": CLASSES}, CLASSIFIED),
    "AUROC by thresholds": ("AUROC", {"task": "binary", "thresholds": 10}, (SCORES, IS_TRUE)),
    "confusion": (
        "ConfusionMatrix",
        {"task": "multiclass", "num_classes": CLASSES},
        CLASSIFIED,
    ),
    "squared error": ("MeanSquaredError", {}, (SCORES, SCORES.flip(1))),
}


def metric(name: str, **options: Any) -> Any:
    kind, arguments, _ = METRICS[name]
    return getattr(torchmetrics, kind)(**arguments, **options)


def computed(made: Any, put: Callable[[Tensor], Any], name: str, forward: bool) -> list[Tensor]:
    """Return the metric of two batches, and after a reset of a third one."""
    batches = list(zip(*(tensor.unbind(0) for tensor in METRICS[name][2]), strict=True))
    values = []
    for part in (batches[:2], batches[2:]):
        for batch in part:
            (made if forward else made.update)(*map(put, batch))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            value = made.compute()
        values.append(value.full_tensor() if isinstance(value, sm.ShardedTensor) else value)
        made.reset()
    return values


def on_ranks(name: str, forward: bool) -> list[Tensor]:
    mesh = sm.init_device_mesh("cpu", (4,), axis_names=("dp",))
    with sm.ops.implicit_replication():
        return computed(
            metric(name, sync_on_compute=False),
            lambda tensor: sm.device_put(tensor, mesh, P("dp")),
            name,
            forward,
        )


@pytest.mark.parametrize("forward", [False, True], ids=["update", "forward"])
@pytest.mark.parametrize("name", METRICS)
def test_values_are_those_of_one_process(name: str, forward: bool) -> None:
    expected = computed(metric(name), lambda tensor: tensor, name, forward)
    for values in sm.simulate(4)(on_ranks)(name, forward):
        torch.testing.assert_close(values, expected)


def errors_of_synchronized_metrics(names: list[str]) -> list[str]:
    mesh, texts = sm.init_device_mesh("cpu", (4,), axis_names=("dp",)), []
    for name in names:
        with (
            sm.ops.implicit_replication(),
            pytest.raises((RuntimeError, NotImplementedError)) as error,
        ):
            computed(metric(name), lambda tensor: sm.device_put(tensor, mesh, P("dp")), name, False)
        texts.append(str(error.value))
    return texts


def test_on_processes(world4: Any) -> None:
    """There torchmetrics adds up the states of ranks in compute(), unless it is told not to."""
    names = ["accuracy", "mean", "sum", "AUROC", "confusion"]
    for texts in world4(errors_of_synchronized_metrics, names, timeout=IMPORT_S):
        assert all("sync_on_compute=False" in text for text in texts), texts
    for name in names:
        expected = computed(metric(name), lambda tensor: tensor, name, False)
        for values in world4(on_ranks, name, False):
            torch.testing.assert_close(values, expected)


def test_a_state_that_is_plain_outside_of_the_block_is_refused() -> None:
    def program() -> None:
        mesh = sm.init_device_mesh("cpu", (4,), axis_names=("dp",))
        with pytest.raises(RuntimeError, match=r"implicit_replication\(\)"):
            computed(
                metric("confusion"),
                lambda tensor: sm.device_put(tensor, mesh, P("dp")),
                "confusion",
                False,
            )

    sm.simulate(4)(program)()
