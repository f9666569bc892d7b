"""The state of a pipeline is that of the whole model: checkpoints from any stages to any others."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardmesh as sm
from shardmesh import ShardedTensor
from tests.sharding.parallel.pipeline.stateful_model import (
    SETUPS,
    Setup,
    batch,
    check_same,
    make_model,
    make_optimizer,
    step,
    whole_state,
)
from tests.sharding.ranks import collectives

STEPS = 2  # before and after a checkpoint


@pytest.fixture(scope="module")
def expected() -> tuple[list[float], Any]:
    """Return the losses of one process and its state after all steps."""
    model = make_model()
    optimizer = make_optimizer(model)
    losses = [step(model, optimizer) for _ in range(2 * STEPS)]
    return losses, sm.simulate(1)(whole_state)(model, optimizer)[0]


def trained_and_saved(setup: Setup, folder: Path) -> Any:
    pipe = setup.pipe()
    optimizer = make_optimizer(pipe)
    for _ in range(STEPS):
        step(pipe, optimizer)
    sm.checkpoint.save(sm.checkpoint.state_dict(pipe, optimizer), folder)
    return whole_state(pipe, optimizer)


def resumed(setup: Setup, folder: Path) -> Any:
    """Return the state as loaded, the losses of the following steps, and the state after them."""
    pipe = setup.pipe(seed=1)  # all values differ
    optimizer = make_optimizer(pipe)
    state = sm.checkpoint.load(folder, like=sm.checkpoint.state_dict(pipe, optimizer))
    sm.checkpoint.load_state_dict(pipe, state, optimizer)
    loaded = whole_state(pipe, optimizer)
    losses = [step(pipe, optimizer) for _ in range(STEPS)]
    return loaded, losses, whole_state(pipe, optimizer)


def resumed_in_one_process(folder: Path) -> Any:
    model = make_model(seed=1)
    optimizer = make_optimizer(model)
    state = sm.checkpoint.load(folder, like=sm.checkpoint.state_dict(model, optimizer))
    sm.checkpoint.load_state_dict(model, state, optimizer)
    return whole_state(model, optimizer)


# each setup is saved once and loaded once, in one that differs in form, schedule and stages
PAIRS = list(zip(SETUPS, SETUPS[7:] + SETUPS[:7], strict=True))


@pytest.mark.one_in(12)
@pytest.mark.parametrize(("before", "after"), PAIRS, ids=str)
def test_resumes_with_other_stages(before, after, tmp_path, expected):
    losses, final = expected
    saved = sm.simulate(before.size)(trained_and_saved)(before, tmp_path)[0]
    results = sm.simulate(after.size)(resumed)(after, tmp_path)
    for _, own_losses, _ in results:
        assert own_losses == pytest.approx(losses[STEPS:], abs=1e-12)
    loaded, _, state = results[0]
    check_same(loaded, saved)
    check_same(state, final, tolerance=1e-12)
    check_same(sm.simulate(1)(resumed_in_one_process)(tmp_path)[0], saved)


@pytest.mark.parametrize("setup", SETUPS[1::6], ids=str)
def test_resumes_what_one_process_saved(setup, tmp_path, expected):
    losses, final = expected

    def saved() -> Any:
        model = make_model()
        optimizer = make_optimizer(model)
        for _ in range(STEPS):
            step(model, optimizer)
        sm.checkpoint.save(sm.checkpoint.state_dict(model, optimizer), tmp_path)
        return whole_state(model, optimizer)

    before = sm.simulate(1)(saved)()[0]
    results = sm.simulate(setup.size)(resumed)(setup, tmp_path)
    check_same(results[0][0], before)
    assert results[-1][1] == pytest.approx(losses[STEPS:], abs=1e-12)
    check_same(results[0][2], final, tolerance=1e-12)


def test_resumes_on_processes(world4, tmp_path, expected):
    saved = world4(trained_and_saved, Setup("fsdp", "1f1b", 2, 2), tmp_path)[0]
    results = world4(resumed, Setup("tp", "zb_v", 2, 4), tmp_path)
    check_same(results[0][0], saved)
    check_same(results[0][2], expected[1], tolerance=1e-12)


# -- ways of saving --------------------------------------------------------------------------------


def by_save(pipe: Any, folder: Path, other: Any) -> None:
    sm.checkpoint.save({"model": pipe}, folder)
    sm.checkpoint.load(folder, like={"model": other})


def by_async_save(pipe: Any, folder: Path, other: Any) -> None:
    saving = sm.checkpoint.async_save({"model": pipe.state_dict()}, folder)
    with torch.no_grad():
        for parameter in pipe.parameters():  # the copies have the values from before
            parameter.zero_()
    saving.wait()
    other.load_state_dict(sm.checkpoint.load(folder, {"model": other.state_dict()})["model"])


def by_safetensors(pipe: Any, folder: Path, other: Any) -> None:
    sm.checkpoint.save_safetensors(pipe, folder / "model.safetensors")
    sm.checkpoint.load_safetensors(folder / "model.safetensors", other)


def by_tree_of_safetensors(pipe: Any, folder: Path, other: Any) -> None:
    sm.checkpoint.save_safetensors(pipe.state_dict(), folder / "model.safetensors")
    loaded = sm.checkpoint.load_safetensors(folder / "model.safetensors", other.state_dict())
    other.load_state_dict(loaded)


def by_full_state(pipe: Any, folder: Path, other: Any) -> None:
    sm.checkpoint.load_full_state_dict(other, sm.checkpoint.full_state_dict(pipe, 1), 1)


def in_memory(pipe: Any, folder: Path, other: Any) -> None:
    other.load_state_dict(pipe.state_dict())


WAYS = [by_save, by_async_save, by_safetensors, by_tree_of_safetensors, by_full_state, in_memory]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_every_way_of_saving(way: Callable[..., None], tmp_path):
    def program() -> Any:
        pipe = Setup("fsdp", "1f1b", 2, 2).pipe()
        other = Setup("tp", "zb_v", 2, 4).pipe(seed=1)
        way(pipe, tmp_path, other)
        return sm.checkpoint.full_state_dict(other)

    state = sm.simulate(4)(program)()[0]
    expected = make_model().state_dict()
    assert list(state) == list(expected)
    for name, x in expected.items():
        assert torch.equal(state[name], x), name


def test_file_has_tied_weights_once(tmp_path):
    library = pytest.importorskip("safetensors.torch")
    pipes = {"object": lambda pipe: pipe, "tree": lambda pipe: pipe.state_dict()}
    for name, tree_of in pipes.items():
        path = tmp_path / f"{name}.safetensors"

        def program(path=path, tree_of=tree_of) -> None:
            pipe = Setup("fsdp", "1f1b", 2, 2).pipe()
            sm.checkpoint.save_safetensors(tree_of(pipe), path)

        sm.simulate(4)(program)()
        assert set(library.load_file(path)) == set(make_model().state_dict()) - {"head.weight"}
        model = make_model(seed=1)
        library.load_model(model, path)
        for name, x in make_model().state_dict().items():
            assert torch.equal(model.state_dict()[name], x), name


# -- the tree --------------------------------------------------------------------------------------


@pytest.mark.parametrize("setup", SETUPS[1::3], ids=str)
def test_tree_is_the_same_on_every_rank(setup):
    def program() -> Any:
        pipe = setup.pipe()
        state = pipe.state_dict()
        assert state["head.weight"] is state["embedding.weight"]
        held: dict[str, int] = {}
        for name, x in state.items():
            assert isinstance(x, ShardedTensor)
            if x.mesh.coordinate is None:
                assert x._local.numel() == 0
            else:
                held[name] = x._local.numel()
        own = {name for name, _ in pipe.named_parameters()}
        assert own <= held.keys() | {"head.weight", "embedding.weight"}
        described = {n: (str(x._layout), x.mesh.ranks.tolist()) for n, x in state.items()}
        return described, held

    results = sm.simulate(setup.size)(program)()
    expected = make_model().state_dict()
    for described, _ in results:
        assert described == results[0][0]
        assert list(described) == list(expected)
    for name, x in expected.items():
        assert sum(held.get(name, 0) for _, held in results) >= x.numel()


def test_tensors_of_the_tree_share_memory_with_parameters():
    def program() -> None:
        pipe = Setup("none", "1f1b", 2, 2).pipe()
        state = pipe.state_dict()
        for name, x in pipe.named_parameters():
            if state[name].mesh.coordinate is not None:
                assert state[name]._local.data_ptr() == x.data_ptr()

    sm.simulate(2)(program)()


def test_communication():
    def program() -> tuple[int, int]:
        pipe = Setup("fsdp", "1f1b", 2, 2).pipe()
        with collectives() as gathers:
            state = pipe.state_dict()
        with collectives() as moves:
            pipe.load_state_dict(state)
        return len(gathers), len(moves)

    # in loading also what the second stage has of the first one's: the tied weight, a common buffer
    assert sm.simulate(4)(program)() == [(1, 3)] * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("norm.bias"), "the state has no norm.bias"),
        (lambda state: state.update(other=torch.ones(1)), "the model has no other"),
        (
            lambda state: state.update({"norm.bias": torch.ones(7)}),
            r"norm.bias is \[7\] in the state and \[6\] in the model",
        ),
    ],
)
def test_states_that_do_not_fit(change, message):
    def program() -> str:
        pipe = Setup("fsdp", "1f1b", 2, 2).pipe()
        state = pipe.state_dict()
        change(state)
        with pytest.raises(RuntimeError, match=message) as error:
            pipe.load_state_dict(state)
        return str(error.value)

    assert len(set(sm.simulate(4)(program)())) == 1


def test_loads_some_names_if_not_strict():
    def program() -> Tensor:
        pipe = Setup("fsdp", "1f1b", 2, 2).pipe()
        pipe.load_state_dict({"head.weight": torch.full((15, 6), 3.0)}, strict=False)
        weights = [x for name, x in pipe.named_parameters() if name == "embedding.weight"]
        assert len(weights) == 1
        return weights[0].full_tensor()

    for weight in sm.simulate(4)(program)():
        assert (weight == 3).all()


def test_a_parameter_on_ranks_of_several_stages_raises_everywhere():
    def program() -> str:
        pipe = Setup("none", "1f1b", 2, 2).pipe()
        x = sm.distribute_tensor(torch.ones(15, 6), pipe.mesh, [sm.Shard(0)])
        if 0 in pipe.stages:
            pipe.stages[0].embedding.weight = torch.nn.Parameter(x)
        with pytest.raises(ValueError, match="is not on the ranks of one stage") as error:
            pipe.state_dict()
        return str(error.value)

    assert len(set(sm.simulate(2)(program)())) == 1


def test_optimizer_state_of_unknown_parameters():
    def program() -> None:
        pipe = Setup("none", "1f1b", 2, 2).pipe()
        optimizer = make_optimizer(pipe)
        step(pipe, optimizer)
        state = sm.checkpoint.state_dict(pipe, optimizer)
        state["optimizer"]["state"]["other"] = {"step": torch.ones(())}
        with pytest.raises(ValueError, match=r"parameters \['other'\] that the pipeline does not"):
            sm.checkpoint.load_state_dict(pipe, state, optimizer)

    sm.simulate(2)(program)()


def copied_stages(form: str) -> bool:
    """Copy trained stages in three ways; return whether all copies hold the state, and do not run.

    The pipeline goes on with its own.
    """
    pipe = Setup(form, "zb_v", 2, 4).pipe()
    optimizer = make_optimizer(pipe)
    step(pipe, optimizer)
    saved = io.BytesIO()
    torch.save(dict(pipe.stages), saved)
    saved.seek(0)
    ways = [
        {number: copy.deepcopy(stage) for number, stage in pipe.stages.items()},
        copy.deepcopy(pipe.stages),
        torch.load(saved, weights_only=False),
    ]
    is_same = True
    for copies in ways:
        for number, stage in pipe.stages.items():
            own, copied = stage.state_dict(), copies[number].state_dict()
            is_same &= own.keys() == copied.keys()
            for name, x in own.items():
                is_same &= torch.equal(local(x), local(copied[name])) and copied[name] is not x
            with pytest.raises(RuntimeError, match=f"a copy of stage {number} of a pipeline"):
                copies[number].eval()((), (batch()[0],), {})
            is_same &= stage.training
    step(pipe, optimizer)
    for number, stage in pipe.stages.items():
        stage.load_state_dict(ways[0][number].state_dict())
    return is_same


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, ShardedTensor) else x


@pytest.mark.filterwarnings("ignore:torch.save writes only this rank's part")
@pytest.mark.parametrize("form", ["none", "fsdp", "tp"])
def test_copies_of_stages_hold_their_state(form: str) -> None:
    assert all(sm.simulate(2 if form == "none" else 4)(copied_stages)(form))
