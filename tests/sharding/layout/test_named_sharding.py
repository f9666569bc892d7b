"""Comparison of specs and shardings, as in JAX."""

from __future__ import annotations

import pytest

from shardmesh import AbstractMesh, NamedSharding, P

MESH = AbstractMesh((2, 4, 1), ("dp", "tp", "one"))


def test_specs_compare_by_spelling():
    assert P(None) != P()
    assert P("dp") != P("dp", None)
    assert P(("dp",)) == P("dp")


@pytest.mark.parametrize(
    ("a", "b", "ndim", "alike"),
    [
        (P("dp"), P("dp", None), 2, True),
        (P(), P(None, None), 2, True),
        (P("one", "dp"), P(None, ("dp", "one")), 2, True),
        (P("dp", unreduced={"one"}), P("dp"), 1, True),
        (P("dp"), P(None, "dp"), 2, False),
        (P(("dp", "tp")), P(("tp", "dp")), 1, False),
        (P("dp", unreduced={"tp"}), P("dp"), 1, False),
        (P("dp", sizes={"dp": (1, 3)}), P("dp"), 1, False),
    ],
)
def test_equivalent_shardings(a, b, ndim, alike):
    assert NamedSharding(MESH, a).is_equivalent_to(NamedSharding(MESH, b), ndim) is alike
    assert not NamedSharding(MESH, a).is_equivalent_to(
        NamedSharding(AbstractMesh((2, 4, 2), MESH.axis_names), b), ndim
    )


def test_spec_with_too_many_entries_raises():
    with pytest.raises(ValueError, match="2 entries"):
        NamedSharding(MESH, P("dp", "tp")).is_equivalent_to(NamedSharding(MESH, P("dp")), 1)


def test_equal_to_jax():
    jax = pytest.importorskip("jax")
    theirs = jax.sharding.PartitionSpec
    assert theirs(None) != theirs()
    assert theirs("dp") != theirs("dp", None)
