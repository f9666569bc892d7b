"""The propagation engine: its choices, operands that stay in place, and results that cannot be
represented.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.ops.rules.notation import einrule
from shardmesh.sharding.ops.rules.propagation import CannotKeep, _assign_axes, assign
from shardmesh.sharding.ops.rules.shapes.view import reshape_rule
from tests.sharding.strategies import specs

MESH = sm.AbstractMesh((2,), ("a",))
MESH2 = sm.AbstractMesh((2, 2), ("a", "b"))
PRODUCT = ((0,), (1,))


def meta(*shape):
    return torch.empty(shape, device="meta")


def run(rule, *specs, mesh=MESH, fixed=None):
    """Return the operands' and the results' specs that the engine chooses."""
    layouts = [
        sm.Layout.of(mesh, spec, x.shape) for x, spec in zip(rule.operands, specs, strict=True)
    ]
    chosen = assign(rule, layouts, fixed)
    return [target.spec for target in chosen.targets], [
        spec.padded(len(d)) for spec, d in zip(chosen.outputs, rule.outputs, strict=True)
    ]


def matmul(m=4, k=6, n=8):
    return einrule("m k, k n -> m n", meta(m, k), meta(k, n), linear=PRODUCT)


# -- choices ---------------------------------------------------------------------------------------


def test_matching_layouts_are_kept():
    assert run(matmul(), P("a"), P()) == ([P("a", None), P(None, None)], [P("a", None)])
    assert run(matmul(), P(), P(None, "a")) == ([P(None, None), P(None, "a")], [P(None, "a")])


def test_contraction_of_a_sharded_dim_is_pending():
    assert run(matmul(), P(None, "a"), P("a")) == (
        [P(None, "a"), P("a", None)],
        [P(None, None, unreduced={"a"})],
    )


def test_cheapest_choice_wins():
    """For long contractions, slicing one operand and reducing the result is cheaper than gathering
    the other operand.
    """
    assert run(matmul(k=64), P(), P("a"))[0] == [P(None, "a"), P("a", None)]
    assert run(matmul(k=6), P(), P("a"))[0] == [P(None, None), P(None, None)]


def test_the_smaller_operand_moves():
    rule = einrule("..., ... -> ...", meta(64, 64), meta(64))
    assert run(rule, P(None, "a"), P("a"))[0] == [P(None, "a"), P("a")]
    rule = einrule("m n, n -> m n", meta(2, 64), meta(64))
    assert run(rule, P("a"), P("a"))[0][0] == P("a", None)


def test_pending_passes_linear_operators():
    assert run(matmul(), P(unreduced={"a"}), P())[1] == [P(None, None, unreduced={"a"})]
    both = einrule("..., ... -> ...", meta(4), meta(4), linear=((0, 1),))
    assert run(both, P(unreduced={"a"}), P(unreduced={"a"})) == (
        [P(None, unreduced={"a"})] * 2,
        [P(None, unreduced={"a"})],
    )


def test_pending_is_reduced_for_nonlinear_operators():
    assert run(einrule("... -> ...", meta(4)), P(unreduced={"a"})) == ([P(None)], [P(None)])
    both = einrule("..., ... -> ...", meta(4), meta(4), linear=((0, 1),))
    assert run(both, P(unreduced={"a"}), P())[0] == [P(None), P(None)]


def test_pending_is_reduced_to_a_shard_if_the_other_operand_is_sharded():
    rule = einrule("..., ... -> ...", meta(8), meta(8))
    assert run(rule, P(unreduced={"a"}), P("a")) == ([P("a"), P("a")], [P("a")])


def test_two_pending_factors_of_a_product_do_not_both_pass():
    targets, (out,) = run(matmul(), P(unreduced={"a"}), P(unreduced={"a"}))
    assert sum(bool(t.unreduced) for t in targets) <= 1
    assert bool(out.unreduced) == any(t.unreduced for t in targets)


def test_other_kinds_pass_only_operators_that_move_values():
    maximum = P(unreduced={"a": "max"})
    moved = einrule("m n -> n m", meta(4, 6), linear=((0,),), transparent=True)
    doubled = einrule("m n -> m n", meta(4, 6), linear=((0,),))
    assert run(moved, maximum)[1] == [P(None, None, unreduced={"a": "max"})]
    assert run(doubled, maximum)[1] == [P(None, None)]
    assert run(doubled, P(unreduced={"a": "avg"}))[1] == [P(None, None, unreduced={"a": "avg"})]


def test_bools_are_never_added():
    rule = einrule("... -> ...", meta(4).bool(), linear=((0,),))
    layout = sm.Layout.of(MESH, P(unreduced={"a"}), (4,), torch.bool)
    assert assign(rule, [layout]).outputs == (P(None),)


def test_bias_is_added_on_one_rank():
    rule = einrule(
        "m k, n k, n -> m n",
        meta(4, 6),
        meta(8, 6),
        meta(8),
        linear=((0, 2), (1, 2)),
        additive=(2,),
    )
    targets, (out,) = run(rule, P(None, "a"), P(None, "a"), P())
    assert targets[2] == P(None, unreduced={"a"})
    assert out == P(None, None, unreduced={"a"})


def test_bracketed_factors_are_gathered():
    assert run(einrule("b [n] -> b [n]", meta(4, 6)), P(None, "a")) == (
        [P(None, None)],
        [P(None, None)],
    )
    assert run(einrule("b [n] -> b [n]", meta(4, 6)), P("a")) == ([P("a", None)], [P("a", None)])


def test_axes_are_decided_independently():
    targets, (out,) = run(matmul(), P("a", "b"), P("b"), mesh=MESH2)
    assert targets == [P("a", "b"), P("b", None)]
    assert out == P("a", None, unreduced={"b"})


def test_axis_order_inside_a_dim_follows_the_largest_operand():
    rule = einrule("..., ... -> ...", meta(8, 4), meta(8, 1))
    targets, (out,) = run(rule, P(("b", "a")), P(("a", "b")), mesh=MESH2)
    assert targets == [P(("b", "a"), None)] * 2
    assert out == P(("b", "a"), None)


# -- composite dims --------------------------------------------------------------------------------


def test_shard_on_a_factor_boundary_is_kept():
    assert run(reshape_rule(meta(4, 6), (24,)), P("a"))[1] == [P("a")]
    assert run(reshape_rule(meta(24), (4, 6)), P("a"))[1] == [P("a", None)]
    assert run(reshape_rule(meta(24), (2, 12)), P(("a", "b")), mesh=MESH2)[1] == [P("a", "b")]
    assert run(reshape_rule(meta(4, 6), (24,)), P("a", "b"), mesh=MESH2) == (
        [P("a", None)],
        [P("a")],
    )
    assert run(reshape_rule(meta(2, 6), (12,)), P("a", "b"), mesh=MESH2)[1] == [P(("a", "b"))]


def test_shard_that_the_result_cannot_represent_is_gathered():
    """Five rows on two ranks are 3 and 2 rows, 9 and 6 elements; fifteen elements would be
    8 and 7.
    """
    assert run(reshape_rule(meta(5, 3), (15,)), P("a")) == ([P(None, None)], [P(None)])
    assert run(reshape_rule(meta(15), (5, 3)), P("a")) == ([P(None)], [P(None, None)])
    assert run(reshape_rule(meta(6, 4), (4, 6)), P("a")) == ([P(None, None)], [P(None, None)])


def test_uneven_shards_of_a_dim_that_stays_are_kept():
    assert run(reshape_rule(meta(5, 6), (5, 2, 3)), P("a"))[1] == [P("a", None, None)]


def test_minor_factors_are_sharded_only_below_fully_sharded_major_ones():
    assert run(reshape_rule(meta(4, 6), (24,)), P(None, "a")) == ([P(None, None)], [P(None)])


# -- in place --------------------------------------------------------------------------------------


def added(*specs, mesh=MESH):
    rule = einrule("..., ... -> ...", meta(4, 6), meta(4, 6), linear=((0, 1),))
    return run(rule, *specs, mesh=mesh, fixed=0)


def test_other_operand_is_redistributed_to_the_fixed_one():
    assert added(P("a"), P(None, "a"))[0] == [P("a", None)] * 2
    assert added(P(), P("a"))[0] == [P(None, None)] * 2
    assert added(P(unreduced={"a"}), P(unreduced={"a"}))[0] == [P(None, None, unreduced={"a"})] * 2


def test_fixed_operand_keeps_its_layout():
    with pytest.raises(CannotKeep):
        added(P(unreduced={"a"}), P())
    with pytest.raises(CannotKeep):
        run(einrule("[n] -> [n]", meta(4)), P("a"), fixed=0)


def test_result_has_the_layout_of_the_fixed_operand():
    """A replicated x times a pending y is pending: x.mul_(y) has to reduce y first."""
    rule = einrule("..., ... -> ...", meta(4), meta(4), linear=PRODUCT)
    assert run(rule, P(), P(unreduced={"a"}), fixed=0) == ([P(None), P(None)], [P(None)])


def test_the_order_of_axes_is_that_of_the_fixed_operand():
    rule = einrule("m, m k -> m", meta(8), meta(8, 9), linear=PRODUCT)
    targets, _ = run(rule, P(("b", "a")), P(("a", "b")), mesh=MESH2, fixed=0)
    assert targets[0] == P(("b", "a"))
    assert targets[1].dims[0] == ("b", "a")


def test_axes_of_one_rank_are_ignored():
    one = sm.AbstractMesh((1,), ("a",))
    assert run(einrule("[n] -> [n]", meta(4)), P("a"), mesh=one, fixed=0)[0] == [P("a")]


# -- remembered choices ----------------------------------------------------------------------------

PATTERNS = ["... m k, k n -> ... m n", "..., ... -> ...", "b [k], n [k] -> b n", "m n, m -> n"]


@given(st.data())
def test_choices_without_communication_are_cached_for_all_shapes(data):
    """All examples share the mesh, so most of them find a choice cached for other sizes."""
    pattern = data.draw(st.sampled_from(PATTERNS))
    size = {name: data.draw(st.sampled_from([0, 1, 2, 3, 5, 8])) for name in "bmkn"}
    dims = [[size[n] for n in part if n in size] for part in pattern.partition("->")[0].split(",")]
    if not any(dims):
        dims = [
            [size["m"], size["n"]],
            data.draw(st.sampled_from([[size["m"], size["n"]], [size["n"]], [1, size["n"]]])),
        ]
    rule = einrule(
        pattern, *[meta(*shape) for shape in dims], linear=data.draw(st.sampled_from([(), PRODUCT]))
    )
    layouts = [
        sm.Layout.of(MESH2, data.draw(specs(("a", "b"), len(shape), ("sum",))), shape)
        for shape in dims
    ]
    assert assign(rule, layouts) == _assign_axes(rule, layouts, None)
