"""Calls of a function under `sm.jit` one of whose arguments has a gradient history."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardmesh as sm
from shardmesh import P
from shardmesh.errors import JitError
from tests.device import DEVICE
from tests.sharding.parallel.compositions import whole
from tests.sharding.ranks import collectives, launched

X = torch.linspace(-1, 1, 24).view(4, 6)


def gradients(model: nn.Module) -> list[Tensor]:
    return [x.grad.clone() for x in model.parameters() if x.grad is not None]


def equal(values: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return len(values) == len(expected) and all(map(torch.equal, values, expected))


def runs_of(f: Any) -> int:
    """Return how many calls with a history ran a graph; the function is that of one rank."""
    states = getattr(f, "_states", {}).values()
    functions = [one for state in states for one in state.with_history.functions]
    return sum(entry.calls for one in functions for entry in one.recordings)


def eager_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [x.message for x in caplog.records if "runs eagerly" in x.message]


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_a_loss_function_of_outputs_of_a_model(
    is_recomputed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def loss_of(outputs: Tensor, target: Tensor, scale: float) -> Tensor:
        return (outputs - target).tanh().square().sum() * scale

    def use(f: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        model, values = nn.Linear(6, 6), []
        for i in range(4):
            outputs = model(X)
            if is_recomputed:
                loss: Any = checkpoint(f, outputs, X * i, 0.5 * i, use_reentrant=False)
            else:
                loss = f(outputs, X * i, 0.5 * i)
            with torch.no_grad():
                values.append(f(outputs, X, 0.5))  # no gradient flows here
            loss.backward()
            values += [loss.detach(), *gradients(model)]
        return values

    jitted = sm.jit(loss_of, backend="eager", fullgraph=True)
    with caplog.at_level(logging.WARNING, "shardmesh"):
        assert equal(use(jitted), use(loss_of))
    assert (len(jitted.recorded), runs_of(jitted)) == (1, 3 + 3 * is_recomputed)
    (line,) = eager_lines(caplog)
    assert "outputs has a gradient history, as have outputs of a model, and grad mode is" in line
    for _ in range(2):
        jitted(X, X, 0.5)  # without a history: another graph
    assert len(jitted.recorded) == 2


# -- other ranks -----------------------------------------------------------------------------------


class Seen(NamedTuple):
    """What a rank has seen: losses, gradients, and the collectives of calls with a history."""

    values: list[float]
    gradients: list[Tensor]
    ops: list[list[str]]
    graphs: int


def _train_and_evaluate(
    lengths: Sequence[tuple[int, int]], jit: bool, reads: Callable[[int, int], bool]
) -> Seen:
    """Train on a rank's own rows; evaluate after each step, in which ranks agree on the graph.

    Args:
        lengths: numbers of rows by step and rank.
        reads: whether the loss reads a value, by step and rank, which is a break.
    """
    mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("dp",))
    rank = mesh.get_rank()
    torch.manual_seed(0)
    model = nn.Linear(6, 6).to(DEVICE)
    sm.parallel.data_parallel(model, mesh)
    count: Any = sm.ones(4, device_mesh=mesh, placements=P("dp")).to(DEVICE)
    state = {"reads": False}

    def loss_of(outputs: Tensor) -> Tensor:
        if state["reads"] and bool(outputs.detach().sum() > 1e9):
            return outputs.sum()
        return (outputs.square().sum() / count.sum().full_tensor()).tanh()

    f: Any = sm.jit(loss_of, backend="eager") if jit else loss_of
    values, ops = [], []
    for i, by_rank in enumerate(lengths):
        rows = X.repeat(3, 1)[: by_rank[rank]].to(DEVICE) + i
        state["reads"] = reads(i, rank)
        outputs = model(rows)
        with collectives() as records:
            loss = f(outputs)
        ops.append(launched(records))
        loss.backward()
        state["reads"] = False
        values += [loss.item(), f(outputs.detach()).item()]
    return Seen(values, list(map(whole, gradients(model))), ops, runs_of(f))


def _never(step: int, rank: int) -> bool:
    return False


@pytest.mark.parametrize("case", ["another shape", "a break"])
def test_what_one_rank_meets_in_such_calls_is_its_own(case: str) -> None:
    """The other rank goes on to agree on calls without a history; neither waits for the other."""
    lengths, reads = [(4, 4)] * 8, _never
    if case == "another shape":
        lengths = [(4, 4)] * 3 + [(4, 3)] * 2 + [(4, 4)] * 2 + [(5, 2)]
    else:
        reads = lambda step, rank: rank == 1 and step in (3, 4)  # noqa: E731
    eager = sm.simulate(2)(_train_and_evaluate)(lengths, False, reads)
    jitted = sm.simulate(2)(_train_and_evaluate)(lengths, True, reads)
    for one, other in zip(jitted, eager, strict=True):
        assert one.values == other.values
        assert equal(one.gradients, other.gradients)
        assert one.ops == other.ops
    assert jitted[0].graphs >= 6
    assert jitted[1].graphs == (0 if case == "a break" else 5)  # it keeps no graph


# -- gradients -------------------------------------------------------------------------------------


class Enabling(nn.Module):
    """Turns gradients on itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return self.layer(x).square().sum()


@pytest.mark.parametrize("is_module", [False, True])
def test_gradients_that_are_turned_on_inside(is_module: bool) -> None:
    """Where grad mode is off outside."""

    def use(wrap: Callable[..., Any]) -> list[Tensor]:
        module = Enabling()
        f: Any = wrap(module) if is_module else wrap(lambda x: module(x))
        values = []
        for i in range(4):
            x = torch.full((2, 6), float(i), requires_grad=True)
            outputs = x * 2
            with torch.no_grad():
                loss = f(outputs)
            loss.backward()
            assert x.grad is not None
            values += [loss.detach(), x.grad, *gradients(module)]
        return values

    assert equal(use(lambda f: sm.jit(f, backend="eager")), use(lambda f: f))


def test_the_history_of_the_caller_is_walked_once() -> None:
    """Also in the call that is recorded, and with a number that autograd has saved."""
    calls = []
    model = nn.Linear(6, 6)
    model.weight.register_hook(lambda g: calls.append(g))
    f = sm.jit(lambda y, scale: (y.tanh() * scale).square().sum(), backend="eager")
    for i in range(3):
        f(model(X), 0.5 + i).backward()
        assert len(calls) == i + 1
    assert len(f.recorded) == 1


def test_recordings_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    f = sm.jit(lambda y, n: y.square().sum() * n, static_argnums=1, backend="eager")
    model = nn.Linear(6, 6)
    with caplog.at_level(logging.WARNING, "shardmesh"):
        for rows in (*range(1, 13), *range(1, 13)):
            f(model(torch.ones(rows, 6)), 1).backward()
    assert (len(f.recorded), runs_of(f)) == (8, 8)
    (state,) = f._states.values()
    assert sum(len(one.entries) for one in state.with_history.functions) == 8
    (line,) = eager_lines(caplog)
    assert "runs eagerly, but for calls that have a graph: <lambda> was recorded 8 times" in line
    with caplog.at_level(logging.WARNING, "shardmesh"):
        for n in range(2, 14):
            f(model(X), n).backward()
    assert len(f.recorded) == 15
    assert "8 other structures or static values" in eager_lines(caplog)[-1]


WEIGHT = nn.Parameter(torch.linspace(0.5, 1, 6))
OPTIMIZER = torch.optim.SGD([WEIGHT], lr=0.1)
OUTSIDE: list[Tensor] = []


def calls_backward(y: Tensor) -> Tensor:
    loss = (y * WEIGHT).square().sum()
    loss.backward(retain_graph=True)
    return loss


def takes_a_gradient(y: Tensor) -> Tensor:
    (g,) = torch.autograd.grad(y.square().sum(), y, create_graph=True)
    return g.square().sum() + y.sum()


def steps_an_optimizer(y: Tensor) -> Tensor:
    OPTIMIZER.step()
    return (y * WEIGHT).sum()


def clears_a_gradient(y: Tensor) -> Tensor:
    WEIGHT.grad = None
    return (y * WEIGHT).sum()


def freezes(y: Tensor) -> Tensor:
    WEIGHT.requires_grad = False
    loss = (y * WEIGHT).sum()
    WEIGHT.requires_grad = True
    return loss


def writes_to_its_argument(y: Tensor) -> Tensor:
    return y.mul_(WEIGHT).sum()


def uses_a_history_outside(y: Tensor) -> Tensor:
    return (y * OUTSIDE[-1]).sum()


def returns_a_view(y: Tensor) -> Tensor:
    return y.view(-1)


def registers_a_hook(y: Tensor) -> Tensor:
    y.register_hook(lambda g: g * 10)
    return y.square().sum()


def assigns_data(y: Tensor) -> Tensor:
    y.data = y.data * 3
    return y.sum()


def calls_backward_by_name(y: Tensor) -> Tensor:
    loss = (y * WEIGHT).square().sum()
    getattr(loss, "backward")(retain_graph=True)  # noqa: B009
    return loss


EAGER: dict[Callable[[Tensor], Tensor], str] = {
    calls_backward: "the function has `backward`",
    takes_a_gradient: "the function has `grad`",
    steps_an_optimizer: "the function reaches an optimizer",
    clears_a_gradient: "the function has `grad`",
    freezes: "the function has `requires_grad`",
    registers_a_hook: "the function has `register_hook`",
    assigns_data: "the function has `data`",
    calls_backward_by_name: "the function has `backward`",
    writes_to_its_argument: "writes in place to an argument that requires grad",
    uses_a_history_outside: "has a gradient history of its own",
    returns_a_view: "returns a view of an argument that requires grad",
}


@pytest.mark.parametrize("function", EAGER)
def test_what_needs_the_history_of_an_argument_runs_eagerly(
    function: Callable[[Tensor], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    def use(f: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        model, values = nn.Linear(6, 6), []
        with torch.no_grad():
            WEIGHT.copy_(torch.linspace(0.5, 1, 6))
        WEIGHT.grad = None
        for i in range(3):
            outputs = model(X + i)
            OUTSIDE[:] = [outputs * 2]
            result = f(outputs)
            if result.ndim:
                result.mul_(2)  # also where the caller has the argument
            loss = result.sum() + outputs.sum()
            loss.backward()
            values += [loss.detach(), WEIGHT.detach().clone(), *gradients(model)]
            values += [] if WEIGHT.grad is None else [WEIGHT.grad.clone()]
        return values

    jitted = sm.jit(function, backend="eager")
    with caplog.at_level(logging.WARNING, "shardmesh"):
        assert equal(use(jitted), use(function))
    (line,) = eager_lines(caplog)
    assert EAGER[function] in line
    assert not jitted.recorded


def multiplies(y: Tensor) -> Tensor:
    return (y * WEIGHT).sum()


@pytest.mark.parametrize("later", [clears_a_gradient, calls_backward])
def test_another_callback_than_in_the_first_call(
    later: Callable[[Tensor], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    def use(f: Callable[..., Tensor]) -> list[Tensor]:
        WEIGHT.grad, values = None, []
        for i in range(4):
            x = torch.full((6,), 1.0 + i, requires_grad=True)
            f(x * 2, multiplies if i < 2 else later).backward()
            assert x.grad is not None
            assert WEIGHT.grad is not None
            values += [x.grad, WEIGHT.grad.clone()]
        return values

    jitted = sm.jit(lambda y, h: h(y), backend="eager", fullgraph=True)
    with caplog.at_level(logging.WARNING, "shardmesh"):
        assert equal(use(jitted), use(lambda y, h: h(y)))
    (line,) = eager_lines(caplog)
    assert EAGER[later] in line


def copies_to_an_argument(y: Tensor, out: Tensor) -> Tensor:
    out.copy_(y * 2)
    return out


def writes_an_element(y: Tensor, out: Tensor) -> Tensor:
    out[0] = y[0] * 2
    return out


def copies_to_a_global(y: Tensor, out: Tensor) -> Tensor:
    BUFFER.copy_(y * 2)
    return y.sum()


def keeps_a_value(y: Tensor, out: Tensor) -> Tensor:
    VALUES.append(y * 2)
    return y.sum()


BUFFER = torch.zeros(6)
VALUES: list[Tensor] = []


@pytest.mark.parametrize(
    "function", [copies_to_an_argument, writes_an_element, copies_to_a_global, keeps_a_value]
)
def test_a_value_with_a_history_that_is_left_outside(function: Callable[..., Tensor]) -> None:
    """A gradient from there would be lost: an error, and eager calls from then on."""
    jitted = sm.jit(function, backend="eager")
    found = []
    for f in (jitted, jitted, function):
        BUFFER.detach_().zero_()
        VALUES[:] = [torch.zeros(6)]
        x = torch.ones(6, requires_grad=True)
        y = x * 1
        if not found:
            with pytest.raises(JitError, match="leaves a value with a gradient history in"):
                f(y, torch.zeros(6))
            found.append(None)
        else:
            (f(y, torch.zeros(6)).sum() + BUFFER.sum() + VALUES[-1].sum() + y.sum()).backward()
            assert x.grad is not None
            found.append(x.grad.tolist())
    assert found[1] == found[2]


class Remembering(nn.Module):
    """Keeps what it returns in a buffer."""

    buffer: Tensor

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.register_buffer("buffer", torch.zeros(6))
        self._replaces = replaces

    def forward(self, y: Tensor) -> Tensor:
        z = y * 2
        if self._replaces:
            self.buffer = z
        else:
            self.buffer.copy_(z)
        return z.sum()


@pytest.mark.parametrize("replaces", [False, True])
def test_a_value_with_a_history_that_is_left_in_a_buffer(replaces: bool) -> None:
    module = sm.jit(Remembering(replaces), backend="eager")
    with pytest.raises(JitError, match="leaves a value with a gradient history in an argument or"):
        module(torch.ones(6, requires_grad=True) * 1)
    module._orig_mod.buffer = torch.zeros(6)
    x = torch.ones(6, requires_grad=True)
    (module(x * 1) + module.buffer.sum()).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [4.0] * 6


def test_a_function_with_an_effect_is_not_called_twice() -> None:
    counts = [0]

    @sm.jit(backend="eager")
    def f(y: Tensor) -> Tensor:
        counts[0] += 1
        return y.view(-1)

    for i in range(3):
        f(torch.ones(2, requires_grad=True) * 1).sum().backward()
        assert counts == [i + 1]


class Branching(nn.Module):
    """Reads a value of its argument if that has three rows."""

    def forward(self, y: Tensor) -> Tensor:
        if len(y) == 3 and bool(y.detach().sum() > 1e9):
            return y.sum()
        return y.tanh().square().sin().sum()


@pytest.mark.parametrize("case", ["a function", "a module", "the limit"])
def test_a_recomputation_after_a_break_runs_the_graph_of_its_forward(case: str) -> None:
    torch.manual_seed(0)
    branching, head = Branching(), nn.Linear(4, 4)
    function: Any = branching if case == "a module" else lambda y: branching(y)
    rows = [3]
    if case == "the limit":
        function = lambda y: head(y).tanh().square().sin().sum()  # noqa: E731
        rows = list(range(10, 20))

    def use(f: Callable[[Tensor], Tensor]) -> list[Tensor]:
        values = []
        for i in range(3):
            x = torch.ones(2, 4, requires_grad=True)
            loss: Any = checkpoint(f, x * 1, use_reentrant=False)
            if i == 2:
                for n in rows:
                    f(torch.ones(n, 4, requires_grad=True) * 1).backward()
            loss.backward()
            assert x.grad is not None
            values.append(x.grad)
        return values

    assert equal(use(sm.jit(function, backend="eager")), use(function))


def test_a_result_with_another_gradient_or_without_one() -> None:
    """Without one, a parameter that only this result depends on has none, as in eager code.

    In the recording the gradients of both are one tensor.
    """

    def use(wrap: Callable[..., Any]) -> list[Tensor | None]:
        torch.manual_seed(0)
        head, values = nn.Linear(6, 6), []
        f = wrap(lambda y: (y.square().sum(), head(y).sum()))
        for i in range(4):
            head.zero_grad()
            x = torch.full((6,), 1.0 + i, requires_grad=True)
            first, second = f(x * 2)
            (first + second * (1 + i) if i < 2 else first).backward()
            values += [x.grad, head.weight.grad]
        return values

    values, expected = use(lambda f: sm.jit(f, backend="eager")), use(lambda f: f)
    assert [x is None for x in values] == [x is None for x in expected]
    for x, y in zip(values, expected, strict=True):
        assert x is None or (y is not None and torch.equal(x, y))


@pytest.mark.parametrize("is_module", [False, True])
def test_results_that_are_differentiated_one_after_the_other(is_module: bool) -> None:
    class Two(nn.Module):
        def forward(self, y: Tensor) -> tuple[Tensor, Tensor]:
            z = y.tanh()
            return z.square().sum(), z.sum()

    f = sm.jit(Two() if is_module else Two().forward, backend="eager")
    gradients = []
    for _ in range(3):
        x = torch.ones(6, requires_grad=True)
        a, b = f(x * 2)
        a.backward(retain_graph=True)
        b.backward()
        assert x.grad is not None
        gradients.append(x.grad)
    x = torch.ones(6, requires_grad=True)
    a, b = Two()(x * 2)
    a.backward(retain_graph=True)
    b.backward()
    assert all(torch.equal(g, x.grad) for g in gradients if x.grad is not None)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_results_that_nobody_differentiates_with_fullgraph() -> None:
    """The error comes in a call, where it reaches the program."""
    f = sm.jit(lambda y: y.square().sum(), backend="eager", fullgraph=True)
    for _ in range(3):
        f(torch.ones(2, requires_grad=True) * 1)
    with pytest.raises(JitError, match="no backward ran through its results in 3 calls"):
        f(torch.ones(2, requires_grad=True) * 1)
    for _ in range(2):
        f(torch.ones(2, requires_grad=True) * 1).backward()
    assert runs_of(f) == 1


class Counting(nn.Module):
    """Counts its calls, and returns a view of its argument."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x.flatten()


def test_a_module_does_not_return_views_of_its_arguments() -> None:
    """A write to the result would be lost to the history of the argument."""
    module = sm.jit(nn.Sequential(nn.Flatten()), backend="eager")
    for _ in range(3):
        x = torch.ones(2, 3, 2, requires_grad=True)
        outputs = x * 2
        (module(outputs).mul_(3).sum() + outputs.sum()).backward()
        assert x.grad is not None
        assert x.grad.unique().tolist() == [12.0]
    counting = sm.jit(Counting(), backend="eager")  # a call that has an effect is not repeated
    result = counting(torch.ones(2, 3, requires_grad=True) * 2)
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        result.mul_(3)
    assert counting.count.item() == 1
    with pytest.raises(JitError, match="returns a view of an argument"):
        sm.jit(nn.Flatten(), backend="eager", fullgraph=True)(
            torch.ones(2, 3, 2, requires_grad=True)
        )


def test_several_results_of_several_calls_before_a_backward() -> None:
    """As functions that each layer of a model calls; one result is the argument itself."""

    def step_of(x: Tensor, past: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        y = (x * past["scale"]).tanh()
        return y, {"norm": y.detach().norm(), "sum": y.sum()}, x

    def use(f: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model, values = nn.Linear(6, 6), []
        for i in range(3):
            x, total = model(X + i), torch.zeros(())
            x.register_hook(values.append)
            for scale in (x.detach() + 2, x, x.detach() + 3):
                before = x
                x, sums, same = f(x, {"scale": scale})
                assert same is before
                total = total + sums["sum"]
                values.append(sums["norm"])
            (total + x.square().sum()).backward()
            values += [total.detach(), *gradients(model)]
        return values

    jitted = sm.jit(step_of, backend="eager", fullgraph=True)
    assert equal(use(jitted), use(step_of))
    assert runs_of(jitted) >= 5


def test_leaves_and_modules_outside_are_inputs() -> None:
    """Their gradients come from the loss alone."""
    scale, holder = torch.full((6,), 2.0, requires_grad=True), [nn.Linear(6, 6)]

    def loss_of(y: Tensor) -> Tensor:
        return (holder[0](y) * scale + y).square().mean()

    def use(f: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        model, values = nn.Linear(6, 6), []
        scale.grad = None
        holder[0].zero_grad()
        for i in range(4):
            f(model(X + i)).backward()
            assert scale.grad is not None
            values += [*gradients(model), *gradients(holder[0]), scale.grad.clone()]
        return values

    jitted = sm.jit(loss_of, backend="eager", fullgraph=True)
    assert equal(use(jitted), use(loss_of))
    assert runs_of(jitted) == 3


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.enable_grad])
def test_a_backward_that_goes_on_through_an_argument(grad_mode: Callable[[], Any]) -> None:
    """The function may turn gradients on itself."""

    @sm.jit(backend="eager")
    def step(x: Tensor) -> Tensor:
        with torch.enable_grad():
            loss = x.square().sum()
            loss.backward()
        return loss.detach()

    for i in range(3):
        x = torch.full((2,), float(i), requires_grad=True)
        y = x * 2
        with grad_mode():
            assert step(y) == 8 * i * i
        assert x.grad is not None
        assert x.grad.tolist() == [8.0 * i] * 2


# -- a language model ------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)
        self.layers = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(
        outputs.flatten(0, 1).float(), labels.flatten(0, 1), reduction="sum", ignore_index=-100
    )


def _train(form: str, jit: bool) -> tuple[list[Tensor], int]:
    """Train as torchtitan does: blocks and the loss are compiled, the step is not.

    Two microbatches a step, with labels that are left out, and a loss for evaluation.

    Args:
        form: "rows" of each rank under `fully_shard`; "sharded" inputs and labels, tensor parallel;
            "both".
    """
    shape, names = ((2, 2), ("dp", "tp")) if form == "both" else ((2,), ("dp",))
    mesh = sm.init_device_mesh(DEVICE, shape, axis_names=names)
    torch.manual_seed(0)
    model = Model().to(DEVICE)
    if form != "rows":
        axis = "tp" if form == "both" else "dp"
        plan = {"*.up": sm.parallel.colwise(), "*.down": sm.parallel.rowwise()}
        sm.parallel.parallelize(model, mesh[axis], plan if form == "both" else {"*": P()})
    loss_of: Callable[..., Tensor] = cross_entropy
    if jit:
        for i, block in enumerate(model.layers):
            model.layers[i] = sm.jit(block, backend="eager")
        loss_of = sm.jit(cross_entropy, backend="eager")
    if form != "sharded":
        sm.parallel.fully_shard(model, mesh, axes="dp", units=[Block])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    values = []
    for i in range(4):
        micro_batches = []
        for j in range(2):
            generator = torch.Generator().manual_seed(10 * i + j)
            ids = torch.randint(10, (4, 5), generator=generator).to(DEVICE)
            labels = ids.roll(-1, 1)
            labels[:, 3 + (i + j) % 2 :] = -100
            if form == "sharded":
                ids = sm.device_put(ids, mesh, P("dp"))
                labels = sm.device_put(labels, mesh, P("dp"))
            elif form == "rows":
                ids, labels = ids.chunk(2)[mesh.get_rank()], labels.chunk(2)[mesh.get_rank()]
            micro_batches.append((ids, labels))
        count = sum(int((labels != -100).sum()) for _, labels in micro_batches)
        for ids, labels in micro_batches:
            loss = loss_of(model(ids), labels) / count
            loss.backward()
            values.append(whole(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            ids, labels = micro_batches[0]
            loss = loss_of(model(ids), labels)
            values.append(whole(loss))
    parameters = [whole(x).detach() for x in model.parameters()]
    return [*values, *parameters], runs_of(loss_of)


@pytest.mark.parametrize("form", ["rows", "sharded", "both"])
def test_the_loss_and_the_blocks_of_a_language_model(form: str) -> None:
    ranks = 4 if form == "both" else 2
    eager, jitted = (sm.simulate(ranks)(_train)(form, jit) for jit in (False, True))
    for (values, graphs), (expected, _) in zip(jitted, eager, strict=True):
        assert equal(values, expected)
        assert graphs == 7  # all microbatches but the first


def test_a_function_that_calls_a_unit_runs_in_parts() -> None:
    """The unit gathers and reduces as in eager mode, as a discriminator of generated data."""

    def train(jit: bool) -> tuple[list[Tensor], int]:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("dp",))
        torch.manual_seed(0)
        generator, discriminator = nn.Linear(8, 8), nn.Sequential(Block(), nn.Linear(8, 1))
        for model, units in ((generator, None), (discriminator, [Block])):
            sm.parallel.fully_shard(model.to(DEVICE), mesh, axes="dp", units=units)

        def loss_of(y: Tensor) -> Tensor:
            return F.softplus(-discriminator(y)).mean()

        f: Any = sm.jit(loss_of, backend="eager") if jit else loss_of
        values = []
        for i in range(3):
            loss = f(generator(torch.ones(2, 8, device=DEVICE) * i))
            loss.backward()
            values.append(loss.detach())
        grads = [x.grad for model in (generator, discriminator) for x in model.parameters()]
        assert all(g is not None for g in grads)
        return [*values, *(whole(g) for g in grads if g is not None)], len(f.parts if jit else ())

    eager, jitted = (sm.simulate(2)(train)(jit) for jit in (False, True))
    for (values, parts), (expected, _) in zip(jitted, eager, strict=True):
        assert equal(values, expected)
        assert parts == 1
