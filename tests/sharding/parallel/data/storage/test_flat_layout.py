"""Splitting a buffer of tensors at row boundaries."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from shardmesh.sharding.parallel.data.storage import flat_layout
from shardmesh.sharding.parallel.data.storage.flat_layout import make_flat_layout

SHAPES = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 9)), max_size=8)


def _cut(shapes, parts):
    lengths = tuple(count * row for count, row in shapes)
    return make_flat_layout(lengths, tuple(row if count else 0 for count, row in shapes), parts)


@given(SHAPES, st.integers(1, 6))
def test_each_row_is_in_one_piece(shapes, parts):
    cutting = _cut(shapes, parts)
    for i, (count, _) in enumerate(shapes):
        found = [cutting.rows_of(i, part, count) for part in range(parts)]
        assert [start for start, _ in found] == [0, *[stop for _, stop in found[:-1]]]
        assert found[-1][1] == count


@given(SHAPES, st.integers(1, 6))
def test_rows_do_not_overlap_within_a_piece(shapes, parts):
    cutting = _cut(shapes, parts)
    taken = set()
    for i, (count, row) in enumerate(shapes):
        for part in range(parts):
            start, stop = cutting.rows_of(i, part, count)
            if row:
                here = range(cutting.offsets[i] + start * row, cutting.offsets[i] + stop * row)
                assert part * cutting.piece <= here.start or start == stop
                assert here.stop <= (part + 1) * cutting.piece or start == stop
                assert taken.isdisjoint(here)
                taken.update(here)
    assert len(taken) == sum(count * row for count, row in shapes)


@given(SHAPES, st.integers(1, 6))
def test_tensors_are_in_order_in_the_buffer(shapes, parts):
    cutting = _cut(shapes, parts)
    end = 0
    for (count, row), offset in zip(shapes, cutting.offsets, strict=True):
        assert offset >= end
        end = offset + count * row
    assert end <= cutting.piece * parts


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=6),
    st.integers(1, 6),
)
def test_pieces_are_nearly_minimal(shapes, parts):
    """Each boundary and each tensor wastes less than a row; a piece is at least as long as the
    longest row.
    """
    cutting, longest = _cut(shapes, parts), max(row for _, row in shapes)
    total = sum(count * row for count, row in shapes)
    assert cutting.piece >= max(math.ceil(total / parts), longest if parts == 1 else 0)
    assert cutting.piece <= math.ceil(total / parts) + 2 * longest * (1 + len(shapes)), cutting


def test_even_shapes_waste_nothing():
    shapes = [(64, 16), (64, 16), (16, 16), (16, 1)] * 4
    assert _cut(shapes, 4).piece * 4 == sum(count * row for count, row in shapes)


def test_a_transformer_block_wastes_little():
    d = 96
    shapes = [(d, 1), (3 * d, d), (d, d), (d, 1), (4 * d, d), (4 * d, 1), (d, 4 * d), (d, 1)]
    total = sum(count * row for count, row in shapes)
    for parts in (2, 3, 5, 8, 64):
        assert _cut(shapes, parts).piece * parts <= 1.02 * total + parts * 4 * d
    assert _cut(shapes, 7) is _cut(shapes, 7)  # found once


def _aligned(shapes, parts, align):
    cutting = _cut(shapes, parts)
    return cutting.piece % align == 0 and all(start % align == 0 for start in cutting.offsets)


def test_starts_are_aligned_after_a_scale_of_one_element():
    """Else every later weight starts at an odd address, and its products take slow kernels."""
    shapes = [(1, 1), (512, 512), (512, 1), (3, 7), (2048, 512), (512, 2048)]
    total = sum(count * row for count, row in shapes)
    for parts in (1, 2, 3, 8):
        assert _aligned(shapes, parts, 64)
        assert total <= _cut(shapes, parts).length <= total * (1 + 1 / 256) + parts * 2048
    found = _cut(shapes, 8)
    for i, (count, row) in enumerate(shapes):
        for part in range(8):
            start, stop = found.rows_of(i, part, count)
            # In the piece of a rank.
            assert start == stop or (found.offsets[i] + start * row - part * found.piece) % 64 == 0


def test_small_buffers_are_aligned_to_16_bytes_or_not_padded():
    assert _aligned([(96, 1), (288, 96), (96, 96), (96, 1)] * 2, 4, 8)
    assert _cut([(1, 1), (1, 3)], 1).offsets == (0, 1)


@given(SHAPES, st.integers(1, 6), st.integers(0, 3000))
def test_alignment_adds_little(shapes, parts, large):
    lengths = (*(count * row for count, row in shapes), large * 8)
    rows = (*(row if count else 0 for count, row in shapes), 8 if large else 0)
    shortest = flat_layout._make(lengths, rows, parts, 1, math.inf)
    assert shortest is not None
    assert make_flat_layout(lengths, rows, parts).length <= shortest.length * (1 + 1 / 256)
