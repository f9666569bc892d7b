"""debug_nans: the operator, line, rank and index of the first NaN or infinity, forward and
backward, without false alarms.
"""

from __future__ import annotations

import linecache
import pickle
import random
import signal
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardmesh as sm
from shardmesh import P, Partial, Replicate, Shard
from shardmesh.sharding.debug.nan_check import BadValueError, debug_nans
from tests.device import DEVICE
from tests.sharding.ranks import collectives, every_rank, on_mesh, place

INF, NAN = float("inf"), float("nan")


def caught(program, *args, infs: bool = True) -> BadValueError:
    """Return the error of a program inside `debug_nans`, and check that it names a line marked as
    bad.
    """
    with pytest.raises(BadValueError) as found, debug_nans(infs=infs):
        program(*args)
    file, _, line = found.value.place.rpartition(":")
    assert "# bad" in linecache.getline(file, int(line)), found.value
    assert found.value.place in str(found.value)
    return found.value


def told(error: BadValueError) -> tuple:
    return error.operator, error.rank, error.index


# -- forward ---------------------------------------------------------------------------------------


def test_operator_rank_line_and_global_index():
    def program(mesh):
        x = place(mesh, torch.arange(8.0).view(4, 2), Shard(0))
        with debug_nans():
            y = x + 1
            return (y - 6).abs().log()  # bad

    with pytest.raises(BadValueError) as found:
        on_mesh((4,), program)
    assert told(found.value) == ("log", 2, (2, 1))
    assert str(found.value) == (
        f"log gave -inf on rank 2, at {found.value.place}: first at index [2, 1] of f32[4, 2] @ "
        "P('a', None) on (a=4); 1 of 2 values on this rank are bad. All arguments are finite."
    )
    assert "# bad" in linecache.getline(__file__, int(found.value.place.rpartition(":")[2]))


def one_element(mesh, where, shape, index, value, otherwise):
    """Return a tensor filled with one value, except at an index."""
    whole = torch.full(shape, otherwise)
    whole[index] = value
    return place(mesh, whole, *where)


@pytest.mark.parametrize("seed", range(12))
def test_planted_value_is_found_at_any_position(seed):
    """A division by zero, or the gradient of sqrt(0), at one index of a random layout in a chain of
    operators.
    """
    rng = random.Random(seed)
    mesh_shape, backward = rng.choice(((2,), (3,), (2, 2))), seed % 2
    shape = [rng.randrange(1, 6) for _ in range(rng.randrange(1, 4))]
    index = tuple(rng.randrange(n) for n in shape)
    where = [rng.choice([Replicate(), *map(Shard, range(len(shape)))]) for _ in mesh_shape]
    good = (
        torch.tanh,
        torch.exp,
        lambda x: x * 0.5,
        lambda x: x.clone(),
        torch.relu,
        lambda x: x + x,
    )
    before, after = ([rng.choice(good) for _ in range(rng.randrange(4))] for _ in range(2))

    def program(mesh):
        x = one_element(mesh, [Replicate()] * mesh.ndim, shape, index, 0.0, 1.0).redistribute(where)
        zero = place(mesh, torch.ones(shape), *where).requires_grad_()
        with debug_nans():
            y = zero
            for f in before:
                y = f(y)
            y = (y * x).sqrt() if backward else y / x
            for f in after:
                y = f(y)
            y.sum().backward()

    with pytest.raises(BadValueError) as found:
        on_mesh(mesh_shape, program)
    assert found.value.operator == ("backward of sqrt" if backward else "div")
    assert found.value.index == index

    def holders(mesh):
        box = sm.typeof(place(mesh, torch.ones(shape), *where)).box
        return all(start <= i < stop for i, (start, stop) in zip(index, box, strict=True))

    assert on_mesh(mesh_shape, holders)[found.value.rank]


@every_rank(2)
def test_existing_values_are_named_as_arguments(mesh):
    layer = sm.parallel.distribute_module(nn.Linear(4, 4), mesh, src_data_rank=None)
    with torch.no_grad():
        layer.weight._local[1, 2] = NAN
    found = caught(lambda: layer(place(mesh, torch.ones(2, 4), Shard(0))))  # bad
    assert found.operator == "linear"
    assert "Argument [1] is not finite already" in str(found)


@every_rank(2)
def test_pending_contribution_is_named_as_such(mesh):
    x = sm.ShardedTensor.from_local(torch.full((3,), 1e38), mesh, [Partial()])
    assert "a contribution that is not reduced yet" in str(caught(lambda: x * 10))  # bad


@every_rank(2)
def test_inside_a_mapped_function(mesh):
    """Also under the type checker's own dispatch mode."""
    x = place(mesh, torch.arange(4.0), Shard(0))
    for check in (True, False):
        mapped = sm.shard_map(
            lambda x: sm.psum((x - 1).log().sum(), "a"),  # bad
            mesh=mesh,
            in_specs=P("a"),
            out_specs=P(),
            check=check,
        )
        found = caught(mapped, x) if mesh.world.rank == 0 else None
        assert found is None or found.operator == "log"


PLAIN = {
    "in place": (lambda: torch.ones(3).log_().log_(), "log_", (0,)),
    "of a list": (
        lambda: torch._foreach_log([torch.ones(2), torch.tensor([1.0, 0.0])]),
        "_foreach_log",
        (1,),
    ),
    "a list in place": (
        lambda: torch._foreach_log_([torch.tensor([1.0, 0.0])]),
        "_foreach_log_",
        (1,),
    ),
    "half precision": (lambda: torch.full((2, 2), 6e4, dtype=torch.float16) * 2, "mul", (0, 0)),
    "8 bits": (lambda: torch.tensor([1.0, 1e9]).to(torch.float8_e5m2), "to", (1,)),
    "complex": (lambda: torch.zeros(2, dtype=torch.complex64).reciprocal(), "reciprocal", (0,)),
    "one number": (lambda: torch.tensor(0.0).log(), "log", ()),
    "of a transform": (
        lambda: torch.func.vmap(lambda x: 1 / x)(torch.tensor([1.0, 0.0])),
        "rdiv",
        (1,),
    ),
    "a module": (lambda: nn.Linear(2, 2)(torch.full((1, 2), 1e30).square()), "square", (0, 0)),
    "a number that is given": (lambda: torch.tensor([1.0, NAN]), "tensor", (1,)),
}


@pytest.mark.parametrize("case", PLAIN)
def test_plain_tensors(case):
    make, operator, index = PLAIN[case]
    with pytest.raises(BadValueError) as found, debug_nans():
        make()
    assert (found.value.operator, found.value.index) == (operator, index)
    assert __file__ in found.value.place
    again = pickle.loads(pickle.dumps(found.value))
    assert (str(again), told(again)) == (str(found.value), told(found.value))


# -- backward --------------------------------------------------------------------------------------


def test_backward_error_names_the_forward_line():
    x = torch.tensor([4.0, 0.0], requires_grad=True)

    def program():
        y = torch.sqrt(x)  # bad
        return (y * 2).sum().backward()

    found = caught(program)
    assert told(found) == ("backward of sqrt", 0, (1,))
    assert "The gradient that it received is finite" in str(found)


def test_nan_in_the_initial_gradient():
    x, start = torch.ones(2, requires_grad=True), torch.tensor([1.0, NAN])

    def program():
        y = x * 3  # bad
        y.backward(start)

    assert "is not finite already" in str(caught(program))


def test_a_backward_after_the_block_raises_too():
    x = torch.zeros(1, requires_grad=True)
    with debug_nans():
        y = x.sqrt()
    with pytest.raises(BadValueError, match="backward of sqrt"):
        y.backward()


def test_values_computed_before_the_block_are_not_checked():
    x = torch.zeros(2, requires_grad=True)
    before = x.sqrt()
    with debug_nans():
        (before * 2).sum().backward()
    assert x.grad is not None
    assert x.grad.isinf().all()


def test_an_operator_of_several_nodes():
    """A linear layer redistributes, multiplies and adds: each of the nodes has its name."""

    def program(mesh):
        w = place(mesh, torch.full((4, 4), 3e38), Shard(1))
        x = place(mesh, torch.ones(2, 4), Shard(0)).requires_grad_()
        with debug_nans():
            F.linear(x * 0, w).sum().backward()

    with pytest.raises(BadValueError, match="backward of linear gave inf"):
        on_mesh((2,), program)


# -- no alarm --------------------------------------------------------------------------------------


@every_rank(2)
def test_training_raises_nothing_and_communicates_the_same(mesh):
    def train() -> list[str]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Embedding(8, 6), nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.5), nn.Linear(6, 8)
        )
        sm.parallel.distribute_module(model, mesh, src_data_rank=None)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        with collectives() as records:
            for _ in range(2):
                ids = place(mesh, torch.arange(8), Shard(0))
                F.cross_entropy(model(ids), ids).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        return [record.op for record in records]

    expected = train()
    with debug_nans():
        assert train() == expected


def test_attention_masks_are_no_false_alarm():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    x = torch.randn(2, 5, 8, requires_grad=True)
    with debug_nans():
        mask = torch.full((5, 5), -INF).triu(1)
        layer(x, src_mask=mask).sum().backward()
        scores = (x @ x.mT).masked_fill(mask.isinf(), -INF)
        torch.softmax(scores + mask, -1).sum().backward()
        assert scores.amax() < INF


def test_uninitialized_memory_is_no_false_alarm():
    """Its contents do not matter: here freed memory full of NaNs."""
    for _ in range(20):
        torch.full((1000,), NAN)
        with debug_nans():
            like = torch.empty_like(torch.empty(1000))
            like[3:7].view(2, 2)
            assert like.new_empty(1000).zero_().sum() == 0.0


def test_views_of_uninitialized_memory_are_not_checked():
    bad = torch.full((4, 2), NAN)
    with debug_nans():
        view = bad[1:3].t().view(2, 2).unsqueeze(0)
        bad[1:3] = 1.0
        assert view.sum() == 4.0


def test_values_that_only_overflow_when_summed_are_no_false_alarm():
    with debug_nans():
        for dtype, value in (
            (torch.float32, 3e38),
            (torch.float16, 6e4),
            (torch.bfloat16, 3e38),
            (torch.float8_e4m3fn, 400.0),
        ):
            assert torch.full((1000,), value).to(dtype).shape == (1000,)


@every_rank(2)
def test_internal_operators_are_skipped(mesh):
    """The next operator of the program finds their bad values."""
    bad = sm.from_local(torch.full((3, 5), NAN), mesh, [Shard(1)])
    with debug_nans():
        moved = bad.redistribute([Shard(0)])
        whole = bad.full_tensor()
        for x in (moved, whole):
            with pytest.raises(BadValueError, match="mul gave nan"):
                x * 1


def test_nans_may_be_allowed():
    x = torch.tensor([1.0, NAN])
    with debug_nans():
        assert torch.nan_to_num(x).sum() == 1.0
        assert x[~x.isnan()].sum() == 1.0


def test_infinities_may_be_allowed():
    with debug_nans(infs=False):
        y = torch.tensor([0.0, 1.0]).log()
        with pytest.raises(
            BadValueError, match=r"mul gave nan.*index \[0\].*1 of 2.*Argument \[0\] is not finite"
        ):
            y * 0


# -- on processes ----------------------------------------------------------------------------------


def find_one_alone(folder: Path) -> None:
    """Find a bad value on rank 1 while rank 0 waits for it in an all_reduce. Each rank records what
    it raises.
    """
    # `launch` ends rank 0 soon after the error of rank 1, on a busy machine before rank 0 has
    # recorded its own.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("a",))
    x = place(mesh, torch.tensor([1.0, 0.0]), Shard(0))
    try:
        with debug_nans():
            x.log().sum().item()
    except Exception as error:
        (folder / str(mesh.world.rank)).write_text(f"{type(error).__name__}: {error}")
        raise


def test_all_ranks_raise(tmp_path):
    with pytest.raises(Exception, match="log gave -inf on rank 1"):
        sm.launch(find_one_alone, 2, (tmp_path,))
    assert (tmp_path / "1").read_text().startswith("BadValueError: log gave -inf on rank 1")
    waits = (tmp_path / "0").read_text()
    assert waits.startswith("PeerError: ")
    assert "log gave -inf on rank 1" in waits
