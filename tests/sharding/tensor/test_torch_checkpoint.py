"""torch.distributed.checkpoint with `ShardedTensor`s: files and functions for state dicts."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._state_dict_utils import (
    _copy_state_dict,
    _create_cpu_state_dict,
    _offload_state_dict_to_cpu,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_leaves

import shardmesh as sm
from shardmesh import Layout, P
from tests.device import DEVICE
from tests.sharding.ranks import every_rank, on_mesh

X = torch.arange(35.0, dtype=torch.float64).reshape(7, 5)
SPECS = [
    P("a", "b"),
    P("b"),
    P(None, ("b", "a")),
    P("a", sizes={"a": (0, 7)}),
    P(),
    P(("a", "b")),
    P("b", "a"),
    P(("b", "a")),
]
FULL = StateDictOptions(full_state_dict=True)


def _mesh(shape=(2, 2)) -> sm.DeviceMesh:
    return sm.init_device_mesh(DEVICE, shape, axis_names=("a", "b")[: len(shape)])


def _place(x: torch.Tensor, mesh: sm.DeviceMesh, spec: P) -> sm.ShardedTensor:
    return sm.distribute_tensor(x, mesh, spec, src_data_rank=None)


def _tensors(mesh: sm.DeviceMesh, specs: list[P], scale: int = 1) -> dict[str, Any]:
    named: dict[str, Any] = {
        str(i): _place(scale * (X + i), mesh, spec) for i, spec in enumerate(specs)
    }
    named["half"] = _place(scale * X.bfloat16(), mesh, specs[0])
    named["number"] = _place(scale * torch.tensor(3.5), mesh, P())
    named["nothing"] = _place(torch.ones(0, 4), mesh, P("a"))
    return {"tensors": named, "plain": scale * X, "step": scale * 7}


def _assert_restored(state: dict[str, Any]) -> None:
    named = state["tensors"]
    for i in range(len(SPECS)):
        assert torch.equal(named[str(i)].full_tensor(), X + i)
    assert torch.equal(named["half"].full_tensor(), X.bfloat16())
    assert named["number"].item() == 3.5
    assert named["nothing"].shape == (0, 4)
    assert torch.equal(state["plain"], X)
    assert state["step"] == 7


def _save_and_load(folder: Path) -> None:
    mesh = _mesh()
    dcp.save(_tensors(mesh, SPECS), checkpoint_id=folder / "ours")
    for other, turn in ((mesh, 1), (mesh, 3), (_mesh((4,)), 0)):
        specs = SPECS[turn:] + SPECS[:turn] if other is mesh else [P("a"), P(None, "a")] * 4
        state = _tensors(other, specs, scale=0)
        dcp.load(state, checkpoint_id=folder / "ours")
        _assert_restored(state)
        assert state["tensors"]["1"].spec == specs[1].padded(2)
    some_ranks = sm.DeviceMesh(DEVICE, [3, 1, 0], axis_names=("a",))
    x = _place(0 * X, some_ranks, P("a"))
    dcp.load({"tensors": {"2": x}}, checkpoint_id=folder / "ours")
    assert x.mesh.coordinate is None or torch.equal(x.full_tensor(), X + 2)
    dcp.save({"w": _place(X, some_ranks, P("a"))}, checkpoint_id=folder / "some")
    w = torch.zeros(7, 5, dtype=torch.float64)
    dcp.load({"w": w}, checkpoint_id=folder / "some")
    assert torch.equal(w, X)
    on_meta = {"w": torch.empty_like(_place(X, mesh, P("b", "a")), device="meta")}
    dcp.load(on_meta, checkpoint_id=folder / "some")
    assert torch.equal(on_meta["w"].full_tensor(), X)


def test_dcp_saves_all_layouts_and_loads_into_others(world4, tmp_path):
    world4(_save_and_load, tmp_path)
    pieces = dcp.FileSystemReader(tmp_path / "ours").read_metadata()
    for i, spec in enumerate(SPECS):  # each box once, none without elements
        chunks = pieces.state_dict_metadata[f"tensors.{i}"].chunks
        assert sum(chunk.sizes.numel() for chunk in chunks) == X.numel()
        assert all(chunk.sizes.numel() for chunk in chunks)
        assert len({chunk.offsets for chunk in chunks}) == len(chunks)
        assert (len(chunks) == 1) == (spec in (P(), P("a", sizes={"a": (0, 7)})))


def _with_torchs_and_sm(folder: Path) -> None:
    mesh = _mesh()
    dcp.save(_tensors(mesh, SPECS), checkpoint_id=folder / "ours")
    zeros = 0 * X
    placements = ([Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(0), Shard(0)])
    dtensors = [distribute_tensor(zeros, mesh.to_torch(), each) for each in placements]
    theirs = {str(i): x for i, x in enumerate([zeros.clone(), *dtensors])}
    dcp.load({"tensors": theirs}, checkpoint_id=folder / "ours")
    for i, x in enumerate(theirs.values()):
        assert torch.equal(x.full_tensor() if i else x, X + i)
    like = {"tensors": {"0": Layout.of(mesh, P(None, "a"), (7, 5), torch.float64)}, "step": None}
    state = sm.checkpoint.load(folder / "ours", like)
    assert torch.equal(state["tensors"]["0"].full_tensor(), X)
    assert state["step"] == 7
    sharded = {"w": distribute_tensor(X, mesh.to_torch(), [Shard(1), Shard(0)]), "p": X}
    dcp.save(sharded, checkpoint_id=folder / "theirs")
    path = sm.checkpoint.save({"w": _place(X, mesh, P("a")), "p": X}, folder / "sm").path
    for checkpoint in (folder / "theirs", path):
        ours = {"w": _place(zeros, mesh, P("b")), "p": _place(zeros, mesh, P(None, ("a", "b")))}
        dcp.load(ours, checkpoint_id=checkpoint)
        assert torch.equal(ours["w"].full_tensor(), X)
        assert torch.equal(ours["p"].full_tensor(), X)


def test_files_are_those_of_torch_and_of_sm_checkpoint(world4, tmp_path):
    world4(_with_torchs_and_sm, tmp_path)


def _save_later(folder: Path) -> None:
    mesh = _mesh()
    state = _tensors(mesh, SPECS)
    parameter = nn.Parameter(
        _place(X, mesh, P("a"))
        # With hooks, a gradient and one of the user's hooks.
    )
    parameter.register_post_accumulate_grad_hook(lambda x: None)
    (parameter * parameter).sum().backward()
    saving = dcp.async_save({**state, "parameter": parameter}, checkpoint_id=folder)
    for x in (*state["tensors"].values(), parameter):
        x._local.detach().zero_()
    saving.result()
    other = {**_tensors(mesh, SPECS[1:] + SPECS[:1], scale=0), "parameter": 0 * X}
    dcp.load(other, checkpoint_id=folder)
    _assert_restored(other)
    assert torch.equal(other["parameter"], X)
    assert torch.equal(parameter.grad.full_tensor(), 2 * X)


def test_async_save_writes_the_values_of_the_call(world4, tmp_path):
    world4(_save_later, tmp_path)


def _refused(folder: Path) -> list[str]:
    pending = _place(X, _mesh(), P()).redistribute(P(unreduced={"a"}))
    texts = []
    for call in (dcp.save, dcp.load):
        with pytest.raises(
            dcp.CheckpointException, match="is pending, so that no rank holds its values"
        ) as caught:
            call({"w": pending}, checkpoint_id=folder)
        texts.append(str(caught.value.failures.keys()))
    return texts


def test_pending_tensors_are_refused_on_every_rank(world4, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": X}, checkpoint_id=tmp_path, no_dist=True)
    assert len({tuple(texts) for texts in world4(_refused, tmp_path)}) == 1


# -- state dicts -----------------------------------------------------------------------------------


def _models(mesh: sm.DeviceMesh) -> tuple[nn.Module, nn.Module]:
    """Return a model that is sharded by hand, and the same as a plain one."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)).double()
    plain[0].register_parameter("scale", nn.Parameter(torch.tensor(1.5, dtype=torch.float64)))
    sharded = copy.deepcopy(plain)
    specs = {
        "0.weight": P("a", "b"),
        "0.bias": P("a"),
        "0.scale": P(),
        "1.weight": P("b"),
        "2.weight": P(),
        "2.bias": P(("b", "a")),
    }
    for name, spec in specs.items():  # 1.bias stays plain, as the buffers
        module = sharded.get_submodule(name[0])
        setattr(
            module, name[2:], nn.Parameter(_place(getattr(module, name[2:]).detach(), mesh, spec))
        )
    return sharded, plain


def _stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for p in model.parameters():
        p.grad = p.detach() * 0 + 1
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def _assert_same(state: Any, expected: Any) -> None:
    """Compare trees whose tensors are plain."""
    assert [*map(type, tree_leaves(state))] == [*map(type, tree_leaves(expected))]
    for x, y in zip(tree_leaves(state), tree_leaves(expected), strict=True):
        assert torch.equal(x, y.detach()) if isinstance(y, torch.Tensor) else x == y


def _whole(model: nn.Module, expected: nn.Module) -> None:
    state, wanted = get_model_state_dict(model, options=FULL), expected.state_dict()
    assert list(state) == list(wanted)
    _assert_same(list(state.values()), list(wanted.values()))


@pytest.mark.parametrize("flat", [False, True])
def test_get_state_dict_returns_whole_plain_tensors(flat):
    def program(mesh):
        sharded, plain = _models(mesh)
        steps = _stepped(sharded), _stepped(plain)
        options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=flat)
        for cpu_offload in (False, True):
            options.cpu_offload = cpu_offload
            for state, expected in zip(
                get_state_dict(sharded, steps[0], options=options),
                get_state_dict(plain, steps[1], options=options),
                strict=True,
            ):
                _assert_same(state, expected)
                assert str(torch.utils._pytree.tree_structure(state)) == str(
                    torch.utils._pytree.tree_structure(expected)
                )
        _assert_same(
            get_optimizer_state_dict(sharded, steps[0], options=options),
            get_optimizer_state_dict(plain, steps[1], options=options),
        )
        parts = get_model_state_dict(sharded, options=StateDictOptions(cpu_offload=True))
        assert parts["0.weight"].spec == P("a", "b")
        sharded[0].weight.requires_grad_(False)
        trained = get_model_state_dict(
            sharded, options=StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
        )
        assert sorted(set(plain.state_dict()) - set(trained)) == ["0.weight"]
        assert not any(isinstance(x, sm.ShardedTensor) for x in trained.values())

    on_mesh((2, 2), program)


@every_rank(2, 2)
def test_every_rank_loads_its_parts_of_a_full_state_dict(mesh):
    sharded, plain = _models(mesh)
    state = plain.state_dict()
    _stepped(sharded)
    weight = sharded[0].weight
    set_model_state_dict(sharded, dict(state), options=FULL)
    assert sharded[0].weight is weight
    assert weight.spec == P("a", "b")
    _whole(sharded, plain)
    optimizer, expected = _stepped(sharded), _stepped(plain)
    _whole(sharded, plain)
    again = torch.optim.AdamW(sharded.parameters(), lr=0.5)
    set_optimizer_state_dict(
        sharded, again, get_optimizer_state_dict(sharded, optimizer, options=FULL), options=FULL
    )
    assert again.param_groups[0]["lr"] == 0.1
    assert again.state[weight]["exp_avg"].spec == P("a", "b")
    _assert_same(
        get_optimizer_state_dict(sharded, again, options=FULL),
        get_optimizer_state_dict(plain, expected, options=FULL),
    )
    with pytest.raises(
        ValueError,
        match=r"0.weight: the state dict has shape \[3, 5\], and the tensor is f64\[7, 5\]",
    ):
        set_model_state_dict(sharded, {**state, "0.weight": torch.ones(3, 5)}, options=FULL)


def _from_rank_0() -> None:
    mesh = _mesh()
    rank = mesh.get_rank()
    broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for on_meta, options in itertools.product((False, True), (broadcast, FULL)):
        sharded, plain = _models(mesh)
        state = {name: x.clone() for name, x in plain.state_dict().items()}
        sharded.to("meta") if on_meta else _stepped(sharded)
        set_model_state_dict(
            sharded, dict(state) if rank == 0 or options is FULL else {}, options=options
        )
        for name, spec in {"weight": P("a", "b"), "bias": P("a"), "scale": P()}.items():
            x = getattr(sharded[0], name)
            assert isinstance(x, sm.ShardedTensor)
            assert isinstance(x, nn.Parameter)
            assert x.spec == spec
            assert x.requires_grad
        _whole(sharded, plain)
    optimizer, expected = _stepped(sharded), _stepped(plain)
    offloaded = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)
    states = get_state_dict(sharded, optimizer, options=offloaded)
    if rank == 0:
        _assert_same(states, get_state_dict(plain, expected))
    else:
        assert states == ({}, {})
    sharded, _ = _models(mesh)
    again = torch.optim.AdamW(sharded.parameters(), lr=0.5)
    set_model_state_dict(sharded, states[0], options=broadcast)
    set_optimizer_state_dict(sharded, again, states[1], options=broadcast)
    _whole(sharded, plain)
    assert again.state[sharded[0].weight]["exp_avg"].spec == P("a", "b")
    _assert_same(
        get_optimizer_state_dict(sharded, again, options=FULL),
        get_optimizer_state_dict(plain, expected),
    )
    one = (
        {"weight": 2 * state["0.weight"]} if rank == 0 else {}
        # As Lightning Fabric loads: parameter by parameter.
    )
    set_model_state_dict(
        sharded[0],
        one,
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False),
    )
    assert torch.equal(sharded[0].weight.detach().full_tensor(), 2 * state["0.weight"])
    assert torch.equal(sharded[0].bias.detach().full_tensor(), plain[0].bias)


def test_full_state_dicts_from_rank_0_and_of_every_rank(world4):
    world4(_from_rank_0)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    out = model(x)
    (out * out).mean().backward()
    optimizer.step()


def _fsdp(mesh: sm.DeviceMesh, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return sm.parallel.fully_shard(model, mesh=mesh["a"])


def _checkpointed_training(folder: Path) -> None:
    """Save as trainers do, `dcp` with `get_state_dict`, and continue in another model."""
    warnings.simplefilter("ignore")
    mesh = _mesh((4,))
    x = torch.linspace(-1, 1, 40, dtype=torch.float64).reshape(8, 5)[2 * mesh.get_rank() :][:2]
    model = _fsdp(mesh, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    _train(model, optimizer, x)
    for flat in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        of_model, of_optimizer = get_state_dict(model, optimizer, options=options)
        dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder / str(flat))
        other = _fsdp(mesh, 1)
        resumed = torch.optim.AdamW(other.parameters(), lr=9.0)
        to_model, to_optimizer = get_state_dict(other, resumed, options=options)
        state = {"model": to_model, "optimizer": to_optimizer}
        dcp.load(state, checkpoint_id=folder / str(flat))
        set_state_dict(
            other,
            resumed,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=options,
        )
        _assert_same(
            get_state_dict(other, resumed, options=FULL),
            get_state_dict(model, optimizer, options=FULL),
        )
    _train(model, optimizer, x)
    _train(other, resumed, x)
    _assert_same(
        get_state_dict(other, resumed, options=FULL), get_state_dict(model, optimizer, options=FULL)
    )


def test_training_resumes_from_dcp(world4, tmp_path):
    world4(_checkpointed_training, tmp_path)


def _gathered_before(folder: Path) -> None:
    mesh = _mesh((4,))
    torch.manual_seed(0)
    inner = nn.Linear(5, 3, bias=False).double()  # the last rank has no rows
    model = sm.parallel.fully_shard(inner, mesh=mesh["a"], reshard_after_forward=False)
    x = torch.linspace(-1, 1, 10, dtype=torch.float64).reshape(2, 5)
    before = model(x).detach()
    dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    with sm.debug.comm_budget(launches=0):  # saving changes nothing
        assert torch.equal(model(x), before)
    with torch.no_grad():
        inner.weight.mul_(2)
    assert torch.equal(model(x), 2 * before)
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=folder)
    assert torch.equal(model(x), before)
    doubled = {name: 2 * value.full_tensor() for name, value in state.items()}
    set_model_state_dict(model, doubled, options=FULL)
    assert torch.equal(model(x), 2 * before)


def _loaded_from_rank_0() -> None:
    mesh = _mesh((4,))["a"]
    torch.manual_seed(0)
    plain = nn.Linear(5, 3, bias=False).double()
    state = {name: x.clone() for name, x in plain.state_dict().items()}
    model = sm.parallel.fully_shard(copy.deepcopy(plain), mesh=mesh)
    is_first = mesh.get_rank() == 0
    if not is_first:
        model.to_empty(device=mesh.device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state if is_first else {}, options=options)
    x = torch.ones(2, 5, dtype=torch.float64)
    assert torch.equal(model(x), plain(x))


def test_values_of_rank_0_replace_memory_that_only_others_made(world4):
    """Ranks compare how values were made; those that were replaced do not count."""
    world4(_loaded_from_rank_0)


def test_values_of_a_checkpoint_replace_memory_that_only_others_made(tmp_path):
    torch.manual_seed(0)
    plain = nn.Linear(5, 3, bias=False).double().to(DEVICE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": plain.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    x = torch.ones(2, 5, dtype=torch.float64, device=DEVICE)

    def program(mesh):
        model = sm.parallel.fully_shard(copy.deepcopy(plain), mesh=mesh)
        if mesh.get_rank():
            model.to_empty(device=mesh.device)
        state = model.state_dict()
        dcp.load({"model": state}, checkpoint_id=tmp_path, no_dist=True)
        model.load_state_dict(state)
        assert torch.equal(model(x), plain(x))

    on_mesh((2,), program)


def test_ranks_agree_that_loading_has_changed_gathered_parameters(world4, tmp_path):
    world4(_gathered_before, tmp_path)


@every_rank(2)
def test_copies_of_state_dicts_on_the_host(mesh):
    state = {
        "w": _place(X, mesh, P("a")),
        "n": _place(torch.tensor(2.0), mesh, P()),
        "e": _place(torch.ones(0, 3), mesh, P("a")),
    }
    copied = _create_cpu_state_dict(state)
    _copy_state_dict(state, copied)
    assert copied["w"]._local.data_ptr() != state["w"]._local.data_ptr()
    for x in (copied, _offload_state_dict_to_cpu(state)):
        assert torch.equal(x["w"].full_tensor(), X)
        assert x["w"].spec == P("a", None)
        assert x["n"].item() == 2


_IMPORTED_LATE = """
import sys, torch, shardmesh as sm
def main():
    mesh = sm.init_device_mesh("cpu", (2,), axis_names=("a",))
    model = torch.nn.Linear(4, 4)
    model.weight = torch.nn.Parameter(sm.ones(4, 4, device_mesh=mesh, placements=sm.P("a")))
    assert mesh.get_rank() or "torch.distributed._state_dict_utils" not in sys.modules
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))["weight"]
    assert type(whole) is torch.Tensor and torch.equal(whole, torch.ones(4, 4)), whole
sm.simulate(2)(main)()
"""


def test_torchs_functions_may_be_imported_after_the_model_was_made():
    subprocess.run([sys.executable, "-c", _IMPORTED_LATE], check=True, timeout=120)
