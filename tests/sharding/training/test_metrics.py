"""Numbers of steps: as all ranks have them, written by rank 0, once per step after a restart."""

from __future__ import annotations

import json
import math
import sys
import types
from typing import Any

import pytest
import torch

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.training.metrics import JsonLines, Metrics, TensorBoard


def test_rank_0_writes_what_all_ranks_have(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    seen: list[Any] = []

    def program() -> None:
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("dp",))
        loss = sm.device_put(torch.tensor([1.0, 2.0, 6.0]), mesh, P("dp")).mean()
        metrics = Metrics(JsonLines(path), lambda step, values: seen.append((step, values)))
        metrics(1, {"loss": loss, "lr": 0.5, "norm": torch.tensor(2)})
        metrics(2, {"loss": math.nan})
        metrics.close()

    sm.simulate(2)(program)()
    assert JsonLines.read(path) == [
        {"step": 1, "loss": 3.0, "lr": 0.5, "norm": 2.0},
        {"step": 2, "loss": None},
    ]
    assert seen[0] == (1, {"loss": 3.0, "lr": 0.5, "norm": 2.0})
    assert len(seen) == 2


def test_a_step_is_in_the_file_once_after_a_restart(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = JsonLines(path)
    for step in range(1, 6):
        first(step, {"loss": float(step)})
    with open(path, "a") as file:
        file.write('{"step": 6, "lo')  # killed
    second = JsonLines(path)
    second(4, {"loss": 0.0})
    second(4, {"evaluation": 1.0})
    rows = JsonLines.read(path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 4]
    assert rows[3] == {"step": 4, "loss": 0.0}
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_picture_has_the_curves_of_a_file(tmp_path):
    pytest.importorskip("matplotlib")
    write = sm.training.JsonLines(tmp_path / "metrics.jsonl")
    for step, loss in enumerate([3.0, math.nan, 2.0]):
        write(step, {"loss": loss, "norm": 1.0, **({"evaluation": 2.5} if step == 2 else {})})
    figure = sm.training.JsonLines.picture(
        tmp_path / "metrics.jsonl", tmp_path / "loss.png", ("loss", "evaluation")
    )
    (axes,) = figure.axes
    points = {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.lines}
    assert points == {"loss": [(0, 3.0), (2, 2.0)], "evaluation": [(2, 2.5)]}
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="has a number 'lr'"):
        sm.training.JsonLines.picture(tmp_path / "metrics.jsonl", names=["lr"])


def test_a_tensor_of_several_elements_is_refused():
    with pytest.raises(ValueError, match=r"'loss' of step 1 is a tensor of shape \[2\]"):
        Metrics()(1, {"loss": torch.zeros(2)})


def test_tensorboard(tmp_path, monkeypatch):
    """With a stand-in for the package, which is not a dependency."""
    calls: list[Any] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            calls.append((folder, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            calls.append((name, value, step))

        def close(self) -> None:
            calls.append("closed")

    module: Any = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    metrics = Metrics(TensorBoard(tmp_path))
    metrics(3, {"loss": 2.0, "lr": 1})
    metrics.close()
    assert calls == [(str(tmp_path), 3), ("loss", 2.0, 3), ("lr", 1.0, 3), "closed"]


def test_tensorboard_that_is_not_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="tensorboard is not installed; pip install"):
        TensorBoard("folder")
