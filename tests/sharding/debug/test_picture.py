"""Pictures of plans: every state's boxes, each once."""

from __future__ import annotations

import subprocess
import sys
from itertools import product

import pytest
import torch
from hypothesis import given

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.debug.picture import page_panels, plan_panels
from tests.device import DEVICE
from tests.sharding.strategies import AXES, ragged_moves

MOVES = [
    ((8, 8), P("dp", "tp"), P("tp", "dp")),
    ((8, 8), P("dp"), P(None, "tp")),
    ((10,), P(("dp", "tp")), P("tp")),
    ((4, 6, 8), P("dp", None, "tp"), P(None, None, ("dp", "tp"))),
    ((8, 8), P("dp", sizes={"dp": (3, 5)}), P("tp", unreduced={"dp"})),
    ((8, 8), P(unreduced={"dp", "tp"}), P("tp")),
    ((), P(unreduced={"dp"}), P()),
    ((0, 3), P("dp"), P(None, "tp")),
    ((4, 4), P("dp"), P("dp")),
]


def explained(shape, src, dst, mesh=((2, 4), ("dp", "tp")), **options):
    return sm.debug.explain(sm.Layout.of(sm.AbstractMesh(*mesh), src, shape), dst, **options)


def texts(figure):
    return [text.get_text() for text in figure.texts]


@pytest.mark.parametrize(("shape", "src", "dst"), MOVES)
def test_a_panel_for_each_state_and_a_patch_for_each_box(shape, src, dst):
    plan = explained(shape, src, dst)
    figure = plan.picture()
    layouts = [plan.plan.src, *[step.dst for step in plan.steps]]
    assert len(figure.axes) == len(layouts) == len(plan.steps) + 1
    for axes, layout in zip(figure.axes, layouts, strict=True):
        boxes = {box for _, box in layout.boxes() if all(start < stop for start, stop in box)}
        assert len(axes.patches) == len(axes.texts) == len(boxes)
        assert all(bool(patch.get_hatch()) == bool(layout.pending) for patch in axes.patches)


def test_patches_are_where_the_boxes_are():
    before, after = explained((8, 6), P("dp", "tp"), P("tp", "dp")).picture().axes
    for axes, spec in ((before, P("dp", "tp")), (after, P("tp", "dp"))):
        layout = sm.Layout.of(sm.AbstractMesh((2, 4), ("dp", "tp")), spec, (8, 6))
        labels = [text.get_text() for text in axes.texts]
        for patch, label in zip(axes.patches, labels, strict=True):
            (x, y), width, height = patch.get_xy(), patch.get_width(), patch.get_height()
            assert layout.box_at(tuple(map(int, label.split(",")))) == (
                (y, y + height),
                (x, x + width),
            )
        assert len(set(labels)) == len(labels)


@given(ragged_moves(("sum", "max")))
def test_every_holder_is_named_once(move):
    """For tensors with at most two dims, the labels of a state name each rank with data exactly
    once.
    """
    mesh_shape, shape, src, dst = move
    for panel in plan_panels(
        explained(
            shape[:2],
            *[_first_dims(spec) for spec in (src, dst)],
            (mesh_shape, AXES[: len(mesh_shape)]),
        ).plan
    ):
        holders = {
            c: box for c, box in panel.layout.boxes() if all(start < stop for start, stop in box)
        }
        named = [(c, part.box) for part in panel.parts for c in _meant(part.label, mesh_shape)]
        assert sorted(named) == sorted(holders.items())
        assert panel.empty == len(list(panel.layout.boxes())) - len(holders)
        assert any("+" in part.label for part in panel.parts) == any(
            panel.layout.mesh.size(axis) > 1 for axis in panel.layout.pending if panel.parts
        )


def _first_dims(spec):
    sized = {
        axes: sizes for axes, sizes in spec.sizes if any(axes[0] in dim for dim in spec.dims[:2])
    }
    return P(*spec.dims[:2], unreduced=dict(spec.unreduced), sizes=sized)


def _meant(label, mesh_shape):
    entries = label.split(",")
    return product(
        *[
            range(n) if e in ("*", "+") else (int(e),)
            for e, n in zip(entries, mesh_shape, strict=True)
        ]
    )


def test_steps_are_named_with_collective_axes_and_bytes():
    plan = explained((8, 8), P("dp"), P(None, "tp"))
    shown = "\n".join(texts(plan.picture()))
    for cost in plan.costs:
        assert cost.op in shown
        assert f"{cost.bytes_received:,} bytes" in shown
        assert ", ".join(cost.axes) in shown


def test_dims_that_are_not_shown_are_named():
    figure = explained((4, 6, 8), P("dp", None, "tp"), P(None, None, ("dp", "tp"))).picture()
    assert "dims 0 and 2 of 3, at index 0 of the others" in texts(figure)[0]


def test_of_hidden_dims_the_first_index_is_drawn():
    mesh = ((2, 2, 2), ("a", "b", "c"))
    (panel,) = plan_panels(explained((4, 4, 4), P("a", "b", "c"), P("a", "b", "c"), mesh).plan)
    assert [part.box[2] for part in panel.parts] == [(0, 2)] * 4


@pytest.mark.parametrize("ending", ["svg", "png", "pdf"])
def test_the_same_plan_gives_the_same_file(ending, tmp_path):
    for name in ("one", "two"):
        explained((8, 8), P("tp", unreduced={"dp"}), P("dp")).picture(tmp_path / f"{name}.{ending}")
    one, two = ((tmp_path / f"{name}.{ending}").read_bytes() for name in ("one", "two"))
    assert one == two
    assert one


def test_files_do_not_depend_on_the_users_settings(tmp_path):
    import matplotlib

    plan = explained((8, 8), P("dp", "tp"), P("tp", "dp"))
    plan.picture(tmp_path / "one.svg")
    with matplotlib.rc_context(
        {"font.size": 20, "axes.facecolor": "black", "svg.fonttype": "path"}
    ):
        plan.picture(tmp_path / "two.svg")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_up_to_64_ranks():
    mesh = ((8, 8), ("a", "b"))
    figure = explained((64, 64), P(("a", "b")), P("a", "b"), mesh).picture()
    assert [len(axes.patches) for axes in figure.axes] == [64, 64]
    with pytest.raises(ValueError, match=r"up to 64 ranks and \(a=13, b=5\) has 65; explain"):
        explained((64, 64), P("a"), P("b"), ((13, 5), ("a", "b"))).picture()


def test_without_matplotlib_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install shardmesh\[viz\]"):
        explained((8, 8), P("dp"), P()).picture()


def test_without_a_display_and_without_pyplot(tmp_path):
    """Nothing that could open a window is imported, whichever backend is configured."""
    code = (
        "import sys, shardmesh as sm; assert 'matplotlib' not in sys.modules\n"
        "layout = sm.Layout.of(sm.AbstractMesh((2,), ('x',)), sm.P('x'), (4, 4))\n"
        "sm.debug.explain(layout, sm.P()).picture(sys.argv[1])\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    path = tmp_path / "plan.png"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        env={"MPLBACKEND": "Agg", "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_tensor_can_be_explained_and_drawn():
    def program():
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("x",))
        x = sm.device_put(torch.ones(4, 4), mesh, P("x"))
        return len(sm.debug.explain(x, P(None, "x")).picture().axes)

    assert sm.simulate(2)(program)() == [2, 2]


# -- layouts ---------------------------------------------------------------------------------------


@given(ragged_moves(("sum", "max")))
def test_the_pages_of_a_layout_show_every_box_once(move):
    mesh_shape, shape, src, _ = move
    layout = sm.Layout.of(sm.AbstractMesh(mesh_shape, AXES[: len(mesh_shape)]), src, shape)
    boxes = {box for _, box in layout.boxes() if all(start < stop for start, stop in box)}
    shown = [part.box for panel in page_panels(layout) for part in panel.parts]
    assert sorted(shown) == sorted(boxes)


@pytest.mark.parametrize(
    ("shape", "spec"), [((5, 4, 3), P("a", "b", "c")), ((6,), P("a")), ((), P()), ((0, 3), P("a"))]
)
def test_a_panel_for_each_page_of_a_layout(shape, spec, tmp_path):
    layout = sm.Layout.of(sm.AbstractMesh((2, 2, 2), ("a", "b", "c")), spec, shape)
    figure = sm.debug.visualize(layout, style="picture", path=tmp_path / "one.svg")
    sm.debug.visualize(layout, style="picture", path=tmp_path / "two.svg")
    assert [axes.get_title() for axes in figure.axes if len(shape) == 3] == [
        "[0:3, :, :]",
        "[3:5, :, :]",
    ][: len(shape) // 3 * 2]
    assert sum(len(axes.patches) for axes in figure.axes) == len(
        {box for _, box in layout.boxes()} if 0 not in shape else ()
    )
    assert str(layout) in texts(figure)[0].replace("\n", " ")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_many_pages_are_arranged_in_rows():
    layout = sm.Layout.of(sm.AbstractMesh((8, 2, 2), ("a", "b", "c")), P("a", "b", "c"), (8, 2, 2))
    places = [
        axes.get_position().bounds for axes in sm.debug.visualize(layout, style="picture").axes
    ]
    assert len(set(places)) == 8
    assert len({round(place[1], 6) for place in places}) == 2
    assert all(x >= 0 and y >= 0 and x + w <= 1 and y + h <= 1 for x, y, w, h in places)
