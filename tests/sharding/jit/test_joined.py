"""`sm.jit` of a module: forward and backward programs, joined by one node of autograd."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import parallelize
from shardmesh.sharding.jit.errors import JitError
from tests.device import DEVICE
from tests.sharding.ranks import every_rank

X = torch.linspace(-1, 1, 24).view(4, 6)


class Net(nn.Module):
    """Two layers with a buffer that forward writes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.down(self.norm(self.up(x)).softmax(-1) * scale) + x


def both(make: Callable[[], nn.Module], use: Callable[[nn.Module], list[Any]]) -> nn.Module:
    """Check that a module under `jit` does what it does in eager mode; return it."""
    eager, jitted = make().to(DEVICE), sm.jit(make().to(DEVICE), backend="eager")
    for value, expected in zip(use(jitted), use(eager), strict=True):
        assert torch.equal(value, expected)
    for (name, value), (_, expected) in zip(
        jitted._orig_mod.state_dict().items(), eager.state_dict().items(), strict=True
    ):
        assert torch.equal(value, expected), name
    return jitted


def gradients(model: nn.Module) -> list[Tensor]:
    return [x.grad.clone() for x in model.parameters() if x.grad is not None]


def test_gradients_of_arguments_and_parameters_and_buffers() -> None:
    def use(model: nn.Module) -> list[Tensor]:
        found = []
        for i in range(4):
            x = (X.to(DEVICE) * (i + 1)).requires_grad_()
            y = model(x * 2)
            y.square().sum().backward()  # .grad accumulates over the calls
            found += [y.detach(), x.grad, *gradients(model)]
        return found

    assert len(both(Net, use).recorded) == 1


def test_two_forwards_before_their_backwards() -> None:
    def use(model: nn.Module) -> list[Tensor]:
        found = []
        for _ in range(3):
            loss = model(X.to(DEVICE)).sum() * model(X.to(DEVICE) + 1).square().sum()
            loss.backward()
            found += gradients(model)
        return found

    assert len(both(Net, use).recorded) == 1


def test_evaluation_between_training() -> None:
    def use(model: nn.Module) -> list[Tensor]:
        found = []
        for _ in range(3):
            model(X.to(DEVICE)).sum().backward()
            model.eval()
            with torch.no_grad():
                found.append(model(X.to(DEVICE)))
            model.train()
        return [*found, *gradients(model)]

    assert len(both(Net, use).recorded) == 2


def test_backward_twice_and_numbers_as_arguments() -> None:
    def use(model: nn.Module) -> list[Tensor]:
        found = []
        for i in range(3):
            y = model(X.to(DEVICE), scale=0.5 + i).sum()
            y.backward(retain_graph=True)
            y.backward()
            found += gradients(model)
        return found

    both(Net, use)


def test_frozen_layers_and_another_shape() -> None:
    def use(model: nn.Module) -> list[Tensor]:
        found = []
        for frozen in (False, True, False):
            model.up.requires_grad_(not frozen)
            for rows in (4, 2):
                model.zero_grad()
                model(X[:rows].to(DEVICE)).square().sum().backward()
                found += gradients(model)
        return found

    assert len(both(Net, use).recorded) == 4


def test_recomputation_around_it() -> None:
    def use(model: nn.Module) -> list[Tensor]:
        found = []
        for _ in range(3):
            x = X.to(DEVICE).clone().requires_grad_()
            checkpoint(model, x, use_reentrant=False).square().sum().backward()
            found += [x.grad, *gradients(model)]
        return found

    both(Net, use)


class Recomputed(nn.Module):
    """Recomputes a module in backward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.module, x, use_reentrant=False)


@pytest.mark.parametrize("is_inside", [False, True])
def test_recomputation_of_several_forwards_before_their_backwards(is_inside: bool) -> None:
    """The second forward is eager, since the first is being recorded, and there is a graph when the
    second is computed again.
    """

    def trained(jit: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net: nn.Module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        wrap = functools.partial(sm.jit, backend="eager") if jit else nn.Sequential
        model = wrap(Recomputed(net)) if is_inside else Recomputed(wrap(net))
        found = []
        for _ in range(3):
            losses = [model(X * (i + 1)).square().sum() for i in range(3)]
            for loss in losses:
                loss.backward()
            found += [loss.detach() for loss in losses]
        return [*found, *gradients(net)]

    for value, expected in zip(trained(True), trained(False), strict=True):
        assert torch.equal(value, expected)


def test_hooks_of_parameters_run_once_a_backward() -> None:
    calls: list[int] = []

    def use(model: nn.Module) -> list[Tensor]:
        calls.clear()
        handle = model.up.weight.register_hook(lambda g: (calls.append(1), g * 2)[1])
        for _ in range(3):
            model(X.to(DEVICE)).sum().backward()
        handle.remove()
        assert len(calls) == 3
        return gradients(model)

    both(Net, use)


def test_a_gradient_for_another_result_than_recorded() -> None:
    class Two(Net):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.up(x)
            return y, self.down(y)

    model = sm.jit(Two(), backend="eager")
    model(X)[0].sum().backward()
    for _ in range(2):
        model.zero_grad()
        model(X)[0].sum().backward()
    expected = Two()
    expected(X)[0].sum().backward()
    assert torch.equal(model.up.weight.grad, expected.up.weight.grad)
    with pytest.raises(sm.errors.JitError, match=r"result 1 .* got a gradient"):
        model(X)[1].sum().backward()


def test_the_derivative_of_a_gradient_raises() -> None:
    model = sm.jit(Net(), backend="eager")
    for _ in range(2):
        x = X.clone().requires_grad_()
        (g,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="the derivative of a gradient through a graph"):
            g.sum().backward()


@pytest.mark.parametrize("calls", [1, 3])
def test_the_derivative_of_a_gradient_that_depends_on_inputs_alone_raises(calls: int) -> None:
    """As in a penalty on gradients: what arrives in backward has no history."""
    model = sm.jit(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), backend="eager")
    for _ in range(calls):
        x = X.clone().requires_grad_()
        (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="the derivative of a gradient through a graph"):
            g.square().sum().backward()
    torch.autograd.grad(model(X).sum(), list(model.parameters()), create_graph=True)  # not used


def test_results_that_nobody_differentiates_are_no_error(caplog: pytest.LogCaptureFixture) -> None:
    model, expected = sm.jit(Net().eval(), backend="eager"), Net().eval()
    with caplog.at_level(logging.WARNING, "shardmesh"):
        for _ in range(6):
            assert torch.equal(model(X), expected(X))
    assert len([x for x in caplog.records if "no backward ran" in x.message]) == 1


def test_attributes_copies_and_checkpoints_are_those_of_the_module() -> None:
    model = sm.jit(Net(), backend="eager")
    model(X).sum().backward()
    assert model.up is model._orig_mod.up
    assert next(name for name, _ in model.named_parameters()) == "_orig_mod.up.weight"
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.up.weight is not model.up.weight
        assert torch.equal(other(X), model(X))
    model.eval()
    assert not model._orig_mod.training
    assert repr(model.up) in repr(model)


def test_the_signature_is_that_of_the_module() -> None:
    """Trainers select columns and labels by it, of the object and of its class."""
    jitted = sm.jit(Net(), backend="eager")
    assert inspect.signature(type(jitted).forward) == inspect.signature(Net.forward)
    for module in (jitted, copy.deepcopy(jitted)):
        assert inspect.signature(module.forward) == inspect.signature(Net().forward)
        assert torch.equal(module(X, scale=2.0), Net()(X, 2.0))


@pytest.mark.parametrize(
    "option",
    [{"donate_argnums": 0}, {"static_argnames": "x"}, {"cudagraphs": True}, {"strict": True}],
)
def test_options_of_functions(option: Any) -> None:
    with pytest.raises(TypeError, match="option for functions"):
        sm.jit(Net(), **option)


def test_fullgraph_names_the_line() -> None:
    class Reads(Net):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else self.up(x)

    with pytest.raises(sm.errors.JitError, match=r"test_joined.py:\d+: .* reads a value"):
        sm.jit(Reads(), backend="eager", fullgraph=True)(X)


@every_rank(2)
def test_sharded_arguments_and_parameters(mesh: Any) -> None:
    """Results keep their layouts; the loss is computed outside."""

    def losses(jit: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)).to(DEVICE)
        parallelize(net, mesh, {"0.weight": P("a"), "0.bias": P("a"), "2.weight": P(None, "a")})
        model = sm.jit(net, backend="eager") if jit else net
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        found = []
        for i in range(4):
            x = sm.device_put((X + i).to(DEVICE), mesh, P())
            y = model(x)
            loss = (y - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found += [loss.full_tensor(), y.full_tensor()]
        return [*found, *(p.full_tensor() for p in net.parameters())]

    for value, expected in zip(losses(True), losses(False), strict=True):
        assert torch.equal(value, expected)


def test_a_function_whose_result_is_differentiated_outside() -> None:
    """The first call is a graph without backward; once a backward has come, two programs."""
    weight, scale = nn.Parameter(torch.ones(6)), torch.full((6,), 2.0, requires_grad=True)
    holder = [scale]

    def f(x: Tensor, y: dict[str, Tensor]) -> Tensor:
        return ((x * weight).tanh() * holder[0] - y["target"]).square().sum()

    def use(f: Callable[..., Tensor]) -> list[Tensor]:
        found = []
        weight.grad = scale.grad = None
        for i in range(5):
            x = X.clone().requires_grad_()
            loss = f(x, {"target": X + i})
            (loss * 2).backward()
            found += [loss.detach(), x.grad, weight.grad.clone(), scale.grad.clone()]
        return found

    jitted = sm.jit(f, backend="eager")
    for value, expected in zip(use(jitted), use(f), strict=True):
        assert torch.equal(value, expected)
    assert [type(x).__name__ for x in jitted.recorded] == ["CompiledGraph"] * 2


def test_a_function_around_which_torch_recomputes() -> None:
    """The recomputation runs inside of a backward pass, and the graph that its forward ran."""
    weight = nn.Parameter(torch.ones(6))

    def f(x: Tensor) -> Tensor:
        return (x * weight).tanh().square().sum()

    def use(f: Callable[..., Tensor]) -> list[Tensor]:
        weight.grad, values = None, []
        for i in range(5):
            loss: Any = checkpoint(f, X * i, use_reentrant=False)
            loss.backward()
            values += [loss.detach(), weight.grad.clone()]
        return values

    jitted = sm.jit(f, backend="eager", fullgraph=True)
    for value, expected in zip(use(jitted), use(f), strict=True):
        assert torch.equal(value, expected)
    assert len(jitted.recorded) == 2


def test_static_arguments_of_a_function_that_is_two_programs() -> None:
    """They stay constants: the function branches on them."""
    weight = nn.Parameter(torch.ones(6))

    def f(x: Tensor, kind: str, alpha: float) -> Tensor:
        y = (x * weight).tanh() if kind == "tanh" else x * weight
        return (y * alpha if alpha > 1 else y).square().sum()

    jitted = sm.jit(f, static_argnums=1, static_argnames="alpha", backend="eager", fullgraph=True)
    for i in range(8):
        kind, alpha = ["tanh", "linear"][i % 2], [0.5, 2.0][i // 2 % 2]
        values: list[list[Tensor]] = []
        for function in (jitted, f):
            weight.grad = None
            loss = function(X + i, kind, alpha=alpha)
            loss.backward()
            assert weight.grad is not None
            values.append([loss.detach(), weight.grad])
        assert all(map(torch.equal, *values))
    assert len(jitted.recorded) == 8


def test_signatures_that_are_two_programs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used one begins anew."""
    monkeypatch.setattr("shardmesh.sharding.jit.jit._SIGNATURES", 2)
    weight = nn.Parameter(torch.ones(6))
    jitted = sm.jit(lambda x, n: (x * weight).square().sum() * n, backend="eager")
    for n in (1, 2, 1, 3, 1, 2, 2, 3):
        weight.grad = None
        jitted(torch.ones(4, 6), n).backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [8.0 * n] * 6
    (state,) = jitted._states.values()
    assert [key[2][1] for key in state.outside] == [(int, 2), (int, 3)]


def test_a_module_that_calls_backward_itself() -> None:
    """Its parameters are not those that the recording has in their place."""

    class Trained(Net):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            loss = super().forward(x, scale).square().sum()
            loss.backward()
            return loss.detach()

    with pytest.raises(JitError, match=r"Trained calls backward\(\) itself"):
        sm.jit(Trained(), backend="eager")(X)


def test_a_module_that_differentiates_itself() -> None:
    """As potentials of molecules do: forces are derivatives of an energy."""

    class Forces(Net):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            x = x.detach().requires_grad_()
            energy = super().forward(x, scale).square().sum()
            return -torch.autograd.grad(energy, x, create_graph=True)[0]

    def use(model: nn.Module) -> list[Tensor]:
        values = []
        for i in range(3):
            forces = model(X * (i + 1))
            (forces - X).square().sum().backward()
            values += [forces.detach(), *gradients(model)]
        return values

    assert len(both(Forces, use).recorded) == 1


def test_tensors_of_modules_that_are_no_parameters() -> None:
    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.full((6,), 3.0, requires_grad=True)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    def use(model: nn.Module) -> list[Tensor]:
        for _ in range(3):
            model(X).sum().backward()
        return [*gradients(model), model.scale.grad.clone()]

    both(Scaled, use)


class Writes(Net):
    """Writes in place to its argument."""

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x.relu_())


def test_writes_to_an_argument_with_a_history() -> None:
    def use(model: nn.Module) -> list[Tensor]:
        found = []
        for _ in range(3):
            x = X.clone().requires_grad_()
            y = x * 2
            (model(y).sum() + y.sum()).backward()  # y is what the module has written
            found += [x.grad, *gradients(model)]
        return found

    both(Writes, use)


def test_writes_to_an_argument_after_an_effect() -> None:
    class Late(Writes):
        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.up(x))  # writes its buffers
            return y.sum() + super().forward(x)

    with pytest.raises(sm.errors.JitError, match="writes in place to an argument"):
        sm.jit(Late(), backend="eager")(X.clone().requires_grad_() * 2)


def test_a_hook_of_backward_that_changes_state() -> None:
    calls: list[int] = []

    def use(model: nn.Module) -> list[Tensor]:
        calls.clear()
        handle = model.up.register_full_backward_hook(lambda *_: calls.append(1))
        for _ in range(5):
            model(X.clone().requires_grad_()).sum().backward()
        handle.remove()
        assert len(calls) == 5
        return gradients(model)

    both(Net, use)


def test_a_hook_that_the_module_registers_on_its_argument() -> None:
    class Hooked(Net):
        def forward(self, x: Tensor) -> Tensor:
            if x.requires_grad:
                x.register_hook(lambda g: g.clamp(-0.1, 0.1))
            return self.up(x).sum() + x.square().sum()

    def use(model: nn.Module) -> list[Tensor]:
        found = []
        for _ in range(3):
            x = X.clone().requires_grad_()
            model(x * 1).backward()
            found += [x.grad, *gradients(model)]
        return found

    both(Hooked, use)


def test_backward_after_the_world_has_ended() -> None:
    weight = nn.Parameter(torch.ones(3))

    def main() -> Tensor:
        sm.init_device_mesh("cpu", (2,), axis_names=("dp",))
        return sm.jit(lambda x: (x * weight).sum(), backend="eager")(torch.ones(3))

    sm.simulate(2)(main)()[0].backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0] * 3
