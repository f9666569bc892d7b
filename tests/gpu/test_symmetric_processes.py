"""Symmetric memory between processes: four ranks on one GPU, over torch's own shared memory and a
gloo group.

The GPU is time-sliced between the processes, so a synchronization of ranks takes milliseconds:
these tests check a few values, and no times. `tests/kernels/test_symmetric.py` tests the same
kernels with ranks that share CPU memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import shardmesh as sm
from shardmesh.kernels import symmetric
from shardmesh.mesh.comm.symmetric_memory import needed_peers
from tests.pool import Pool

pytestmark = pytest.mark.gpu

SIZES = [(4,), (2, 2)]  # one group of four ranks, and two groups of two
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        pool = Pool(4, "cuda")
        yield pool
        pool.close()


def _peers(mesh_shape: tuple[int, ...]) -> symmetric.Peers:
    mesh = sm.init_device_mesh("cuda", mesh_shape, axis_names=("a", "b")[: len(mesh_shape)])
    return needed_peers(mesh.group(mesh.axis_names[-1]), mesh.device)


def _values(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the input of every rank, on each rank: magnitudes whose sums depend on the order."""
    generator = torch.Generator("cpu").manual_seed(size)
    return [
        torch.randn(shape, generator=generator, device="cpu").mul(10.0 ** (r % 3)).to("cuda", dtype)
        for r in range(size)
    ]


def _same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def _all_reduces(mesh_shape: tuple[int, ...]) -> None:
    """Check that both algorithms equal the reference bitwise, for changing sizes."""
    peers = _peers(mesh_shape)
    for count in (1, 7, 4096, 100_003, 5):
        for dtype in DTYPES:
            xs = _values(peers.size, (count,), dtype)
            expected = symmetric.reference_all_reduce(xs, dtype)
            for reduce in (symmetric.one_shot_all_reduce, symmetric.two_shot_all_reduce):
                x = xs[peers.rank]
                _same(reduce(peers, x, torch.empty_like(x)), expected)
    torch.cuda.synchronize()
    symmetric.check(peers)


def _captured(mesh_shape: tuple[int, ...]) -> None:
    """Check that a CUDA graph replays the launches on new values: no argument changes between
    calls.
    """
    peers = _peers(mesh_shape)
    x, out = torch.zeros(1000, device="cuda"), torch.zeros(1000, device="cuda")
    symmetric.one_shot_all_reduce(peers, x, out)  # compiles before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        symmetric.one_shot_all_reduce(peers, x, out)
    for step in range(5):
        xs = _values(peers.size, (1000,), torch.float32)
        x.copy_(xs[peers.rank] + step)
        graph.replay()
        _same(out, symmetric.reference_all_reduce([v + step for v in xs], torch.float32))
    symmetric.check(peers)


def _add_norms(mesh_shape: tuple[int, ...]) -> None:
    peers = _peers(mesh_shape)
    for dtype in DTYPES:
        xs = _values(peers.size, (33, 512), dtype)
        (residual,) = _values(1, (33, 512), dtype)
        epilogue = symmetric.AddNorm(
            residual, torch.linspace(0.5, 2, 512, device="cuda").to(dtype), 1e-6, residual.clone()
        )
        added, expected = symmetric.reference_add_norm(
            symmetric.reference_all_reduce(xs, dtype), epilogue, dtype
        )
        for reduce in (symmetric.one_shot_all_reduce, symmetric.two_shot_all_reduce):
            out = reduce(peers, xs[peers.rank], torch.empty_like(expected), epilogue)
            _same(epilogue.added, added)
            torch.testing.assert_close(out, expected)


def _pulls(mesh_shape: tuple[int, ...]) -> None:
    """Check chunks along every dim, also uneven ones and more ranks than rows."""
    peers = _peers(mesh_shape)
    rank, size = peers.rank, peers.size
    for shape in ((8, 12, 16), (7, 3, 5), (2, 1, 130)):
        for dtype in DTYPES:
            xs = _values(size, shape, dtype)
            whole, total = xs[0], symmetric.reference_all_reduce(xs, dtype)
            for dim in range(3):
                part, summed = _chunk(whole, dim, rank, size), _chunk(total, dim, rank, size)
                _same(symmetric.all_gather(peers, part, torch.empty_like(whole), dim), whole)
                _same(
                    symmetric.reduce_scatter(peers, xs[rank], torch.empty_like(summed), dim), summed
                )
                turned = _chunk(whole, (dim + 1) % 3, rank, size)
                _same(
                    symmetric.all_to_all(peers, part, torch.empty_like(turned), dim, (dim + 1) % 3),
                    turned,
                )


def _chunk(x: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    """Return this rank's part in `torch.chunk`; empty if there are fewer chunks than ranks."""
    chunks = x.chunk(size, dim)
    return (chunks[rank] if rank < len(chunks) else x.narrow(dim, 0, 0)).contiguous()


@pytest.mark.parametrize("program", [_all_reduces, _captured, _add_norms, _pulls])
@pytest.mark.parametrize("mesh_shape", SIZES)
def test_values(ranks: Pool, program, mesh_shape):
    ranks(program, mesh_shape, timeout=240)
