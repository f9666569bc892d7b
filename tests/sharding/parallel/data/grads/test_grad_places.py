"""Gradients are written into the buffer of their collective.

Whole ones as soon as they are computed, and those that are split when all of the unit are.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardmesh as sm
from shardmesh.parallel import MixedPrecisionPolicy, data_parallel, fully_shard
from shardmesh.sharding.parallel.data.grads.grad_places import GradWriter
from shardmesh.sharding.redistribute.packed_collectives import contiguous_memory

D, LAYERS = 8, 3


class _Log(torch.autograd.Function):
    """Logs when backward passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log: list[str], name: str) -> Tensor:
        ctx.log, ctx.name = log, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ctx.log.append(ctx.name)
        return grad, None, None


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(D, D, bias=False) for _ in range(LAYERS)])
        self.log = []

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(_Log.apply(x, self.log, f"below {i}"))
        return x


class _Operators(TorchDispatchMode):
    """Records operators on at least as many elements as a weight has."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.numel() >= D * D:
            self.names.append(func.overloadpacket.__name__)
        return out


FORMS = {
    "ddp": lambda model, mesh: data_parallel(model, mesh),
    "zero1": lambda model, mesh: data_parallel(model, mesh, optimizer="a"),
    "zero2": lambda model, mesh: data_parallel(model, mesh, gradient="a", optimizer="a"),
    "fsdp": lambda model, mesh: fully_shard(model, mesh),
}


def _mesh() -> sm.DeviceMesh:
    return sm.init_device_mesh("cpu", (2,), axis_names=("a",))


@pytest.mark.parametrize("form", FORMS)
def test_when_gradients_are_copied(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole ones before the next is computed; a buffer to reduce is not allocated before the end.

    The buffer of the outermost unit, with the head of a language model, would be there during all
    of backward.
    """
    put = GradWriter._write
    current = threading.local()

    def logged(self: GradWriter, number: int, grad: Tensor, scale: float) -> None:
        current.log.append(f"put {number}")
        put(self, number, grad, scale)

    monkeypatch.setattr(GradWriter, "_write", logged)

    def program(mesh: sm.DeviceMesh) -> list[str]:
        model: Any = FORMS[form](_Layers(), mesh)
        current.log = model.log
        model(torch.ones(1, D, requires_grad=True)).sum().backward()
        return model.log

    backward = [f"below {i}" for i in reversed(range(LAYERS))]
    puts = [f"put {i}" for i in reversed(range(LAYERS))]
    one_by_one = [event for pair in zip(puts, backward, strict=True) for event in pair]
    for log in sm.simulate(2)(lambda: program(_mesh()))():
        assert log == (one_by_one if form == "ddp" else [*backward, *reversed(puts)])


def test_gradients_of_whole_parameters_are_scaled_and_summed_in_place() -> None:
    def program(mesh: sm.DeviceMesh) -> list[str]:
        model: Any = FORMS["ddp"](
            nn.Sequential(*[nn.Linear(D, D, bias=False) for _ in range(LAYERS)]), mesh
        )
        loss = model(torch.ones(1, D)).sum()
        with _Operators() as operators:
            loss.backward()
        assert (
            len({x.grad.to_local().untyped_storage().data_ptr() for x in model.parameters()}) == 1
        )
        return operators.names

    for names in sm.simulate(2)(lambda: program(_mesh()))():
        assert names.count("mul") == LAYERS
        assert not {"cat", "clone", "_to_copy"} & set(names)


def test_gradients_are_converted_as_they_are_added() -> None:
    """Several microbatches: a copy in the dtype of the sums would take their memory again."""

    def program(mesh: sm.DeviceMesh) -> list[str]:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model: Any = data_parallel(_Layers(), mesh, optimizer="a", mp_policy=policy)
        with sm.accumulate_grads():
            losses = [model(torch.ones(1, D)).sum() for _ in range(2)]
            with _Operators() as operators:
                for loss in losses:
                    loss.backward()
        assert all(x.grad.dtype is torch.float32 for x in model.parameters())
        return operators.names

    for names in sm.simulate(2)(lambda: program(_mesh()))():
        assert "_to_copy" not in names


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, once: list[int]) -> Tensor:
        ctx.once = once
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if ctx.once:
            raise KeyError(ctx.once.pop())
        return grad, None


@pytest.mark.parametrize("again", ["backward", "accumulate", "create_graph"])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_a_failed_backward_are_discarded(form: str, again: str) -> None:
    """The second backward through the same graph uses only its own gradients."""

    def program(mesh: sm.DeviceMesh) -> None:
        torch.manual_seed(0)
        plain: Any = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))
        once = [1]
        model: Any = FORMS[form](copy.deepcopy(plain), mesh)
        x = torch.arange(float(D)).view(1, D)

        def loss_of(net: Any, weight: float, fails: list[int]) -> Tensor:
            handle = net[0].register_forward_hook(lambda m, args, out: _Fails.apply(out, fails))
            out = net(x)
            handle.remove()
            return (out * out).sum() * weight

        loss = loss_of(model, 1.0, once)
        with pytest.raises(KeyError):
            (loss * 3).backward(retain_graph=True)
        for p in model.parameters():
            p.grad = None
        if again == "accumulate":
            with sm.accumulate_grads():
                loss.backward()
        else:
            loss.backward(create_graph=again == "create_graph")
        loss_of(plain, 1.0, []).backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad.detach().full_tensor(), q.grad)

    sm.simulate(2)(lambda: program(_mesh()))()


def test_adjacent_tensors_are_viewed_as_one() -> None:
    x = torch.arange(12.0)
    parts = [x[2:5], x[5:5], x[5:9].view(2, 2)]
    found = contiguous_memory(parts, torch.float32)
    assert found is not None
    assert torch.equal(found, x[2:9])
    assert found.data_ptr() == parts[0].data_ptr()
    for others in (
        [x[5:9], x[2:5]],
        [x[2:5], x[6:9]],
        [x[:6].view(2, 3).T, x[6:]],
        [x[0:2], x[2:4].double()],
        [x[:0], x[0:2]],
    ):
        assert contiguous_memory(others, torch.float32) is None
