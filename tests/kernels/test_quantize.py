"""Quantized records: the documented error bound, exact values, and kernels bitwise equal to their
definition.
"""

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmesh.kernels.backend import using_kernels
from shardmesh.kernels.box import box_size, full_box, slices
from shardmesh.kernels.quantize import (
    BLOCK,
    DTYPES,
    FORMATS,
    LARGEST,
    SMALLEST_SCALE,
    compile_dequantize,
    compile_quantize,
    dequantize_many,
    error_bound,
    quantize_many,
    record_bytes,
)
from tests.kernels.device import DEVICE
from tests.tiers import examples

# The interpreter's numpy, of NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")

LAYOUTS = ("contiguous", "transposed", "strided", "inside another")
BLOCKS = (32, 128, 256)
SPECIALS = (torch.inf, -torch.inf, torch.nan, 0.0, -0.0)

formats = pytest.mark.parametrize("transport", FORMATS)
every_dtype = pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
few = settings(max_examples=examples(40))


@pytest.fixture(scope="module", autouse=True)
def on_device():
    with torch.device(DEVICE):
        yield


# -- what is drawn ---------------------------------------------------------------------------------

seeds = st.integers(0, 2**31)
dtypes = st.sampled_from(sorted(DTYPES, key=str))
layouts = st.sampled_from(LAYOUTS)
shapes = st.one_of(
    st.lists(st.integers(0, 9), max_size=4).map(tuple),
    st.tuples(st.integers(1, 5), st.integers(1, 9).map(lambda n: 8 * n)),
    st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4).map(lambda n: 8 * n)),
    st.tuples(st.integers(300, 700)),
)


def interval(size):
    return st.tuples(st.integers(0, size), st.integers(0, size)).map(
        lambda ends: (min(ends), max(ends))
    )


def any_boxes(shape):
    return st.lists(
        st.one_of(st.just(full_box(shape)), st.tuples(*map(interval, shape))), max_size=3
    )


@st.composite
def cuts(draw, shape):
    """Draw boxes that split the tensor along one dim, some of them empty."""
    if not shape:
        return [()]
    dim = draw(st.integers(0, len(shape) - 1))
    ends = [0, *sorted(draw(st.lists(st.integers(0, shape[dim]), max_size=3))), shape[dim]]
    whole = full_box(shape)
    return list({(*whole[:dim], cut, *whole[dim + 1 :]): None for cut in pairwise(ends)})


def numbers(shape, dtype, seed):
    """Return normally distributed numbers of different magnitudes, with a few special values."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp(
        4 * torch.randn(shape, generator=generator)
    )
    which = torch.randint(0, 60, shape, generator=generator)
    for i, special in enumerate(SPECIALS):
        x[which == i] = special
    return x.to(dtype)


def laid_out(x, layout):
    """Return the same tensor in this memory layout."""
    if layout == "transposed":
        dims = tuple(range(x.ndim))[::-1]
        return x.permute(dims).contiguous().permute(dims)
    if layout == "strided":
        wide = x.new_zeros([2 * n for n in x.shape])[tuple(slice(1, None, 2) for _ in x.shape)]
        return wide.copy_(x)
    if layout == "inside another":
        return x.new_zeros([n + 2 for n in x.shape])[tuple(slice(1, n + 1) for n in x.shape)].copy_(
            x
        )
    return x


def stacked(sizes, block, copies=1):
    """Return the offsets of records of these sizes with gaps of 16 bytes, and the total bytes."""
    *starts, total = accumulate(
        [record_bytes(n, block) + 16 for n in sizes for _ in range(copies)], initial=0
    )
    return [starts[i : i + copies] for i in range(0, len(starts), copies)], total


def quantized(x, transport, block=BLOCK):
    return compile_quantize(x.shape, [full_box(x.shape)], transport, block=block)(x)


def dequantized(flat, like, transport, block=BLOCK, starts=(0,)):
    compiled = compile_dequantize(
        like.shape, {full_box(like.shape): starts}, transport, block=block
    )
    return compiled(flat, torch.empty_like(like))


def there_and_back(x, transport, block=BLOCK):
    return dequantized(quantized(x, transport, block), x, transport, block)


def same_bits(a, b):
    """Assert equal bits; all NaNs are equal."""
    assert a.dtype == b.dtype
    assert torch.equal(a.isnan(), b.isnan())
    integer = {2: torch.int16, 4: torch.int32}[a.itemsize]
    a, b = (x.nan_to_num(0.0, torch.inf, -torch.inf).view(integer) for x in (a, b))
    assert torch.equal(a, b)


# -- kernels ---------------------------------------------------------------------------------------


@few
@given(st.data(), st.sampled_from(FORMATS), st.sampled_from(BLOCKS), st.integers(1, 3), seeds)
def test_kernels_quantize_like_torch(data, transport, block, count, seed):
    xs, compiled, start = [], [], 0
    for i in range(count):
        shape, dtype, layout = data.draw(shapes), data.draw(dtypes), data.draw(layouts)
        boxes = data.draw(any_boxes(shape))
        places, total = stacked(map(box_size, boxes), block)
        xs.append(laid_out(numbers(shape, dtype, seed + i), layout))
        compiled.append(
            compile_quantize(shape, boxes, transport, [start + place for (place,) in places], block)
        )
        start += total
    by_torch, by_kernel = torch.full((2, start + 16), 0x55, dtype=torch.uint8)
    with using_kernels(False):
        assert quantize_many(compiled, xs, by_torch) is by_torch
    with using_kernels():
        quantize_many(compiled, xs, by_kernel)
    assert torch.equal(by_torch, by_kernel)


@few
@given(
    st.data(),
    st.sampled_from(FORMATS),
    st.sampled_from(BLOCKS),
    st.integers(1, 9),
    st.integers(1, 3),
    seeds,
)
def test_kernels_dequantize_like_torch(data, transport, block, copies, count, seed):
    """Records of any bytes: every code, and scales that overflow."""
    outs, compiled, start = [], [], 0
    for _ in range(count):
        shape, dtype = data.draw(shapes), data.draw(dtypes)
        boxes = data.draw(cuts(shape))
        places, total = stacked(map(box_size, boxes), block, copies)
        stacks = {box: [start + p for p in where] for box, where in zip(boxes, places, strict=True)}
        outs.append(torch.full(shape, 7.0, dtype=dtype))
        compiled.append(compile_dequantize(shape, stacks, transport, block=block))
        start += total
    flat = torch.randint(
        0, 256, (start,), dtype=torch.uint8, generator=torch.Generator(DEVICE).manual_seed(seed)
    )
    with using_kernels(False):
        by_torch = dequantize_many(compiled, flat, [x.clone() for x in outs])
    with using_kernels():
        by_kernel = dequantize_many(compiled, flat, outs)
    for a, b, out in zip(by_torch, by_kernel, outs, strict=True):
        assert b is out
        same_bits(a, b)


@formats
def test_kernels_take_large_offsets(transport, monkeypatch):
    from shardmesh.kernels import quantize_triton

    monkeypatch.setattr(quantize_triton, "NARROW", 0)
    x = numbers((3, 5, 40), torch.bfloat16, 0)
    boxes = [((0, 3), (1, 4), (8, 24)), ((1, 3), (0, 5), (3, 40))]
    quantize = compile_quantize(x.shape, boxes, transport)
    flat = quantize(x)
    with using_kernels():
        assert torch.equal(quantize(x), flat)
    dequantize = compile_dequantize(x.shape, {boxes[0]: [0]}, transport)
    with using_kernels():
        out = dequantize(flat, torch.zeros_like(x))
    same_bits(out, dequantize(flat, torch.zeros_like(x)))


def test_kernels_find_the_box_among_many():
    x = numbers((41, 80), torch.float32, 0)
    boxes = [((i, i + 1), (0, 8 * (i % 11))) for i in range(41)]
    quantize = compile_quantize(x.shape, boxes, "int8", block=32)
    by_torch = quantize(x)
    with using_kernels():
        assert torch.equal(quantize(x), by_torch)


@formats
def test_kernels_round_to_nearest_even(transport):
    """Numbers halfway between codes, and their neighbors, at a scale of 1."""
    largest = int(LARGEST[transport])
    codes = torch.arange(largest + 1 if transport == "int8" else 0x7E, dtype=torch.uint8)
    codes = codes.float() if transport == "int8" else codes.view(torch.float8_e4m3fn).float()
    halves = (codes[1:] + codes[:-1]) / 2
    near = torch.cat(
        [codes, halves, torch.nextafter(halves, codes[:-1]), torch.nextafter(halves, codes[1:])]
    )
    rows = torch.cat([near, -near])
    rows = torch.nn.functional.pad(rows, (0, -rows.numel() % 31)).view(-1, 31)
    x = torch.cat([rows, torch.full((len(rows), 1), float(largest))], 1)
    flat = quantized(x, transport, 32)
    scales = flat[x.numel() :][: 4 * len(rows)].view(torch.float32)
    assert (scales == 1).all()
    want = x.round().to(torch.int8) if transport == "int8" else x.to(torch.float8_e4m3fn)
    assert torch.equal(flat[: x.numel()], want.view(torch.uint8).view(-1))
    with using_kernels():
        assert torch.equal(quantized(x, transport, 32), flat)


# -- the format ------------------------------------------------------------------------------------


def test_record_bytes():
    assert [record_bytes(n) for n in (0, 1, 128, 129, 512, 513)] == [0, 144, 144, 272, 528, 672]
    assert record_bytes(33, block=32) == 80


@formats
def test_record_layout(transport):
    """Codes of two blocks, the second padded with zeros, two scales, and zeros up to a multiple of
    16 bytes.
    """
    largest = LARGEST[transport]
    x = torch.tensor(
        [largest, 2.0, -1.0, torch.inf, -torch.inf, torch.nan] + [0.0] * 26 + [8 * largest]
    )
    flat = quantized(x, transport, 32)
    codes = (
        [126, 2, -1, 127, -127, -128]
        if transport == "int8"
        else [0x7D, 0x40, 0xB8, 0x7E, 0xFE, 0x7F]
    )
    assert flat.numel() == record_bytes(33, 32)
    assert flat[:6].tolist() == [code % 256 for code in codes]
    assert flat[32].item() == codes[0]
    assert not flat[6:32].any()
    assert not flat[33:64].any()
    assert flat[64:72].view(torch.float32).tolist() == [1.0, 8.0]
    assert not flat[72:].any()


@formats
@every_dtype
def test_non_finite_values_are_kept_and_do_not_affect_others(transport, dtype):
    """In a block with infinities and NaNs, the other values have the same error as without them."""
    x = numbers((40, 128), torch.float32, 1).clamp(-1e4, 1e4).to(dtype)
    x[3] = torch.nan
    x[4] = torch.inf
    x[5:8] = torch.randn(3, 128)
    x[5, ::2], x[6, ::2], x[7, ::2] = torch.inf, -torch.inf, torch.nan
    got, finite = there_and_back(x, transport), x.isfinite()
    same_bits(got[~finite], x[~finite])
    same_bits(got[finite].abs(), there_and_back(x.where(finite, 0), transport)[finite].abs())


VALUES = {
    "normal": lambda x, most, least: x,
    "of all sizes": lambda x, most, least: (
        x * torch.exp2(torch.linspace(-20, 10, x.numel())).view(x.shape)
    ),
    "huge": lambda x, most, least: (x * most).clamp(-most, most),
    "tiny": lambda x, most, least: x * least,
    "subnormal": lambda x, most, least: x * least * 2**-5,
    "constant": lambda x, most, least: torch.full_like(x, 0.3),
    "zero": lambda x, most, least: torch.zeros_like(x),
}


@formats
@every_dtype
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("block", BLOCKS)
def test_error_is_below_its_bound(transport, dtype, values, block):
    info = torch.finfo(dtype)
    x = torch.randn(
        (24, block), dtype=torch.float64, generator=torch.Generator(DEVICE).manual_seed(2)
    )
    x = VALUES[values](x, info.max, info.tiny).to(dtype)
    got = there_and_back(x, transport, block)
    assert got.isfinite().all()
    amax = x.abs().amax(1, keepdim=True)
    assert ((got.double() - x.double()).abs() <= error_bound(amax, x, transport)).all()
    if values == "zero":
        assert not got.any()


@formats
def test_bound_is_tight(transport):
    """1/252 of the largest value for int8, 1/16 of the value for fp8, and not much more."""
    x = torch.rand(1000) + 0.25
    share = error_bound(1.25, x, transport) / (1.25 / 252 if transport == "int8" else x / 16)
    assert (share < 1.001).all()
    assert (share >= 1).all()


@formats
def test_finite_values_stay_finite(transport):
    """With the largest possible scale."""
    bits = 0x7F7FFFFF - torch.arange(4096, dtype=torch.int32)
    x = torch.stack([bits.view(torch.float32), -bits.view(torch.float32)], 1).repeat(1, 8)
    got = there_and_back(x, transport, 16)
    assert got.isfinite().all()
    torch.testing.assert_close(got, x, rtol=2**-21, atol=0)


@formats
@every_dtype
def test_dequantized_values_get_the_same_codes(transport, dtype):
    x = numbers((64, 128), dtype, 3).clamp(-1e4, 1e4)
    x = x.where((x.abs() >= 1e-3) | (x == 0), 1e-3)  # no subnormal results, see the format
    codes = quantized(x, transport)
    assert torch.equal(
        quantized(dequantized(codes, x, transport), transport)[: x.numel()], codes[: x.numel()]
    )


def test_scale_has_a_floor():
    x = torch.full((32,), 2.0**-149)
    flat = quantized(x, "int8", 32)
    assert flat[32:36].view(torch.float32).item() == SMALLEST_SCALE
    assert not there_and_back(x, "int8", 32).any()


# -- sums ------------------------------------------------------------------------------------------


@formats
@every_dtype
@pytest.mark.parametrize("count", [2, 8, 11])
def test_sum_is_taken_in_fp32_in_the_order_of_starts(transport, dtype, count):
    parts = [
        numbers((3, 50), torch.float32, i).clamp(-1e3, 1e3).nan_to_num(1.0) * 2.0 ** (5 - i)
        for i in range(count)
    ]
    size = record_bytes(150)
    flat = torch.cat([quantized(x, transport) for x in parts])
    order = [(7 * i) % count for i in range(count)]
    total = torch.zeros(3, 50)
    for i in order:
        total += dequantized(flat, parts[0], transport, starts=[i * size])
    starts = [i * size for i in order]
    for use in (False, True):
        with using_kernels(use):
            same_bits(
                dequantized(flat, torch.empty(3, 50, dtype=dtype), transport, starts=starts),
                total.to(dtype),
            )


def test_omitted_boxes_are_not_written():
    x, box = torch.randn(6, 10), ((2, 4), (3, 9))
    flat = compile_quantize(x.shape, [box], "int8")(x)
    for use in (False, True):
        with using_kernels(use):
            out = compile_dequantize(x.shape, {box: [0]}, "int8", kind="max")(
                flat, torch.full_like(x, 5.0)
            )
        torch.testing.assert_close(
            out[slices(box)], x[slices(box)], rtol=0, atol=x.abs().max().item() / 250
        )
        out[slices(box)] = 5
        assert (out == 5).all()


def test_empty_input():
    for use in (False, True):
        with using_kernels(use):
            assert (
                compile_quantize((0, 3), [((0, 0), (0, 3))], "int8")(torch.empty(0, 3)).numel() == 0
            )
            assert compile_quantize((2,), [], "fp8")(torch.ones(2)).numel() == 0
            out = compile_dequantize((0,), {((0, 0),): [0]}, "int8")(
                torch.empty(0, dtype=torch.uint8), torch.empty(0)
            )
            assert out.shape == (0,)


# -- errors ----------------------------------------------------------------------------------------

WHOLE = ((0, 4),)


@pytest.mark.parametrize(
    ("compile_one", "message"),
    [
        (
            lambda: compile_quantize((4,), [WHOLE], "int4"),
            "unknown transport 'int4': choose one of 'int8', 'fp8'",
        ),
        (
            lambda: compile_quantize((4,), [WHOLE], "int8", block=100),
            "blocks of 100 elements: choose a power of two",
        ),
        (lambda: compile_quantize((4,), [((0, 5),)], "int8"), "which is not inside 0:4"),
        (
            lambda: compile_quantize((4,), [WHOLE], "int8", [8]),
            "cannot start at byte 8: starts must be multiples of 16",
        ),
        (lambda: compile_quantize((4,), [WHOLE], "int8", [-16]), "cannot start at byte -16"),
        (lambda: compile_quantize((4,), [WHOLE], "int8", [0, 160]), "1 boxes with the offsets"),
        (
            lambda: compile_quantize((4,), [WHOLE] * 2, "int8", [0, 128]),
            "bytes 0:144, and another starts at 128",
        ),
        (
            lambda: compile_dequantize((4,), {WHOLE: [0, 144]}, "int8", "max"),
            "only be summed, not combined by 'max'",
        ),
        (lambda: compile_dequantize((4,), {WHOLE: []}, "int8"), "has no record"),
        (lambda: compile_dequantize((4,), {WHOLE: [4]}, "int8"), "cannot start at byte 4"),
        (lambda: compile_dequantize((4,), {((0, 5),): [0]}, "fp8"), "which is not inside 0:4"),
    ],
)
def test_unsupported_arguments_raise(compile_one, message):
    with pytest.raises(ValueError, match=message):
        compile_one()


def test_mismatched_tensors_raise():
    quantize = compile_quantize((4,), [WHOLE], "int8")
    dequantize = compile_dequantize((4,), {WHOLE: [0]}, "int8")
    flat = quantize(torch.ones(4))
    with pytest.raises(TypeError, match=r"takes float16, bfloat16 or float32, not torch\.float64"):
        quantize(torch.ones(4, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"not torch\.int32"):
        dequantize(flat, torch.ones(4, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"shape \(5,\), not \(4,\)"):
        quantize(torch.ones(5))
    with pytest.raises(ValueError, match="writes to contiguous tensors"):
        dequantize(flat, torch.ones(8)[::2])
    for wrong in (
        flat[:-1],
        flat.view(torch.int8),
        flat.view(2, -1),
        torch.zeros(300, dtype=torch.uint8)[4:],
    ):
        with pytest.raises(ValueError, match="contiguous uint8 buffer of at least 144 bytes"):
            dequantize(wrong, torch.ones(4))
        with pytest.raises(ValueError, match="contiguous uint8 buffer of at least 144 bytes"):
            quantize(torch.ones(4), wrong)
