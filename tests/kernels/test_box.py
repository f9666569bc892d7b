import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardmesh.kernels.box import (
    box_origin,
    box_shape,
    box_size,
    check_boxes,
    full_box,
    intersect,
    merge_dims,
    row_major_strides,
    shift,
    slices,
)

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def intervals(size):
    return st.tuples(st.integers(0, size), st.integers(0, size)).map(
        lambda ends: (min(ends), max(ends))
    )


def boxes_in(shape):
    return st.tuples(*map(intervals, shape))


@given(st.data(), shapes)
def test_shape_size_and_slices_agree_with_indexing(data, shape):
    box = data.draw(boxes_in(shape))
    part = torch.zeros(shape)[slices(box)]
    assert part.shape == box_shape(box)
    assert part.numel() == box_size(box)


@given(st.data(), shapes)
def test_intersection_is_the_common_elements(data, shape):
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    marks = torch.zeros(shape)
    marks[slices(a)] += 1
    marks[slices(b)] += 1
    common = intersect(a, b)
    assert common == intersect(b, a)
    if common is None:
        assert not (marks == 2).any()
    else:
        assert (marks[slices(common)] == 2).all()
        assert (marks == 2).sum() == box_size(common) > 0


@given(st.data(), shapes)
def test_a_part_is_indexed_relative_to_its_origin(data, shape):
    x = torch.arange(torch.Size(shape).numel()).view(shape)
    outer, other = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    inner = intersect(outer, other)
    if inner is not None:
        part, origin = x[slices(outer)], box_origin(outer)
        assert torch.equal(part[slices(inner, origin)], x[slices(inner)])
        assert slices(shift(inner, origin)) == slices(inner, origin)


def test_0d_boxes():
    assert full_box(()) == box_shape(()) == box_origin(()) == slices(()) == shift((), ()) == ()
    assert box_size(()) == 1
    assert intersect((), ()) == ()


@given(shapes)
def test_row_major_strides_are_those_of_a_contiguous_tensor(shape):
    if 0 not in shape:  # torch counts an empty dim as 1 in its strides
        assert row_major_strides(shape) == torch.empty(shape).stride()
    check_boxes(shape, [full_box(shape)])


@given(st.data(), st.lists(st.integers(1, 4), max_size=4).map(tuple))
def test_merged_dims_visit_the_same_elements(data, shape):
    x = torch.arange(4**5)  # long enough for any order of the strides
    strides = data.draw(st.permutations(row_major_strides(shape)).map(tuple))
    sizes, merged = merge_dims(shape, strides)
    assert len(sizes) >= 1
    assert torch.equal(
        x.as_strided(sizes, merged).reshape(-1), x.as_strided(shape, strides).reshape(-1)
    )


def test_contiguous_dims_merge_into_one():
    assert merge_dims((2, 3, 4), row_major_strides((2, 3, 4))) == ((24,), (1,))
    assert merge_dims((), ()) == ((1,), (1,))


@pytest.mark.parametrize(
    ("box", "says"),
    [
        (((0, 2),), "has 1 dims, but the tensor.s shape .* has 2"),
        (((0, 2), (1, 4)), "spans 1:4 in dim 1, which is not inside 0:3"),
        (((2, 1), (0, 3)), "spans 2:1 in dim 0"),
        (((-1, 1), (0, 3)), "spans -1:1 in dim 0"),
    ],
)
def test_box_outside_raises(box, says):
    with pytest.raises(ValueError, match=says):
        check_boxes((2, 3), [((0, 1), (0, 1)), box])
