"""The examples in the docstrings of the modules of `shardmesh/`, which `help` shows, run."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Callable
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import shardmesh as sm

MODULES = ("shardmesh", *(f"shardmesh.{name}" for name in sm._NAMESPACES))


def _examples(name: str) -> list[str]:
    """Return the indented blocks of a module's docstring."""
    text = import_module(name).__doc__ or ""
    return [textwrap.dedent(block) for block in re.findall(r"(?:^    .*\n\n?)+", text + "\n", re.M)]


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Block(), _Block()])


class _Called(_Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _core(_: Any) -> None:
    arrays, namespaces = _examples("shardmesh")
    names: dict[str, Any] = {"t": torch.arange(64.0).reshape(4, 16)}
    exec(arrays.replace('"cuda"', '"cpu"'), names)
    assert torch.equal(names["y"].full_tensor(), names["t"])
    listed = re.findall(r"^sm\.(\w+)", namespaces, re.M)
    assert listed == list(sm._NAMESPACES)


def _parallel(_: Any) -> None:
    mesh = sm.init_device_mesh("cpu", (2, 2), axis_names=("dp", "tp"))
    model = _Model()
    (example,) = _examples("shardmesh.parallel")
    exec(example, {"model": model, "mesh": mesh})
    for parameter in model.parameters():
        assert isinstance(parameter, sm.ShardedTensor)
        assert "dp" in parameter.spec.axes
    assert "tp" in dict(model.named_parameters())["blocks.0.up.weight"].spec.axes  # type: ignore[attr-defined]


def _checkpoint(path: Any) -> None:
    model = nn.Linear(2, 2)
    names = {"sm": sm, "model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    (example,) = _examples("shardmesh.checkpoint")
    exec(example.replace('"run"', repr(str(path / "run"))), names)
    assert (path / "run" / "step-00000100").is_dir()


def _elastic(_: Any) -> None:
    """The call fits the signature of `run`, which needs processes; its result has these names."""
    run = sm.elastic.ElasticRun({}, sm.init_device_mesh("cpu", (1,), axis_names=("dp",)))
    names = dict.fromkeys(("build", "step", "data", "make_mesh"))
    (example,) = _examples("shardmesh.elastic")
    with mock.patch.object(
        sm.elastic, "run", mock.create_autospec(sm.elastic.run, return_value=run)
    ):
        exec(example, {"sm": sm, **names})


def _tuning(_: Any) -> None:
    with torch.device("meta"):
        model, batch = _Called(), torch.empty(8, 4)
    names: dict[str, Any] = {"sm": sm, "dataclasses": dataclasses, "model": model, "batch": batch}
    (example,) = _examples("shardmesh.tuning")
    exec(example, names)
    assert isinstance(names["tuning"], sm.tuning.Tuning)
    assert isinstance(names["tuning"].best.form, sm.tuning.Form)
    assert names["tuning"].prices.device.float32 == 494e12


def _compat(_: Any) -> None:
    (diff,) = _examples("shardmesh.compat")
    for line in diff.splitlines():
        exec(line.removeprefix("- ").removeprefix("+ "), {})


CHECKS: dict[str, tuple[int, Callable[[Any], None]]] = {
    "shardmesh": (16, _core),
    "shardmesh.parallel": (4, _parallel),
    "shardmesh.checkpoint": (2, _checkpoint),
    "shardmesh.elastic": (1, _elastic),
    "shardmesh.tuning": (1, _tuning),
    "shardmesh.compat": (1, _compat),
}


@pytest.mark.parametrize("name", CHECKS)
def test_examples_run(name: str, tmp_path):
    ranks, check = CHECKS[name]
    sm.simulate(ranks)(check)(tmp_path)


def test_every_example_is_run():
    assert {name for name in MODULES if _examples(name)} == set(CHECKS)


@pytest.mark.parametrize("name", MODULES)
def test_examples_are_indented(name: str):
    """Else `_examples` does not see them; ruff dedents them if no prose follows."""
    prose = re.sub(r"^    .*$", "", import_module(name).__doc__ or "", flags=re.M)
    assert not re.search(r"^(?:sm\.|from |import |\w+ = |\w+\()", prose, re.M)
