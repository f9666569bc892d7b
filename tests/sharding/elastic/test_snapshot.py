"""A snapshot has copies of what forward writes, and the parameters themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardmesh.sharding.checkpoint.state import RandomState
from shardmesh.sharding.elastic.snapshot import Snapshot


class Counting(nn.BatchNorm1d):
    """A norm that counts its calls in a state that is no buffer."""

    def __init__(self) -> None:
        super().__init__(3)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def test_what_forward_writes_is_that_of_the_moment_of_the_snapshot():
    for norm in (nn.BatchNorm1d(3), Counting()):
        model = nn.Sequential(nn.Linear(3, 3), norm)
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        random = RandomState()
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "random": random}
        expected = torch.get_rng_state()
        first = Snapshot(state)
        second = Snapshot(state, first)
        mean = norm.state_dict()["running_mean"].clone()
        model(torch.randn(4, 3))
        scheduler.step()
        for tree in (first.tree(), second.tree()):
            assert tree["model"].keys() == model.state_dict().keys()
            assert torch.equal(tree["model"]["1.running_mean"], mean)
            assert tree["model"]["1.num_batches_tracked"] == 1
            assert tree["optimizer"]["param_groups"][0]["lr"] == 1e-3
            assert tree["optimizer"]["param_groups"][0]["params"] == [0, 1, 2, 3]
            assert tree["scheduler"]["last_epoch"] == 0
            assert torch.equal(tree["random"]["torch"].value, expected)
            assert tree["model"].get("1._extra_state", {"calls": 1}) == {"calls": 1}


def test_parameters_and_optimizer_states_are_those_of_the_state():
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    tree = Snapshot({"model": model, "optimizer": optimizer}).tree()
    assert tree["model"]["weight"].data_ptr() == model.weight.data_ptr()
    momentum = optimizer.state[model.weight]["momentum_buffer"]
    assert tree["optimizer"]["state"][0]["momentum_buffer"] is momentum


def test_a_module_that_takes_the_place_of_another_one_has_its_own_buffers():
    first = Snapshot({"model": nn.BatchNorm1d(3)})
    after = Snapshot({"model": nn.Sequential(nn.BatchNorm1d(2))}, first).tree()
    assert list(after["model"]) == [
        "0.weight",
        "0.bias",
        "0.running_mean",
        "0.running_var",
        "0.num_batches_tracked",
    ]
