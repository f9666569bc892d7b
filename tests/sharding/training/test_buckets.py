"""Batches padded to a few lengths, the same on all ranks."""

from __future__ import annotations

from collections import UserDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import shardmesh as sm
from shardmesh import P
from shardmesh.mesh.comm.current_world import current_world
from tests.device import DEVICE
from tests.sharding.parallel.compositions import whole
from tests.sharding.ranks import every_rank

BUCKETS, PAD = (4, 8, 16), {"ids": 0, "labels": -100}
Pair = namedtuple("Pair", "ids labels")


def batch_of(length: int, rows: int = 2) -> dict[str, torch.Tensor]:
    ids = torch.arange(1, 1 + rows * length).view(rows, length) % 31 + 1
    return {"ids": ids, "labels": ids, "weight": torch.ones(rows)}


@every_rank(2)
def test_all_ranks_pad_to_the_bucket_of_the_longest(mesh: Any) -> None:
    own_lengths = [[3, 8, 1], [5, 2, 4]][mesh.world.rank]
    batches = list(sm.training.pad_to_buckets(map(batch_of, own_lengths), BUCKETS, PAD, mesh))
    assert [x["ids"].shape[1] for x in batches] == [8, 8, 4]
    for length, batch in zip(own_lengths, batches, strict=True):
        expected = batch_of(length)
        assert torch.equal(batch["ids"][:, :length], expected["ids"])
        assert (batch["ids"][:, length:] == 0).all()
        assert (batch["labels"][:, length:] == -100).all()
        assert torch.equal(batch["weight"], expected["weight"])


@every_rank(2, 2)
def test_ranks_along_other_axes_do_not_count(mesh: Any) -> None:
    row, _ = mesh.coordinate
    loader = [batch_of(3 if row == 0 else 12)]
    (own,) = sm.training.pad_to_buckets(loader, BUCKETS, PAD, mesh, axes="b")
    assert own["ids"].shape[1] == (4 if row == 0 else 16)


@pytest.mark.parametrize("kind", ["tuple", "named tuple", "list", "mapping", "numpy"])
def test_kinds_of_batches(kind: str, one_rank_job: None) -> None:
    x = batch_of(3)
    pair = x["ids"], x["labels"]
    batch: Any = {
        "tuple": pair,
        "named tuple": Pair(*pair),
        "list": list(pair),
        "mapping": UserDict(x),
        "numpy": {key: value.numpy() for key, value in x.items()},
    }[kind]
    by_name = kind in ("mapping", "numpy")
    pad: Any = PAD if by_name else {0: 0, 1: -100}
    (padded,) = sm.training.pad_to_buckets([batch], BUCKETS, pad, sm.init_device_mesh("cpu", (1,)))
    assert isinstance(padded, dict if by_name else type(batch))
    ids, labels = (padded["ids"], padded["labels"]) if by_name else padded
    assert isinstance(ids, np.ndarray if kind == "numpy" else torch.Tensor)
    assert ids.tolist() == F.pad(x["ids"], (0, 1)).tolist()
    assert labels.tolist() == F.pad(x["labels"], (0, 1), value=-100).tolist()


@every_rank(2)
def test_sharded_batches(mesh: Any) -> None:
    """Also the last one, of which a rank has no rows."""
    lengths = [3, 3, 6, 2, 9]
    rows = [{"ids": torch.full((n,), n), "n": n} for n in lengths]
    sampler = sm.training.DistributedSampler(rows, mesh=mesh, axes=mesh.axis_names, shuffle=False)

    def collate(samples: list[Any]) -> Any:
        ids = nn.utils.rnn.pad_sequence([x["ids"] for x in samples], batch_first=True)
        return {"ids": ids, "n": torch.tensor([x["n"] for x in samples])}

    loader = DataLoader(rows, batch_size=1, sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]
    spec = P(*mesh.axis_names)
    found = sm.training.batches(loader, mesh, spec, buckets=BUCKETS, pad={"ids": 0})
    wholes = [(x["ids"].full_tensor(), x["n"].full_tensor()) for x in found]
    assert [list(ids.shape) for ids, _ in wholes] == [[2, 4], [2, 8], [1, 16]]
    for ids, n in wholes:
        assert torch.equal(ids.sum(1), n * n)


def test_forty_lengths_have_a_graph_for_each_bucket() -> None:
    """Ranks have other lengths; losses are those of the batches as they are."""

    def main(jitted: bool) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(33, 8), nn.Linear(8, 33)).double()
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("dp",))
        sm.parallel.fully_shard(model, mesh, axes="dp", units=nn.Linear, src_data_rank=None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        rank = current_world().rank
        batches = [batch_of(1 + (7 * i + 3 * rank) % 40) for i in range(40)]
        if not jitted:
            return [step(x["ids"], x["labels"]).item() for x in batches], 0
        f = sm.jit(step, backend="eager")
        loader = sm.training.pad_to_buckets(batches, (10, 20, 40), PAD, mesh)
        return [whole(f(x["ids"], x["labels"])).item() for x in loader], len(f.recorded)

    for padded, plain in zip(sm.simulate(2)(main)(True), sm.simulate(2)(main)(False), strict=True):
        torch.testing.assert_close(padded[0], plain[0])
        assert padded[1] <= 6


@pytest.mark.parametrize(
    ("buckets", "pad", "text"),
    [
        ((), PAD, "write lengths in ascending order"),
        ((8, 4), PAD, "write lengths in ascending order"),
        ((0, 4), PAD, "write lengths in ascending order"),
        ((4,), {}, "name the entries of a batch"),
        ((4,), None, "name the entries of a batch"),
        ((4, 8), {"ids": 0, "mask": 0}, "has no such entry"),
        ((4, 8), {"weight": 0}, r"not one of shape \[2\]"),
        ((2, 4), {"ids": 0}, r"sequences of 5, and the largest of buckets=\(2, 4\) is 4"),
        ((8,), {"ids": 0, "other": 0}, "have the same length, not 'ids' 5, 'other' 3"),
    ],
)
def test_errors(buckets: Any, pad: Any, text: str, one_rank_job: None) -> None:
    batch = batch_of(5) | {"other": torch.ones(2, 3)}
    with pytest.raises((ValueError, TypeError), match=text):
        list(sm.training.pad_to_buckets([batch], buckets, pad, sm.init_device_mesh("cpu", (1,))))


@every_rank(2)
def test_all_ranks_raise_if_one_has_a_batch_that_is_too_long(mesh: Any) -> None:
    loader = [batch_of(3 if mesh.world.rank == 0 else 17)]
    with pytest.raises(ValueError, match="sequences of 17, and the largest"):
        list(sm.training.pad_to_buckets(loader, BUCKETS, PAD, mesh))
    with pytest.raises(TypeError, match="pass buckets as well"):
        sm.training.batches(loader, mesh, P(), pad=PAD)
