"""State of modules and optimizers: by name, sharded, full on one rank, and loaded onto another
mesh.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import shardmesh as sm
from shardmesh import P, ShardedTensor
from shardmesh.parallel import fully_shard
from shardmesh.sharding.checkpoint.agreement import CheckpointError
from shardmesh.sharding.checkpoint.full_state import full_state_dict, load_full_state_dict
from shardmesh.sharding.checkpoint.load import load
from shardmesh.sharding.checkpoint.save import save
from shardmesh.sharding.checkpoint.state import load_state_dict, state_dict
from shardmesh.sharding.checkpoint.tree import PerRank
from tests.sharding.ranks import collectives, launched, on_mesh, same_error

ROWS = P(("b", "a"))


def model_of(mesh, spec=None, seed=0):
    """Return two layers and a plain buffer; parameters have the layouts `spec(parameter)`."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(6, 5, dtype=torch.float64), nn.ReLU(), nn.Linear(5, 3, dtype=torch.float64)
    )
    model.register_buffer("count", torch.tensor(4))
    for name, parameter in list(model.named_parameters()) if spec else []:
        owner, _, own = name.rpartition(".")
        sharded = sm.distribute_tensor(
            parameter.detach(), mesh, spec(parameter), src_data_rank=None
        )
        setattr(model.get_submodule(owner), own, nn.Parameter(sharded))
    return model


def ragged(parameter):
    """Return a layout with all rows on the middle one of three ranks."""
    return P("a", sizes={"a": (0, parameter.shape[0], 0)})


def steps(model, optimizer, count):
    for _ in range(count):
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 0.5
        optimizer.step()


def adam(model, lr=0.1):
    return torch.optim.AdamW(model.parameters(), lr=lr)


def whole_of(model):
    return {
        name: p.detach().full_tensor() if isinstance(p, ShardedTensor) else p.detach()
        for name, p in model.named_parameters()
    }


def expected(count):
    """Return the result on one rank, without meshes."""
    model = model_of(None)
    steps(model, adam(model), count)
    return whole_of(model)


def close(found, wanted):
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-13, atol=0)


def test_names_and_no_communication():
    def program(mesh):
        model = model_of(mesh, lambda p: P("a"))
        optimizer = adam(model)
        steps(model, optimizer, 1)
        with collectives() as records:
            state = state_dict(model, optimizer)
            load_state_dict(model, state, optimizer)
        assert records == []
        assert list(state["model"]) == ["count", "0.weight", "0.bias", "2.weight", "2.bias"]
        assert list(state["optimizer"]["state"]) == ["0.weight", "0.bias", "2.weight", "2.bias"]
        assert state["optimizer"]["param_groups"][0]["params"] == [
            "0.weight",
            "0.bias",
            "2.weight",
            "2.bias",
        ]
        average = state["optimizer"]["state"]["0.weight"]["exp_avg"]
        assert sm.typeof(average) is sm.typeof(model[0].weight)
        assert not state["model"]["0.weight"].requires_grad
        assert state["model"]["0.weight"]._local.data_ptr() == model[0].weight._local.data_ptr()

    on_mesh((2,), program)


SPECS = {
    "rows": lambda p: P("a"),
    "columns": lambda p: P(None, "a") if p.ndim == 2 else P(),
    "ragged": ragged,
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_training_resumes_on_another_mesh(spec, tmp_path):
    """Three steps on (2, 2), two more on (3,) with a new optimizer equal five without
    interruption.
    """

    def first(mesh):
        model = model_of(mesh, lambda p: ROWS)
        optimizer = adam(model)
        steps(model, optimizer, 3)
        save(state_dict(model, optimizer), tmp_path)

    def second(mesh):
        model = model_of(mesh, spec, seed=1)
        optimizer = adam(model, lr=9.0)
        state = load(tmp_path, state_dict(model, optimizer))
        with collectives() as records:
            load_state_dict(model, state, optimizer)
        assert records == []
        assert sm.typeof(optimizer.state[model[0].weight]["exp_avg"]) is sm.typeof(model[0].weight)
        assert optimizer.param_groups[0]["lr"] == 0.1
        steps(model, optimizer, 2)
        return whole_of(model)

    on_mesh((2, 2), first)
    for found in on_mesh((3,), second):
        close(found, expected(5))


def test_modules_optimizers_and_schedulers_in_the_tree(tmp_path):
    def first(mesh):
        model = model_of(mesh, lambda p: P("a"))
        optimizer = adam(model)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        for _ in range(2):
            steps(model, optimizer, 1)
            schedule.step()
        save({"train": [model, {"optimizer": optimizer, "schedule": schedule}]}, tmp_path)

    def second(mesh):
        model = model_of(mesh, lambda p: P("a"), seed=1)
        optimizer = adam(model, lr=9.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        found = load(tmp_path, {"train": [model, {"optimizer": optimizer, "schedule": schedule}]})
        assert found["train"][0] is model
        assert schedule.last_epoch == 2
        steps(model, optimizer, 1)
        schedule.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
        return whole_of(model)

    on_mesh((4,), first)
    for found in on_mesh((3,), second):
        close(found, expected(3))


class Loader:
    """A data loader whose state has another structure after it has started."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_entries_of_objects_come_from_the_checkpoint(tmp_path):
    """More and other entries than the new object has, tensors of other shapes, and per-rank
    values.
    """
    begun = {
        "epoch": 3,
        "order": torch.arange(5),
        "workers": [{"position": torch.tensor(7)}, {}],
        "rate": torch.tensor(0.5),
    }

    def first(mesh):
        save({"loader": Loader({**begun, "own": PerRank(mesh.get_rank())})}, tmp_path)

    def second(mesh):
        loader = Loader({"order": torch.empty(0), "rate": 0.1})
        assert load(tmp_path, {"loader": loader})["loader"] is loader
        return loader.state

    on_mesh((2,), first)
    for rank, state in enumerate(on_mesh((3,), second)):
        assert list(state) == [*begun, "own"]
        assert torch.equal(state["order"], begun["order"])
        assert (state["epoch"], state["workers"], state["rate"]) == (3, begun["workers"], 0.5)
        assert state["own"] == (rank if rank < 2 else None)


def test_damaged_file_changes_nothing(tmp_path):
    """Not even objects that were read before the damage was found."""

    def first(mesh):
        save({"model": model_of(mesh, lambda p: P("a")), "z": torch.arange(9)}, tmp_path)

    def second(mesh):
        model = model_of(mesh, lambda p: P("a"), seed=1)
        with pytest.raises(CheckpointError, match="damaged"):
            load(tmp_path, {"model": model, "z": torch.zeros(9, dtype=torch.int64)})
        return whole_of(model), whole_of(model_of(mesh, lambda p: P("a"), seed=1))

    on_mesh((2,), first)
    for path in tmp_path.rglob("*.distcp"):
        path.write_bytes(path.read_bytes()[:-1] + b"\1")
    for found, before in on_mesh((2,), second):
        close(found, before)


def test_an_optimizer_of_other_parameters():
    model = model_of(None)
    with pytest.raises(ValueError, match="not the model's"):
        state_dict(model, adam(model_of(None)))


def test_a_state_without_the_optimizer():
    model = model_of(None)
    with pytest.raises(ValueError, match="no 'optimizer'"):
        load_state_dict(model, state_dict(model), adam(model))


def test_different_param_groups():
    """Settings are matched by the parameters of the group."""
    model = model_of(None)
    one = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters()}],
        lr=0.1,
        momentum=0.9,
    )
    steps(model, one, 1)
    other = torch.optim.SGD(
        [{"params": model[2].parameters()}, {"params": model[0].parameters()}], lr=7.0, momentum=0.9
    )
    load_state_dict(model, state_dict(model, one), other)
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.5]
    buffers = [
        [optimizer.state[model[i].weight]["momentum_buffer"] for i in (0, 2)]
        for optimizer in (one, other)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*buffers, strict=True))


# -- whole on one rank -----------------------------------------------------------------------------


def test_full_state_on_one_rank():
    """One all_to_all per tensor, in which only that rank receives, and only what it lacks."""

    def program(mesh):
        model = model_of(mesh, lambda p: ROWS)
        with collectives() as records:
            state = full_state_dict(model, rank=2)
        sizes = {name: p._local.nbytes for name, p in model.named_parameters()}
        return state, records, sizes

    results = on_mesh((2, 2), program)
    assert [list(state) for state, _, _ in results] == [[], [], list(results[2][0]), []]
    close(results[2][0], {**whole_of(model_of(None)), "count": torch.tensor(4)})
    for rank, (_, records, sizes) in enumerate(results):
        assert launched(records) == ["all_to_all"] * 4
        assert sum(r.bytes_sent for r in records) == (0 if rank == 2 else sum(sizes.values()))
        assert rank == 2 or all(r.bytes_received == 0 for r in records)


@pytest.mark.parametrize("rank", [0, 2])
def test_from_one_rank_to_any_mesh(rank):
    def first(mesh):
        model = model_of(mesh, lambda p: P("a"))
        optimizer = adam(model)
        steps(model, optimizer, 3)
        return full_state_dict(state_dict(model, optimizer))

    def second(mesh):
        model = model_of(mesh, ragged, seed=1)
        optimizer = adam(model, lr=9.0)
        load_full_state_dict(
            model, state if mesh.get_rank() == rank else None, rank, optimizer=optimizer
        )
        steps(model, optimizer, 2)
        return whole_of(model), model.count

    state = on_mesh((2,), first)[0]
    for found, count in on_mesh((3,), second):
        close(found, expected(5))
        assert count == 4


def test_only_boxes_are_sent():
    """One all_to_all in which each rank receives its rows once."""

    def program(mesh):
        model = nn.Linear(8, 8, bias=False)
        model.weight = nn.Parameter(
            sm.distribute_tensor(model.weight.detach(), mesh, P("a"), src_data_rank=None)
        )
        state = {"weight": torch.arange(64.0).reshape(8, 8)} if mesh.get_rank() == 0 else None
        with collectives() as records:
            load_full_state_dict(model, state)
        assert torch.equal(model.weight.detach().full_tensor(), torch.arange(64.0).reshape(8, 8))
        return [
            (r.op, r.bytes_sent, r.bytes_received) for r in records if r.op != "all_gather_object"
        ]

    assert on_mesh((4,), program) == [[("all_to_all", 3 * 64, 0)], *[[("all_to_all", 0, 64)]] * 3]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("0.bias"), ["no 'model.0.bias'"]),
        (
            lambda state: state.update({"0.bias": torch.zeros(4, dtype=torch.float64)}),
            ["'model.0.bias'", "[4]", "[5]"],
        ),
        (
            lambda state: state.update({"0.bias": torch.zeros(5)}),
            ["torch.float32", "torch.float64"],
        ),
        (lambda state: state.update({"more": torch.zeros(5)}), ["'model.more'", "does not have"]),
    ],
)
def test_incompatible_state_raises(change, words):
    state = {name: value.clone() for name, value in model_of(None).state_dict().items()}
    change(state)

    def program(mesh):
        load_full_state_dict(
            model_of(mesh, lambda p: P("a")), state if mesh.get_rank() == 0 else None
        )

    text = same_error((2,), program, ValueError, silent=False)
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    "function", [full_state_dict, lambda m, rank: load_full_state_dict(m, None, rank)]
)
def test_nonexistent_rank_raises(function):
    assert "rank must be an integer from 0 to 1, got 7" in same_error(
        (2,), lambda mesh: function(model_of(mesh), rank=7), ValueError
    )


def _wrapped(model, wrapper):
    """Wrap the first module as torch's tools do; `whole` the model."""
    if wrapper == "checkpoint_wrapper":
        model[0] = checkpoint_wrapper(model[0])
    if wrapper == "compile":
        model[0] = torch.compile(model[0], backend="eager")
    if wrapper == "both":
        model[0] = torch.compile(checkpoint_wrapper(model[0]), backend="eager")
    if wrapper == "module":
        model.module = model._modules.pop("0")  # the program's own name, which is no wrapper's
    return torch.compile(model, backend="eager") if wrapper == "whole" else model


@pytest.mark.parametrize("loaded_into", ["none", "checkpoint_wrapper", "whole"])
@pytest.mark.parametrize("wrapper", ["none", "checkpoint_wrapper", "compile", "both", "whole"])
def test_names_have_no_parts_of_wrappers(wrapper, loaded_into, tmp_path):
    names = ["0.bias", "0.weight", "1.bias", "1.weight"]

    def made(kind, value):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for p in model.parameters():
            nn.init.constant_(p, value)
        model = _wrapped(model, kind)
        fully_shard(model, sm.init_device_mesh("cpu", (2,), axis_names=("dp",)))
        return model, torch.optim.AdamW(model.parameters(), 0.1)

    def program():
        model, optimizer = made(wrapper, 0.5)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        state = sm.checkpoint.state_dict(model, optimizer)
        assert sorted(state["model"]) == sorted(state["optimizer"]["state"]) == names
        assert sorted(state["optimizer"]["param_groups"][0]["params"]) == names
        sm.checkpoint.save(state, tmp_path, step=1)
        other, its = made(loaded_into, 0.0)
        sm.checkpoint.load_state_dict(
            other, sm.checkpoint.load(tmp_path, like=sm.checkpoint.state_dict(other, its)), its
        )
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(p.full_tensor(), q.full_tensor())
            assert torch.equal(
                optimizer.state[p]["exp_avg"].full_tensor(), its.state[q]["exp_avg"].full_tensor()
            )

    sm.simulate(2)(program)()


def test_a_module_that_is_called_module_keeps_its_name():
    model = _wrapped(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "module")
    optimizer = torch.optim.AdamW(model.parameters())
    state = sm.checkpoint.state_dict(model, optimizer)
    assert sorted(state["model"]) == ["1.bias", "1.weight", "module.bias", "module.weight"]
    assert state["optimizer"]["param_groups"][0]["params"] == [
        "1.weight",
        "1.bias",
        "module.weight",
        "module.bias",
    ]


def test_states_saved_with_the_parts_of_wrappers_are_loaded():
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    state = sm.checkpoint.state_dict(model, optimizer)
    values = {
        "step": torch.tensor(3.0),
        "exp_avg": torch.ones(4, 4),
        "exp_avg_sq": torch.ones(4, 4),
    }
    old = {
        "model": {
            name.replace("0.", "0._orig_mod."): torch.ones_like(x)
            for name, x in state["model"].items()
        },
        "optimizer": {
            "state": {"0._checkpoint_wrapped_module.weight": values},
            "param_groups": [
                {
                    "lr": 0.5,
                    "params": [
                        "0._checkpoint_wrapped_module.weight",
                        "0._checkpoint_wrapped_module.bias",
                    ],
                }
            ],
        },
    }
    sm.checkpoint.load_state_dict(model, old, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.state[model[0].weight]["step"] == 3
    assert torch.equal(model[0].bias, torch.ones(4))
