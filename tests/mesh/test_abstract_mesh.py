"""Meshes without processes: names, sizes, coordinates."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmesh.mesh import AbstractMesh, MeshError

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@given(shape=SHAPES)
def test_ranks_and_coordinates_agree(shape: tuple[int, ...]) -> None:
    mesh = AbstractMesh(shape)
    assert mesh.ranks.shape == mesh.shape == shape
    assert mesh.size() == mesh.ranks.size
    for place, rank in np.ndenumerate(mesh.ranks):
        assert mesh.coordinate_of(int(rank)) == place
    assert mesh.coordinate_of(mesh.size()) is None
    assert mesh.coordinate_of(-1) is None


def test_sizes_and_names() -> None:
    mesh = AbstractMesh((4096, 8), ("dp", "tp"))
    assert (mesh.size(), mesh.size(("tp", "dp"))) == (32768, 32768)
    assert (mesh.size("tp"), mesh.size(0), mesh.size(-1)) == (8, 4096, 8)
    assert mesh.axis_names == mesh.mesh_dim_names == ("dp", "tp")
    assert (mesh.axis_index("tp"), mesh.ndim) == (1, 2)
    assert repr(mesh) == "AbstractMesh(dp=4096, tp=8)"
    assert AbstractMesh((2, 2)).axis_names == ("axis_0", "axis_1")


def test_value_equality_hash_and_copies() -> None:
    mesh = AbstractMesh((2, 4), ("a", "b"))
    assert mesh == AbstractMesh([2, 4], ["a", "b"])
    assert hash(mesh) == hash(AbstractMesh((2, 4), ("a", "b")))
    assert mesh != AbstractMesh((4, 2), ("a", "b"))
    assert mesh != AbstractMesh((2, 4), ("b", "a"))
    assert mesh != "mesh"
    assert pickle.loads(pickle.dumps(mesh)) == mesh
    assert copy.deepcopy(mesh) is mesh
    assert mesh.cache is None


def test_immutable_ranks() -> None:
    with pytest.raises(ValueError, match="read-only"):
        AbstractMesh((2,)).ranks[0] = 1


def test_parts() -> None:
    mesh = AbstractMesh((2, 3, 4), ("a", "b", "c"))
    assert mesh["c", "a"] == AbstractMesh((4, 2), ("c", "a"))
    assert mesh["c", "a"] is mesh["c", "a"]
    assert mesh["a", "b", "c"] is mesh
    assert mesh.flatten(("c", "a")) == AbstractMesh((8,), ("c_a",))
    assert mesh["c_a"] is mesh.flatten(("c", "a"))
    assert mesh.size("c_a") == 8
    assert mesh.flatten(name="all").shape == (24,)


def test_flattened_name_is_an_axis_of_slices() -> None:
    mesh = AbstractMesh((2, 3, 4), ("a", "b", "c"))
    flat = mesh["b", "c"].flatten(name="bc")
    assert mesh["bc"] == flat == AbstractMesh((12,), ("bc",))
    assert mesh["a", "bc"] == AbstractMesh((2, 12), ("a", "bc"))
    assert mesh["bc", "a"]["bc"] == flat
    assert mesh.size(("a", "bc")) == 24
    assert mesh["bc", "a"].flatten() == mesh["bc_a"] == AbstractMesh((24,), ("bc_a",))
    with pytest.raises(MeshError, match=r"axis 'b' is used twice in \('b', 'b', 'c'\)"):
        mesh["b", "bc"]


def test_slice_cannot_reuse_a_name_of_another_axis() -> None:
    mesh = AbstractMesh((2, 3, 4), ("a", "b", "c"))
    with pytest.raises(
        MeshError, match=r"flatten\(\('b', 'c'\)\): the name 'a' is already used for \('a',\)"
    ):
        mesh["b", "c"].flatten(name="a")
    mesh["a", "b"].flatten(name="n")
    with pytest.raises(MeshError, match=r"'n' is already used for \('a', 'b'\)"):
        mesh["b", "c"].flatten(name="n")
    assert mesh["b", "c"].flatten(name="m") == mesh["m"]  # what was refused left nothing behind


def test_errors_subclass_those_of_torch() -> None:
    mesh = AbstractMesh((2, 3), ("a", "b"))
    for kind, make in {
        KeyError: lambda: mesh["pp"],
        IndexError: lambda: mesh.size(2),
        RuntimeError: lambda: mesh["a", "a"],
    }.items():
        with pytest.raises(kind) as caught:
            make()
        assert isinstance(caught.value, MeshError)
        assert not str(caught.value).startswith(('"', "'"))  # as the text of a KeyError would
        assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args
    with pytest.raises(RuntimeError, match="'a' is used twice"):
        AbstractMesh((2, 3), ("a", "a"))
    with pytest.raises(RuntimeError, match="the names given are"):
        AbstractMesh((2, 3), ("a",))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: m.size("x"), r"unknown axis 'x': the mesh has axes \['a', 'b'\]"),
        (lambda m: m["x"], "unknown axis 'x'"),
        (lambda m: m[0], "must be a name or a tuple of names"),
        (lambda m: m["a", "a"], r"axis 'a' is used twice in \('a', 'a'\)"),
        (lambda m: m[()], "no axis given"),
        (lambda m: m.size(2), "axis 2 is out of range"),
        (lambda m: m.flatten(("a", "b"), name="a"), r"'a' is already used for \('a',\)"),
        (lambda m: [m.flatten(axes, name="n") for axes in ("ab", "ba")], "unknown axis 'ab'"),
        (
            lambda m: [m.flatten(tuple(axes), name="n") for axes in ("ab", "ba")],
            r"'n' is already used for \('a', 'b'\)",
        ),
    ],
)
def test_errors(make: object, message: str) -> None:
    with pytest.raises(MeshError, match=message):
        make(AbstractMesh((2, 3), ("a", "b")))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((0, 2),), r"shape \(0, 2\).*positive integers"),
        (((2.5,),), "positive integers"),
        (((),), "positive integers"),
        (("ab",), "positive integers"),
        ((4,), "positive integers"),
        (((2, 2), ("a",)), r"has 2 axes, but the names given are \('a',\)"),
        (((2, 2), ("a", 1)), "one non-empty string per axis"),
        (((2, 2), ("a", "a")), "axis 'a' is used twice"),
    ],
)
def test_invalid_shapes_and_names_raise(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(MeshError, match=message):
        AbstractMesh(*arguments)
