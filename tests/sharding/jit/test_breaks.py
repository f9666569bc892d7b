"""What a graph cannot repeat runs eagerly, between the graphs of modules: equal to eager code."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import data_parallel, fully_shard, parallelize
from tests.device import DEVICE
from tests.sharding.jit.test_refused import READS, X
from tests.sharding.ranks import on_mesh

STEPS = 4
FORMS = ["one process", "data_parallel", "fully_shard", "parallelize"]


class Block(nn.Module):
    """A block of a transformer, without attention.

    Args:
        reads: whether Python branches on a value.
    """

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(8), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.drop(nn.functional.gelu(self.up(self.norm(x)))))
        if self.reads and y.sum() > 0:
            y = y * 2
        return x + y


class Model(nn.Module):
    """A language model whose embedding and head share a weight, used on both sides of the break.

    Args:
        at: the break: "none", "between" two blocks, or "in" one.
    """

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks = nn.ModuleList([Block(at == "in" and i == 1) for i in range(3)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for i, block in enumerate(self.blocks):
            x = block(x)
            if self.at == "between" and i == 0 and x.sum() > 0:
                x = x / 2
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def build(form: str, at: str, mesh: Any) -> Model:
    torch.manual_seed(0)
    model = Model(at).to(DEVICE)
    if form == "data_parallel":
        data_parallel(model, mesh)
    elif form == "fully_shard":
        fully_shard(model, mesh, units=["Block"])
    elif form == "parallelize":
        plan = {"up.weight": P("a"), "up.bias": P("a"), "down.weight": P(None, "a")}
        parallelize(model, mesh, {f"blocks.*.{name}": spec for name, spec in plan.items()})
    return model


def train(form: str, at: str, how: str, mesh: Any) -> tuple[list[Tensor], int]:
    """Return losses and parameters after some steps, and the number of graphs."""
    model = build(form, at, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    call = sm.jit(model, backend="eager") if how == "module" else model

    def step(ids: Tensor) -> Tensor:
        loss = call(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    f = sm.jit(step, backend="eager") if how == "step" else step
    losses = []
    for i in range(STEPS):
        torch.manual_seed(i)
        sm.random.manual_seed(i)
        ids = torch.randint(0, 11, (4, 5), device=DEVICE)
        if form in ("data_parallel", "fully_shard"):
            ids = ids.chunk(2)[mesh.get_rank()]
        losses.append(f(ids))
    jitted = {"module": call, "step": f}.get(how)
    whole = [getattr(x, "full_tensor", lambda x=x: x)() for x in [*losses, *model.parameters()]]
    return [x.detach() for x in whole], len(jitted.recorded) if jitted is not None else 0


@pytest.mark.one_in(4, each=["how", "at", "form"])
@pytest.mark.parametrize("how", ["module", "step"])
@pytest.mark.parametrize(("at", "graphs"), [("none", 1), ("between", 3), ("in", 2)])
@pytest.mark.parametrize("form", FORMS)
def test_a_model_with_a_break_has_the_bits_of_eager(form, at, graphs, how):
    """A parameter is used on both sides of the break, and gradients are clipped after it."""

    def program(mesh):
        expected, _ = train(form, at, "eager", mesh)
        values, count = train(form, at, how, mesh)
        for value, other in zip(values, expected, strict=True):
            assert torch.equal(value, other)
        return count

    if form == "fully_shard" and how == "module":
        graphs = {"none": 3, "between": 3, "in": 2}[at]  # units gather between the blocks
    assert on_mesh((2,), program) == [graphs] * 2


@pytest.mark.parametrize("f", READS, ids=lambda f: f.__name__)
def test_a_function_that_reads_values_runs_eagerly(f: Callable[..., Tensor], capsys: Any) -> None:
    jitted = sm.jit(f, backend="eager")
    for i in range(5):
        assert torch.equal(jitted(X + i), f(X + i))
    assert not jitted.recorded


def test_an_assignment_at_an_index_without_dims_is_a_break() -> None:
    """torch reads such a tensor as a number, for a ShardedTensor inside of the library."""

    def assigned(y: Any, i: Tensor, value: Tensor) -> Any:
        y = y.clone()
        y[i] = value
        return y

    def main() -> None:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("a",))
        y = sm.device_put(torch.zeros(4, 2, device=DEVICE), mesh, P())
        jitted = sm.jit(assigned, backend="eager")
        for i in range(3):
            args = y, torch.tensor(i), torch.tensor(1.0 + i, device=DEVICE)
            assert torch.equal(jitted(*args).full_tensor(), assigned(*args).full_tensor())

    sm.simulate(2)(main)()


def test_what_python_changes_changes_once_a_call() -> None:
    losses: list[float] = []

    @sm.jit(backend="eager")
    def step(x: Tensor) -> Tensor:
        losses.append(x.sum().item())
        return x * len(losses)

    for i in range(6):
        assert torch.equal(step(X), X * (i + 1))
    assert losses == [3.0] * 6
    assert all(type(x) is float for x in losses)


def test_a_break_is_logged_once_with_its_place(caplog: pytest.LogCaptureFixture) -> None:
    step = sm.jit(lambda x: x * int(x.argmax()), backend="eager")
    with caplog.at_level(logging.WARNING, "shardmesh"):
        for _ in range(4):
            step(X)
    (line,) = [x.message for x in caplog.records if "runs eagerly" in x.message]
    assert "test_breaks.py:" in line


def test_a_break_on_one_rank_is_a_break_on_all() -> None:
    def main() -> Any:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("a",))
        x = sm.device_put(X, mesh, P())

        def f(x: Any) -> Any:
            scale = 2 if mesh.get_rank() == 0 and x._local.sum() > 0 else 2.0
            return (x * scale).sum()

        jitted = sm.jit(f, backend="eager")
        return [jitted(x).item() for _ in range(4)], len(jitted.recorded)

    assert sm.simulate(2)(main)() == [([6.0] * 4, 0)] * 2


def test_other_shapes_on_each_rank_after_a_break() -> None:
    """Ranks meet new shapes in calls of their own, and the parts have the collectives of eager."""

    def main() -> Any:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("a",))
        torch.manual_seed(0)
        model = fully_shard(Model("between").to(DEVICE), mesh, units=["Block"])
        step = sm.jit(lambda ids: model(ids).backward(), backend="eager")
        for i in range(8):
            length = 3 + i * (1 + mesh.get_rank()) % 4
            step(torch.ones(2, length, dtype=torch.long, device=DEVICE))
        return True

    assert all(sm.simulate(2)(main)())


@pytest.mark.parametrize("file", ["<stdin>", "<doctest page[0]>", "<python-input-3>"])
def test_what_is_typed_is_the_users_program(file: str) -> None:
    scope: dict[str, Any] = {}
    exec(compile("def f(x): return x * 2 if x.sum() > 0 else x", file, "exec"), scope)
    with pytest.raises(sm.errors.JitError, match="reads a value"):
        sm.jit(scope["f"], backend="eager", fullgraph=True)(X)
