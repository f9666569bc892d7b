"""Errors about types name the earlier line at which the value began to vary, or to be pending."""

from __future__ import annotations

import re

import pytest
import torch

import shardmesh as sm
from shardmesh import P
from tests.sharding.functional.helpers import put, values
from tests.sharding.ranks import same_error

X, W = values(4, 6), values(6, 3, seed=1)
VARYING, PENDING = (P("a"), P()), (P(unreduced="a"), P())
HERE = r"at test_origins\.py:\d+"


def result_varies(x, w):
    y = x @ w
    return y.relu()


def result_pending(x, w):
    y = sm.pcast(w, "a", to="unreduced")
    return y * 2


def argument_pending(u, w):
    return u.relu()


def not_linear(x, w):
    y = sm.pcast(w, "a", to="unreduced")
    return (y * 2).exp()


def gathered_pending(x, w):
    y = sm.pcast(w, "a", to="unreduced")
    return sm.all_gather(y, "a", tiled=True)


def largest_of_pending(x, w):
    y = sm.pcast(w, "b", to="unreduced")
    return sm.pmax(y, "a")


def pcast_of_varying(x, w):
    y = x * 2
    return sm.pcast(y + 1, "a", to="unreduced")


def looked_at_pending(x, w):
    y = sm.pcast(w, "a", to="unreduced")
    return w * y.sum().item()


def by_a_number(x, w):
    y = sm.pcast(w, "a", to="unreduced")
    n = x.sum().item()
    return y * n


def loss_varies(x, w):
    return sm.grad(lambda w: (x @ w).sin().sum())(w)


def loss_pending(x, w):
    return sm.grad(lambda w: sm.pcast(w, "a", to="unreduced").sum())(w)


def jvp_of_varying(x, w):
    y = x.sin()
    return sm.jvp(lambda w: w * 2, (w,), (w * y.sum(),))[1]


def vmap_of_varying(x, w):
    return sm.vmap(lambda c: (x @ c).sum(), 1)(w)


def scan_of_varying(x, w):
    return sm.scan(lambda c, row: (c + row.sum(), c), w.sum(), x)[0]


def written(x, w):
    y = x.sum(0)
    w[0] = y[:3]
    return sm.psum(x, "a")


CASES = {
    result_varies: (
        VARYING,
        rf"varies over 'a', and out_specs .* It varies since matmul {HERE}, of argument 0",
    ),
    result_pending: (
        VARYING,
        rf"is pending over 'a', .* It is pending since pcast to 'unreduced' {HERE}",
    ),
    argument_pending: (
        PENDING,
        r"relu of a value that is pending over 'a' since argument 0: each rank",
    ),
    not_linear: (
        VARYING,
        rf"exp of a value that is pending over 'a' since pcast to 'unreduced' {HERE}",
    ),
    gathered_pending: (
        VARYING,
        rf"all_gather over 'a' of a value that is pending over 'a' since pcast to 'unreduced' "
        rf"{HERE}",
    ),
    largest_of_pending: (
        VARYING,
        rf"pmax over 'a' of a value that is pending over 'b' since pcast to 'unreduced' {HERE}",
    ),
    pcast_of_varying: (
        VARYING,
        rf"of a value that varies over 'a' since mul {HERE}, of argument 0; return it under",
    ),
    looked_at_pending: (
        VARYING,
        rf"item of a value that is pending over 'a' since pcast to 'unreduced' {HERE}: each rank",
    ),
    by_a_number: (
        VARYING,
        rf"since pcast .* {HERE} and a number, which may differ between ranks since item, .* "
        rf"{HERE}: ",
    ),
    loss_varies: (
        VARYING,
        rf"the loss varies over 'a' since matmul {HERE}, of argument 0, so that every rank",
    ),
    loss_pending: (
        VARYING,
        rf"the loss is pending over 'a' since pcast to 'unreduced' {HERE}; psum\(loss, 'a'\) first",
    ),
    jvp_of_varying: (VARYING, rf"varies over 'a', .* It varies since sin {HERE}, of argument 0"),
    vmap_of_varying: (
        VARYING,
        rf"varies over 'a', .* It varies since (matmul|mv) {HERE}, of argument 0",
    ),
    scan_of_varying: (VARYING, rf"varies over 'a', .* It varies since \w+ {HERE}, of argument 0"),
    written: (
        VARYING,
        rf"argument 1 is the same .* a value that is not was written to it, since sum {HERE}, of "
        rf"argument 0",
    ),
}


@pytest.mark.parametrize("body", CASES, ids=lambda body: body.__name__)
def test_error_names_the_origin_of_a_type(body):
    in_specs, match = CASES[body]

    def program(mesh):
        first = put(mesh, X, P("a")).sum(0) if in_specs is PENDING else put(mesh, X, P("a"))
        sm.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=P())(first, put(mesh, W))

    text = same_error((2, 2), program, sm.errors.ShardingTypeError, silent=False)
    assert re.search(match, re.sub(r"\S*/(test_origins\.py)", r"\1", text)), text


def test_error_names_a_branch_on_a_varying_value():
    def body(x):
        y = x.sum()
        if y > 0:
            return torch.ones(2)
        return torch.zeros(2)

    def program(mesh):
        sm.shard_map(body, mesh=mesh, in_specs=P("a"), out_specs=P())(put(mesh, X, P("a")))

    text = same_error((2,), program, sm.errors.ShardingTypeError, silent=False)
    assert re.search(
        r"since __bool__, after which control flow may differ between ranks .*test_origins\.py:\d+",
        text,
    ), text
