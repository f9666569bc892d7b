"""Values that the type checker could miss: random numbers, untracked functions, and changes without
an operator.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import shardmesh as sm
from shardmesh import P
from tests.sharding.functional.helpers import put, same, values
from tests.sharding.functional.types.test_type_checker import accepted, over, refused
from tests.sharding.ranks import same_error

X, W = values(6, 4), values(4, 4, seed=1)


# -- random numbers --------------------------------------------------------------------------------


def test_random_numbers_from_keys():
    key = sm.random.key(7)

    def together(x, w):
        with sm.random.seeded(key):
            return F.dropout(w + torch.rand(4), 0.5)

    first, *others = accepted(together)
    assert all(torch.equal(first, other) for other in others)

    def own(x, w):
        with sm.random.seeded(sm.random.fold_in(key, sm.axis_index("a"))):
            return torch.rand(1, 4)

    assert "varies over 'a'" in refused(own)
    drawn = accepted(own, P("a"))[0]
    assert len({tuple(row.tolist()) for row in drawn}) == 3


def test_keys_of_numbers():
    key = sm.random.key(1)
    assert (
        sm.random.fold_in(key, 3)
        == sm.random.fold_in(key, torch.tensor(3))
        != sm.random.fold_in(key, 4)
    )
    assert sm.random.key(1) == key != sm.random.key(2)
    with sm.random.seeded(key):
        one = torch.rand(3)
    before = torch.get_rng_state()
    with sm.random.seeded(key):
        assert torch.equal(torch.rand(3), one)
    assert torch.equal(torch.get_rng_state(), before)


def test_no_random_numbers_drawn():
    for result in accepted(lambda x, w: F.dropout(w, 0.5, training=False)):
        assert torch.equal(result, W)


# -- what no type shows ----------------------------------------------------------------------------


def positive_rows(x, w):
    return w * (x > 0).nonzero().shape[0]


def selected_length(x, w):
    return w * x[x > 0.3].shape[0]


def written_argument(x, w):
    w.add_(x.sum())
    return sm.psum(x, "a")


def written_part_of_an_argument(x, w):
    w[0].mul_(x.sum())
    return sm.psum(x, "a")


def set_memory(x, w):
    y = torch.zeros(4, dtype=torch.float64)
    y.set_(x[0])
    return y


def set_data(x, w):
    y = torch.zeros(4, dtype=torch.float64)
    y.data = x[0]
    return y


def running_mean(x, w):
    mean, var = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    F.batch_norm(x, mean, var, training=True)
    return mean


def running_mean_of_a_module(x, w):
    norm = torch.nn.BatchNorm1d(4, affine=False).double()
    norm(x)
    return norm.running_mean


UNSEEN = (
    positive_rows,
    selected_length,
    written_argument,
    written_part_of_an_argument,
    set_memory,
    set_data,
    running_mean,
)


@pytest.mark.parametrize("f", [*UNSEEN, running_mean_of_a_module])
def test_escapes_from_type_tracking(f):
    refused(f)


# -- lengths of uneven parts -----------------------------------------------------------------------


def test_lengths_of_uneven_parts():
    def program(mesh):
        mapped = over(mesh, lambda x, w: w * x.shape[0])
        same(mapped(put(mesh, X, P("a")), W), W * 2)
        mapped(put(mesh, values(4, 4), P("a")), W)

    text = same_error((3,), program, sm.errors.ShardingTypeError, silent=False)
    assert "read from shapes of parts" in text
