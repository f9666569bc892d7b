"""What a training loop needs, over the stages of a pipeline.

Norms, clipping, loss scaling, averages, Muon, loops over uneven batches.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardmesh as sm
from shardmesh.parallel import pipeline
from tests.sharding.parallel.pipeline.stateful_model import (
    SETUPS,
    Setup,
    batch,
    make_model,
    own_rows,
    step,
)
from tests.sharding.ranks import collectives


def whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, sm.ShardedTensor) else x.clone()


def with_gradients(setup: Setup) -> Any:
    pipe = setup.pipe()
    pipe.step(*own_rows(pipe.mesh, *batch()), loss_fn=F.cross_entropy)
    return pipe


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """Return the model with the gradients of a step in one process."""
    model = make_model()
    ids, targets = batch()
    F.cross_entropy(model(ids), targets).backward()
    return model


# -- norms -----------------------------------------------------------------------------------------


@pytest.mark.one_in(3)
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_norms_are_those_of_the_whole_model(setup, model):
    orders = (2.0, 1.0, math.inf)

    def program() -> Any:
        pipe = with_gradients(setup)
        norms = [
            sm.training.tensor_norms(pipe),
            sm.training.tensor_norms(pipe, of="grad"),
            sm.training.tensor_norms(pipe, of="grad", ord=math.inf),
        ]
        totals = [sm.training.get_total_norm(pipe, ord).item() for ord in orders]
        grads = [x.grad for x in pipe.parameters()]
        totals.append(sm.training.get_total_norm(grads).item())
        return norms, totals

    grads = [x.grad for x in model.parameters()]
    expected = [
        sm.training.tensor_norms(model),
        sm.training.tensor_norms(model, of="grad"),
        sm.training.tensor_norms(model, of="grad", ord=math.inf),
    ]
    totals = [sm.training.get_total_norm(grads, ord).item() for ord in orders]
    for own_norms, own_totals in sm.simulate(setup.size)(program)():
        for own, other in zip(own_norms, expected, strict=True):
            assert own == pytest.approx(other, abs=1e-12)
        assert own_totals == pytest.approx([*totals, totals[0]], abs=1e-12)


@pytest.mark.one_in(6, each=["whole_list"])
@pytest.mark.parametrize("whole_list", [False, True])
@pytest.mark.parametrize("setup", SETUPS[1:], ids=str)
def test_clipping(setup, whole_list, model):
    def program() -> Any:
        pipe = with_gradients(setup)
        parameters = list(pipe.parameters()) if whole_list else pipe
        norm = sm.training.clip_grad_norm_(parameters, 0.1).item()
        return norm, {name: whole(x.grad) for name, x in pipe.named_parameters()}

    expected = sm.training.get_total_norm([x.grad for x in model.parameters()]).item()
    named = dict(model.named_parameters(remove_duplicate=False))
    for norm, grads in sm.simulate(setup.size)(program)():
        assert norm == pytest.approx(expected, abs=1e-12)
        for name, grad in grads.items():
            clipped = named[name].grad * (0.1 / (expected + 1e-6))
            torch.testing.assert_close(grad, clipped, rtol=0, atol=1e-12)


def test_clipping_needs_one_collective():
    def program() -> list[str]:
        pipe = with_gradients(Setup("fsdp and tp", "1f1b", 2, 2))
        sm.training.clip_grad_norm_(pipe, 1.0)
        with collectives() as records:
            sm.training.clip_grad_norm_(pipe, 1.0)
        return [record.op for record in records]

    assert sm.simulate(8)(program)() == [["all_reduce"]] * 8


def test_some_of_the_parameters_raise():
    def program() -> None:
        pipe = with_gradients(Setup("fsdp", "1f1b", 2, 2))
        some = list(pipe.parameters())[1:]
        with pytest.raises(ValueError, match=r"Call clip_grad_norm_\(pipe, ...\)"):
            sm.training.clip_grad_norm_(some, 1.0)
        with pytest.raises(ValueError, match=r"Call get_total_norm\(pipe, ...\)"):
            sm.training.get_total_norm([x.grad for x in some])
        with pytest.raises(ValueError, match=r"pass the pipeline"):
            sm.training.tensor_norms(dict(pipe.named_parameters()))
        # another model is none of the pipeline's
        other = nn.Linear(2, 2)
        other(torch.ones(1, 2)).sum().backward()
        assert sm.training.get_total_norm([x.grad for x in other.parameters()]) > 0

    sm.simulate(4)(program)()


def test_parameters_without_gradient():
    """Frozen ones, all of a stage, and one of many."""

    def freeze(named: Any) -> None:
        for name, x in named:
            frozen = name.startswith(("blocks.1", "blocks.2", "norm")) or name == "blocks.0.up.bias"
            x.requires_grad_(not frozen)

    model = make_model(tied=False)
    freeze(model.named_parameters())
    model.head.weight.requires_grad_(False)
    ids, targets = batch()
    F.cross_entropy(model(ids), targets).backward()

    def program() -> Any:
        whole_model = make_model(tied=False)
        freeze(whole_model.named_parameters())
        whole_model.head.weight.requires_grad_(False)
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("pp",))
        pipe = pipeline(whole_model, mesh, split=["blocks.1"], microbatches=2)
        pipe.step(ids, targets, loss_fn=F.cross_entropy)
        trained = [x for x in pipe.parameters() if x.requires_grad]
        norms = sm.training.tensor_norms(pipe, of="grad")
        total = sm.training.clip_grad_norm_(pipe, 1e9).item()
        return norms, total, len(trained)

    expected = sm.training.tensor_norms(model, of="grad")
    results = sm.simulate(2)(program)()
    assert results[1][2] == 0
    for norms, total, _ in results:
        assert norms == pytest.approx(expected, abs=1e-12)
        assert total == pytest.approx(math.hypot(*expected.values()), abs=1e-12)


def test_parameters_that_change_after_the_first_step_raise():
    def program() -> None:
        pipe = with_gradients(Setup("none", "1f1b", 2, 2))
        sm.training.clip_grad_norm_(pipe, 1.0)
        norm = next(block.norm for block in _blocks(pipe))
        norm.weight = nn.Parameter(torch.ones(7, dtype=torch.float64))
        with pytest.raises(RuntimeError, match="call state_dict"):
            sm.training.clip_grad_norm_(pipe, 1.0)
        pipe.state_dict()
        assert sm.training.clip_grad_norm_(pipe, 1.0) > 0

    def _blocks(pipe: Any) -> Any:
        for stage in pipe.stages.values():
            yield from stage.blocks

    sm.simulate(2)(program)()


def test_a_list_outlives_its_pipeline():
    """Parameters of a pipeline that is gone are those of any model."""
    import gc

    def program() -> float:
        pipe = with_gradients(Setup("none", "1f1b", 2, 2))
        parameters = list(pipe.parameters())[1:]
        del pipe
        gc.collect()
        return sm.training.get_total_norm([x.grad for x in parameters]).item()

    first, second = sm.simulate(2)(program)()
    assert first > 0
    assert second > 0


# -- loss scaling ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["none", "fsdp"])
def test_an_infinity_in_one_stage_skips_the_step_in_all(form):
    setup = Setup(form, "1f1b", 2, 2)

    def program() -> None:
        pipe = setup.pipe()
        optimizer = torch.optim.SGD(pipe.parameters(), lr=1.0)
        scaler = sm.training.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        before = [whole(x.detach()) for x in pipe.parameters()]
        for is_infinite, scale in ((True, 2.0), (False, 4.0)):
            optimizer.zero_grad()
            pipe.step(*own_rows(pipe.mesh, *batch()), loss_fn=F.cross_entropy)
            if is_infinite and 0 in pipe.stages:
                grad: Any = next(iter(pipe.parameters())).grad
                getattr(grad, "_local", grad).view(-1)[:1].fill_(torch.inf)
            scaler.scale(torch.ones(()))  # makes the scale
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == scale
            after = [whole(x.detach()) for x in pipe.parameters()]
            same = [torch.equal(x, y) for x, y in zip(before, after, strict=True)]
            assert all(same) if is_infinite else not any(same)

    sm.simulate(setup.size)(program)()


# -- averages --------------------------------------------------------------------------------------


@pytest.mark.parametrize("setup", SETUPS[2::5], ids=str)
def test_averages(setup, tmp_path):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ema = sm.training.EMA(model, 0.9)
    for _ in range(2):
        step(model, optimizer)
        ema.update()
    expected = ema.state_dict()["average"]
    loss = F.cross_entropy
    with ema.swapped():
        ids, targets = batch()
        averaged = loss(model(ids), targets).item()

    def program() -> float:
        pipe = setup.pipe()
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        ema = sm.training.EMA(pipe, 0.9)
        for _ in range(2):
            step(pipe, optimizer)
            ema.update()
        sm.checkpoint.save({"ema": ema}, tmp_path)
        with ema.swapped():
            return pipe.eval(*own_rows(pipe.mesh, *batch()), loss_fn=loss).item()

    def resumed() -> Any:
        pipe = Setup("fsdp", "zb_v", 2, 4).pipe(seed=1)
        ema = sm.training.EMA(pipe, 0.5)
        sm.checkpoint.load(tmp_path, {"ema": ema})
        assert (ema.decay, ema.updates) == (0.9, 2)
        return {name: whole(x) for name, x in ema.average.items()}

    assert sm.simulate(setup.size)(program)() == [pytest.approx(averaged, abs=1e-12)] * setup.size
    seen: set[str] = set()
    for average in sm.simulate(4)(resumed)():
        for name, x in average.items():
            name = "embedding.weight" if name == "head.weight" else name
            torch.testing.assert_close(x, expected[name], rtol=0, atol=1e-12)
            seen.add(name)
    assert seen == set(expected)


# -- Muon ------------------------------------------------------------------------------------------


@pytest.mark.one_in(2)
@pytest.mark.parametrize("setup", [SETUPS[1], SETUPS[6], SETUPS[13], SETUPS[16]], ids=str)
def test_muon(setup, tmp_path):
    """The pattern matches only names of the first stage."""

    def make_optimizer(model: Any) -> Any:
        return sm.optim.Muon(
            model.named_parameters(), lr=0.02, adamw=["embed*"], ns_dtype=torch.float64
        )

    model = make_model()
    optimizer = make_optimizer(model)
    losses = [step(model, optimizer) for _ in range(4)]

    def program() -> list[float]:
        pipe = setup.pipe()
        optimizer = make_optimizer(pipe)
        losses = [step(pipe, optimizer) for _ in range(2)]
        sm.checkpoint.save(sm.checkpoint.state_dict(pipe, optimizer), tmp_path)
        return losses

    def resumed() -> list[float]:
        pipe = Setup("tp", "interleaved", 2, 4).pipe(seed=1)
        optimizer = make_optimizer(pipe)
        state = sm.checkpoint.load(tmp_path, sm.checkpoint.state_dict(pipe, optimizer))
        sm.checkpoint.load_state_dict(pipe, state, optimizer)
        return [step(pipe, optimizer) for _ in range(2)]

    for own in sm.simulate(setup.size)(program)():
        assert own == pytest.approx(losses[:2], abs=1e-10)
    for own in sm.simulate(4)(resumed)():
        assert own == pytest.approx(losses[2:], abs=1e-10)


def test_a_pattern_that_matches_in_no_stage_raises():
    def program() -> str:
        pipe = Setup("none", "1f1b", 2, 2).pipe()
        with pytest.raises(ValueError, match=r"no parameter matches \['lm_head\*'\]") as error:
            sm.optim.Muon(pipe.named_parameters(), adamw=["lm_head*", "embed*"])
        return str(error.value)

    sm.simulate(2)(program)()


# -- batches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["stop", "shadow", "empty"])
def test_batches_of_uneven_numbers(mode):
    """The ranks of a pipeline have the same batches; those along fsdp different numbers of them."""
    rows = {0: [0, 1, 2], 1: [3]}
    ids, targets = batch()

    def program() -> int:
        pipe = Setup("fsdp", "1f1b", 2, 2).pipe()
        numbers = rows[pipe.mesh.get_local_rank("fsdp")]
        own = [(ids[2 * i : 2 * i + 2], targets[2 * i : 2 * i + 2]) for i in numbers]
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        steps = 0
        for item in sm.parallel.uneven_inputs(own, pipe.mesh, axes="fsdp", mode=mode):
            (x, y), weight = item if mode == "shadow" else (item, 1.0)
            # a rank that has run out has no valid target
            pipe.step(x, y if weight else torch.full_like(y, -100), loss_fn=F.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
        return steps, {name: whole(x.detach()) for name, x in pipe.named_parameters()}

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(1 if mode == "stop" else 3):
        some = [j for own in rows.values() for j in own[i : i + 1]]
        index = [row for j in some for row in (2 * j, 2 * j + 1)]
        F.cross_entropy(model(ids[index]), targets[index]).backward()
        optimizer.step()
        optimizer.zero_grad()
    named = dict(model.named_parameters(remove_duplicate=False))
    for steps, parameters in sm.simulate(4)(program)():
        assert steps == (1 if mode == "stop" else 3)
        for name, x in parameters.items():
            torch.testing.assert_close(x, named[name], rtol=0, atol=1e-12)
