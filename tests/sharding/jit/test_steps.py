"""Whole training steps under `sm.jit` equal eager ones: the compositions of the tests of layers, a
Hugging Face model, processes.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import train_lm
from torch import Tensor, nn

import shardmesh as sm
from shardmesh import P
from tests.device import DEVICE
from tests.pool import Pool
from tests.sharding.jit.steps import composed, mean_square, mlp, pair, runs, trained, training_step
from tests.sharding.parallel.compositions import EVEN, UNEVEN, Composition, whole
from tests.sharding.parallel.test_compositions import CASES as COMPOSITIONS

CASES = [
    Composition("ddp", "", "plain", EVEN, (2,)),
    Composition("zero1", "", "global", UNEVEN, (3,)),
    Composition("zero2", "sp", "plain", EVEN, (1, 2)),
    Composition("fsdp", "", "global", EVEN, (2,)),
    Composition("fsdp", "tp", "global", EVEN, (2, 2)),
    Composition("fsdp", "sp", "global", UNEVEN, (2, 2)),
    Composition("fsdp", "sp", "plain", EVEN, (2, 2)),
    Composition("hsdp", "", "plain", EVEN, (2, 2)),
    Composition("ddp", "tp", "global", UNEVEN, (1, 3)),
]


@pytest.mark.one_in(10)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_composition_has_the_bits_of_eager(case: Composition) -> None:
    simulated = sm.simulate(math.prod(case.shape))
    for expected, found in zip(
        simulated(composed)(case, None), simulated(composed)(case, "eager"), strict=True
    ):
        assert_same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPOSITIONS, ids=str)
def test_every_composition_has_the_bits_of_eager(case: Composition) -> None:
    test_a_composition_has_the_bits_of_eager(case)


def test_processes_have_the_bits_of_eager(world4: Pool) -> None:
    case = Composition("fsdp", "sp", "global", UNEVEN, (2, 2))
    for expected, found in zip(
        world4(composed, case, None), world4(composed, case, "eager"), strict=True
    ):
        assert_same(found, expected)


@pytest.mark.slow  # four processes compile
def test_processes_with_inductor(world4: Pool) -> None:
    case = Composition("fsdp", "tp", "global", EVEN, (2, 2))
    for expected, found in zip(
        world4(composed, case, None), world4(composed, case, "inductor"), strict=True
    ):
        assert_same(found, expected, 1e-5)


@pytest.mark.timeout(300)  # Inductor compiles
def test_inductor() -> None:
    case = Composition("ddp", "tp", "global", EVEN, (1, 2))
    for expected, found in zip(
        sm.simulate(2)(composed)(case, None),
        sm.simulate(2)(composed)(case, "inductor"),
        strict=True,
    ):
        assert_same(found, expected, 1e-5)


def assert_same(
    found: tuple[Tensor, list[Tensor], int],
    expected: tuple[Tensor, list[Tensor], int],
    tolerance: float = 0,
) -> None:
    assert found[2] >= 2  # calls that ran a graph
    torch.testing.assert_close(found[:2], expected[:2], rtol=tolerance, atol=tolerance)


def test_the_rate_is_an_input_and_the_step_is_recorded_twice() -> None:
    def main() -> Any:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("tp",))
        model = mlp(mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)

        @sm.jit(backend="eager")
        def step(x: Any, y: Any) -> tuple[Any]:
            loss = mean_square(model, x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return (loss,)

        for i in range(12):
            step(*pair(mesh, i))
            schedule.step()
        return runs(step), len(step.recorded)

    assert sm.simulate(2)(main)() == [(10, 1), (10, 1)]


def test_an_optimizer_over_lists_writes_parameters_that_are_gathered() -> None:
    """Whole parameters are kept from step to step and gathered again when they were written."""

    def main(backend: str | None) -> Any:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("fsdp",))
        model = mlp(None)
        sm.parallel.data_parallel(
            model, mesh, optimizer="fsdp", gradient="fsdp", src_data_rank=None
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

        def step(x: Any, y: Any) -> tuple[Any]:
            losses = []
            for _ in range(2):
                losses.append(mean_square(model, x, y))
                losses[-1].backward()
                optimizer.step()
                optimizer.zero_grad()
            return (losses[-1],)

        return trained(step, backend, model, schedule, lambda i: pair(None, i))

    for expected, found in zip(
        sm.simulate(2)(main)(None), sm.simulate(2)(main)("eager"), strict=True
    ):
        assert_same(found, expected)


@pytest.mark.parametrize(
    "jitted", [("train",), ("evaluate",), ("train", "evaluate")], ids=" and ".join
)
def test_graphs_and_eager_code_in_turns(jitted: tuple[str, ...]) -> None:
    """Gathered parameters that are kept from step to step are outdated when a graph has written the
    parameters, and the other way round.
    """

    def main(jitted: tuple[str, ...]) -> Any:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("fsdp",))
        model = mlp(None)
        sm.parallel.data_parallel(
            model, mesh, optimizer="fsdp", gradient="fsdp", src_data_rank=None
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        train = training_step(model, optimizer)

        def evaluate(x: Any, y: Any) -> Any:
            with torch.no_grad():
                return mean_square(model, x, y)

        named = {"train": train, "evaluate": evaluate}
        steps = {
            name: sm.jit(f, backend="eager") if name in jitted else f for name, f in named.items()
        }
        found = []
        for i in range(6):
            found.append(steps["train"](*pair(None, i)))
            found += [
                steps["evaluate"](*pair(None, 0)),
                steps["evaluate"](*pair(None, 1)),
                evaluate(*pair(None, 0)),
            ]
        return [x.item() for x in found]

    assert sm.simulate(2)(main)(jitted) == sm.simulate(2)(main)(set())


def test_another_optimizer_loop_and_dropout() -> None:
    def main(backend: str | None) -> Any:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("tp",))
        sm.random.manual_seed(5)
        model = mlp(mesh, dropout=0.4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False, fused=False)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

        def step(x: Any, y: Any) -> tuple[Any]:
            loss = mean_square(model, x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return (loss,)

        found = trained(step, backend, model, schedule, lambda i: pair(mesh, i), steps=6)
        return *found[:2], found[2], sm.random.get_rng_state()

    for expected, found in zip(
        sm.simulate(2)(main)(None), sm.simulate(2)(main)("eager"), strict=True
    ):
        assert_same(found[:3], expected[:3])
        assert torch.equal(found[3], expected[3])


def test_a_hugging_face_model() -> None:
    for expected, found in zip(
        sm.simulate(4)(llama)(None), sm.simulate(4)(llama)("eager"), strict=True
    ):
        assert_same(found, expected)


def llama(backend: str | None) -> tuple[Tensor, list[Tensor], int]:
    transformers = pytest.importorskip("transformers")
    mesh = sm.init_device_mesh(DEVICE, (2, 2), axis_names=("dp", "tp"))
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=32)
    )
    plan = {
        f"model.layers.*.{name}": P("tp")
        for name in ("self_attn.[qkv]_proj.*", "mlp.gate_proj.*", "mlp.up_proj.*")
    }
    plan |= {
        f"model.layers.*.{name}": P(None, "tp")
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
    }
    sm.parallel.parallelize(model, mesh, plan, src_data_rank=None)
    sm.parallel.fully_shard(
        model, mesh, axes="dp", units=type(model.model.layers[0]), src_data_rank=None
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def step(ids: Any) -> tuple[Any, Any]:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm

    def batch(i: int) -> tuple[Any]:
        ids = torch.randint(0, 32, (4, 7), generator=torch.Generator().manual_seed(i))
        return (sm.device_put(ids, mesh, P("dp"), src_data_rank=None),)

    return trained(step, backend, model, schedule, batch)


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "how",
    [["--mesh", "fsdp=2,tp=2"], ["--parallel", "fsdp=2,tp=2"], ["--parallel", "zero2=2,sp=2"]],
    ids=" ".join,
)
def test_the_model_of_the_example(how: list[str]) -> None:
    for expected, found in zip(
        sm.simulate(4)(example)(how, None), sm.simulate(4)(example)(how, "eager"), strict=True
    ):
        assert_same(found, expected)


def example(how: list[str], backend: str | None) -> tuple[Tensor, list[Tensor], int]:
    options = train_lm.parse(["--size", "tiny", *how])
    mesh = sm.init_device_mesh(DEVICE, tuple(options.mesh.values()), axis_names=tuple(options.mesh))
    trainer = train_lm.Trainer(options, mesh)

    def step(ids: Any, targets: Any) -> tuple[Any, Any]:
        loss = F.cross_entropy(trainer.model(ids), targets)
        loss.backward()
        norm = sm.training.clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return loss, norm

    return trained(step, backend, trainer.model, trainer.schedule, lambda i: next(trainer.batches))


def test_gradients_that_are_left_and_read() -> None:
    def main(backend: str | None) -> list[Tensor]:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("tp",))
        model = mlp(mesh)

        def backward(x: Any, y: Any) -> Any:
            loss = mean_square(model, x, y)
            loss.backward()
            return loss

        f = backward if backend is None else sm.jit(backward, backend=backend)
        found = []
        for i in range(8):
            found.append(whole(f(*pair(mesh, i))))
            found += [whole(p.grad) for p in model.parameters()]
            if i in (2, 5):
                model.zero_grad()
        return found

    for expected, found in zip(
        sm.simulate(2)(main)(None), sm.simulate(2)(main)("eager"), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("check_state", "most"), [(True, 64), (False, 59)])
def test_python_calls_of_a_call(check_state: bool, most: int) -> None:
    """A call of a graph is so many calls of Python around it, whatever the model's size."""

    def count(size: int) -> int:
        model = nn.ModuleList([nn.Linear(2, 2) for _ in range(size)])
        f = sm.jit(lambda module: None, backend="eager", check_state=check_state)
        for _ in range(3):
            f(model)
        events: list[str] = []
        sys.setprofile(lambda frame, event, argument: events.append(event))
        try:
            f(model)
        finally:
            sys.setprofile(None)
        return events.count("call")

    assert count(100) == count(1) <= most
