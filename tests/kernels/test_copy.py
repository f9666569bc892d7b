"""pack and unpack compared with indexing on raw bytes, so that every dtype and bit pattern is
covered.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardmesh.kernels.box import box_size, full_box, slices
from shardmesh.kernels.copy import compile_pack, compile_unpack, pack, unpack

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128),
    *(
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
    ),
]
LAYOUTS = ("contiguous", "transposed", "strided", "inside another")

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
dtypes = st.sampled_from(DTYPES)
layouts = st.sampled_from(LAYOUTS)


def interval(size):
    return st.tuples(st.integers(0, size), st.integers(0, size)).map(
        lambda ends: (min(ends), max(ends))
    )


def any_boxes(shape):
    return st.lists(st.tuples(*map(interval, shape)), max_size=6)


def chunks(size, parts):
    """Return the intervals of torch.chunk, with empty ones at the end."""
    step = -(-size // parts)
    return [(min(i * step, size), min((i + 1) * step, size)) for i in range(parts)]


@st.composite
def grids(draw, shape):
    """Draw boxes that tile the tensor: every dim split as in torch.chunk, in any order of the split
    dims.
    """
    dims = draw(st.permutations(range(len(shape))))
    boxes = [full_box(shape)]
    for dim in dims:
        cuts = chunks(shape[dim], draw(st.integers(1, 4)))
        boxes = [(*box[:dim], cut, *box[dim + 1 :]) for box in boxes for cut in cuts]
    return boxes


def random_bytes(numel, dtype, seed=0):
    raw = torch.randint(
        0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=torch.manual_seed(seed)
    )
    return (raw & 1 if dtype == torch.bool else raw).view(dtype)


def empty_tensor(shape, dtype, layout):
    """Return zero bytes in this memory layout."""
    if layout == "transposed":
        return torch.zeros(shape[::-1], dtype=dtype).permute(tuple(range(len(shape)))[::-1])
    if layout == "strided":
        return torch.zeros([2 * size for size in shape], dtype=dtype)[
            tuple(slice(1, None, 2) for _ in shape)
        ]
    if layout == "inside another":
        return torch.zeros([size + 2 for size in shape], dtype=dtype)[
            tuple(slice(1, size + 1) for size in shape)
        ]
    return torch.zeros(shape, dtype=dtype)


def random_tensor(shape, dtype, layout):
    x = empty_tensor(shape, dtype, layout)
    x.copy_(random_bytes(x.numel(), dtype).view(shape))
    return x


def raw(x):
    """Return the tensor's bytes, row-major."""
    flat = torch.empty(x.numel(), dtype=x.dtype)
    flat.view(x.shape).copy_(x)
    return flat.view(torch.uint8)


def same_bytes(a, b):
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert torch.equal(raw(a), raw(b))


def expected(x, boxes):
    """Return the specification: x[box] for every box, concatenated (as bytes, since not every dtype
    has cat).
    """
    parts = [raw(x[slices(box)]) for box in boxes]
    return torch.cat([torch.empty(0, dtype=torch.uint8), *parts]).view(x.dtype)


@given(st.data(), shapes, dtypes, layouts)
def test_pack_is_indexing(data, shape, dtype, layout):
    boxes = data.draw(st.one_of(any_boxes(shape), grids(shape)))
    x = random_tensor(shape, dtype, layout)
    packed = pack(x, boxes)
    assert packed.is_contiguous()
    same_bytes(packed, expected(x, boxes))


@given(st.data(), shapes, dtypes, layouts)
def test_pack_into_a_part_of_a_buffer(data, shape, dtype, layout):
    boxes = data.draw(st.one_of(any_boxes(shape), grids(shape)))
    x, size = random_tensor(shape, dtype, layout), sum(map(box_size, boxes))
    buffer = random_bytes(size + 5, dtype, seed=1)
    before = buffer.clone()
    assert pack(x, boxes, out=buffer[3 : 3 + size]).data_ptr() == buffer[3:].data_ptr() or size == 0
    same_bytes(buffer[3 : 3 + size], expected(x, boxes))
    same_bytes(buffer[:3], before[:3])
    same_bytes(buffer[3 + size :], before[3 + size :])


@given(st.data(), shapes, dtypes, layouts)
def test_unpack_reverses_pack(data, shape, dtype, layout):
    boxes = data.draw(grids(shape))
    x, out = random_tensor(shape, dtype, "contiguous"), empty_tensor(shape, dtype, layout)
    assert unpack(pack(x, boxes), boxes, out) is out
    same_bytes(out, x)
    same_bytes(compile_unpack(shape, boxes)(pack(x, boxes)), x)


@given(st.data(), shapes, dtypes, layouts)
def test_unpack_does_not_write_elsewhere(data, shape, dtype, layout):
    box = data.draw(st.tuples(*map(interval, shape)))
    x, out = random_tensor(shape, dtype, "contiguous"), random_tensor(shape, dtype, layout)
    flat = random_bytes(box_size(box), dtype, seed=2)
    wanted = out.clone(memory_format=torch.contiguous_format)
    wanted[slices(box)] = flat.view(wanted[slices(box)].shape)
    same_bytes(unpack(flat, [box], out), wanted)
    padded = compile_unpack(shape, [box])(pack(x, [box]))
    wanted = torch.zeros(shape, dtype=dtype)
    wanted[slices(box)] = x[slices(box)]
    same_bytes(padded, wanted)


@st.composite
def places(draw, boxes):
    """Draw an offset for each box in any order, with gaps, and a length that contains them all."""
    offsets, end = [0] * len(boxes), 0
    for i in draw(st.permutations(range(len(boxes)))):
        offsets[i] = end + draw(st.integers(0, 3))
        end = offsets[i] + box_size(boxes[i])
    return offsets, end + draw(st.integers(0, 3))


@given(st.data(), shapes, dtypes, layouts)
def test_pack_to_offsets(data, shape, dtype, layout):
    boxes = data.draw(st.one_of(any_boxes(shape), grids(shape)))
    offsets, length = data.draw(places(boxes))
    x, buffer = random_tensor(shape, dtype, layout), random_bytes(length, dtype, seed=1)
    wanted = buffer.clone()
    for box, start in zip(boxes, offsets, strict=True):
        wanted[start : start + box_size(box)].view(x[slices(box)].shape).copy_(x[slices(box)])
    compile_pack(shape, boxes, offsets)(x, buffer)
    same_bytes(buffer, wanted)


@given(st.data(), shapes, dtypes, layouts)
def test_unpack_from_offsets(data, shape, dtype, layout):
    boxes = data.draw(grids(shape))
    offsets, length = data.draw(places(boxes))
    flat, wanted = random_bytes(length, dtype), empty_tensor(shape, dtype, "contiguous")
    for box, start in zip(boxes, offsets, strict=True):
        part = wanted[slices(box)]
        part.copy_(flat[start : start + box_size(box)].view(part.shape))
    unpacking = compile_unpack(shape, boxes, offsets)
    same_bytes(unpacking(flat, empty_tensor(shape, dtype, layout)), wanted)
    same_bytes(unpacking(flat), wanted)


@given(st.data(), st.lists(shapes.filter(len), min_size=1, max_size=3), st.integers(1, 4))
def test_several_tensors_share_a_buffer(data, many, peers):
    """A bucket: for each peer its box of the first tensor, its box of the second, ..."""
    grid = []
    for shape in many:
        dim, whole = data.draw(st.integers(0, len(shape) - 1)), full_box(shape)
        grid.append([(*whole[:dim], cut, *whole[dim + 1 :]) for cut in chunks(shape[dim], peers)])
    xs = [random_tensor(shape, torch.int32, "contiguous") for shape in many]
    offsets, end = [[0] * peers for _ in many], 0
    for peer in range(peers):
        for i in range(len(many)):
            offsets[i][peer], end = end, end + box_size(grid[i][peer])
    buffer = torch.zeros(end, dtype=torch.int32)
    for x, boxes, starts in zip(xs, grid, offsets, strict=True):
        compile_pack(x.shape, boxes, starts)(x, buffer)
    same_bytes(
        buffer,
        torch.cat([expected(xs[i], [grid[i][p]]) for p in range(peers) for i in range(len(many))]),
    )
    for x, boxes, starts in zip(xs, grid, offsets, strict=True):
        same_bytes(compile_unpack(x.shape, boxes, starts)(buffer, torch.zeros_like(x)), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_dtype_crosses_columns(dtype, layout):
    x, boxes = random_tensor((3, 8), dtype, layout), [((0, 3), cut) for cut in chunks(8, 4)]
    same_bytes(pack(x, boxes), expected(x, boxes))
    same_bytes(unpack(pack(x, boxes), boxes, empty_tensor((3, 8), dtype, layout)), x)


@given(st.data(), shapes)
def test_an_expanded_tensor_packs(data, shape):
    boxes = data.draw(any_boxes((3, *shape)))
    x = random_tensor(shape, torch.float32, "contiguous").expand(3, *shape)
    same_bytes(pack(x, boxes), expected(x, boxes))


@pytest.mark.parametrize(
    ("shape", "boxes", "part"),
    [
        ((), [()], slice(0, 1)),
        ((6, 4), [((0, 6), (0, 4))], slice(0, 24)),
        ((6, 4), [(cut, (0, 4)) for cut in chunks(6, 4)], slice(0, 24)),
        ((6, 4), [((2, 3), (0, 4)), ((3, 5), (0, 4))], slice(8, 20)),
        ((1, 6, 4), [((0, 1), cut, (0, 4)) for cut in chunks(6, 3)], slice(0, 24)),
        (
            (6, 4),
            [((2, 3), (0, 2)), ((2, 3), (2, 4)), ((3, 4), (0, 2)), ((3, 4), (2, 4))],
            slice(8, 16),
        ),
        ((6, 4), [((0, 0), (0, 4)), ((5, 6), (1, 3)), ((6, 6), (0, 4))], slice(21, 23)),
    ],
)
def test_one_contiguous_range_is_a_view(shape, boxes, part):
    x = random_tensor(shape, torch.float32, "contiguous")
    packing, unpacking = compile_pack(shape, boxes), compile_unpack(shape, boxes)
    assert packing.zero_copy
    assert packing(x).data_ptr() == x.data_ptr() + 4 * part.start
    assert torch.equal(packing(x), x.view(-1)[part])
    if packing.size == x.numel():
        assert unpacking(packing(x)).data_ptr() == x.data_ptr()


def test_a_contiguous_range_of_a_strided_tensor_is_copied():
    x = random_tensor((6, 4), torch.float32, "transposed")
    packed = pack(x, [full_box((6, 4))])
    assert packed.data_ptr() != x.data_ptr()
    assert torch.equal(packed, x.reshape(-1))


@pytest.mark.parametrize(
    ("shape", "boxes", "copies"),
    [
        ((5, 16), [((0, 5), cut) for cut in chunks(16, 8)], 1),
        ((5, 15), [((0, 5), cut) for cut in chunks(15, 8)], 2),
        ((4, 6, 8), [((0, 4), a, b) for a in chunks(6, 3) for b in chunks(8, 2)], 1),
        ((4, 6, 8), [((0, 4), a, b) for b in chunks(8, 2) for a in chunks(6, 3)], 1),
        ((8, 8), [(a, b) for a in chunks(8, 2) for b in chunks(8, 4)], 1),
        ((4, 4), [((0, 4), (0, 2))] * 3, 1),
        ((4, 4), [((i, i + 1), (i, i + 1)) for i in range(4)], 1),
        ((4, 4), [((0, 4), cut) for cut in reversed(chunks(4, 2))], 2),
        ((4, 4), [], 0),
        ((0, 4), [((0, 0), cut) for cut in chunks(4, 2)], 0),
    ],
)
def test_equal_boxes_fold_into_few_copies(shape, boxes, copies):
    assert compile_pack(shape, boxes).copies == copies
    x = random_tensor(shape, torch.int32, "contiguous")
    same_bytes(pack(x, boxes), expected(x, boxes))


COLUMNS = [((0, 4), cut) for cut in chunks(8, 4)]


@pytest.mark.parametrize(
    ("offsets", "copies"),
    [
        ([0, 8, 16, 24], 1),
        ([5, 20, 35, 50], 1),  # at a constant step on both sides
        ([5, 20, 36, 51], 1),  # two pairs at a step, of two boxes at another
        ([0, 9, 20, 40], 2),
        ([50, 35, 20, 5], 4),  # backwards: no such view
    ],
)
def test_equal_steps_in_tensor_and_buffer_fold(offsets, copies):
    assert compile_pack((4, 8), COLUMNS, offsets).copies == copies
    assert compile_unpack((4, 8), COLUMNS, offsets).copies == copies


def test_boxes_separated_in_the_buffer_are_not_folded():
    rows = [(cut, (0, 8)) for cut in chunks(4, 2)]
    assert compile_pack((4, 8), rows, [0, 16]).zero_copy
    apart = compile_pack((4, 8), rows, [0, 17])
    assert not apart.zero_copy
    assert (apart.copies, apart.size) == (1, 33)  # as one view of two parts


def test_a_range_of_a_buffer_unpacks_to_a_view():
    unpacking, flat = compile_unpack((4, 8), [full_box((4, 8))], [5]), torch.arange(40)
    assert unpacking.zero_copy
    assert unpacking(flat).data_ptr() == flat[5:].data_ptr()
    assert torch.equal(unpacking(flat), flat[5:37].view(4, 8))
    packing = compile_pack((4, 8), [full_box((4, 8))], [5])
    assert not packing.zero_copy
    assert compile_unpack((0, 8), [((0, 0), (0, 8))], [5])(flat).shape == (0, 8)


def test_one_part_of_a_buffer_may_be_read_twice():
    boxes = [((0, 2), (0, 3)), ((2, 4), (0, 3))]
    assert torch.equal(
        compile_unpack((4, 3), boxes, [1, 1])(torch.arange(7)),
        torch.arange(1, 7).view(2, 3).tile(2, 1),
    )


def test_invalid_offsets_raise():
    with pytest.raises(ValueError, match=r"4 boxes with the offsets \[0, 8\]: give one per box"):
        compile_pack((4, 8), COLUMNS, [0, 8])
    with pytest.raises(ValueError, match="each >= 0"):
        compile_unpack((4, 8), COLUMNS, [-1, 8, 16, 24])
    with pytest.raises(ValueError, match=r"takes 0:8 of the flat buffer, and box .* starts at 7"):
        compile_pack((4, 8), COLUMNS, [0, 7, 16, 24])
    with pytest.raises(ValueError, match="pass the buffer to write to as out="):
        compile_pack((4, 8), COLUMNS, [0, 9, 18, 27])(torch.zeros(4, 8))
    with pytest.raises(ValueError, match=r"at least 35,\), not one of shape \(34,\)"):
        compile_pack((4, 8), COLUMNS, [0, 9, 18, 27])(torch.zeros(4, 8), torch.zeros(34))


def test_a_lazily_conjugated_tensor_is_packed_by_value():
    x = torch.tensor([1 + 2j, 3 - 1j])
    assert not pack(x.conj(), [((0, 2),)]).is_conj()
    assert torch.equal(pack(x.conj(), [((0, 2),)]), torch.tensor([1 - 2j, 3 + 1j]))
    assert torch.equal(pack(x.conj().imag, [((0, 2),)]), torch.tensor([-2.0, 1.0]))


def test_out_may_have_another_dtype():
    x = torch.tensor([[1.5, 2.5], [3.5, 4.5]])
    out = pack(x, [((0, 2), (0, 1)), ((0, 2), (1, 2))], out=torch.empty(4, dtype=torch.bfloat16))
    assert out.tolist() == [1.5, 3.5, 2.5, 4.5]
    back = unpack(out, [((0, 2), (0, 1)), ((0, 2), (1, 2))], torch.empty(2, 2, dtype=torch.float64))
    assert torch.equal(back, x.double())


def test_meta_tensors_pack_to_shapes():
    boxes = [((0, 4), (0, 2)), ((0, 4), (2, 3))]
    assert pack(torch.empty(4, 4, device="meta"), boxes).shape == (12,)
    assert unpack(
        torch.empty(12, device="meta"), boxes, torch.empty(4, 4, device="meta")
    ).shape == (4, 4)


def test_compiled_copy_accepts_any_strides_and_dtype():
    boxes = [((0, 4), cut) for cut in chunks(6, 3)]
    packing = compile_pack((4, 6), boxes)
    for layout in LAYOUTS:
        for dtype in (torch.float32, torch.bool):
            x = random_tensor((4, 6), dtype, layout)
            same_bytes(packing(x), expected(x, boxes))


def test_errors_show_the_arguments():
    packing = compile_pack((4, 6), [((0, 4), (0, 3))])
    unpacking = compile_unpack((4, 6), [((0, 4), (0, 3))])
    with pytest.raises(ValueError, match=r"shape \(6, 4\), not \(4, 6\)"):
        packing(torch.zeros(6, 4))
    with pytest.raises(
        ValueError, match=r"contiguous buffer of shape \(12,\), not one of shape \(11,\)"
    ):
        packing(torch.zeros(4, 6), out=torch.zeros(11))
    with pytest.raises(ValueError, match=r"strides \(2,\)"):
        unpacking(torch.zeros(24)[::2])
    with pytest.raises(ValueError, match=r"shape \(6, 4\), not \(4, 6\)"):
        unpacking(torch.zeros(12), torch.zeros(6, 4))
    with pytest.raises(ValueError, match="spans 0:7 in dim 1"):
        compile_pack((4, 6), [((0, 4), (0, 7))])


def test_repr_shows_the_copies():
    columns = [((0, 4), cut) for cut in chunks(6, 3)]
    assert repr(compile_pack((4, 6), columns)) == "Pack([4, 6] <-> [24]: 3 x [4, 2] at [0, 0])"
    assert repr(compile_unpack((4, 6), columns)) == "Unpack([4, 6] <-> [24]: 3 x [4, 2] at [0, 0])"
    assert repr(compile_pack((4,), [((0, 4),)])) == "Pack([4] <-> [4]: a view where contiguous)"
