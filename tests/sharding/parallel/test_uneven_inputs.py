"""uneven_inputs: ranks take equally many steps, training equals one process, and errors are raised
on all ranks.
"""

from __future__ import annotations

import dataclasses
import logging
from itertools import count, islice

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import train_lm
from hypothesis import given, settings
from hypothesis import strategies as st

import shardmesh as sm
from shardmesh import P
from shardmesh.mesh.errors import MeshError, PeerError
from shardmesh.parallel import distribute_module
from shardmesh.sharding.parallel.batch_counts import check_lengths
from shardmesh.sharding.parallel.uneven_inputs import uneven_inputs
from tests.device import DEVICE
from tests.sharding.ranks import collectives, launched, on_mesh, same_error

FEATURES, HIDDEN, CLASSES, RATE = 5, 6, 6, 0.5  # 6: to be split over 2 or 3 ranks
WEIGHTS = {
    "w_up": (HIDDEN, FEATURES),
    "b_up": (HIDDEN,),
    "w_down": (CLASSES, HIDDEN),
    "b_down": (CLASSES,),
}

# -- training, against one process that has all samples of a step ----------------------------------

# For each place along "a", the numbers of rows of its batches; one without batches among them.
feeds = st.lists(st.lists(st.integers(1, 4), max_size=4), min_size=2, max_size=3).filter(any)


def feed_of(rows_of_places):
    """Return the batches (x, y) of each rank."""
    random = torch.Generator().manual_seed(sum(map(sum, rows_of_places)))

    def batch(rows):
        x = torch.randn(rows, FEATURES, generator=random, dtype=torch.float64, device="cpu")
        return x.to(DEVICE), torch.randint(CLASSES, (rows,), generator=random, device="cpu").to(
            DEVICE
        )

    return [[batch(rows) for rows in place] for place in rows_of_places]


def first_weights():
    random = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=random, dtype=torch.float64, device="cpu").to(DEVICE)
        for name, shape in WEIGHTS.items()
    }


def logits_of(w, x, norm=True, total=lambda x: x):
    """Apply a layer, optionally a batch norm, and another layer whose partial results
    `total` sums.
    """
    hidden = F.linear(x, w["w_up"], w["b_up"])
    if norm:
        hidden = (hidden - hidden.mean(0)) / (hidden.var(0, correction=0) + 0.1).sqrt()
    return total(F.linear(torch.tanh(hidden), w["w_down"])) + w["b_down"]


def descend(weights, loss):
    loss.backward()
    with torch.no_grad():
        for w in weights.values():
            w -= RATE * w.grad
            w.grad = None


def train_alone(feed, norm=True):
    weights = {name: w.requires_grad_() for name, w in first_weights().items()}
    losses = []
    for step in range(max(map(len, feed))):
        batches = [place[step] for place in feed if step < len(place)]
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        loss = F.cross_entropy(logits_of(weights, x, norm), y)
        descend(weights, loss)
        losses.append(loss.item())
    return losses, {name: w.detach() for name, w in weights.items()}


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


STORED = {
    "dp": {},
    "fsdp": dict.fromkeys(WEIGHTS, P("a")),
    "tp": {"w_up": P("b"), "b_up": P("b"), "w_down": P(None, "b")},
    "fsdp and tp": {
        "w_up": P(("b", "a")),
        "b_up": P(("b", "a")),
        "w_down": P("a", "b"),
        "b_down": P("a"),
    },
}
USED = {"w_up": P("b"), "b_up": P("b"), "w_down": P(None, "b")}  # of those with tp


def train_sharded(mesh, feed, how):
    """Train with sharded tensors for batches, weights and the loss."""
    stored, used = STORED[how], USED if "tp" in how else {}
    weights = {
        name: sm.device_put(w, mesh, stored.get(name, P()), src_data_rank=None).requires_grad_()
        for name, w in first_weights().items()
    }
    losses = []
    for batch in uneven_inputs(feed[mesh.get_local_rank("a")], mesh, axes="a", mode="empty"):
        x, y = (sm.make_array_from_process_local_data(mesh, P("a"), t) for t in batch)
        gathered = {name: sm.reshard(w, used.get(name, P())) for name, w in weights.items()}
        loss = F.cross_entropy(logits_of(gathered, x), y)
        descend(weights, loss)
        losses.append(loss.item())
    return losses, {name: w.full_tensor().detach() for name, w in weights.items()}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("how", STORED)
@settings(max_examples=4)
@given(rows=feeds)
def test_empty_batches_have_no_weight(how, rows):
    feed = feed_of(rows)
    expected = train_alone(feed)
    shape = (len(rows), 2) if "tp" in how else (len(rows),)
    for found in on_mesh(shape, lambda mesh: train_sharded(mesh, feed, how)):
        close(found, expected)


def train_in_parts(mesh, feed, how):
    """Train with plain tensors: each rank has its own loss, averaged over the ranks."""
    specs = {name: STORED[how].get(name, P()) for name in WEIGHTS}
    weights = {
        name: sm.device_put(w, mesh, specs[name], src_data_rank=None)
        for name, w in first_weights().items()
    }
    total = (lambda x: sm.psum(x, "b")) if "tp" in how else (lambda x: x)

    @sm.shard_map(mesh=mesh, out_specs=(specs, P()))
    def step(weights, x, y, weight):
        def loss(weights):
            whole = {
                n: sm.all_gather(w, "a", tiled=True) if specs[n] == P("a") else w
                for n, w in weights.items()
            }
            return sm.pmean(
                F.cross_entropy(logits_of(whole, x, norm=False, total=total), y) * weight.sum(), "a"
            )

        value, grads = sm.value_and_grad(loss)(weights)
        return {name: w - RATE * grads[name] for name, w in weights.items()}, value

    losses = []
    for batch, weight in uneven_inputs(
        feed[mesh.get_local_rank("a")], mesh, axes="a", mode="shadow"
    ):
        parts = (*batch, torch.tensor([weight], dtype=torch.float64))
        parts = (sm.make_array_from_process_local_data(mesh, P("a"), part) for part in parts)
        weights, loss = step(weights, *parts)
        losses.append(loss.item())
    return losses, {name: w.full_tensor() for name, w in weights.items()}


@pytest.mark.parametrize("how", ["dp", "fsdp", "tp"])
@settings(max_examples=4)
@given(rows=feeds)
def test_weighted_losses_are_the_mean_over_all_samples(how, rows):
    feed = feed_of(rows)
    expected = train_alone(feed, norm=False)
    shape = (len(rows), 2) if "tp" in how else (len(rows),)
    for found in on_mesh(shape, lambda mesh: train_in_parts(mesh, feed, how)):
        close(found, expected)


def test_a_language_model_on_short_and_missing_batches():
    """The example's model on (fsdp=3, tp=2): attention, a tied embedding, tokens flattened from a
    batch with empty parts.
    """
    size = train_lm.SIZES["tiny"]
    random = torch.Generator().manual_seed(0)
    feed = [
        [torch.randint(256, (rows, 9), generator=random) for rows in place]
        for place in ([2], [4, 1], [])
    ]

    def train(batches, mesh):
        torch.manual_seed(0)
        reshard = train_lm.keep_layout if mesh is None else train_lm.reshard
        model = train_lm.GPT(dataclasses.replace(size, s=8), reshard).double()
        if mesh is not None:
            distribute_module(model, mesh, train_lm.place_weights, src_data_rank=None)
        losses = []
        for batch in batches:
            ids = (
                batch
                if mesh is None
                else sm.make_array_from_process_local_data(mesh, P("fsdp"), batch)
            )
            loss = F.cross_entropy(
                model(ids[:, :-1]), reshard(ids[:, 1:].flatten(), train_lm.TOKENS)
            )
            descend(dict(model.named_parameters()), loss)
            losses.append(loss.item())
        return losses, [train_lm.whole(p).detach() for p in model.parameters()]

    def rank():
        mesh = sm.init_device_mesh("cpu", (3, 2), axis_names=("fsdp", "tp"))
        return train(
            uneven_inputs(feed[mesh.get_local_rank("fsdp")], mesh, axes="fsdp", mode="empty"), mesh
        )

    expected = train([torch.cat([feed[0][0], feed[1][0]]), feed[1][1]], None)
    for found in sm.simulate(6)(rank)():
        close(found, expected)


# -- steps, batches and weights --------------------------------------------------------------------


def batches_of(rank, lengths, rows=2):
    """Return a rank's batches, which identify their rank."""
    return [torch.full((rows, 3), 10.0 * rank + step) for step in range(lengths[rank])]


def firsts(batches):
    return [batch[0, 0].item() for batch in batches]


@given(lengths=st.lists(st.integers(0, 4), min_size=1, max_size=4))
@settings(max_examples=15)
def test_stop_is_like_zip(lengths):
    def program(mesh):
        mine = batches_of(mesh.get_rank(), lengths)
        given = list(uneven_inputs(iter(mine), mesh))
        assert all(got is own for got, own in zip(given, mine, strict=False))
        return len(given)

    assert on_mesh((len(lengths),), program) == [min(lengths)] * len(lengths)


@given(lengths=st.lists(st.integers(0, 4), min_size=1, max_size=4))
@settings(max_examples=15)
def test_shadows_take_all_steps(lengths):
    def program(mesh):
        rank = mesh.get_rank()
        mine = batches_of(rank, lengths)
        shadows = list(uneven_inputs(batches_of(rank, lengths), mesh, mode="shadow"))
        empty = list(uneven_inputs(batches_of(rank, lengths), mesh, mode="empty"))
        assert [len(batch) for batch in empty] == [2] * len(mine) + [0] * (max(lengths) - len(mine))
        assert {tuple(batch.shape[1:]) for batch in empty} <= {(3,)}
        first = (
            firsts(mine)[:1] or [10.0 * next(r for r, n in enumerate(lengths) if n)]
            if shadows
            else []
        )
        assert firsts(batch for batch, _ in shadows) == firsts(mine) + first * (
            max(lengths) - len(mine)
        )
        assert {tuple(batch.shape) for batch, _ in shadows} <= {(2, 3)}
        return [weight for _, weight in shadows]

    for step, weights in enumerate(zip(*on_mesh((len(lengths),), program), strict=True)):
        having = [length > step for length in lengths]
        assert weights == tuple(len(lengths) / sum(having) * has for has in having)


def test_loops_without_end():
    def program(mesh):
        endless = (torch.ones(1) * i for i in count())
        assert (
            len(list(uneven_inputs([torch.ones(1)] * 3 if mesh.get_rank() == 1 else endless, mesh)))
            == 3
        )
        shadowing = uneven_inputs(
            [torch.ones(1)] if mesh.get_rank() == 1 else endless, mesh, mode="shadow"
        )
        return [weight for _, weight in islice(shadowing, 3)]

    assert on_mesh((2,), program) == [[1.0, 2.0, 2.0], [1.0, 0.0, 0.0]]


def test_batches_of_any_kind_and_loops_that_change_them():
    """Loops that pop from dicts and write to tensors, on a rank with one batch and on one with
    none.
    """

    def program(mesh):
        batch = {
            "x": torch.ones(2, 3),
            "name": ["p", "q"],
            "n": np.arange(2),
            "mask": torch.eye(3),
            "scale": torch.tensor(2.0),
        }
        found = []
        for got, _ in uneven_inputs([batch] * [3, 1, 0][mesh.get_rank()], mesh, mode="shadow"):
            found.append((got["name"], *(got[key].tolist() for key in ("x", "n", "mask", "scale"))))
            if mesh.get_rank():
                got.pop("name")
                got["x"].zero_()
                got["n"][:] = 5
        return found

    first, second, third = on_mesh((3,), program)
    n = ([0, 1], [0, 1], [0, 0])  # one row of another rank's stands in for all
    for found, expected in zip((first, second, third), n, strict=True):
        assert found == [(["p", "q"], [[1.0] * 3] * 2, expected, torch.eye(3).tolist(), 2.0)] * 3


def test_empty_batch_keeps_all_other_dims():
    def program(mesh):
        batch = {"x": torch.ones(2, 3), "n": np.arange(2), "mask": torch.eye(3), "scale": 2.0}
        *_, last = uneven_inputs([batch] * (1 + mesh.get_rank()), mesh, mode="empty")
        return {key: tuple(getattr(value, "shape", ())) for key, value in last.items()}

    assert on_mesh((2,), program)[0] == {"x": (0, 3), "n": (0,), "mask": (3, 3), "scale": ()}


def test_placeholder_batches_do_not_copy_storages():
    def program(mesh):
        batches = torch.ones(1000, 3).split(2)
        *_, (last, _) = islice(
            uneven_inputs(batches[: 1 + mesh.get_rank()], mesh, mode="shadow"), 2
        )
        return last.untyped_storage().nbytes()

    assert on_mesh((2,), program)[0] == 2 * 3 * 4


def test_count_gives_the_weight_of_a_batch():
    class Batch:
        def __init__(self, tokens):
            self.tokens = tokens

    def program(mesh):
        batches = [Batch(tokens) for tokens in ([3, 2], [1])[mesh.get_rank()]]
        return [
            (b.tokens, w)
            for b, w in uneven_inputs(
                batches, mesh, mode="shadow", count=lambda batch: batch.tokens
            )
        ]

    assert on_mesh((2,), program) == [[(3, 1.5), (2, 2.0)], [(1, 0.5), (1, 0.0)]]


def test_batches_with_zero_weight():
    def program(mesh):
        return [weight for _, weight in uneven_inputs([torch.ones(0, 2)], mesh, mode="shadow")]

    assert on_mesh((2,), program) == [[0.0], [0.0]]


def test_leaving_the_loop_early():
    def program(mesh):
        x = torch.ones(1)
        for step, _ in enumerate(uneven_inputs([x] * (4 + mesh.get_rank()), mesh)):
            if step == 2:
                break
        mesh.group().all_reduce(x)
        return step, x.item(), len(list(uneven_inputs([x] * 2, mesh)))

    assert on_mesh((2,), program) == [(2, 2.0, 2)] * 2


def test_one_small_collective_per_step():
    def program(mesh):
        with collectives() as records:
            for _ in uneven_inputs([torch.ones(2)] * 3, mesh, axes=("a", "b")):
                pass
        return launched(records), {record.bytes_sent for record in records}

    assert on_mesh((2, 2), program) == [(["all_gather"] * 4, {3 * 16})] * 4


def test_skipped_batches_are_logged(caplog):
    with caplog.at_level(logging.INFO, logger="shardmesh"):
        on_mesh(
            (3,), lambda mesh: list(uneven_inputs(batches_of(mesh.get_rank(), [4, 2, 3]), mesh))
        )
        on_mesh((2,), lambda mesh: list(uneven_inputs(batches_of(mesh.get_rank(), [2, 2]), mesh)))
    assert {record.getMessage() for record in caplog.records} == {
        "uneven_inputs: rank 1 had 2 batches, after which all ranks stop; ranks 0, 2 had more"
    }


def test_current_mesh_and_single_rank():
    with sm.set_mesh(sm.init_device_mesh(DEVICE, (1,))):
        assert [weight for _, weight in uneven_inputs([torch.ones(2)] * 2, mode="shadow")] == [
            1.0,
            1.0,
        ]
        assert check_lengths([1, 2, 3]) == 3
    dist.destroy_process_group()  # or later tests would find themselves in a job


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("mode", ["stop", "empty", "shadow"])
def test_null_world_has_only_its_own_counts(device, mode):
    with sm.debug.null_world(64, rank=5):
        mesh = sm.init_device_mesh(device, (8, 8), axis_names=("a", "b"))
        given = list(uneven_inputs([torch.ones(2)] * 2, mesh, axes="a", mode=mode))
        assert check_lengths([1, 2], mesh) == 2
    assert len(given) == 2
    if mode == "shadow":
        assert [weight for _, weight in given] == [1.0, 1.0]


# -- what goes wrong -------------------------------------------------------------------------------


def spoilt(batches):
    """Return a loader that fails on its third batch."""
    yield from batches[:2]
    raise OSError("cannot read shard 7")


def caught_by(mesh, mode, spoilt_ranks):
    """Return the batches and the error of a rank whose loader may fail, after a further
    collective.
    """
    given, caught, rank = 0, None, mesh.get_rank()
    try:
        for _ in uneven_inputs(
            spoilt([torch.ones(1)] * 3) if rank in spoilt_ranks else [torch.ones(1)] * 5,
            mesh,
            mode=mode,
        ):
            given += 1
    except (OSError, PeerError) as error:
        caught = error
    assert len(list(uneven_inputs([torch.ones(1)], mesh))) == 1
    return given, caught


@pytest.mark.parametrize("mode", ["stop", "shadow", "empty"])
@pytest.mark.parametrize("spoilt_ranks", [(1,), (0, 2)])
def test_error_in_a_loader_is_raised_on_all_ranks_at_the_same_step(mode, spoilt_ranks):
    found = on_mesh((4,), lambda mesh: caught_by(mesh, mode, spoilt_ranks))
    for rank, (steps, error) in enumerate(found):
        assert steps == 2
        if rank in spoilt_ranks:
            assert type(error) is OSError
            assert "for step 2 of sm.parallel.uneven_inputs" in error.__notes__[0]
            continue
        assert isinstance(error, PeerError)
        assert error.ranks == spoilt_ranks
        assert "for step 2 of sm.parallel.uneven_inputs" in str(error)
        assert "in spoilt" in str(error)  # the traceback
        assert error.verdict.kind == "raised"
        for seen in error.verdict.seen:
            assert seen.call == "next(loader) raised OSError: cannot read shard 7"
            assert seen.place.startswith(__file__)


def test_invalid_loaders_raise():
    def program(mesh):
        kinds = []
        for loader, mode in ((7, "stop"), (["text"], "empty"), ([3.0], "shadow")):
            with pytest.raises((TypeError, PeerError)) as caught:
                list(uneven_inputs(loader if mesh.get_rank() else [torch.ones(1)], mesh, mode=mode))
            kinds.append((caught.type.__name__, str(caught.value)))
        return kinds

    others, own = on_mesh((2,), program)
    for (peer, told), (kind, text) in zip(others, own, strict=True):
        assert (peer, kind) == ("PeerError", "TypeError")
        assert text in told
    assert "not iterable" in own[0][1]
    assert "batch of type str has no tensor" in own[1][1]
    assert "count=lambda batch" in own[2][1]


@pytest.mark.parametrize(
    ("rows", "mode", "words"),
    [
        ([[2, 2], [2, 2], [2, 2], [2]], "stop", "in step 1 rank 2 has a batch; rank 3 has none"),
        (
            [[2, 2], [2], [2], [2]],
            "shadow",
            "in step 1 rank 0 has a batch of 2 samples; rank 1 has none",
        ),
        (
            [[2], [2], [2], [3]],
            "empty",
            "in step 0 rank 2 has a batch of 2 samples; rank 3 has a batch of 3 samples",
        ),
    ],
)
def test_ranks_that_must_have_the_same_batches(rows, mode, words):
    def program(mesh):
        list(
            uneven_inputs([torch.ones(n) for n in rows[mesh.get_rank()]], mesh, axes="a", mode=mode)
        )

    text = same_error((2, 2), program, ValueError, silent=False)
    assert words in text
    assert "uneven_inputs over ['a']" in text
    assert "differ only along ['b']" in text
    assert "axes=('a', 'b')" in text


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"mode": "repeat"}, ValueError, ["mode='repeat'", "'stop', 'shadow', 'empty'"]),
        (
            {"count": len, "axes": "a"},
            ValueError,
            ["mode='stop'", "only mode='shadow' has weights"],
        ),
        ({}, MeshError, ["a=2, b=2", "axes='a'"]),
        ({"axes": "dp"}, MeshError, ["'dp'", "['a', 'b']"]),
        ({"axes": ("a", "c")}, MeshError, ["'c'"]),
        ({"mesh": "a"}, TypeError, ["mesh must be a DeviceMesh", "'a'"]),
        ({"mesh": None}, TypeError, ["give the mesh"]),
    ],
)
def test_invalid_arguments_raise(arguments, kind, words):
    text = same_error((2, 2), lambda mesh: uneven_inputs([], **{"mesh": mesh, **arguments}), kind)
    for word in words:
        assert word in text


# -- lengths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        (
            [100, 100, 97, 100],
            [
                "rank 2 has 97, ranks 0, 1, 3 have 100",
                "after 97",
                "run 100 steps",
                "sm.parallel.uneven_inputs(loader, mesh)",
            ],
        ),
        ([3, 4], ["rank 0 has 3, rank 1 has 4"]),
        ([5, 5, 6, 7], ["rank 2 has 6, rank 3 has 7, ranks 0, 1 have 5"]),
    ],
)
def test_different_lengths(lengths, words):
    text = same_error(
        (len(lengths),),
        lambda mesh: check_lengths(range(lengths[mesh.get_rank()]), mesh),
        ValueError,
        silent=False,
    )
    for word in words:
        assert word in text


def test_lengths():
    assert (
        on_mesh(
            (2, 2),
            lambda mesh: check_lengths(
                torch.utils.data.DataLoader(torch.arange(7), batch_size=2), mesh
            ),
        )
        == [4] * 4
    )
    text = same_error(
        (3,),
        lambda mesh: check_lengths([] if mesh.get_rank() == 1 else iter([]), mesh),
        TypeError,
        silent=False,
    )
    assert "no len() on ranks 0, 2," in text
    assert "sm.parallel.uneven_inputs(loader, mesh)" in text


# -- real processes --------------------------------------------------------------------------------


def on_a_rank(rows):
    mesh = sm.init_device_mesh(DEVICE, (4,), axis_names=("a",))
    feed = feed_of(rows)
    trained = [train_sharded(mesh, feed, "fsdp"), train_in_parts(mesh, feed, "dp")]
    lengths, rank = [len(place) for place in rows], mesh.get_rank()
    stopped = len(list(uneven_inputs(batches_of(rank, lengths), mesh)))
    for _ in uneven_inputs(batches_of(rank, [3, 4, 5, 6]), mesh):
        break
    given, error = caught_by(mesh, "shadow", (3,))
    with pytest.raises(ValueError, match="check_lengths") as uneven:
        check_lengths(range(lengths[rank]), mesh)
    return trained, stopped, given, type(error).__name__, str(uneven.value)


def test_on_real_processes(world4):
    rows = [[3, 2, 4], [1], [4, 4], [2, 1, 1, 3]]
    feed = feed_of(rows)
    expected = [train_alone(feed), train_alone(feed, norm=False)]
    for rank, (trained, stopped, steps, error, uneven) in enumerate(world4(on_a_rank, rows)):
        for found, one in zip(trained, expected, strict=True):
            close(found, one)
        assert (stopped, steps) == (1, 2)
        assert error == ("OSError" if rank == 3 else "PeerError")
        assert "rank 1 has 1" in uneven
