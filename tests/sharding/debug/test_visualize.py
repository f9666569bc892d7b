"""Pictures of layouts in plain text."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given
from torch import nn

import shardmesh as sm
from shardmesh import Layout, P
from shardmesh.debug import visualize
from shardmesh.sharding.parallel.rank_table import RankTable
from tests.device import DEVICE
from tests.sharding.layout.test_layout import layouts
from tests.sharding.ranks import collectives, every_rank, on_mesh, place

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
           dim 2 0:2  dim 2 2:4
dim 0 0:1          0          1
dim 0 1:2          2          3""",
        ),
        (
            P("dp", None, None, None, unreduced={"tp": "max"}),
            (3, 2, 1, 2),
            """
f32[3, 2, 1, 2] @ P('dp', None, None, None, unreduced={'tp': 'max'}) on (dp=2, tp=2)
           dim 3 0:2
dim 0 0:2    0,1 max
dim 0 2:3    2,3 max""",
        ),
        (
            P("dp", sizes={"dp": (0, 3)}),
            (3, 2),
            """
f32[3, 2] @ P('dp', None, sizes={'dp': (0, 3)}) on (dp=2, tp=2)
          cols 0:2
rows 0:3       2,3""",
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


def test_further_split_dims_are_pages():
    layout = Layout.of(sm.AbstractMesh((2, 2, 2), ("a", "b", "c")), P("a", "b", "c"), (5, 4, 3))
    assert visualize(layout).splitlines()[1:] == [
        "[0:3, :, :]  dim 2 0:2  dim 2 2:3",
        "  dim 1 0:2          0          1",
        "  dim 1 2:4          2          3",
        "[3:5, :, :]  dim 2 0:2  dim 2 2:3",
        "  dim 1 0:2          4          5",
        "  dim 1 2:4          6          7",
    ]


@given(layouts(("sum", "max")))
def test_every_rank_with_elements_is_shown_once_at_its_box(layout):
    """For any number of dims and axes, the labels around a rank are the intervals of its box."""
    boxes = {
        int(layout.mesh.ranks[c]): box for c, box in layout.boxes() if all(b > a for a, b in box)
    }
    found = []
    for (corner, *cols), *rows in RankTable.of(layout).pages:
        for label, *cells in rows:
            for col, cell in zip(cols, cells, strict=True):
                for rank in ranks_in(cell.text):
                    found.append(rank)
                    check_place(boxes[rank], layout.shape, corner.text, label.text, col.text)
    assert sorted(found) == sorted(boxes)


def check_place(box, shape, page, row, col):
    for label in (row, col):
        if label != "all":
            dim = {"rows": -2, "cols": -1}.get(label.split()[0])
            dim = int(label.split()[1]) if dim is None else dim
            assert label.split()[-1] == "{}:{}".format(*box[dim])
    named = {label.split()[-1] for label in (row, col)}
    for dim, entry in enumerate(page.strip("[]").split(", ") if page else []):
        assert entry in (":", "{}:{}".format(*box[dim]))
        assert entry != ":" or box[dim] == (0, shape[dim]) or "{}:{}".format(*box[dim]) in named
    if not page:
        hidden = [
            i for i, (interval, n) in enumerate(zip(box, shape, strict=True)) if interval != (0, n)
        ]
        assert len(hidden) <= 2


def ranks_in(text):
    return [rank for part in text.split()[0].strip("+").split(",") for rank in expanded(part)]


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
    sm.parallel.shard_parameter(module.inner, "weight", mesh, P(None, "a"))
    module.register_buffer("steps", torch.zeros((), dtype=torch.int64))
    lines = [line.split("  ") for line in visualize(module).splitlines()]
    assert [[cell.strip() for cell in line if cell] for line in lines] == [
        ["tensor", "global", "spec", "local", "bytes"],
        ["inner.weight", "f32[3, 4]", "P(None, 'a')", "[3, 2]", "24"],
        ["inner.bias", "f32[3]", "plain", "[3]", "12"],
        ["steps", "i64[]", "plain", "[]", "8"],
        ["3 tensors on (a=2): 44 bytes on this rank, 68 in all"],
    ]


# -- large meshes ----------------------------------------------------------------------------------

LARGE = sm.AbstractMesh((16, 8, 8), ("a", "b", "c"))


@pytest.mark.parametrize(
    ("spec", "left_out"),
    [
        (P(("a", "b", "c")), "1,008 of 1,024 rows"),
        (P(None, None, ("a", "b", "c")), "1,016 of 1,024 columns"),
        (P("a", "b", "c"), "12 of 16 pages"),
        (P(("a", "b"), None, "c"), "112 of 128 rows"),
        (P("a"), None),
    ],
)
def test_large_tables_show_both_ends_and_count_the_rest(spec, left_out):
    lines = visualize(Layout.of(LARGE, spec, (4096, 4096, 4096))).splitlines()
    assert len(lines) <= 70
    assert max(map(len, lines)) < 300
    assert lines[-1].startswith("not shown: ") == (left_out is not None)
    if left_out:
        assert left_out in lines[-1]
        assert "..." in "".join(lines[1:-1]) or "pages" in left_out
    last = lines[-2] if left_out else lines[-1]
    assert last.split()[-1] in ("1023", "960-1023")


def test_many_nonconsecutive_ranks_are_counted():
    assert (
        visualize(Layout.of(LARGE, P("c"), (8,)))
        .splitlines()[2]
        .startswith("all  0,8,16,...,1016 (128 ranks)  1,9")
    )


def test_many_sizes_are_shortened():
    mesh = sm.AbstractMesh((512,), ("a",))
    layout = Layout.of(mesh, P("a", sizes={"a": [3] + [1] * 511}), (514,))
    assert (
        visualize(layout).splitlines()[0]
        == "f32[514] @ P('a', sizes={'a': (3, ..., 1)}) on (a=512)"
    )


# -- other styles ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec", [P("dp", "tp"), P(unreduced={"dp"}), P("dp", sizes={"dp": (0, 5)})]
)
def test_rich_shows_the_same_cells_in_the_color_of_their_ranks(spec):
    layout = Layout.of(MESH, spec, (5, 4))
    table = visualize(layout, style="rich")
    shown = [[cell.plain for cell in column.cells] for column in table.columns]
    ((_, *rows),) = RankTable.of(layout).pages
    assert shown == [[row[i].text for row in rows] for i in range(len(rows[0]))]
    assert str(table.title) == str(layout)
    colours = [str(cell.style) for column in list(table.columns)[1:] for cell in column.cells]
    assert len(set(colours)) == len(colours)


def test_rich_has_a_section_for_each_page(capsys):
    import rich

    layout = Layout.of(sm.AbstractMesh((2, 2, 2), ("a", "b", "c")), P("a", "b", "c"), (5, 4, 3))
    rich.print(visualize(layout, style="rich"))
    text = capsys.readouterr().out
    assert "[0:3, :, :]" in text
    assert "[3:5, :, :]" in text
    rich.print(visualize(Layout.of(MESH, P(), (0, 2)), style="rich"))
    assert "no elements" in capsys.readouterr().out


def test_without_rich_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(ImportError, match=r"pip install shardmesh\[viz\]"):
        visualize(Layout.of(MESH, P(), (2,)), style="rich")


@pytest.mark.parametrize(
    ("x", "options", "error", "text"),
    [
        (
            torch.ones(3),
            {},
            TypeError,
            r"visualize\(Tensor\): a plain tensor is on this rank only; shard it",
        ),
        ("dp", {}, TypeError, r"visualize\(str\): give a ShardedTensor or a Layout"),
        (
            nn.Linear(2, 2),
            {"style": "picture"},
            ValueError,
            "the styles for a module are 'text', 'tree', 'rich'; draw",
        ),
        (
            Layout.of(MESH, P(), ()),
            {"style": "tree"},
            ValueError,
            "the styles for a tensor or a layout are 'text', 'rich', 'pic",
        ),
        (Layout.of(MESH, P(), ()), {"style": ["text"]}, ValueError, r"style=\['text'\]\)"),
        (
            Layout.of(MESH, P(), ()),
            {"path": "x.svg"},
            ValueError,
            "only pictures are written to files; add style='picture'",
        ),
        (
            Layout.of(LARGE, P(), ()),
            {"style": "picture"},
            ValueError,
            r"up to 64 ranks and \(a=16, b=8, c=8\) has 1024; draw",
        ),
    ],
)
def test_errors(x, options, error, text):
    with pytest.raises(error, match=text):
        visualize(x, **options)


def test_outside_the_mesh():
    def program():
        x = sm.zeros(
            5, 2, device_mesh=sm.DeviceMesh(DEVICE, [2, 1], axis_names=("a",)), placements=P("a")
        )
        return visualize(x)

    table = ["          cols 0:2", "rows 0:3         2", "rows 3:5         1"]
    assert set(sm.simulate(3)(program)()) == {
        "\n".join(["f32[5, 2] @ P('a', None) on (a=2)", *table])
    }


@pytest.mark.parametrize("style", ["text", "tree"])
def test_the_value_of_an_expression_is_shown_as_lines(style):
    """A notebook shows `repr`, or what IPython's printer makes of it."""
    if style == "tree":
        text = visualize(nn.Linear(2, 2), style="tree")
    else:
        text = visualize(Layout.of(sm.AbstractMesh((2,), ("dp",)), P("dp"), (4,)))
    assert isinstance(text, str)
    assert repr(text) == str(text)
    assert "\n" in f"{visualize(nn.Sequential(nn.Linear(2, 2)), style='tree')!r}"
    printer = pytest.importorskip("IPython.lib.pretty")
    assert printer.pretty(text) == str(text)
