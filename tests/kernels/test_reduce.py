"""Reductions of contributions: the torch implementation compared with sequential addition, and the
kernel with torch.
"""

import math
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmesh.kernels import strided, strided_triton, strided_views
from shardmesh.kernels.backend import using_kernels
from shardmesh.kernels.box import box_size, full_box, slices
from shardmesh.kernels.reduce import combine_many, compile_combine
from tests.kernels.device import DEVICE
from tests.kernels.drawn import flat, grids, numbers, same_numbers, shapes, shifts
from tests.tiers import examples

KINDS = ("sum", "max", "min", "product")
NUMBERS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64]
kinds, dtypes = st.sampled_from(KINDS), st.sampled_from(NUMBERS)
# A product of nine, or a NaN that is looked at, makes numpy warn in Triton's interpreter.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value|underflow) encountered:RuntimeWarning"
)

ONE_AFTER_THE_OTHER = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


@st.composite
def stacks(draw, shape, at):
    """Draw boxes of the tensor, each with 1 to 9 contributions at even or uneven distances, and the
    end of the last one.
    """
    found = {}
    for box in dict.fromkeys(draw(grids(shape))):
        count, gap = draw(st.integers(1, 9)), draw(st.sampled_from([0, 0, 3, 8, None]))
        found[box] = []
        for _ in range(count):
            found[box].append(at)
            at += box_size(box) + (draw(st.integers(0, 3)) if gap is None else gap)
    return found, at


@st.composite
def bundles(draw, most):
    """[(shape, stacks)] of tensors that share a buffer, and the buffer's size."""
    found, at = [], draw(st.sampled_from([0, 0, 1]))
    for shape in draw(
        st.lists(shapes.filter(lambda shape: math.prod(shape) <= 400), min_size=1, max_size=most)
    ):
        boxes, at = draw(stacks(shape, at))
        found.append((shape, boxes))
    return found, at


def one_after_the_other(kind, parts):
    wide = parts[0].float() if parts[0].is_floating_point() and parts[0].itemsize < 4 else parts[0]
    for part in parts[1:]:
        wide = ONE_AFTER_THE_OTHER[kind](wide, part.to(wide.dtype))
    return wide.to(parts[0].dtype)


def sprinkled(values):
    """Insert a NaN and infinities, some in positions that contributions share."""
    if values.is_floating_point():
        values[::11], values[3::17], values[5::23] = math.nan, math.inf, -math.inf
    return values


@settings(max_examples=examples(60))
@given(bundles(1), kinds, dtypes, shifts, st.booleans())
def test_torch_implementation_reduces_in_order(bundle, kind, dtype, shift, special):
    """For any box size: ranks that hold an element in boxes of different sizes get the same
    bits.
    """
    ((shape, boxes),), size = bundle
    values = numbers(size, dtype)
    values = flat(sprinkled(values) if special else values, shift)
    out = torch.zeros(shape, dtype=dtype, device=DEVICE)
    with using_kernels(False):
        compile_combine(shape, boxes, kind)(values, out)
    for box, starts in boxes.items():
        parts = [values[start:][: box_size(box)].view(out[slices(box)].shape) for start in starts]
        same_numbers(out[slices(box)], one_after_the_other(kind, parts))


@settings(max_examples=examples(50))
@given(
    bundles(3),
    kinds,
    dtypes,
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    shifts,
    st.booleans(),
    st.sampled_from([1, 1024]),
)
def test_kernel_equals_torch(bundle, kind, dtype, to, shift, special, most_rows):
    several, size = bundle
    values = numbers(size, dtype)
    values = flat(sprinkled(values) if special else values, shift)

    def combined():
        combines = [compile_combine(shape, boxes, kind) for shape, boxes in several]
        cast = to if dtype.is_floating_point else dtype
        outs = [torch.zeros(shape, dtype=cast, device=DEVICE) for shape, _ in several]
        combine_many(combines, values, outs)
        whole = [c for c in combines if sum(map(box_size, c.stacks)) == math.prod(c.shape)]
        return [*outs, *combine_many(whole, values)]

    with mock.patch.object(strided, "MAX_ROWS", most_rows):
        with using_kernels(False):
            expected = combined()
        with using_kernels():
            found = combined()
    for a, b in zip(found, expected, strict=True):
        same_numbers(a, b)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", [2, 8, 9, 20])
def test_planes_that_are_cut(kind, parts):
    shape = (7, 90)
    boxes = {
        ((0, 7), (0, 33)): [i * 7 * 33 for i in range(parts)],
        ((0, 7), (33, 90)): [7 * 33 * parts + 400 * i for i in range(parts)],
    }
    values = flat(numbers(7 * 33 * parts + 400 * parts, torch.bfloat16))
    with using_kernels(False):
        expected = compile_combine(shape, boxes, kind)(values)
    for most in (1 << 31, 128):
        with using_kernels(), mock.patch.object(strided_views, "MAX_PLANE", most):
            same_numbers(compile_combine(shape, boxes, kind)(values), expected)


def test_bool_goes_through_torch():
    values = flat(torch.tensor([True, False, False, False]))
    for kind, expected in (("sum", [True, False]), ("max", [True, False]), ("min", [False, False])):
        with using_kernels():
            out = torch.zeros(2, dtype=torch.bool, device=DEVICE)
            assert (
                compile_combine((2,), {((0, 2),): [0, 2]}, kind)(values, out).tolist() == expected
            )


def test_omitted_boxes_are_not_written():
    out = torch.full((4, 4), 7.0, device=DEVICE)
    with using_kernels():
        compile_combine((4, 4), {((0, 2), (0, 4)): [0, 8]})(torch.ones(16, device=DEVICE), out)
    assert out.tolist() == [[2.0] * 4] * 2 + [[7.0] * 4] * 2


def test_single_contribution_is_a_view_and_several_tensors_share_a_launch():
    values = flat(numbers(64, torch.float32))
    lone = compile_combine((4, 4), {full_box((4, 4)): [0]})
    pairs = [compile_combine((16,), {full_box((16,)): [16 * i, 16 * i + 16]}) for i in range(3)]
    with using_kernels(), mock.patch.object(strided_triton, "run", wraps=strided_triton.run) as run:
        assert lone(values).data_ptr() == values.data_ptr()
        assert not run.called
        combine_many(pairs, values)
        assert run.call_count == 1
