"""Benchmark cases of the kernels: each case runs our kernel and the torch operations that do the
same.

    full tensor  <->  [ rank 0's part | rank 1's part | ... | rank 7's part ]    as in torch.chunk

The torch operations are those that PyTorch's libraries run before and after their collectives (read
in torch 2.13):

    DTensor     P -> S: `Shard._reduce_shard_tensor`, then `funcol.reduce_scatter_single`;
                S -> R: `Shard._to_replicate_tensor`, over `funcol.all_gather_single`;
                uneven chunks are padded before and narrowed after
    FSDP2       `foreach_reduce` (`torch._chunk_cat`) and
                `foreach_all_gather_copy_out` (`torch.split_with_sizes_copy`)

kernels.py times the cases on a GPU; kernel_bytes.py counts the bytes that they move, without a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardmesh.kernels.box import Box
from shardmesh.kernels.copy import (
    Pack,
    Unpack,
    compile_pack,
    compile_unpack,
    pack_many,
    unpack_many,
)
from shardmesh.kernels.quantize import (
    BLOCK,
    FORMATS,
    compile_dequantize,
    compile_quantize,
    record_bytes,
)
from shardmesh.kernels.random import normal, uniform
from shardmesh.kernels.reduce import combine_many, compile_combine

RANKS = 8
BF16, FP32 = torch.bfloat16, torch.float32
SHORT = {BF16: "bf16", FP32: "fp32"}
# Of a mean over ranks; a power of two, so that the order of scaling and rounding does not matter.
SCALE = 1 / RANKS

# targets on an H200, as fractions of the copy rate
BOX_COPY = 0.90
TINY = 0.75
FUSED = 0.88
QUANTIZED = 0.85
TWICE = 2.0

Call = Callable[..., Any]


@dataclass(frozen=True)
class Peer:
    """Torch operations that do the same as one of our kernels.

    Attributes:
        call: called with the inputs.
        exact: removes padding from its result, to compare it with ours; not part of the work.
        compiled: whether to also time `torch.compile` of it.
        least: target for the speedup of ours, over the compiled form if there is one.
    """

    call: Call
    exact: Call = field(default=lambda result: result)
    compiled: bool = False
    least: float | None = None


@dataclass(frozen=True)
class Work:
    """A case at some size, on some device.

    Attributes:
        elements: number of elements of the full tensor, or of all contributions; figures are bytes
            per element.
        inputs: inputs of ours and of the peers.
        ours: called with the inputs.
        peers: torch's operations, by name.
    """

    elements: int
    inputs: tuple[Tensor, ...]
    ours: Call
    peers: Mapping[str, Peer]

    def needed(self) -> int:
        """Return the bytes that must be read or written: inputs and results, each once; 0 if the
        results are views.
        """
        results = tensors_in(self.ours(*self.inputs))
        if {storage_of(x) for x in results} <= {storage_of(x) for x in self.inputs}:
            return 0
        return sum(x.nbytes for x in (*self.inputs, *results))


@dataclass(frozen=True)
class KernelCase:
    """One operation of a kernel.

    Attributes:
        name: the operation and the dim.
        make: (bytes of the full tensor, device) -> work.
        target: target as a fraction of the copy rate, if any.
        same: True if results are bitwise equal, False if they are close, None if not comparable.
    """

    name: str
    make: Callable[[int, torch.device | str], Work]
    target: float | None
    same: bool | None = True


def tensors_in(results: Any) -> list[Tensor]:
    """Return a tensor, or a sequence of tensors, as a list."""
    return [results] if isinstance(results, Tensor) else list(results)


def storage_of(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def disagreeing(case: KernelCase, work: Work) -> list[str]:
    """Return the peers whose results differ from ours."""
    results = tensors_in(work.ours(*work.inputs))
    return [
        name
        for name, peer in work.peers.items()
        if not agree(results, peer.exact(peer.call(*work.inputs)), case.same)
    ]


def agree(ours: Sequence[Tensor], theirs: Any, same: bool | None) -> bool:
    if same is None:
        return True
    alike = torch.equal if same else close
    return all(alike(a, b) for a, b in zip(ours, tensors_in(theirs), strict=True))


def close(a: Tensor, b: Tensor) -> bool:
    """Return whether results are equal up to the order of summation of a few numbers near 1."""
    return torch.allclose(a, b, rtol=2 * torch.finfo(a.dtype).eps, atol=1e-5)


def chunks(shape: Sequence[int], dim: int) -> list[Box]:
    """Return the box of each rank when this dim is split as in torch.chunk; empty for ranks without
    a part.
    """
    step, n = -(-shape[dim] // RANKS), shape[dim]
    bounds = [(min(r * step, n), min(r * step + step, n)) for r in range(RANKS)]
    return [
        (*((0, m) for m in shape[:dim]), rows, *((0, m) for m in shape[dim + 1 :]))
        for rows in bounds
    ]


def random(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


# -- one tensor ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """A tensor of some size in bytes that is split along a dim.

    Attributes:
        name: description of the dim.
        dim: the dim to split.
        inner: sizes of all dims but the first; the size of the first follows from the bytes.
        target: target of the case.
    """

    name: str
    dim: int
    inner: tuple[int, ...]
    target: float = BOX_COPY

    def shape(self, elements: int) -> tuple[int, ...]:
        """Return a shape of about this many elements; dim 0 is even unless it is split and the name
        says uneven.
        """
        rows = max(RANKS, elements // math.prod(self.inner) // RANKS * RANKS)
        return (rows - 3 * (self.dim == 0 and "uneven" in self.name), *self.inner)


EVEN = (
    Split("first dim", 0, (1024,)),
    Split("middle dim", 1, (64, 512)),
    Split("last dim", 1, (1024,)),
    Split("last dim, 8 elements a rank", 1, (64,), TINY),
    Split("last dim, 1 element a rank", 1, (8,), TINY),
)
UNEVEN = (
    Split("first dim, uneven", 0, (1024,)),
    Split("middle dim, uneven", 1, (61, 512)),
    Split("last dim, uneven", 1, (1021,)),
    Split("last dim, 1 or 2 elements a rank", 1, (15,), TINY),
)
SINGLE = (*((split, True) for split in EVEN), *((split, False) for split in UNEVEN))


def packing(
    split: Split, even: bool, dtype: torch.dtype, size: int, device: torch.device | str
) -> Work:
    """Return the work before a reduce_scatter along a dim."""
    x = random(split.shape(size // dtype.itemsize), dtype, device)
    pack = compile_pack(x.shape, chunks(x.shape, split.dim))
    return Work(
        x.numel(),
        (x,),
        pack,
        pack_peers(split.dim) if even else uneven_pack_peers(x.shape, split.dim),
    )


def pack_peers(dim: int) -> dict[str, Peer]:
    if dim == 0:
        return {"DTensor": Peer(lambda x: x.contiguous().view(-1))}
    return {
        "DTensor: cat of chunks": Peer(lambda x: cat_of_chunks(x, dim).view(-1), compiled=True),
        "movedim().contiguous()": Peer(
            lambda x: x.unflatten(dim, (RANKS, -1)).movedim(dim, 0).contiguous().view(-1),
            compiled=True,
        ),
    }


def uneven_pack_peers(shape: Sequence[int], dim: int) -> dict[str, Peer]:
    boxes = chunks(shape, dim)
    padded = (*shape[:dim], -(-shape[dim] // RANKS), *shape[dim + 1 :])

    def without_padding(flat: Tensor) -> Tensor:
        parts = flat.view(RANKS, *padded).unbind()
        return torch.cat(
            [
                part.narrow(dim, 0, box[dim][1] - box[dim][0]).reshape(-1)
                for part, box in zip(parts, boxes, strict=True)
            ]
        )

    return {
        "DTensor: pad, cat, cat": Peer(
            partial(dtensor_pack, dim=dim), without_padding, compiled=True, least=TWICE
        ),
        "cat of flattened chunks": Peer(
            lambda x: torch.cat([c.reshape(-1) for c in x.chunk(RANKS, dim)])
        ),
    }


def cat_of_chunks(x: Tensor, dim: int) -> Tensor:
    """Arrange chunks along this dim as `funcol.reduce_scatter_single` and FSDP2's `foreach_reduce`
    do.
    """
    return torch.cat(x.chunk(RANKS, dim)) if dim else x


def dtensor_pack(x: Tensor, dim: int) -> Tensor:
    """Pad, concatenate and arrange uneven chunks as DTensor does."""
    step = -(-x.shape[dim] // RANKS)
    parts = list(x.tensor_split([step * r for r in range(1, RANKS)], dim))
    parts = [pad(part, dim, step - part.shape[dim]).contiguous() for part in parts]
    return cat_of_chunks(torch.cat(parts, dim), dim).view(-1)


def pad(x: Tensor, dim: int, more: int) -> Tensor:
    return F.pad(x, [*[0, 0] * (x.ndim - 1 - dim), 0, more]) if more else x


def unpacking(
    split: Split, even: bool, dtype: torch.dtype, size: int, device: torch.device | str
) -> Work:
    """Return the work after an all_gather along a dim; every rank's part is padded to the same
    number of elements.
    """
    shape, dim = split.shape(size // dtype.itemsize), split.dim
    part = (*shape[:dim], -(-shape[dim] // RANKS), *shape[dim + 1 :])
    boxes, length = chunks(shape, dim), math.prod(part)
    flat = random((RANKS * length,), dtype, device)
    unpack = compile_unpack(shape, boxes, [r * length for r in range(RANKS)])
    peers = unpack_peers(shape, dim, part) if even else uneven_unpack_peers(flat, boxes, dim, part)
    return Work(math.prod(shape), (flat,), unpack, peers)


def unpack_peers(shape: Sequence[int], dim: int, part: Sequence[int]) -> dict[str, Peer]:
    def moved(flat: Tensor) -> Tensor:
        return flat.view(RANKS, *part).movedim(0, dim).flatten(dim, dim + 1).contiguous()

    also = {"movedim().contiguous()": Peer(moved, compiled=True)} if dim else {}
    return {
        "DTensor: cat of chunks": Peer(
            partial(dtensor_unpack, shape=shape, dim=dim, part=part), compiled=True
        ),
        **also,
    }


def uneven_unpack_peers(
    flat: Tensor, boxes: Sequence[Box], dim: int, part: Sequence[int]
) -> dict[str, Peer]:
    """Return the peer on the same values: DTensor pads each part along the dim, ours after the
    part's elements.
    """
    padded = []
    for values, box in zip(flat.view(RANKS, -1), boxes, strict=True):
        sizes = [stop - start for start, stop in box]
        padded.append(
            pad(values[: math.prod(sizes)].view(sizes), dim, part[dim] - sizes[dim]).reshape(-1)
        )
    theirs, shape = torch.cat(padded), [box[1] for box in boxes[-1]]
    return {
        "DTensor: cat, cut": Peer(
            lambda flat: dtensor_unpack(theirs, shape, dim, part), compiled=True, least=TWICE
        )
    }


def dtensor_unpack(flat: Tensor, shape: Sequence[int], dim: int, part: Sequence[int]) -> Tensor:
    parts = flat.view(RANKS * part[0], *part[1:])
    whole = torch.cat(parts.chunk(RANKS), dim) if dim else parts
    return whole.narrow(dim, 0, shape[dim]).contiguous()


# -- cast and scale --------------------------------------------------------------------------------


def casting(split: Split, size: int, device: torch.device | str) -> Work:
    """Return the work of averaging float32 gradients and sending them as bfloat16."""
    x = random(split.shape(size // FP32.itemsize), FP32, device)
    pack = compile_pack(x.shape, chunks(x.shape, split.dim))

    def ours(x: Tensor) -> Tensor:
        return pack(x, x.new_empty(pack.size, dtype=BF16), scale=SCALE)

    def chain(x: Tensor) -> Tensor:
        return cat_of_chunks(x.to(BF16) * SCALE, split.dim).view(-1)

    return Work(x.numel(), (x,), ours, {"to(), *, cat of chunks": Peer(chain, compiled=True)})


# -- many tensors ----------------------------------------------------------------------------------

# Matrices of a transformer layer, in multiples of its width.
LAYER = ((4, 1), (1, 4), (1, 1), (1, 1), (1, 1), (1, 1))


def layer(elements: int, even: bool) -> list[tuple[int, ...]]:
    """Return the shapes of a transformer layer's parameters."""
    width = max(16, int(math.sqrt(elements / 12)) // 64 * 64) + (0 if even else 3)
    return [*((a * width, b * width) for a, b in LAYER), (width,), (width,)]


@dataclass(frozen=True)
class Bucket:
    """A layer's tensors in one buffer: each rank's parts of all tensors are contiguous, each padded
    to the same size.

    Attributes:
        shapes: shapes of the tensors.
        dim: the dim to split.
    """

    shapes: Sequence[tuple[int, ...]]
    dim: int

    @property
    def parts(self) -> list[tuple[int, ...]]:
        """Padded shape of a rank's part of each tensor."""
        d = self.dim
        return [(*s[:d], -(-s[d] // RANKS), *s[d + 1 :]) for s in self.shapes]

    @property
    def sizes(self) -> list[int]:
        """Number of elements of a rank's part of each tensor."""
        return [math.prod(part) for part in self.parts]

    @property
    def elements(self) -> int:
        return sum(map(math.prod, self.shapes))

    def offsets(self) -> list[list[int]]:
        """Return the offsets of every rank's part, for each tensor."""
        total, starts = sum(self.sizes), accumulate(self.sizes, initial=0)
        return [
            [r * total + start for r in range(RANKS)]
            for start, _ in zip(starts, self.shapes, strict=False)
        ]

    def packs(self) -> list[Pack]:
        return [
            compile_pack(s, chunks(s, self.dim), o)
            for s, o in zip(self.shapes, self.offsets(), strict=True)
        ]

    def unpacks(self) -> list[Unpack]:
        return [
            compile_unpack(s, chunks(s, self.dim), o)
            for s, o in zip(self.shapes, self.offsets(), strict=True)
        ]


def bucket_packing(
    dim: int, even: bool, to: torch.dtype, size: int, device: torch.device | str
) -> Work:
    """Return the work of FSDP on a layer's gradients before the reduce_scatter."""
    bucket = Bucket([s for s in layer(size // 2, even) if len(s) > dim], dim)
    gradients = tuple(random(shape, BF16, device) for shape in bucket.shapes)
    packs, length = bucket.packs(), RANKS * sum(bucket.sizes)
    buffer = torch.zeros(length, dtype=to, device=device)

    def fsdp(*gradients: Tensor) -> Tensor:
        arranged = [cat_of_chunks(g, dim) for g in gradients]
        out = gradients[0].new_empty(length, dtype=to)
        torch._chunk_cat(arranged, dim=0, num_chunks=RANKS, out=out.view(RANKS, -1))
        return out

    peers = {"FSDP2: _chunk_cat": Peer(fsdp)}
    return Work(
        bucket.elements, gradients, lambda *gradients: pack_many(packs, gradients, buffer), peers
    )


def bucket_unpacking(dim: int, even: bool, size: int, device: torch.device | str) -> Work:
    """Return the work of FSDP on a layer's gathered parameters."""
    bucket = Bucket([s for s in layer(size // 2, even) if len(s) > dim], dim)
    gathered = random((RANKS * sum(bucket.sizes),), BF16, device)
    unpacks = bucket.unpacks()

    def fsdp(gathered: Tensor) -> list[Tensor]:
        outs = [gathered.new_empty(RANKS * n) for n in bucket.sizes]
        out = [x.view(RANKS, -1) for x in outs]
        torch.split_with_sizes_copy(gathered.view(RANKS, -1), bucket.sizes, dim=1, out=out)
        whole = [
            x.view(RANKS * part[0], *part[1:]) for x, part in zip(outs, bucket.parts, strict=True)
        ]
        return [torch.cat(x.chunk(RANKS), dim) if dim else x for x in whole]

    def without_padding(padded: Sequence[Tensor]) -> list[Tensor]:
        return [
            x.narrow(dim, 0, shape[dim]) for x, shape in zip(padded, bucket.shapes, strict=True)
        ]

    peers = {"FSDP2: split_with_sizes_copy": Peer(fsdp, without_padding)}
    return Work(
        bucket.elements, (gathered,), lambda gathered: unpack_many(unpacks, gathered), peers
    )


# -- sums ------------------------------------------------------------------------------------------


def summing(dtype: torch.dtype, size: int, device: torch.device | str) -> Work:
    """Return the work of summing eight contributions to a tensor."""
    length = size // dtype.itemsize // RANKS
    flat = random((RANKS * length,), dtype, device)
    add = compile_combine((length,), {((0, length),): [r * length for r in range(RANKS)]})
    peer = Peer(lambda flat: flat.view(RANKS, -1).sum(0), compiled=True)
    return Work(flat.numel(), (flat,), add, {"view().sum(0)": peer})


def bucket_summing(size: int, device: torch.device | str) -> Work:
    """Return the work of summing eight contributions to each tensor of a layer; those of a rank are
    contiguous.
    """
    shapes = layer(size // BF16.itemsize // RANKS, even=False)
    sizes = [math.prod(shape) for shape in shapes]
    total, starts = sum(sizes), list(accumulate(sizes, initial=0))[:-1]
    flat = random((RANKS * total,), BF16, device)
    adds = [
        compile_combine(
            shape, {tuple([(0, n) for n in shape]): [r * total + start for r in range(RANKS)]}
        )
        for shape, start in zip(shapes, starts, strict=True)
    ]

    def sums(flat: Tensor) -> list[Tensor]:
        parts = flat.view(RANKS, total).split(sizes, 1)
        return [part.sum(0).view(shape) for part, shape in zip(parts, shapes, strict=True)]

    return Work(
        flat.numel(), (flat,), lambda flat: combine_many(adds, flat), {"sum(0) of each": Peer(sums)}
    )


# -- quantized -------------------------------------------------------------------------------------

# The largest code, and the dtype of codes.
CODES = {"int8": (126.0, torch.int8), "fp8": (416.0, torch.float8_e4m3fn)}


def quantizing(split: Split, transport: str, size: int, device: torch.device | str) -> Work:
    """Return the work of quantizing to one byte per element, with a scale per block."""
    x = random(split.shape(size // BF16.itemsize), BF16, device)
    quantize = compile_quantize(x.shape, chunks(x.shape, split.dim), transport)
    peer = Peer(partial(quantized, dim=split.dim, transport=transport), compiled=True, least=1.0)
    return Work(x.numel(), (x,), quantize, {"in torch": peer})


def quantized(x: Tensor, dim: int, transport: str) -> Tensor:
    """Quantize in torch: return the records of all ranks, for even chunks of whole blocks."""
    largest, dtype = CODES[transport]
    blocks = x.unflatten(dim, (RANKS, -1)).movedim(dim, 0).reshape(RANKS, -1, BLOCK).float()
    scale = (blocks.abs().amax(-1, keepdim=True) * (1 / largest)).clamp_min(2.0**-126)
    codes = blocks * (1 / scale)
    codes = (codes.round() if transport == "int8" else codes).to(dtype)
    return torch.cat(
        [part.reshape(RANKS, -1).view(torch.uint8) for part in (codes, scale)], 1
    ).view(-1)


def dequantizing(transport: str, size: int, device: torch.device | str) -> Work:
    """Return the work of summing eight quantized contributions: the local part of an
    all_to_all_reduce.
    """
    length = max(1, size // BF16.itemsize // RANKS // (4 * BLOCK)) * 4 * BLOCK
    flat = quantized(random((RANKS, length), BF16, device), 0, transport)
    add = compile_dequantize(
        (length,), {((0, length),): [r * record_bytes(length) for r in range(RANKS)]}, transport
    )
    peer = Peer(partial(dequantized, transport=transport), compiled=True, least=1.0)
    return Work(
        RANKS * length,
        (flat,),
        lambda flat: add(flat, flat.new_empty(length, dtype=BF16)),
        {"in torch": peer},
    )


def dequantized(flat: Tensor, transport: str) -> Tensor:
    records = flat.view(RANKS, -1)
    codes, scales = records.split(
        [records.shape[1] // (BLOCK + 4) * BLOCK, records.shape[1] // (BLOCK + 4) * 4], 1
    )
    values = codes.view(CODES[transport][1]).float().view(RANKS, -1, BLOCK)
    return (values * scales.view(FP32).unsqueeze(-1)).sum(0).to(BF16).view(-1)


# -- random numbers --------------------------------------------------------------------------------


def drawing(
    draw: Call, torchs: Call, dtype: torch.dtype, size: int, device: torch.device | str
) -> Work:
    """Return the work of drawing random numbers that do not depend on the mesh; torch draws other
    values.
    """
    shape = (size // dtype.itemsize,)
    box = ((0, shape[0]),)
    return Work(
        shape[0],
        (),
        lambda: draw(shape, box, seed=1, stream=2, dtype=dtype, device=device),
        {torchs.__name__: Peer(lambda: torchs(shape, dtype=dtype, device=device))},
    )


# -- the list --------------------------------------------------------------------------------------

CASES: tuple[KernelCase, ...] = (
    *(
        KernelCase(
            f"{what}, {split.name}, {SHORT[dtype]}", partial(make, split, even, dtype), split.target
        )
        for what, make in (("pack", packing), ("unpack", unpacking))
        for split, even in SINGLE
        for dtype in (BF16, FP32)
    ),
    *(
        KernelCase(f"cast, scale, pack, {split.name}", partial(casting, split), FUSED)
        for split in EVEN
    ),
    KernelCase("pack a layer, dim 0", partial(bucket_packing, 0, True, BF16), BOX_COPY),
    KernelCase("pack a layer, dim 0, uneven", partial(bucket_packing, 0, False, BF16), BOX_COPY),
    KernelCase("pack a layer, dim 0, to fp32", partial(bucket_packing, 0, True, FP32), FUSED),
    KernelCase("pack a layer, dim 1", partial(bucket_packing, 1, True, BF16), BOX_COPY),
    KernelCase("unpack a layer, dim 0", partial(bucket_unpacking, 0, True), BOX_COPY),
    KernelCase("unpack a layer, dim 0, uneven", partial(bucket_unpacking, 0, False), BOX_COPY),
    KernelCase("unpack a layer, dim 1", partial(bucket_unpacking, 1, True), BOX_COPY),
    *(
        KernelCase(f"sum of 8, {SHORT[dtype]}", partial(summing, dtype), FUSED, same=False)
        for dtype in (BF16, FP32)
    ),
    KernelCase("sum of 8, a layer, uneven", bucket_summing, FUSED, same=False),
    *(
        KernelCase(
            f"quantise, pack, {split.name}, {transport}",
            partial(quantizing, split, transport),
            QUANTIZED,
        )
        for split in (EVEN[0], EVEN[2])
        for transport in FORMATS
    ),
    KernelCase("uniform, bf16", partial(drawing, uniform, torch.rand, BF16), None, same=None),
    KernelCase("uniform, fp32", partial(drawing, uniform, torch.rand, FP32), None, same=None),
    KernelCase("normal, bf16", partial(drawing, normal, torch.randn, BF16), None, same=None),
    *(
        KernelCase(f"dequantise, sum of 8, {t}", partial(dequantizing, t), QUANTIZED, same=False)
        for t in FORMATS
    ),
)
