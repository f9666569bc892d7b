r"""A convolution over an image that is sharded along its height: each rank needs a few rows of its
neighbors, the halo.

    image P(None, None, "sp"): [b c h/4 w] on each rank    with a kernel of 3 rows the halo is 1 row

             0 0 0 0 0 0      the first rank receives zeros, which serve as padding
    rank 0   . . . . . .
             . . . . . .  --\  its last row is sent down
    rank 1   . . . . . .  --/  its first row is sent up
             . . . . . .
             ...
    rank 3   . . . . . .
             0 0 0 0 0 0      the last rank receives zeros too

Two `ppermute`s exchange the halo, whatever the size of the image. Backward reverses them: the
gradient of a row that was sent to a neighbor is sent back and added. Heights need not be multiples
of the number of ranks, but every part must be as high as the halo.

    python examples/halo_conv.py                         4 ranks simulated in this process
    python examples/halo_conv.py --launch 4              4 local processes
    torchrun --nproc-per-node 4 examples/halo_conv.py    the same, started by torchrun
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardmesh as sm
from shardmesh import P

ROWS = P(None, None, "sp")  # layout of an image [b c h w]


def conv(image: sm.ShardedTensor, kernel: Tensor) -> Any:
    """Compute `F.conv2d(image, kernel, padding="same")` of an image laid out as `ROWS`; the result
    has the same layout.

    Args:
        image: [b c h w].
        kernel: [c' c k k] with an odd k, replicated.

    Raises: ValueError if a rank has fewer rows than its neighbors need.
    """
    check_rows(height=image.shape[2], ranks=image.mesh.size("sp"), size=kernel.shape[2])
    return conv_part(image, kernel)


def check_rows(height: int, ranks: int, size: int) -> None:
    """Raise ValueError on every rank, before any communication, if a rank has fewer rows than the
    halo.
    """
    if size % 2 == 0:
        raise ValueError(f"a kernel of {size} rows has no middle one: pad it to {size + 1}")
    most, needed = -(-height // ranks), max(size // 2, 1)
    # Parts as from torch.chunk: the last one has the remainder.
    fewest = max(height - (ranks - 1) * most, 0)
    if fewest < needed:
        raise ValueError(
            f"{height} rows over {ranks} ranks leave {fewest} to the last one, and a kernel of "
            f"{size} rows needs {needed} of each: use fewer ranks, or add rows of zeros until "
            f"there are {ranks * max(most, needed)}"
        )


@sm.shard_map(in_specs=(ROWS, P()), out_specs=ROWS)
def conv_part(image: Tensor, kernel: Tensor) -> Tensor:
    """Compute the convolution on one rank, given its rows of the image."""
    (halo, margin), last = (n // 2 for n in kernel.shape[2:]), sm.axis_size("sp") - 1
    if halo == 0:
        return F.conv2d(image, kernel, padding=(0, margin))
    above = sm.ppermute(image[:, :, -halo:], "sp", [(i, i + 1) for i in range(last)])
    below = sm.ppermute(image[:, :, :halo], "sp", [(i + 1, i) for i in range(last)])
    return F.conv2d(torch.cat([above, image, below], dim=2), kernel, padding=(0, margin))


# -- a network of two convolutions, and the reference in one process -------------------------------


def network(image: sm.ShardedTensor, first: Tensor, second: Tensor) -> Tensor:
    """Return a scalar loss; only the convolutions depend on the sharding."""
    return conv(conv(image, first).tanh(), second).square().mean()


def network_single(image: Tensor, first: Tensor, second: Tensor) -> Tensor:
    hidden = F.conv2d(image, first, padding="same").tanh()
    return F.conv2d(hidden, second, padding="same").square().mean()


def main(ranks: int = 4) -> float:
    """Compare loss and gradients with one process; return the largest difference relative to the
    largest element.
    """
    mesh = sm.init_device_mesh("cpu", (ranks,), axis_names=("sp",))
    random = torch.Generator().manual_seed(0)  # every rank draws the same
    # The last rank has one row less.
    shapes = [(2, 3, 8 * ranks - 1, 10), (4, 3, 3, 3), (2, 4, 5, 5)]
    plain = [torch.randn(shape, generator=random).requires_grad_() for shape in shapes]
    expected = network_single(*plain)
    expected_grads = torch.autograd.grad(expected, plain)
    arguments = [
        sm.device_put(x.detach(), mesh, spec)
        for x, spec in zip(plain, (ROWS, P(), P()), strict=True)
    ]
    loss, grads = sm.value_and_grad(network, argnums=(0, 1, 2))(*arguments)
    pairs = zip([loss, *grads], [expected, *expected_grads], strict=True)
    differences = [
        (ours.full_tensor() - other).abs().max() / other.abs().max() for ours, other in pairs
    ]
    difference = torch.stack(differences).max().item()
    if mesh.get_rank() == 0:
        print(
            f"{shapes[0][2]} rows over {ranks} ranks, convolved with 3x3 and 5x5 kernels: loss "
            f"{expected:.4f}"
        )
        print(
            "largest relative difference from one process, of the loss or any gradient: "
            f"{difference:.1e}"
        )
    return difference


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Convolution with halo exchange, compared with one process"
    )
    parser.add_argument(
        "--launch",
        type=int,
        metavar="N",
        help="run on N local processes; else 4 ranks are simulated",
    )
    processes = parser.parse_args().launch
    if "RANK" in os.environ:  # torchrun has started the ranks
        main(int(os.environ["WORLD_SIZE"]))
    elif processes:
        sm.launch(main, processes, (processes,))
    else:
        sm.simulate(4, prints="first")(main)(4)
