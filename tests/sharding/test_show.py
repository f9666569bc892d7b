"""Pictures of layouts in plain text."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from torch import nn

import shardmesh as sm
from shardmesh import Layout, P, visualize
from tests.sharding.ranks import collectives, every_rank, on_mesh, place
from tests.sharding.test_layout import layouts

MESH = sm.AbstractMesh((2, 2), ("dp", "tp"))


@pytest.mark.parametrize(
    ("spec", "shape", "picture"),
    [
        (
            P("dp", "tp"),
            (4, 6),
            """
f32[4, 6] @ P('dp', 'tp') on (dp=2, tp=2)
          cols 0:3  cols 3:6
rows 0:2         0         1
rows 2:4         2         3""",
        ),
        (
            P(("tp", "dp")),
            (5, 2),
            """
f32[5, 2] @ P(('tp', 'dp'), None) on (dp=2, tp=2)
          cols 0:2
rows 0:2         0
rows 2:3         2
rows 3:4         1
rows 4:5         3""",
        ),
        (
            P(None, "tp", unreduced={"dp"}),
            (4, 3),
            """
f32[4, 3] @ P(None, 'tp', unreduced={'dp'}) on (dp=2, tp=2)
          cols 0:2  cols 2:3
rows 0:4      0,2+      1,3+""",
        ),
        (
            P("tp"),
            (6,),
            """
f32[6] @ P('tp') on (dp=2, tp=2)
     cols 0:3  cols 3:6
all       0,2       1,3""",
        ),
        (
            P(),
            (),
            """
f32[] @ P() on (dp=2, tp=2)
     all
all  0-3""",
        ),
        (
            P("dp", None, "tp"),
            (2, 3, 4),
            """
f32[2, 3, 4] @ P('dp', None, 'tp') on (dp=2, tp=2)
          cols 0:2  cols 2:4
rows 0:3         0         1""",
        ),
        (
            P("dp"),
            (0, 3),
            """
f32[0, 3] @ P('dp', None) on (dp=2, tp=2)
no elements""",
        ),
    ],
)
def test_pictures(spec, shape, picture):
    assert visualize(Layout.of(MESH, spec, shape)) == picture.strip()


@given(layouts())
def test_every_rank_with_elements_is_in_the_picture_once(layout):
    """Of tensors with at most two dims, whatever the layout."""
    if len(layout.shape) > 2:
        return
    cells = [
        cell
        for line in visualize(layout).splitlines()[2:]
        for cell in line.split()
        if cell[0].isdigit() and ":" not in cell
    ]
    shown = sorted(rank for cell in cells for part in cell.strip("+").split(",") for rank in expanded(part))
    holders = sorted(int(layout.mesh.ranks[c]) for c, box in layout.boxes() if all(b > a for a, b in box))
    assert shown == holders


def expanded(part):
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)


def test_a_tensor_looks_the_same_on_every_rank():
    def program(mesh):
        x = place(mesh, torch.ones(5, 3), sm.Shard(0))
        with collectives() as records:
            text = visualize(x)
        assert records == []
        return text

    first, second = on_mesh((2,), program)
    assert first == second
    assert first.splitlines()[2:] == ["rows 0:3         0", "rows 3:5         1"]


@every_rank(2)
def test_a_module(mesh):
    module = nn.Module()
    module.inner = nn.Linear(4, 3)
    sm.shard_parameter(module.inner, "weight", mesh, P(None, "a"))
    module.register_buffer("steps", torch.zeros((), dtype=torch.int64))
    lines = [line.split("  ") for line in visualize(module).splitlines()]
    assert [[cell.strip() for cell in line if cell] for line in lines] == [
        ["tensor", "global", "spec", "local"],
        ["inner.weight", "f32[3, 4]", "P(None, 'a')", "[3, 2]"],
        ["inner.bias", "f32[3]", "plain", "[3]"],
        ["steps", "i64[]", "plain", "[]"],
    ]
