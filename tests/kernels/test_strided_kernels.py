"""The kernels of box copies compared with torch on raw bytes, for every dtype and bit pattern."""

import math
from collections.abc import Callable
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmesh.kernels import strided, strided_triton, strided_views
from shardmesh.kernels.backend import using_kernels
from shardmesh.kernels.box import box_size, full_box
from shardmesh.kernels.copy import compile_pack, compile_unpack, pack_many, unpack_many
from tests.kernels.device import DEVICE
from tests.kernels.drawn import (
    DTYPES,
    chunks,
    dtypes,
    empty,
    flat,
    grids,
    laid_out,
    layouts,
    numbers,
    offsets,
    random_bytes,
    same_bytes,
    same_numbers,
    shapes,
    shifts,
)
from tests.tiers import examples

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
PLANES = st.sampled_from([1 << 31, 256, 64])  # units: small ones are cut, and count as wide


def both(action: Callable[[], torch.Tensor | list[torch.Tensor]]):
    """Return the results of torch and of the kernels."""
    with using_kernels(False):
        expected = action()
    with using_kernels():
        return expected, action()


@contextmanager
def launches():
    """Count the launches inside the block."""
    with mock.patch.object(strided_triton, "run", wraps=strided_triton.run) as run:
        yield run


def cut(shape, dim, parts):
    return [
        (*((0, n) for n in shape[:dim]), c, *((0, n) for n in shape[dim + 1 :]))
        for c in chunks(shape[dim], parts)
    ]


@settings(max_examples=examples(60))
@given(st.data(), shapes, dtypes, layouts, shifts, shifts, PLANES)
def test_pack(data, shape, dtype, layout, shift, flat_shift, most):
    boxes = data.draw(grids(shape))
    x = laid_out(random_bytes(math.prod(shape), dtype), shape, layout, shift)
    starts = data.draw(offsets(boxes))

    def packed():
        pack = compile_pack(shape, boxes, starts)
        return pack(
            x, flat(random_bytes(pack.size + (starts is not None), dtype, seed=1), flat_shift)
        )

    with mock.patch.object(strided_views, "MAX_PLANE", most):
        expected, found = both(packed)
    same_bytes(found, expected)


@settings(max_examples=examples(60))
@given(st.data(), shapes, dtypes, layouts, shifts, shifts, PLANES)
def test_unpack(data, shape, dtype, layout, shift, flat_shift, most):
    boxes = data.draw(grids(shape))
    starts = data.draw(offsets(boxes))

    def unpacked():
        unpack = compile_unpack(shape, boxes, starts)
        buffer = flat(random_bytes(unpack.size, dtype), flat_shift)
        return [unpack(buffer, empty(shape, dtype, layout, shift)), unpack(buffer)]

    with mock.patch.object(strided_views, "MAX_PLANE", most):
        expected, found = both(unpacked)
    for a, b in zip(found, expected, strict=True):
        same_bytes(a, b)


@settings(max_examples=examples(60))
@given(
    st.data(),
    shapes,
    *[st.sampled_from(FLOATS)] * 2,
    layouts,
    shifts,
    st.sampled_from([None, 0.3, -2.0]),
)
def test_casts_and_scales(data, shape, dtype, to, layout, shift, scale):
    boxes = data.draw(grids(shape))
    starts = data.draw(offsets(boxes))
    x = laid_out(numbers(math.prod(shape), dtype), shape, layout, shift)

    def there_and_back():
        pack, unpack = compile_pack(shape, boxes, starts), compile_unpack(shape, boxes, starts)
        packed = pack(x, flat(numbers(pack.size, to, seed=1), shift), scale=scale)
        return [packed, unpack(packed, empty(shape, dtype, layout, shift), scale=scale)]

    for a, b in zip(*both(there_and_back), strict=True):
        same_bytes(b, a)


@settings(max_examples=examples(40))
@given(
    st.data(),
    st.lists(shapes, min_size=1, max_size=5),
    dtypes,
    shifts,
    st.sampled_from([1, 2, 1024]),
)
def test_many_at_once(data, several, dtype, shift, most_rows):
    grid_of = [data.draw(grids(shape)) for shape in several]
    layout_of = [data.draw(layouts) for _ in several]
    tensors = [
        laid_out(random_bytes(math.prod(shape), dtype, seed), shape, layout, shift)
        for seed, (shape, layout) in enumerate(zip(several, layout_of, strict=True))
    ]
    at, starts = 1, []
    for boxes in grid_of:
        starts.append([])
        for box in boxes:
            starts[-1].append(at)
            at += box_size(box) + 1

    def there_and_back():
        arguments = list(zip(several, grid_of, starts, strict=True))
        packs = [compile_pack(*a) for a in arguments]
        unpacks = [compile_unpack(*a) for a in arguments]
        packed = pack_many(packs, tensors, flat(random_bytes(at, dtype, seed=9), shift))
        outs = [
            empty(shape, dtype, layout, shift)
            for shape, layout in zip(several, layout_of, strict=True)
        ]
        return [packed, *unpack_many(unpacks, packed, outs), *unpack_many(unpacks, packed)]

    with mock.patch.object(strided, "MAX_ROWS", most_rows):
        expected, found = both(there_and_back)
    for a, b in zip(found, expected, strict=True):
        same_bytes(a, b)


EACH_KIND = {
    "units of 16 bytes": ((24, 64), 1, 4),
    "three dims": ((5, 16, 6, 32), 1, 8),
    "runs of 16 to 127 bytes": ((100, 8 * 12), 1, 8),
    "odd runs": ((9, 7 * 8), 1, 8),
    "groups": ((5, 2 * 300 - 1), 1, 2),
    "long groups": ((3, 2 * 1001), 1, 2),
    "words": ((600, 8), 1, 8),
    "words of several": ((300, 16), 1, 8),
    "many tiles": ((300, 80, 2), 1, 40),
    "an uneven side": ((301, 8), 1, 8),
    "runs of three": ((200, 3 * 8), 1, 8),
    "runs of five": ((90, 5 * 6), 1, 6),
    "uneven columns": ((150, 10), 1, 4),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64], ids=str
)
@pytest.mark.parametrize("case", EACH_KIND)
def test_each_kind(case, dtype):
    shape, dim, parts = EACH_KIND[case]
    pack = compile_pack(shape, cut(shape, dim, parts))
    unpack = compile_unpack(shape, cut(shape, dim, parts))
    x = laid_out(random_bytes(math.prod(shape), dtype), shape, "contiguous")
    with launches() as run:
        expected, found = both(lambda: pack(x))
        same_bytes(found, expected)
        same_bytes(both(lambda: unpack(found))[1], x)
    assert run.called


@settings(max_examples=examples(60))
@given(
    st.sampled_from([torch.uint8, torch.bfloat16]), st.integers(114, 700), *[st.integers(0, 17)] * 4
)
def test_uneven_rows_of_small_elements_wherever_they_begin(
    dtype, run, src_at, src_gap, dst_at, dst_gap
):
    """What is next to a run is not written, though words of 8 bytes are."""
    x = random_bytes(src_at + 3 * (run + src_gap), dtype)[src_at:].view(3, run + src_gap)
    rows = [((i, i + 1), (0, run)) for i in range(3)]
    places = [i * (run + dst_gap) for i in range(3)]

    def packed():
        memory = random_bytes(dst_at + 3 * (run + dst_gap) + 9, dtype, seed=1)
        compile_pack(tuple(x.shape), rows, places)(x, memory[dst_at:])
        return memory

    same_bytes(*both(packed))


@pytest.mark.parametrize("case", EACH_KIND)
def test_each_kind_cast(case):
    shape, dim, parts = EACH_KIND[case]
    pack = compile_pack(shape, cut(shape, dim, parts))
    unpack = compile_unpack(shape, cut(shape, dim, parts))
    x = laid_out(numbers(math.prod(shape), torch.float32), shape, "contiguous")
    expected, found = both(
        lambda: pack(x, torch.zeros(x.numel(), dtype=torch.bfloat16, device=DEVICE), scale=0.3)
    )
    same_bytes(found, expected)
    expected, found = both(lambda: unpack(found, torch.zeros_like(x), scale=3.0))
    same_bytes(found, expected)


@pytest.mark.parametrize(
    "dtype", [torch.int16, torch.float32, torch.complex64, torch.complex128], ids=str
)
def test_an_expanded_source(dtype):
    x = laid_out(random_bytes(24, dtype), (4, 1, 6), "contiguous").expand(4, 10, 6)
    for dim in range(3):
        same_bytes(*both(lambda dim=dim: compile_pack(x.shape, cut(x.shape, dim, 3))(x)))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_conjugate_and_negative_views(dtype):
    x = laid_out(numbers(60, dtype).mul_(1 + 2j), (6, 10), "contiguous")
    pack = compile_pack((6, 10), cut((6, 10), 1, 3))
    unpack = compile_unpack((6, 10), cut((6, 10), 1, 3))
    same_bytes(*both(lambda: pack(x.conj())))
    same_bytes(*both(lambda: pack(x.imag) if x.imag.is_neg() else pack(x.conj().imag)))
    packed = pack(x)

    def unpacked():
        memory = torch.zeros_like(x)
        unpack(packed, memory.conj())
        return memory

    same_bytes(*both(unpacked))
    same_bytes(*both(lambda: unpack(packed.conj())))


# numpy's, in Triton's interpreter.
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("to", FLOATS, ids=str)
def test_non_finite_values_are_kept(dtype, to):
    # Triton's interpreter loses smaller ones.
    least = 1e-37 if dtype == torch.bfloat16 and DEVICE == "cpu" else 1e-40
    special = [math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, least, 65519.0, 65520.0, 3.3e38]
    special = torch.tensor(special, dtype=torch.float64)
    x = laid_out(special.repeat(16).to(dtype), (16, 10), "contiguous")
    pack = compile_pack((16, 10), cut((16, 10), 1, 5))
    for scale in (None, 1.5):
        same_numbers(
            *both(
                lambda scale=scale: pack(x, torch.zeros(160, dtype=to, device=DEVICE), scale=scale)
            )
        )


def test_unsupported_cases_use_torch():
    x = torch.arange(40, device=DEVICE).view(4, 10)
    pack = compile_pack((4, 10), cut((4, 10), 1, 2))
    for dtype, to, scale in (
        (torch.int64, torch.int64, 0.5),
        (torch.bool, torch.float32, None),
        (torch.float64, torch.float64, 0.3),
    ):
        same_bytes(
            *both(
                lambda d=dtype, t=to, s=scale: pack(
                    x.to(d), torch.zeros(40, dtype=t, device=DEVICE), scale=s
                )
            )
        )


def test_one_launch_for_all_tensors_of_a_kind():
    shapes = [(n, 32) for n in (3, 40, 7, 100)]
    packs, at = [], 0
    for shape in shapes:
        boxes = cut(shape, 1, 4)
        packs.append(compile_pack(shape, boxes, [at + i * box_size(boxes[0]) for i in range(4)]))
        at += math.prod(shape)
    tensors = [
        laid_out(numbers(math.prod(shape), torch.float32), shape, "contiguous") for shape in shapes
    ]
    with launches() as run, using_kernels():
        pack_many(packs, tensors, torch.zeros(at, device=DEVICE))
        assert run.call_count == 1
        pack_many(packs, tensors, torch.zeros(at, dtype=torch.bfloat16, device=DEVICE), scale=0.5)
        assert run.call_count == 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_view_launches_nothing(dtype):
    x = laid_out(random_bytes(60, dtype), (6, 10), "contiguous")
    boxes = cut((6, 10), 0, 3)
    with launches() as run, using_kernels():
        packed = compile_pack((6, 10), boxes)(x)
        assert (
            packed.data_ptr() == compile_unpack((6, 10), boxes)(packed).data_ptr() == x.data_ptr()
        )
        assert compile_pack((6, 0), [full_box((6, 0))] * 2)(x[:, :0]).numel() == 0
    assert not run.called
