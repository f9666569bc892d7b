"""Patterns, factors of shapes, and mismatches."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardmesh.sharding.ops.rules.notation import NoMatch, einrule
from shardmesh.sharding.ops.rules.shapes.view import factor_shapes, reshape_rule


def meta(*shape):
    return torch.empty(shape, device="meta")


def test_ellipsis_lines_up_from_the_right():
    rule = einrule("... k, ... k n -> ... n", meta(5, 4, 3), meta(4, 3, 2))
    assert rule.inputs == ((("_1",), ("_0",), ("k",)), (("_0",), ("k",), ("n",)))
    assert rule.outputs == ((("_1",), ("_0",), ("n",)),)
    assert rule.sizes == {"_1": 5, "_0": 4, "k": 3, "n": 2}


def test_a_dim_of_one_that_is_larger_elsewhere_is_broadcast():
    rule = einrule("..., ... -> ...", meta(4, 1), meta(3))
    assert rule.inputs == ((("_1",), ()), (("_0",),))
    assert rule.outputs == ((("_1",), ("_0",)),)


def test_a_dim_of_one_that_is_one_everywhere_may_be_split():
    assert einrule("..., ... -> ...", meta(1, 3), meta(1, 3)).inputs[0] == (("_1",), ("_0",))


def test_one_against_zero_broadcasts_to_zero():
    rule = einrule("..., ... -> ...", meta(1), meta(0))
    assert rule.inputs == (((),), (("_0",),))
    assert rule.sizes == {"_0": 0}


def test_brackets_name_whole_factors():
    rule = einrule("b [n], [n] -> b [n]", meta(4, 3), meta(3))
    assert rule.whole == {"n"}
    assert rule.outputs == ((("b",), ("n",)),)


def test_omitted_operands_drop_their_part_of_the_pattern():
    rule = einrule(
        "... k, n k, n -> ... n",
        meta(4, 3),
        meta(5, 3),
        None,
        linear=((0, 2), (1, 2)),
        additive=(2,),
    )
    assert len(rule.inputs) == 2
    assert rule.linear == ((0,), (1,))
    assert rule.additive == frozenset()
    rule = einrule(
        "n, ... k, n k -> ... n",
        None,
        meta(4, 3),
        meta(5, 3),
        linear=((1, 0), (2, 0)),
        additive=(0,),
    )
    assert rule.linear == ((0,), (1,))


def test_composite_dims_take_sizes():
    rule = einrule("(b s) d -> b s d", meta(6, 4), sizes={"b": 2, "s": 3})
    assert rule.inputs == ((("b", "s"), ("d",)),)
    assert rule.outputs == ((("b",), ("s",), ("d",)),)


@pytest.mark.parametrize(
    ("pattern", "operands"),
    [
        ("m k, k n -> m n", (meta(4, 3), meta(3))),
        ("a, b -> a", (meta(4),)),
        ("... a b -> ...", (meta(3),)),
    ],
)
def test_mismatches_raise(pattern, operands):
    with pytest.raises(NoMatch, match="->"):
        einrule(pattern, *operands)


# -- shapes as products of factors -----------------------------------------------------------------


def test_split_and_merge():
    before, after, sizes, whole = factor_shapes((8, 3), (2, 4, 3))
    assert [len(dim) for dim in before] == [2, 1]
    assert [len(dim) for dim in after] == [1, 1, 1]
    assert (before[0], before[1]) == ((after[0][0], after[1][0]), after[2])
    assert [sizes[f] for f in before[0]] == [2, 4]
    assert not whole


def test_incompatible_shapes_are_unsharded():
    before, after, _, whole = factor_shapes((6, 4), (4, 6))
    assert whole == {f for dim in (*before, *after) for f in dim}


def test_only_incompatible_dims_are_unsharded():
    before, after, _, whole = factor_shapes((5, 6, 4, 7), (5, 4, 6, 7))
    assert before[0] == after[0]
    assert before[3] == after[3]
    assert whole == {f for dim in (*before[1:3], *after[1:3]) for f in dim}


def test_dims_of_one_have_a_factor_where_they_stay():
    before, after, sizes, _ = factor_shapes((1, 4, 1), (4, 1))
    assert before == [(), *after]
    assert [sizes[name] for (name,) in after] == [4, 1]


def test_without_elements_only_leading_dims_are_followed():
    before, after, _, _ = factor_shapes((4, 0, 3), (4, 3, 0))
    assert before[0] == after[0] != ()
    assert before[1:] == [(), ()]
    assert after[1:] == [(), ()]


@st.composite
def two_shapes(draw):
    """Draw two shapes with the same number of elements."""
    primes = draw(st.lists(st.sampled_from([1, 2, 2, 3, 5]), max_size=6))

    def grouped():
        shape = []
        for p in draw(st.permutations(primes)):
            if shape and draw(st.booleans()):
                shape[-1] *= p
            else:
                shape.append(p)
        return tuple(shape) or (1,)

    return grouped(), grouped()


@given(two_shapes())
def test_factors_multiply_to_both_shapes(shapes):
    """Every dim is the product of its factors, and both sides list the factors that are not whole
    in the same order.
    """
    before, after, sizes, whole = factor_shapes(*shapes)
    for dims, shape in ((before, shapes[0]), (after, shapes[1])):
        assert all(
            math.prod(sizes[f] for f in dim) == n for dim, n in zip(dims, shape, strict=True)
        )
    assert [f for d in before for f in d if f not in whole] == [
        f for d in after for f in d if f not in whole
    ]


@given(two_shapes())
def test_a_reshape_rule_describes_the_result(shapes):
    rule = reshape_rule(meta(*shapes[0]), shapes[1])
    assert rule.transparent
    assert len(rule.outputs[0]) == len(shapes[1])
