"""Individual styles: which parameters they shard, what they communicate, and that other axes are
unchanged.
"""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shardmesh as sm
from shardmesh import P, Replicate, Shard
from shardmesh.sharding.layout.layout import Layout
from shardmesh.sharding.parallel.tensor.activations import along
from shardmesh.sharding.parallel.tensor.plan import parallelize
from shardmesh.sharding.parallel.tensor.styles import (
    Style,
    colwise,
    prepare_inputs,
    prepare_outputs,
    rowwise,
    sequence_parallel,
    shard_params,
)
from tests.device import DEVICE
from tests.sharding.ranks import collectives, launched, on_mesh, place, same_error
from tests.sharding.strategies import specs


def f64(*shape, seed=0):
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, device="cpu"
    ).to(DEVICE)


class Conv1D(nn.Module):
    """Hugging Face's GPT-2 layer: a linear layer whose weight is [inputs, outputs]."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


ROWS, COLUMNS, BIAS = P("a", None), P(None, "a"), P("a")

KINDS = [
    (lambda: nn.Linear(6, 7), (5, 6), colwise(), {"weight": ROWS, "bias": BIAS}, []),
    (
        lambda: nn.Linear(7, 5),
        (2, 3, 7),
        rowwise(),
        {"weight": COLUMNS, "bias": P(None)},
        ["all_reduce"],
    ),
    (
        lambda: nn.Linear(8, 5, bias=False),
        (4, 8),
        rowwise(out=P("a")),
        {"weight": COLUMNS},
        ["reduce_scatter"],
    ),
    (lambda: nn.Linear(8, 6), (5, 8), rowwise(units=4), {"weight": COLUMNS}, ["all_reduce"]),
    (
        lambda: nn.Linear(8, 6),
        (5, 8),
        rowwise(out=Shard(-1)),
        {"weight": COLUMNS},
        ["reduce_scatter"],
    ),
    (lambda: nn.Embedding(7, 6), 7, colwise(), {"weight": COLUMNS}, []),
    (lambda: nn.Embedding(7, 6), 7, rowwise(), {"weight": ROWS}, ["all_reduce"]),
    (
        lambda: nn.Conv1d(3, 5, 2),
        (2, 3, 6),
        colwise(),
        {"weight": P("a", None, None), "bias": BIAS},
        [],
    ),
    (
        lambda: nn.Conv2d(4, 5, 2),
        (2, 4, 6, 6),
        rowwise(),
        {"weight": P(None, "a", None, None), "bias": P(None)},
        ["all_reduce"],
    ),
    (lambda: Conv1D(7, 6), (5, 6), colwise(), {"weight": COLUMNS, "bias": BIAS}, []),
    (lambda: Conv1D(5, 7), (4, 7), rowwise(), {"weight": ROWS, "bias": P(None)}, ["all_reduce"]),
    (
        lambda: nn.LayerNorm(6),
        (4, 7, 6),
        sequence_parallel(),
        {"weight": P(None), "bias": P(None)},
        [],
    ),
]


@pytest.mark.parametrize(("make", "shape", "style", "placed", "moves"), KINDS)
def test_a_module_by_a_style(make, shape, style, placed, moves):
    """Result and gradients equal one process, also for uneven parts; communication in forward is
    that of the table.
    """
    torch.manual_seed(0)
    plain = make().double()
    x = torch.tensor([[0, 6, 3], [2, 2, 5]]) if isinstance(shape, int) else f64(*shape)
    result = plain(x)
    result.square().sum().backward()
    state = pickle.dumps(plain.state_dict())

    def program(mesh):
        module = make().double()
        module.load_state_dict(pickle.loads(state))
        parallelize(module, mesh, {"": style}, src_data_rank=None)
        for name, spec in placed.items():
            where = getattr(module, name).spec
            assert P(*where.dims) == spec
        given = place(mesh, x)
        with collectives() as records:
            out = module(given)
        assert launched(records) == moves
        out.square().sum().backward()
        torch.testing.assert_close(out.full_tensor(), result, rtol=1e-12, atol=1e-12)
        for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-12, atol=1e-12)

    on_mesh((2,), program)


def test_bilinear():
    torch.manual_seed(0)
    plain = nn.Bilinear(3, 4, 5).double()
    expected = plain(f64(2, 3), f64(2, 4))
    state = pickle.dumps(plain.state_dict())

    def program(mesh):
        module = nn.Bilinear(3, 4, 5).double()
        module.load_state_dict(pickle.loads(state))
        parallelize(module, mesh, {"": colwise()}, src_data_rank=None)
        assert module.weight.spec == P("a", None, None)
        torch.testing.assert_close(
            module(place(mesh, f64(2, 3)), place(mesh, f64(2, 4))).full_tensor(), expected
        )

    on_mesh((2,), program)


def test_units_are_kept_whole():
    """10 heads of 4 over 4 ranks: 3 3 3 1; `view` keeps them, and nothing is communicated until
    heads are summed.
    """

    def program(mesh):
        up, down = nn.Linear(6, 40, bias=False).double(), nn.Linear(40, 6, bias=False).double()
        parallelize(up, mesh, {"": colwise(units=10)}, src_data_rank=None)
        parallelize(down, mesh, {"": rowwise(units=10, out=None)}, src_data_rank=None)
        assert up.weight.to_local().shape[0] == [12, 12, 12, 4][mesh.world.rank]
        with collectives() as records:
            heads = up(place(mesh, f64(2, 6))).view(2, -1, 4)
            assert heads.to_local().shape == (2, [3, 3, 3, 1][mesh.world.rank], 4)
            out = down(heads.flatten(1))
        assert launched(records) == []
        assert out.spec == P(None, None, unreduced={"a"})

    on_mesh((4,), program)


def test_more_ranks_than_units():
    def program(mesh):
        module = parallelize(nn.Linear(6, 8), mesh, {"": colwise(units=2)}, src_data_rank=None)
        return module.weight.to_local().shape[0]

    assert on_mesh((4,), program) == [4, 4, 0, 0]


@pytest.mark.parametrize("style", [colwise(), rowwise()])
def test_unknown_module_raises(style):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    text = same_error((2,), lambda mesh: parallelize(Scaled(), mesh, {"": style}), ValueError)
    assert (
        "which dims of the parameters of Scaled (scale [3]) have those is not known; give the "
        "layout of each: shard_params({'scale'" in text
    )


def test_modules_that_cannot_be_sharded_by_inputs_raise():
    text = same_error(
        (2,), lambda mesh: parallelize(nn.Bilinear(3, 4, 5), mesh, {"": rowwise()}), ValueError
    )
    assert (
        "rowwise() of plan[''] splits a module by its inputs, but which dims of the parameters of "
        "Bilinear" in text
    )
    assert "not known" in same_error(
        (2,),
        lambda mesh: parallelize(nn.Conv1d(4, 4, 1, groups=2), mesh, {"": colwise()}),
        ValueError,
    )


def test_shard_params_sets_layouts_of_parameters_and_activations():
    def program(mesh):
        module = nn.MultiheadAttention(4, 2, batch_first=True).double()
        style = shard_params(
            {"in_proj_weight": ROWS, "in_proj_bias": Shard(0)}, in_=P(), out=P("a")
        )
        parallelize(module, mesh, {"": style}, src_data_rank=None)
        assert module.in_proj_weight.spec == ROWS
        assert module.in_proj_bias.spec == BIAS
        assert module.out_proj.weight.is_fully_replicated
        x = place(mesh, f64(2, 3, 4), Shard(0))
        out, _ = module(x, place(mesh, f64(2, 3, 4)), place(mesh, f64(2, 3, 4)), need_weights=False)
        assert out.spec == P("a", None, None)

    on_mesh((2,), program)


# -- activations -----------------------------------------------------------------------------------


class Three(nn.Module):
    """Positional, keyword and nested arguments; several results."""

    def forward(self, x, pair, scale=None):
        return x, (pair[0], scale)


def test_inputs_and_outputs_of_every_kind():
    def program(mesh):
        x, y, z = (place(mesh, f64(4, 4) + i) for i in range(3))
        plan = {
            "": [prepare_inputs(ROWS, None, scale=Replicate()), prepare_outputs(None, Shard(1))]
        }
        module = parallelize(Three(), mesh, plan)
        first, (pair, scale) = module(x, (y, "text"), z.redistribute(COLUMNS))
        assert first.spec == ROWS
        assert pair.spec == COLUMNS
        assert scale.spec == COLUMNS
        first, (pair, scale) = module(pair=(y, 1), x=x)
        assert first.spec == ROWS
        assert pair.spec == COLUMNS
        assert scale is None

    on_mesh((2,), program)


def test_tree_of_inputs_is_redistributed_together():
    def program(mesh):
        module = parallelize(Three(), mesh, {"": prepare_inputs(None, P())})
        parts = tuple(place(mesh, f64(4, 4) + i, Shard(0)) for i in range(2))
        with collectives() as records:
            _, (first, _) = module(1, parts)
        assert launched(records) == ["all_gather"]
        assert first.is_fully_replicated

    on_mesh((2,), program)


def test_wrong_number_of_results_raises():
    def program(mesh):
        parallelize(Three(), mesh, {"": prepare_outputs(P(), P(), P())})(1, (2, 3))

    def alone(mesh):
        parallelize(nn.Identity(), mesh, {"": prepare_outputs(P(), P())})(1)

    text = same_error((2,), program, ValueError)
    assert text == (
        "the module itself: prepare_outputs(P(), P(), P()) of plan[''] has layouts for 3 outputs, "
        "but the module returned 2 of them; give one for each, or one for all"
    )


def test_activations_already_in_the_layout_are_returned_unchanged():
    def program(mesh):
        module = parallelize(
            nn.Identity(), mesh, {"": [prepare_inputs(ROWS), prepare_outputs(ROWS)]}
        )
        x = place(mesh, f64(4, 4), Shard(0))
        assert module(x) is x
        assert module(x) is x  # the second time it is known

    on_mesh((2,), program)


def test_input_on_a_mesh_without_the_axis_raises():
    def program(mesh):
        module = parallelize(nn.Identity(), mesh, {"": prepare_inputs(P("b"), axis="b")})
        module(place(mesh["a"], f64(4)))

    assert (
        "argument 0 is f64[4] @ P(None) on (a=2), on a mesh without the axis 'b'; place it on"
        in same_error((2, 2), program, ValueError)
    )


def test_plain_tensor_uses_the_mesh_of_the_parameters():
    """On a larger mesh a plain tensor raises, unless the parameters are on a mesh of the axis
    alone, as gathered ones are.
    """

    def program(mesh):
        module = parallelize(nn.Linear(4, 4), mesh, {"": colwise(axis="b")}, src_data_rank=None)
        for name, whole in [("weight", f64(4, 4)), ("bias", f64(4))]:
            setattr(
                module,
                name,
                nn.Parameter(sm.device_put(whole, mesh["b"], P("b"), src_data_rank=None)),
            )
        out = module(f64(2, 4))
        assert out.mesh is mesh["b"]
        assert out.spec == P(None, "b")

    on_mesh((2, 2), program)


def test_custom_style():
    class halves(Style):
        def parameters(self, site, module):
            return {"weight": P(site.axis)}

    def program(mesh):
        module = parallelize(nn.Linear(4, 4), mesh, {"": halves()})
        assert module.weight.spec == ROWS
        assert module.bias.spec == P(None)

    on_mesh((2,), program)


def test_repr_of_styles():
    assert repr(colwise()) == "colwise()"
    assert (
        repr(rowwise(out=P(None, "tp", None), units=4))
        == "rowwise(out=P(None, 'tp', None), units=4)"
    )
    assert repr(sequence_parallel(2, out=P())) == "sequence_parallel(dim=2, out=P())"
    assert repr(shard_params({"w": P("tp")})) == "shard_params(specs={'w': P('tp')})"
    assert (
        repr(prepare_inputs(P(), None, mask=Shard(0))) == "prepare_inputs(P(), None, mask=Shard(0))"
    )
    assert repr(prepare_outputs(P())) == "prepare_outputs(P())"


def test_invalid_spec_raises():
    with pytest.raises(
        TypeError, match=r"inputs: expected P\(...\), Shard\(dim\), Replicate\(\) or None, got 'tp'"
    ):
        prepare_inputs("tp")
    with pytest.raises(TypeError, match="give one P"):
        prepare_outputs()


# -- along an axis ---------------------------------------------------------------------------------

MESH = sm.AbstractMesh((2, 3, 2), ("a", "b", "c"))


@pytest.mark.parametrize(
    ("lies", "where", "becomes"),
    [
        (P("a", None, "b"), P(), P("a", None, None)),
        (P("a", None, "b"), P(None, "b", None), P("a", "b", None)),
        (P("a", unreduced={"b"}), Shard(1), P("a", "b", None)),
        (P("a", unreduced={"b", "c"}), Replicate(), P("a", None, None, unreduced={"c"})),
        (P("a"), P("b"), P(("a", "b"), None, None)),  # the axis of the style is the minor one
        (P(("b", "a")), P("b"), P(("b", "a"), None, None)),  # the same axes: their order stays
        (P(("b", "a")), P(None, "b"), P("a", "b", None)),
        # A spec may name further axes.
        (P("a", "c"), P(None, None, ("b", "c")), P("a", None, ("b", "c"))),
        (P("a", sizes={"a": (1, 11)}), P(None, "b"), P("a", "b", None, sizes={"a": (1, 11)})),
        (
            P(("a", "b"), sizes={("a", "b"): (1, 2, 3, 4, 2, 0)}),
            P(),
            P("a", None, None, sizes={"a": (6, 6)}),
        ),
        (
            P(("b", "a"), sizes={("b", "a"): (1, 2, 3, 4, 2, 0)}),
            P(),
            P("a", None, None, sizes={"a": (6, 6)}),
        ),
        (P("a"), Shard(-1, sizes=(12, 0, 0)), P("a", None, "b", sizes={"b": (12, 0, 0)})),
    ],
)
def test_along_an_axis(lies, where, becomes):
    layout = Layout.of(MESH, lies, (12, 12, 12))
    assert layout.replace(along(layout, where, "b")) is layout.replace(becomes)


@given(st.data())
def test_other_axes_keep_their_dims(data):
    lies, where = (data.draw(specs(("a", "b", "c"), 3)) for _ in range(2))
    layout = Layout.of(MESH, lies, (12, 12, 12))
    found = layout.replace(along(layout, where, "b"))
    named = {"b", *where.axes}
    for axis in MESH.axis_names:
        source = Layout.of(MESH, where, (12, 12, 12)) if axis in named else layout
        assert found.dim_of.get(axis) == source.dim_of.get(axis)
        assert found.pending.get(axis) == source.pending.get(axis)
