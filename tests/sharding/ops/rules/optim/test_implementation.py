"""The implementation that a torch optimizer uses for sharded parameters, and its number of
calls.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.optim.optimizer as torch_optimizer
from torch import nn

import shardmesh as sm
from shardmesh import P, ShardedTensor
from shardmesh.sharding.ops.rules.optim import implementation
from tests.recorded_operators import RecordedOperators
from tests.sharding.ranks import every_rank, on_mesh

SHAPES = [(4, 3), (6, 2), (5,), (2, 2)]
SPECS = [P("a"), P(None, "a"), P("a"), P()]
MAKERS = {
    "AdamW": lambda params, **how: torch.optim.AdamW(params, lr=0.1, **how),
    "Adam amsgrad": lambda params, **how: torch.optim.Adam(
        params, lr=0.1, amsgrad=True, weight_decay=0.1, **how
    ),
    "SGD": lambda params, **how: torch.optim.SGD(
        params, lr=0.1, momentum=0.9, nesterov=True, **how
    ),
    "Adagrad": lambda params, **how: torch.optim.Adagrad(params, lr=0.1, **how),
    "RMSprop": lambda params, **how: torch.optim.RMSprop(
        params, lr=0.1, momentum=0.5, centered=True, **how
    ),
    "Adamax": lambda params, **how: torch.optim.Adamax(params, lr=0.1, **how),
    "NAdam": lambda params, **how: torch.optim.NAdam(params, lr=0.1, **how),
    "RAdam": lambda params, **how: torch.optim.RAdam(params, lr=0.1, **how),
    "ASGD": lambda params, **how: torch.optim.ASGD(params, lr=0.1, **how),
    "Adadelta": lambda params, **how: torch.optim.Adadelta(params, lr=0.1, **how),
    "Rprop": lambda params, **how: torch.optim.Rprop(params, lr=0.1, **how),
    "Adafactor": lambda params, **how: torch.optim.Adafactor(params, lr=0.1, **how),
}
FUSED = {
    "AdamW": "_fused_adamw_",
    "Adam amsgrad": "_fused_adam_",
    "SGD": "_fused_sgd_",
    "Adagrad": "_fused_adagrad_",
}


def values() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape) for shape in SHAPES]


def sharded(mesh: sm.DeviceMesh) -> list[Any]:
    return [
        nn.Parameter(sm.distribute_tensor(x, mesh, spec))
        for x, spec in zip(values(), SPECS, strict=True)
    ]


def stepped(params: list[Any], optimizer: torch.optim.Optimizer, steps: int = 3) -> list[Any]:
    for step in range(steps):
        for x in params:
            x.grad = (x.detach() - 0.3 * step).sin()
        optimizer.step()
    return params


@pytest.mark.parametrize("name", MAKERS)
def test_every_optimizer_by_its_default_equals_one_process(name: str) -> None:
    alone = [nn.Parameter(x) for x in values()]
    expected = stepped(alone, MAKERS[name](alone))

    def program(mesh: sm.DeviceMesh) -> None:
        params = sharded(mesh)
        for x, y in zip(stepped(params, MAKERS[name](params)), expected, strict=True):
            torch.testing.assert_close(x.detach().full_tensor(), y.detach(), rtol=2e-6, atol=1e-6)

    on_mesh((2, 2), program)


@pytest.mark.parametrize("name", FUSED)
def test_a_step_is_one_fused_call_on_the_parts(name: str) -> None:
    def program(mesh: sm.DeviceMesh) -> None:
        params = sharded(mesh)
        optimizer = MAKERS[name](params)
        stepped(params, optimizer)
        with RecordedOperators("aten") as called:
            optimizer.step()
        assert [one for one in called.names if one.startswith("_fused")] == [FUSED[name]]
        assert len(called.names) <= 2  # one counts the steps

    on_mesh((2, 2), program)


@every_rank(2, 2)
def test_optimizers_without_a_fused_kernel_use_foreach(mesh: sm.DeviceMesh) -> None:
    """One call for all parameters, where the loop makes one for each."""
    params = sharded(mesh)
    optimizer = MAKERS["NAdam"](params)
    stepped(params, optimizer)
    with RecordedOperators("aten") as called:
        optimizer.step()
    assert called.names.count("_foreach_lerp_") == 1
    assert "lerp_" not in called.names


@every_rank(2)
def test_choice_is_limited_to_the_step(mesh: sm.DeviceMesh) -> None:
    params = [nn.Parameter(sm.distribute_tensor(torch.ones(4), mesh, P("a")))]
    optimizer = MAKERS["AdamW"](params)
    stepped(params, optimizer)
    assert optimizer.param_groups[0]["fused"] is None
    optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    optimizer._optimizer_step_pre_hooks.clear()
    optimizer.step()
    assert optimizer.param_groups[0]["fused"] is None


@pytest.mark.parametrize(
    "how", [{"foreach": False}, {"fused": False}, {"differentiable": True}], ids=str
)
def test_explicit_choice_is_respected(how: dict[str, bool]) -> None:
    def program(mesh: sm.DeviceMesh) -> None:
        x = sm.distribute_tensor(torch.ones(4), mesh, P("a"))
        x.grad = torch.ones_like(x)
        optimizer = torch.optim.AdamW([x], **how)  # type: ignore[arg-type]
        with RecordedOperators("aten") as called:
            optimizer.step()
        assert "lerp_" in called.names

    on_mesh((2,), program)


@every_rank(2)
def test_noncontiguous_parameters_are_not_fused(mesh: sm.DeviceMesh) -> None:
    """Fused kernels assume contiguous memory; foreach respects strides."""
    around = torch.arange(12.0).view(3, 4)
    before = around.clone()
    x = nn.Parameter(sm.from_local(around[:, ::2], mesh, P("a"), shape=(6, 2)))
    optimizer = torch.optim.AdamW([x], lr=0.1)
    x.grad = torch.ones_like(x)
    optimizer.step()
    assert torch.equal(around[:, 1::2], before[:, 1::2])
    torch.testing.assert_close(around[:, ::2], before[:, ::2] * (1 - 0.1 * 0.01) - 0.1)


@every_rank(2)
def test_sharded_and_plain_parameters_in_one_list(mesh: sm.DeviceMesh) -> None:
    params: list[Any] = [
        nn.Parameter(sm.distribute_tensor(torch.ones(4), mesh, P("a"))),
        nn.Parameter(torch.ones(3)),
    ]
    for x in params:
        x.grad = torch.ones_like(x)
    torch.optim.AdamW(params, lr=0.1, fused=True).step()
    for part in (params[0]._local, params[1]):
        torch.testing.assert_close(part.detach(), torch.full_like(part, 0.899).detach())


class Grouping(torch.optim.Optimizer):
    """An optimizer whose step groups the lists in `lists`, as torch's do."""

    def __init__(self, params: list[Any]) -> None:
        super().__init__(params, {})
        self.lists: Any = None
        self.before_end: Any = lambda: None

    def step(self) -> Any:  # type: ignore[override]
        groups = torch.optim.Optimizer._group_tensors_by_device_and_dtype(self.lists, True)
        self.before_end()
        return groups


@every_rank(2)
def test_lists_are_grouped_by_device(mesh: sm.DeviceMesh) -> None:
    """As on a GPU, where `step` lies beside the part and the wrapper says "meta": float64 stands
    for the other device.
    """
    dtypes = (torch.float32, torch.float64, torch.float32)
    xs: list[Any] = [
        sm.distribute_tensor(torch.ones(2, dtype=dtype), mesh, P("a")) for dtype in dtypes
    ]
    steps: list[Any] = [torch.zeros((), device=x._local.device) for x in xs]
    optimizer = Grouping([x.requires_grad_() for x in xs])
    optimizer.lists = [xs, [None, None, xs[2]], [], steps]
    found: Any = optimizer.step()
    assert {(str(device), dtype): numbers for (device, dtype), (_, numbers) in found.items()} == {
        ("cpu", torch.float32): [0, 2],
        ("cpu", torch.float64): [1],
    }
    lists = found[torch.device("cpu"), torch.float32][0]
    expected = ([xs[0], xs[2]], [None, xs[2]], [], [steps[0], steps[2]])
    assert [list(map(id, tensors)) for tensors in lists] == [
        list(map(id, tensors)) for tensors in expected
    ]


@every_rank(2)
def test_torch_default_is_foreach(mesh: sm.DeviceMesh) -> None:
    """On a GPU its own default is foreach then; a second leaf installs nothing."""
    sharded(mesh)
    assert torch_optimizer._foreach_supported_types.count(ShardedTensor) == 1
    before = len(torch_optimizer._global_optimizer_pre_hooks)
    sharded(mesh)
    assert len(torch_optimizer._global_optimizer_pre_hooks) == before


def replaced() -> bool:
    return torch_optimizer._group_tensors_by_device_and_dtype is implementation._by_local_device


def test_grouping_is_replaced_while_any_rank_steps() -> None:
    """A rank that ends its step leaves the function to those whose step waits in a collective."""

    def program(mesh: sm.DeviceMesh) -> None:
        params = sharded(mesh)
        optimizer = Grouping(params)
        optimizer.lists = [params]

        ends: list[bool] = []
        optimizer.before_end = lambda: (mesh.group().barrier(), ends.append(replaced()))
        for _ in range(2):
            optimizer.step()
        mesh.group().barrier()
        assert ends == [True, True]
        assert not replaced()

    on_mesh((2, 2), program)


@every_rank(1)
def test_grouping_is_torchs_again_after_a_step_that_raised(mesh: sm.DeviceMesh) -> None:
    params = sharded(mesh)
    optimizer = Grouping(params)
    optimizer.lists = [params]
    optimizer.before_end = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    optimizer.before_end = lambda: None
    optimizer.step()
    assert not replaced()


@every_rank(1)
def test_a_step_within_a_step_leaves_the_grouping_to_the_outer_one(mesh: sm.DeviceMesh) -> None:
    params = sharded(mesh)
    outer, inner = Grouping(params), MAKERS["AdamW"](params[:1])
    outer.lists, seen = [params], []
    outer.before_end = lambda: (inner.step(), seen.append(replaced()))
    outer.step()
    assert seen == [True]
    assert not replaced()


@every_rank(1)
def test_steps_of_plain_parameters_are_left_alone(mesh: sm.DeviceMesh) -> None:
    sharded(mesh)
    optimizer = Grouping([nn.Parameter(torch.ones(2))])
    optimizer.lists, seen = [[torch.ones(2)]], []
    optimizer.before_end = lambda: seen.append(replaced())
    optimizer.step()
    assert seen == [False]


@pytest.mark.parametrize("inf_on", [None, 0, 1])
def test_torchs_grad_scaler_with_a_fused_step(inf_on):
    """An infinity on one rank skips the step on all."""

    def train(x, weights):
        optimizer, scaler = torch.optim.AdamW([x], lr=0.1, fused=True), torch.amp.GradScaler("cpu")
        for _ in range(2):
            scaler.scale((x * weights).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return scaler.get_scale()

    def program(mesh):
        values = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
        weights = torch.ones(4, 3)
        if inf_on is not None:
            weights[2 * inf_on] = float("inf")
        plain = values.clone().requires_grad_()
        sharded = sm.device_put(values, mesh, P("a")).requires_grad_()
        assert train(plain, weights) == train(sharded, sm.device_put(weights, mesh, P("a")))
        assert torch.equal(sharded.full_tensor(), plain)
        assert torch.equal(plain, values) == (inf_on is not None)

    on_mesh((2,), program)
