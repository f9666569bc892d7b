"""Trees and their prefixes, next to a definition by paths and torch's pytree."""

from __future__ import annotations

import dataclasses
import re
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.trees import (
    PrefixKind,
    broadcast_prefix,
    flatten,
    flatten_without_none,
    map_prefix,
    map_tensors,
    paths_of,
    place_of,
    tensors_in,
    unflatten,
)
from tests.device import DEVICE
from tests.sharding.ranks import every_rank
from tests.tiers import examples

Pair = namedtuple("Pair", ("first", "second"))


@dataclasses.dataclass
class Point:
    """A node of a class of the program."""

    x: Any
    y: Any


class Box:
    """A node of a class that is registered without keys."""

    def __init__(self, *items: Any) -> None:
        self.items = items


class Unregistered(dict):
    """A dict that is a leaf."""


pytree.register_dataclass(Point)
pytree.register_pytree_node(Box, lambda x: (list(x.items), None), lambda items, _: Box(*items))

AXES = PrefixKind(lambda x: x is None or type(x) is int, "an int or None")
PARTIAL = AXES._replace(is_partial=True)

# -- random trees ----------------------------------------------------------------------------------

# A description of a tree: a leaf, or the kind of a node and its branches by key.
FAMILIES = {
    "tuple": "sequence",
    "list": "sequence",
    "pair": "sequence",
    "dict": "dict",
    "ordered": "dict",
    "default": "dict",
    "point": "point",
}
LEAVES = st.sampled_from([torch.ones(2), 1.5, "text", None, torch.float32])
VALUES = st.one_of(st.integers(0, 9), st.none())


@dataclasses.dataclass(frozen=True)
class Node:
    kind: str
    branches: tuple[tuple[Any, Any], ...]

    @property
    def family(self) -> str:
        return FAMILIES[self.kind]

    def keys(self) -> set[Any]:
        return {key for key, _ in self.branches}


@dataclasses.dataclass(frozen=True)
class Leaf:
    value: Any


@st.composite
def nodes(draw: Any, below: Any) -> Node:
    kind = draw(st.sampled_from(sorted(FAMILIES)))
    if FAMILIES[kind] == "dict":
        keys = draw(st.lists(st.sampled_from(["w", "b", 0, "x"]), unique=True, max_size=3))
    elif kind in ("pair", "point"):
        keys = [0, 1] if kind == "pair" else ["x", "y"]
    else:
        keys = list(range(draw(st.integers(0, 3))))
    branches = [(key, draw(below)) for key in keys]
    if kind == "point":  # a field that is None is no leaf of a dataclass: see MATCHES
        branches = [(key, Leaf(0) if x == Leaf(None) else x) for key, x in branches]
    return Node(kind, tuple(branches))


TREES = st.recursive(st.builds(Leaf, LEAVES), nodes, max_leaves=8)


def build(tree: Any) -> Any:
    """Return the tree of a description."""
    if isinstance(tree, Leaf):
        return tree.value
    items = [(key, build(branch)) for key, branch in tree.branches]
    values = [value for _, value in items]
    return {
        "tuple": lambda: tuple(values),
        "list": lambda: values,
        "pair": lambda: Pair(*values),
        "dict": lambda: dict(items),
        "ordered": lambda: OrderedDict(items),
        "default": lambda: defaultdict(int, items),
        "point": lambda: Point(*values),
    }[tree.kind]()


@st.composite
def prefixes(draw: Any, tree: Any) -> Any:
    """Draw a description of a prefix of a tree, or of something close to one."""
    if isinstance(tree, Leaf) or draw(st.integers(0, 3)) == 0:
        if draw(st.integers(0, 15)) == 0:
            return draw(nodes(st.builds(Leaf, VALUES)))
        return Leaf(draw(VALUES))
    branches = [(key, draw(prefixes(branch))) for key, branch in tree.branches]
    kind = tree.kind
    if FAMILIES[kind] == "dict":
        branches = draw(st.permutations(branches))
        kind = draw(st.sampled_from(["dict", "ordered", "default"]))
    elif kind != "point":
        kind = draw(st.sampled_from(["tuple", "list"]))
    if kind != "point" and branches and draw(st.integers(0, 15)) == 0:
        branches = branches[:-1]
    return Node(kind, tuple(branches))


def inner(tree: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Node]:
    """Return the nodes of a tree by path."""
    if isinstance(tree, Leaf):
        return {}
    below = [inner(branch, (*path, key)) for key, branch in tree.branches]
    return {path: tree} | {p: node for part in below for p, node in part.items()}


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """Return the leaves of a tree by path, in order."""
    if isinstance(tree, Leaf):
        return {path: tree.value}
    below = [leaves(branch, (*path, key)) for key, branch in tree.branches]
    return {p: leaf for part in below for p, leaf in part.items()}


def text_of(tree: Any, path: tuple[Any, ...]) -> str:
    """Return a path in a tree as Python would write it."""
    text = ""
    for key in path:
        if tree.kind == "point":
            text += f".{key}"
        elif tree.kind == "pair":
            text += f".{Pair._fields[key]}"
        else:
            text += f"[{key!r}]"
        tree = dict(tree.branches)[key]
    return text


@settings(max_examples=examples(300))
@given(st.data(), TREES)
def test_a_prefix_gives_each_leaf_the_value_above_it(data, tree):
    prefix = data.draw(prefixes(tree))
    tree_nodes, prefix_nodes = inner(tree), inner(prefix)
    differing = [
        path
        for path, node in prefix_nodes.items()
        if path not in tree_nodes
        or tree_nodes[path].family != node.family
        or tree_nodes[path].keys() != node.keys()
    ]
    # The first nodes that differ: below them paths say nothing.
    first = [path for path in differing if all(path[:n] not in differing for n in range(len(path)))]
    if first:
        with pytest.raises(ValueError, match="expected an int or None") as raised:
            broadcast_prefix("f: axes", build(prefix), build(tree), AXES)
        places = [f"f: axes{text_of(tree, path)}: expected" for path in first]
        assert any(str(raised.value).startswith(place) for place in places), str(raised.value)
        return
    values = leaves(prefix)
    expected = [
        next(values[path[:n]] for n in range(len(path) + 1) if path[:n] in values)
        for path in leaves(tree)
    ]
    assert broadcast_prefix("f: axes", build(prefix), build(tree), AXES) == expected
    replaced = map_prefix("f: axes", lambda _, value: f"{value}", build(prefix), build(tree), AXES)
    assert flatten(replaced)[0] == list(map(str, values_in_order(prefix, tree)))
    assert pytree.tree_is_leaf(replaced) or type(replaced) is type(build(tree))


def values_in_order(prefix: Any, tree: Any) -> Any:
    """Yield the values of a prefix in the order of the tree."""
    if isinstance(prefix, Leaf):
        yield prefix.value
        return
    parts = dict(prefix.branches)
    for key, branch in tree.branches:
        yield from values_in_order(parts[key], branch)


@settings(max_examples=examples(200))
@given(TREES)
def test_leaves_structure_and_paths_are_those_of_torch(description):
    tree = build(description)
    entries, _ = pytree.tree_flatten_with_path(tree)
    flat, structure = flatten(tree)
    assert len(flat) == len(entries)
    assert all(leaf is other for leaf, (_, other) in zip(flat, entries, strict=True))
    assert paths_of(tree) == [pytree.keystr(path) for path, _ in entries]
    assert paths_of(tree) == [text_of(description, path) for path in leaves(description)]
    numbers = list(range(len(flat)))
    rebuilt = unflatten(structure, numbers)
    assert pytree.tree_structure(rebuilt) == pytree.tree_structure(tree)
    assert pytree.tree_leaves(rebuilt) == numbers
    without_none, definition = flatten_without_none(tree)
    assert all(leaf is not None for leaf in without_none)
    again = definition.unflatten(without_none)
    assert all(a is b for a, b in zip(flatten(again)[0], flat, strict=True))
    tensors = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
    if not re.search("Point|defaultdict|OrderedDict", repr(tree)):  # no arguments of operators
        assert all(a is b for a, b in zip(tensors_in((tree,)), tensors, strict=True))
        halves = map_tensors(lambda x: x / 2, (tree,))
        assert all(x.tolist() == [0.5, 0.5] for x in tensors_in(halves))
        assert pytree.tree_structure(halves[0]) == pytree.tree_structure(tree)


# -- odd containers --------------------------------------------------------------------------------

X = torch.ones(2)
MATCHES = {
    "one value": (3, {"a": [X, None], "b": ()}, [3, 3]),
    "no leaves": (3, [(), {}], []),
    "empty containers": (((), {}), [[], {}], []),
    "None as a leaf": ([1, 2], (None, X), [1, 2]),
    "None as a value": ({"a": None, "b": 1}, {"a": [X, X], "b": X}, [None, None, 1]),
    "another order of keys": ({"b": 1, "a": 2}, {"a": X, "b": (X, X)}, [2, 1, 1]),
    "a tuple for a named tuple": ((1, 2), Pair(X, [X]), [1, 2]),
    "a named tuple for a list": (Pair(1, 2), [X, X], [1, 2]),
    "torch's results": ((1, 2), torch.max(torch.ones(2, 2), 1), [1, 2]),
    "a dataclass": (Point(1, [2, 3]), Point((X, X), [X, X]), [1, 1, 2, 3]),
    "a dataclass with None": (Point(None, 2), Point([X, X], X), [None, None, 2]),
    "a field without leaves": (Point(1, 2), Point(None, X), [2]),
    "a class without keys": (Box(1, 2), Box(X, [X, X]), [1, 2, 2]),
    "an OrderedDict": (OrderedDict(b=1, a=2), {"a": X, "b": X}, [2, 1]),
    "a dict for a defaultdict": ({"a": 1}, defaultdict(list, a=[X]), [1]),
    "a mapping that is a leaf": ([1], [UserDict(a=X, b=X)], [1]),
    "a shape": (None, torch.Size([2, 3]), [None, None]),
}


@pytest.mark.parametrize("name", MATCHES)
def test_matches(name):
    prefix, tree, expected = MATCHES[name]
    assert broadcast_prefix("f", prefix, tree, AXES) == expected
    mapped = map_prefix("f", lambda subtree, _: subtree, prefix, tree, AXES)
    assert type(mapped) is type(tree)
    assert all(a is b for a, b in zip(flatten(mapped)[0], flatten(tree)[0], strict=True))


MISMATCHES = {
    "fewer": (
        (1,),
        (X, X),
        "f: axes: expected an int or None, or a tree of these like it, for a tuple of 2; "
        "got a tuple of 1",
    ),
    "a tree for a leaf": (
        [{"a": (1, 2)}],
        [{"a": X}],
        "f: axes[0]['a']: expected an int or None for a Tensor; got a tuple of 2",
    ),
    "another key": (
        Pair(1, {"b": 1}),
        Pair(X, {"a": X}),
        "f: axes.second: expected an int or None, or a tree of these like it, for a dict with "
        "keys ['a']; got a dict with keys ['b']",
    ),
    "an empty tree": (
        [()],
        [{}],
        "f: axes[0]: expected an int or None, or a tree of these like it, for an empty dict; got "
        "an empty tuple",
    ),
    "another number of branches": (
        Box(1),
        Box(X, X),
        "f: axes: expected an int or None, or a tree of these like it, for a Box of 2; got a Box "
        "of 1",
    ),
    "another class": (
        Point(1, 2),
        Box(X, X),
        "f: axes: expected an int or None, or a tree of these like it, for a Box of 2; got a "
        "Point of 2",
    ),
    "a dict for a dataclass": (
        Point(1, {"x": 1, "y": 2}),
        Point(X, Point(X, X)),
        "f: axes.y: expected an int or None, or a tree of these like it, for a Point of 2; got a "
        "dict with keys ['x', 'y']",
    ),
    "a tree for None": (
        {"a": [1]},
        {"a": None},
        "f: axes['a']: expected an int or None for None; got a list of 1",
    ),
    "a tree in a class without keys": (
        Box(1, [2]),
        Box(X, X),
        "f: axes[1]: expected an int or None for a Tensor; got a list of 1",
    ),
    "a mapping that is a leaf": (
        {"a": 1},
        Unregistered(a=X),
        "f: axes: expected an int or None for an Unregistered with keys ['a']; got a dict with "
        "keys ['a']",
    ),
    "many keys": (
        {},
        dict.fromkeys(range(20)),
        "f: axes: expected an int or None, or a tree of these like it, for a dict with keys "
        "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ...]; got an empty dict",
    ),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_mismatches_name_the_path_and_what_was_expected(name):
    prefix, tree, text = MISMATCHES[name]
    for call in (
        lambda: broadcast_prefix("f: axes", prefix, tree, AXES),
        lambda: map_prefix("f: axes", lambda subtree, _: subtree, prefix, tree, AXES),
    ):
        with pytest.raises(ValueError, match=re.escape(text)) as raised:
            call()
        assert str(raised.value) == text


def test_what_is_neither_a_value_nor_a_container():
    text = "f: axes[1]['a']: expected an int or None for a Tensor; got 'dp'"
    with pytest.raises(TypeError) as raised:
        broadcast_prefix("f: axes", (1, {"a": "dp"}), (X, {"a": X}), AXES)
    assert str(raised.value) == text


def test_partial_dicts_stand_for_any_mapping():
    def call(prefix: Any, tree: Any) -> Any:
        return map_prefix("f", lambda subtree, value: (subtree, value), prefix, tree, PARTIAL)

    assert call({"a": 1, "c": 2}, {"a": X, "b": "s"}) == {"a": (X, 1), "b": ("s", None)}
    assert call([{"a": 1}], [UserDict(b=3, a=X)]) == [{"b": (3, None), "a": (X, 1)}]
    found = call({"a": 1}, OrderedDict(b=3, a=X))
    assert type(found) is OrderedDict
    assert list(found.items()) == [("b", (3, None)), ("a", (X, 1))]
    assert broadcast_prefix("f", {"a": 1}, {"b": [X, X], "a": X}, PARTIAL) == [None, None, 1]
    with pytest.raises(ValueError, match=r"f\[0\]\['a'\]: expected an int or None for an int"):
        call([{"a": [1]}], [UserDict(a=3)])


def test_place_of_a_leaf():
    assert [place_of({"w": [X, X]}, i) for i in (0, 1)] == [" at ['w'][0]", " at ['w'][1]"]
    assert place_of(X, 0) == ""


# -- who matches prefixes --------------------------------------------------------------------------

PUT = {"w": torch.ones(4, 2), "layers": [torch.ones(4), torch.ones(2)]}


def put(mesh: sm.DeviceMesh) -> Any:
    return sm.device_put(PUT, mesh, P())


CALLERS = {
    "device_put": (
        lambda mesh, specs: sm.device_put(PUT, mesh, specs),
        "device_put: spec",
        "P(...) or a list of placements (P() for replicated)",
    ),
    "with_sharding_constraint": (
        lambda mesh, specs: sm.with_sharding_constraint(put(mesh), specs),
        "with_sharding_constraint: spec",
        "P(...) or a list of placements (P() for replicated)",
    ),
    "in_specs of shard_map": (
        lambda mesh, specs: sm.shard_map(
            lambda tree: tree["w"].sum(), mesh=mesh, in_specs=(specs,), out_specs=P()
        )(PUT),
        "shard_map(<lambda>): in_specs[0]",
        "P(...), one placement per mesh axis, or None for what is no tensor",
    ),
    "out_specs of shard_map": (
        lambda mesh, specs: sm.shard_map(
            lambda x: {"w": x, "layers": [x, x]}, mesh=mesh, in_specs=P(), out_specs=specs
        )(PUT["w"]),
        "shard_map(<lambda>): out_specs",
        "P(...), one placement per mesh axis, or None for what is no tensor",
    ),
    "in_axes of vmap": (
        lambda mesh, specs: sm.vmap(lambda tree: tree["w"], (specs,))(PUT),
        "vmap(<lambda>): in_axes[0]",
        "an int or None",
    ),
    "out_axes of vmap": (
        lambda mesh, specs: sm.vmap(lambda x: {"w": x, "layers": [x, x]}, 0, specs)(PUT["w"]),
        "vmap(<lambda>): out_axes",
        "an int or None",
    ),
    "global_array_to_host_local_array": (
        lambda mesh, specs: sm.multihost.global_array_to_host_local_array(put(mesh), mesh, specs),
        "global_array_to_host_local_array: pspecs",
        "P(...) or a list of placements (P() for replicated)",
    ),
}


@pytest.mark.parametrize("name", CALLERS)
def test_all_have_one_text(name):
    call, argument, expected = CALLERS[name]
    value = 0 if "axes" in name else P()
    wrong = [
        (
            {"w": value, "layers": [value]},
            ValueError,
            f"{argument}['layers']: expected {expected}, or a tree of these like it, for a list of "
            "2; got a list of 1",
        ),
        (
            {"w": value, "layers": [value, "dp"]},
            TypeError,
            f"{argument}['layers'][1]: expected {expected} for a Tensor; got 'dp'",
        ),
    ]

    @every_rank(2)
    def program(mesh: sm.DeviceMesh) -> None:
        for specs, kind, text in wrong:
            with pytest.raises(kind) as raised:
                call(mesh, specs)
            assert str(raised.value).replace("ShardedTensor", "Tensor") == text

    program()


def test_shardings_of_jit_may_leave_out_keys():
    def program() -> Any:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("a",))
        split, whole = sm.NamedSharding(mesh, P("a")), sm.NamedSharding(mesh, P())
        f = sm.jit(
            lambda batch, scale: {"y": batch["x"] * scale, "n": batch["n"]},
            in_shardings=({"x": split, "unknown": split}, None),
            out_shardings={"y": whole},
            backend="eager",
        )
        for _ in range(2):
            out = f(UserDict(x=torch.ones(4), n=sm.ones(4, device_mesh=mesh)), 3.0)
            assert out["y"].full_tensor().tolist() == [3.0] * 4
            assert out["y"].spec == P(None)
            assert out["n"].spec == sm.ones(4, device_mesh=mesh).spec
        text = re.escape(
            "in_shardings[0]: expected a NamedSharding or None for a Tensor; got a dict with keys "
            "['x', 'unknown']"
        )
        with pytest.raises(ValueError, match=text):
            f(torch.ones(4), 3.0)
        text = re.escape(
            "in_shardings: expected a NamedSharding or None, or a tree of these like it, for a "
            "tuple of 1; got a tuple of 2"
        )
        with pytest.raises(ValueError, match=text):
            f({"x": torch.ones(4)})

    sm.simulate(2)(program)()
