"""`sm.debug.print`, in eager mode and as a node of graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardmesh as sm
from shardmesh import P
from tests.device import DEVICE
from tests.sharding.ranks import every_rank

X = torch.arange(4.0)


@pytest.mark.parametrize("backend", [None, "eager", "inductor"])
def test_every_call_prints(backend: str | None, capsys: Any) -> None:
    def f(x: Tensor, rate: float) -> Tensor:
        y = x * rate
        sm.debug.print("sum {:.2f} of {n} at {rate}: {}", y.sum(), x, n=len(x), rate=rate)
        return y.sum() + y.max().item()

    g = f if backend is None else sm.jit(f, backend=backend, fullgraph=True)
    for i in range(3):
        assert g(X + i, 0.5) == f(X + i, 0.5)
    lines = capsys.readouterr().out.splitlines()
    assert lines[::2] == lines[1::2]
    assert lines[0] == "sum 3.00 of 4 at 0.5: tensor([0., 1., 2., 3.])"
    assert lines[-1] == "sum 7.00 of 4 at 0.5: tensor([2., 3., 4., 5.])"


def test_values_with_a_history_in_a_step_and_in_a_module(capsys: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            sm.debug.print("y = {:.4f}", y)
            return y

    torch.manual_seed(0)
    net = Net()
    model = sm.jit(net, backend="eager", fullgraph=True)
    for _ in range(3):
        model(X).sum().backward()
    assert len(set(capsys.readouterr().out.splitlines())) == 1
    expected = net.linear.weight.grad.clone()
    net.zero_grad()
    for _ in range(3):
        net(X).sum().backward()
    assert torch.equal(net.linear.weight.grad, expected)


@every_rank(2)
def test_sharded_tensors(mesh: Any) -> None:
    """Nothing is communicated."""
    x = sm.device_put(X.to(DEVICE), mesh, P("a"))
    with sm.debug.comm_report() as report:
        sm.debug.print("{} and {}", x, 3)
    assert not report.by_operator


def test_a_text_of_a_sharded_tensor(capsys: Any) -> None:
    def main() -> None:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("a",))
        x = sm.device_put(X.to(DEVICE), mesh, P("a"))

        @sm.jit(backend="eager", fullgraph=True)
        def f(x: Any) -> Any:
            total = x.sum()
            sm.debug.print("part {}", x)
            sm.debug.print("total {:.1f}", total.redistribute(P()))
            return total

        for _ in range(2):
            f(x)

    sm.simulate(2)(main)()
    out = capsys.readouterr().out
    assert out.count("total 6.0") == 4
    assert out.count("[0., 1.]") == out.count("[2., 3.]") == 2
    assert "this rank's part of" in out


def test_lowering_prints_nothing(capsys: Any) -> None:
    mesh = sm.AbstractMesh((2,), ("a",))
    f = sm.jit(lambda x: (sm.debug.print("{}", x), x * 2)[1])
    lowered = f.lower(sm.Layout.of(mesh, P("a"), (4,)))
    assert "print" in str(lowered)
    assert not capsys.readouterr().out
