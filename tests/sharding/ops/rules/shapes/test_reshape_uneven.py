"""Reshapes of uneven parts: what every rank can do alone moves nothing, and values and gradients
are those of the whole.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.layout.layout import Layout
from shardmesh.sharding.ops.rules.shapes.reshape_uneven import reshaped_layout
from tests.sharding.ranks import collectives, launched, on_mesh
from tests.sharding.strategies import ragged_specs


def laid_out(mesh, shape, spec, **options):
    whole = torch.arange(float(math.prod(shape)), dtype=torch.float64).reshape(shape)
    return sm.distribute_tensor(whole, mesh, spec, src_data_rank=None, **options)


@pytest.mark.parametrize(
    ("shape", "spec", "call", "becomes"),
    [
        (
            (2, 40),
            P(None, "a", sizes={"a": (12, 12, 12, 4)}),
            lambda x: x.view(2, 10, 4),
            P(None, "a", None),
        ),
        (
            (2, 40),
            P(None, "a", sizes={"a": (0, 20, 8, 12)}),
            lambda x: x.unflatten(1, (-1, 4)),
            P(None, "a", sizes={"a": (0, 5, 2, 3)}),
        ),
        (
            (2, 10, 4),
            P(None, "a"),
            lambda x: x.flatten(1),
            P(None, "a", sizes={"a": (12, 12, 12, 4)}),
        ),
        (
            (10, 4, 3),
            P("a"),
            lambda x: torch.reshape(x, (20, 2, 3)),
            P("a", sizes={"a": (6, 6, 6, 2)}),
        ),
        # Parts are even, and the shapes have no common factors.
        ((8, 3, 2), P("a"), lambda x: x.reshape(12, 4), P("a", None)),
        (
            (6, 1, 4),
            P("a", sizes={"a": (1, 2, 3, 0)}),
            lambda x: x.reshape(1, 24),
            P(None, "a", sizes={"a": (4, 8, 12, 0)}),
        ),
        (
            (10, 4),
            P("a", unreduced={"b": "sum"}),
            lambda x: x.view(40),
            P("a", unreduced={"b"}, sizes={"a": (12, 12, 12, 4)}),
        ),
    ],
)
def test_no_communication(shape, spec, call, becomes):
    def program(mesh):
        x = laid_out(mesh, shape, spec).requires_grad_()
        with collectives() as records:
            out = call(x)
        assert launched(records) == []
        assert sm.typeof(out) is sm.typeof(x).replace(becomes, shape=out.shape)
        assert out.to_local()._base is not None  # a view, as torch has it
        whole = x.full_tensor().detach().requires_grad_()
        expected = call(whole)
        assert torch.equal(out.full_tensor(), expected)
        (out * out).sum().backward()
        (expected * expected).sum().backward()
        assert torch.equal(x.grad.full_tensor(), whole.grad)

    on_mesh((4, 2), program)


@pytest.mark.parametrize(
    ("shape", "spec", "after"),
    [
        ((40,), P("a", sizes={"a": (10, 14, 8, 8)}), (10, 4)),  # a cut inside a row
        ((4, 10), P(None, "a"), (40,)),  # not the first of the dims that are put together
        ((1, 6), P("a"), (6,)),  # split although it has one element
        ((0, 6), P("a"), (0,)),
    ],
)
def test_what_is_left_to_the_rule(shape, spec, after):
    mesh = sm.AbstractMesh((4,), ("a",))
    assert reshaped_layout(Layout.of(mesh, spec, shape), after) is None

    def program(mesh):
        x = laid_out(mesh, shape, spec)
        assert torch.equal(x.reshape(after).full_tensor(), x.full_tensor().reshape(after))

    on_mesh((4,), program)


def test_view_as_another_dtype():
    def program(mesh):
        x = laid_out(mesh, (10, 4), P("a"))
        assert torch.equal(x.view(torch.int64).full_tensor(), x.full_tensor().view(torch.int64))

    on_mesh((4,), program)


SHAPES = [(12, 2), (24,), (2, 12), (4, 3, 2), (2, 2, 6), (1, 24), (6, 1, 4)]


@given(st.data())
def test_any_reshape_of_any_layout_keeps_the_values(data):
    shape, after = data.draw(st.sampled_from(SHAPES)), data.draw(st.sampled_from(SHAPES))
    spec = data.draw(ragged_specs(sm.AbstractMesh((2, 2), ("a", "b")), shape))

    def program(mesh):
        x = laid_out(mesh, shape, spec)
        with collectives() as records:
            out = x.reshape(after)
        if (found := reshaped_layout(sm.typeof(x), after)) is not None:
            assert launched(records) == []
            assert sm.typeof(out) is found
        assert torch.equal(out.full_tensor(), x.full_tensor().reshape(after))

    on_mesh((2, 2), program)
