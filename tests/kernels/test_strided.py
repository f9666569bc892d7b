"""The tables of strided copies, without a kernel: what each program would read and write, computed
from their rows.
"""

import math
import random
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmesh.kernels import strided, strided_views
from shardmesh.kernels.box import row_major_strides
from shardmesh.kernels.copy import compile_pack
from shardmesh.kernels.strided import Column as C
from shardmesh.kernels.strided import PlacedView, Table, View, divisor, make_tables
from tests.kernels.drawn import chunks, grids, offsets, shapes
from tests.tiers import examples

TRUE_PLANE = strided_views.MAX_PLANE


# -- the kernels' arithmetic, in numpy -------------------------------------------------------------


def rows_of(table):
    """(row, first program, one after its last) of each view."""
    found = [row for row in table.rows.host.tolist() if row[0] < table.programs]
    assert [row[0] for row in found] == sorted({row[0] for row in found}), "a view without programs"
    return list(
        zip(
            found,
            [row[0] for row in found],
            [*(row[0] for row in found[1:]), table.programs],
            strict=True,
        )
    )


def quotient(n, multiplier, shift):
    assert n.max(initial=0) < 1 << 31, "what stands for a division takes 31 bits"
    n = n.astype(np.uint64)
    return (((n * np.uint64(multiplier) >> np.uint64(32)) + n) >> np.uint64(shift)).astype(np.int64)


def in_32_bits(offset, inside, table):
    """Return the offsets; check that they fit into 32 bits unless the table says that they
    do not.
    """
    assert table.kind.wide or offset[inside].max(initial=0) < 1 << 31
    return offset


def batches(row):
    """Return (size, source stride, destination stride) of each batch dim."""
    return [row[at : at + 3] for at in range(C.BATCH, C.PART, 3)]


def batch_offsets(row, batch):
    src, dst = np.zeros_like(batch), np.zeros_like(batch)
    for size, src_stride, dst_stride in batches(row):
        batch, digit = np.divmod(batch, size)
        src, dst = src + digit * src_stride, dst + digit * dst_stride
    return src, dst


def elements_of_rows(table, row, index):
    """(source, destination) of each element that these programs of a row move; so that each is one
    of a lane's unit.
    """
    kind, (lanes,) = table.kind, table.lanes
    tile, batch = np.divmod(index, math.prod(size for size, *_ in batches(row)))
    lane = tile[:, None] * lanes + np.arange(lanes)
    ab = quotient(lane, *row[C.RUN_DIVISOR : C.RUN_DIVISOR + 2])
    a = quotient(ab, *row[C.B_DIVISOR : C.B_DIVISOR + 2])
    b, r = ab - a * row[C.B_SIZE], (lane - ab * row[C.RUN_LANES]) * kind.group
    unit = r[..., None] + np.arange(kind.group)
    inside = (lane < row[C.PLANE_LANES])[..., None] & (unit < row[C.RUN_UNITS])
    src = in_32_bits((a * row[C.A_SRC] + b * row[C.B_SRC])[..., None] + unit, inside, table)
    dst = in_32_bits((a * row[C.A_DST] + b * row[C.B_DST])[..., None] + unit, inside, table)
    src_batch, dst_batch = (offset[:, None, None] for offset in batch_offsets(row, batch))
    within = np.arange(kind.unit)
    places = [
        (start + x)[inside][:, None] * kind.unit + within
        for start, x in ((row[C.SRC] + src_batch, src), (row[C.DST] + dst_batch, dst))
    ]
    return [x.ravel() for x in places]


def elements_of_tiles(table, row, index):
    """Return the same as `elements_of_rows` for tiles; reads and writes are separate, since the
    units of their sides differ.
    """
    kind, (along_i, along_j), run = table.kind, table.lanes, table.kind.run
    unit_i, unit_j = kind.unit // kind.word, kind.dst_unit // kind.word
    batch, tile = np.divmod(index, row[C.PROGRAMS])
    i0, j0 = tile // row[C.J_PROGRAMS] * along_i, tile % row[C.J_PROGRAMS] * along_j
    i = (i0[:, None] + np.arange(along_i))[:, :, None, None]
    j = (j0[:, None] + np.arange(along_j))[:, None, :, None]
    r = np.arange(run)
    assert row[C.I_WORDS] * unit_i < 1 << 31
    assert row[C.J_WORDS] * unit_j < 1 << 31
    inside = (
        (i * kind.padded < row[C.I_WORDS] * unit_i)
        & (j * kind.padded < row[C.J_WORDS] * unit_j)
        & (r >= 0)
    )
    src_batch, dst_batch = (offset[:, None, None, None] for offset in batch_offsets(row, batch))
    src = (row[C.SRC] + src_batch) * unit_i + i * run + r + j * row[C.J_SRC] * unit_i
    dst = (row[C.DST] + dst_batch) * unit_j + j * run + r + i * row[C.I_DST] * unit_j
    words = np.arange(kind.word)
    return [
        (np.broadcast_to(x, inside.shape)[inside][:, None] * kind.word + words).ravel()
        for x in (src, dst)
    ]


def elements(table: Table, row, index):
    return (elements_of_tiles if table.kind.tiled else elements_of_rows)(
        table, row, np.asarray(index, dtype=np.int64)
    )


def moved(tables):
    """(tensor, source, destination) of every element that any program of any launch moves,
    sorted.
    """
    found = [np.zeros((3, 0), dtype=np.int64)]
    for table in tables:
        assert (
            sum(stop - first for _, first, stop in rows_of(table))
            == table.programs
            <= strided.MAX_PROGRAMS
        )
        for row, first, stop in rows_of(table):
            src, dst = elements(table, row, np.arange(stop - first))
            found.append(np.stack([np.full_like(src, row[C.TENSOR]), src, dst]))
    return np.array(sorted(np.concatenate(found, axis=1).T.tolist())).reshape(-1, 3)


def wanted(placed, to_flat):
    """Return the expected elements, computed from the views."""
    found = [np.zeros((0, 3), dtype=np.int64)]
    for tensor, view, _ in placed:
        index = np.indices(view.sizes).reshape(len(view.sizes), -1)
        ours = view.offset + np.array(view.strides) @ index
        theirs = view.flat_offset + np.array(view.flat_strides) @ index
        found.append(
            np.stack(
                [np.full_like(ours, tensor), *((ours, theirs) if to_flat else (theirs, ours))],
                axis=1,
            )
        )
    return np.array(sorted(np.concatenate(found).tolist())).reshape(-1, 3)


# -- every element once ----------------------------------------------------------------------------

itemsizes = st.sampled_from([(1, 1), (2, 2), (4, 4), (8, 8), (4, 2), (2, 4), (8, 2)])
alignments = st.sampled_from([16, 16, 8, 4])


@st.composite
def placements(draw):
    """Draw views of the boxes of up to three tensors of any strides."""
    placed = []
    for tensor in range(draw(st.integers(1, 3))):
        shape = draw(shapes)
        boxes = draw(grids(shape))
        pack = compile_pack(shape, boxes, draw(offsets(boxes)))
        order = draw(st.permutations(range(len(shape))))
        steps = row_major_strides([shape[d] + draw(st.sampled_from([0, 0, 1])) for d in order])
        strides = tuple(steps[order.index(d)] for d in range(len(shape)))
        placed += [PlacedView(tensor, view) for view in pack._views_for(strides)]
    return placed


@settings(max_examples=examples(150))
@given(
    placements(),
    st.booleans(),
    itemsizes,
    alignments,
    st.booleans(),
    st.sampled_from([TRUE_PLANE, 256, 64, 32]),
    st.sampled_from([1024, 2]),
)
def test_every_element_is_moved_once(placed, to_flat, sizes, aligned, raw, most, most_rows):
    raw, aligned = raw and sizes[0] == sizes[1], max(aligned, *sizes)
    with (
        mock.patch.object(strided_views, "MAX_PLANE", most),
        mock.patch.object(strided, "MAX_ROWS", most_rows),
    ):
        tables = make_tables(placed, to_flat, sizes, aligned, raw)
    assert np.array_equal(moved(tables), wanted(placed, to_flat))
    assert sum(table.elements for table in tables) == sum(math.prod(p.view.sizes) for p in placed)
    assert all(len(table.rows.host) <= max(most_rows, 1) for table in tables)


@settings(max_examples=examples(60))
@given(placements(), st.booleans(), itemsizes, alignments)
def test_units_are_contiguous_and_aligned(placed, to_flat, sizes, aligned):
    aligned = max(aligned, *sizes)
    for table in make_tables(placed, to_flat, sizes, aligned, raw=False):
        kind = table.kind
        for unit, itemsize in zip((kind.unit, kind.dst_unit), sizes, strict=True):
            assert unit & (unit - 1) == 0
            assert unit * itemsize <= aligned * max(sizes) // min(sizes)
        if kind.tiled:
            assert math.prod(table.lanes) * kind.padded <= 8192
            assert kind.unit <= table.lanes[0] * kind.padded
            assert kind.dst_unit <= table.lanes[1] * kind.padded


# -- sizes of which nobody has so much memory ------------------------------------------------------

HUGE = {
    "rows of 6 GB for each peer": ((3 << 20, 8 * 2048), 1, 8),
    "odd rows": (((1 << 21) + 1, 8 * 1001), 1, 8),
    "one run longer than 32 bits": ((3, 2 * ((1 << 31) + 6)), 1, 2),
    "one odd run longer than 32 bits": ((3, (1 << 32) + 7), 1, 2),
    "short runs": ((1 << 28, 8 * 8), 1, 8),
    "a tile": (((1 << 31) + 8, 8), 1, 8),
    "a tile with an uneven side": (((1 << 31) + 9, 8), 1, 8),
    "runs of three": ((1 << 29, 8 * 3), 1, 8),
}


def view_of(shape, dim, parts):
    step = shape[dim] // parts
    boxes = [
        (*((0, n) for n in shape[:dim]), (start, stop))
        for start, stop in chunks(shape[dim], parts)
        if stop - start == step
    ]
    (view,) = compile_pack(shape, boxes)._views_for(row_major_strides(shape))
    return view


def partner(view: View, flat):
    """Return the positions in the tensor that correspond to positions in the flat buffer."""
    at, left = view.offset, np.asarray(flat) - view.flat_offset
    for _, stride, step in sorted(
        zip(view.sizes, view.strides, view.flat_strides, strict=True), key=lambda d: -d[2]
    ):
        digit, left = np.divmod(left, step)
        at = at + digit * stride
    assert not left.any()
    return at


@pytest.mark.parametrize("to_flat", [True, False])
@pytest.mark.parametrize("case", HUGE)
def test_huge(case, to_flat):
    """Each program moves contiguous elements with offsets that fit; together they move every
    element.
    """
    view = view_of(*HUGE[case])
    tables = make_tables([PlacedView(0, view)], to_flat, (2, 2))
    assert sum(table.elements for table in tables) == math.prod(view.sizes)
    draw = random.Random(0)
    for table in tables:
        for row, first, stop in rows_of(table):
            count = stop - first
            src, dst = elements(
                table, row, [0, count - 1, *(draw.randrange(count) for _ in range(3))]
            )
            assert np.array_equal(partner(view, dst if to_flat else src), src if to_flat else dst)


def test_offsets_beyond_32_bits():
    (table,) = make_tables(
        [PlacedView(0, View((64, 1 << 10), (1 << 26, 1), 0, (1 << 10, 1), 0))], True, (2, 2)
    )
    assert table.kind.wide
    (table,) = make_tables(
        [PlacedView(0, View((31, 1 << 10), (1 << 26, 1), 0, (1 << 10, 1), 0))], True, (2, 2)
    )
    assert not table.kind.wide


def test_too_many_programs_raise():
    sizes = (2, 1 << 21, 1 << 21, 2)
    view = View(sizes, (1 << 50, 1 << 25, 3, 1), 0, (1 << 44, 1 << 23, 2, 1), 0)
    with (
        mock.patch.object(strided, "MAX_PROGRAMS", 1000),
        pytest.raises(ValueError, match="programs; one launch has at most 1000"),
    ):
        make_tables([PlacedView(0, view)], True, (4, 4))


# -- what the tables are for -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "unit", "dst_unit"),
    [
        ((4096, 8), 8, 8),
        ((4096, 16), 8, 8),
        ((4100, 8), 8, 4),
        ((4097, 8), 8, 1),
        ((4096, 6 * 3), 1, 1),
    ],
)
def test_units_of_a_tile(shape, unit, dst_unit):
    parts = 6 if shape[1] == 18 else 8
    (table,) = make_tables([PlacedView(0, view_of(shape, 1, parts))], True, (2, 2))
    assert (table.kind.tiled, table.kind.unit, table.kind.dst_unit) == (True, unit, dst_unit)


@pytest.mark.parametrize("to_flat", [True, False])
@pytest.mark.parametrize("run", [8, 16, 32, 60])
def test_programs_of_short_runs_take_whole_lines_of_both_sides(run, to_flat):
    """With 2-byte elements, packed for 8 peers and back, programs share few sectors."""
    view = view_of((2048, 8 * run), 1, 8)
    (table,) = make_tables([PlacedView(0, view)], to_flat, (2, 2))
    ((row, first, stop),) = rows_of(table)
    sectors = [0, 0]
    for program in range(first, stop):
        for side, places in enumerate(elements(table, row, [program])):
            sectors[side] += len(np.unique(places * 2 // 32))
    least = table.elements * 2 // 32
    assert max(sectors) <= 1.15 * least
    assert table.programs <= 1.1 * table.elements * 2 / (4096 if run == 60 else 1 << 14) + 1


@pytest.mark.parametrize(
    ("run", "group"), [(1001, 128), (128, 128), (2001, 128), (63, 1), (130, 1), (1024, 1)]
)
def test_groups_leave_few_lanes_idle(run, group):
    (table,) = make_tables(
        [PlacedView(0, View((64, run), (run + (run % 8 > 0), 1), 0, (run, 1), 0))], True, (2, 2)
    )
    assert table.kind.group == (group if run % 8 else 1)


def test_equal_views_share_tables():
    view = view_of((64, 64), 1, 8)
    key = (True, (4, 4), 16, True)
    tables = [
        strided.cached_tables([view], key, lambda: make_tables([PlacedView(0, view)], *key))
        for _ in range(2)
    ]
    assert tables[0] is tables[1]


@given(st.integers(0, (1 << 31) - 1), st.integers(1, (1 << 31) - 1))
def test_divisors_divide(n, d):
    for numerator in (n, 0, d - 1, d, (1 << 31) - 1, (1 << 31) - 1 - (1 << 31) % d):
        assert quotient(np.array([numerator]), *divisor(d)).tolist() == [numerator // d]
