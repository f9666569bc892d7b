r"""A transformer block whose heads and MLP are sharded over "tp", and whose batch is sharded over
"dp".

    on each tp rank:  x [b s d], replicated

      norm --> its heads of w_qkv --> attention --> its rows of w_o --\
                                                                       psum --> + x        attention
      the other rank: other heads, other rows ------------------------/
      norm --> its columns of w_up --> gelu --> its rows of w_down ---\
                                                                       psum --> + x        MLP
      the other rank: other columns, other rows ----------------------/

The first matrix is split by columns and the second by the matching rows, so no communication is
needed between them: each rank ends with one term of a sum (Shoeybi et al. 2019, "Megatron-LM"). One
`psum` after attention and one after the MLP add the terms, and each has one more in backward. "dp"
needs no code in the block: backward ends by summing gradients of replicated parameters over the
ranks.

Tensor names end in one letter per dim: b batch, s position, d width of the residual stream, h head,
e width of a head, f width of the MLP, c query, key and value.

    python examples/megatron_block.py                         4 ranks simulated in this process
    python examples/megatron_block.py --launch 4              4 local processes
    torchrun --nproc-per-node 4 examples/megatron_block.py    the same, started by torchrun
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

import shardmesh as sm
from shardmesh import P

Params = Mapping[str, Tensor]
Total = Callable[[Tensor], Tensor]
SIZES = {"b": 8, "s": 16, "d": 32, "h": 4, "e": 8, "f": 96, "c": 3}

# -- layouts on the mesh ---------------------------------------------------------------------------

STREAM = P("dp")  # [b s d]: the batch is sharded over dp
SPECS = {
    "norm_1_d": P(),
    "w_qkv_cdhe": P(None, None, "tp"),  # by heads: columns
    "w_o_hed": P("tp"),  # by heads: rows
    "norm_2_d": P(),
    "w_up_df": P(None, "tp"),  # columns
    "w_down_fd": P("tp"),  # rows
}


def sharded_block(mesh: sm.DeviceMesh) -> Callable[[Params, Tensor], Tensor]:
    """Return the block below as a function on this mesh, summing partial results over tp."""
    return sm.shard_map(
        partial(block, total=partial(sm.psum, axis_name="tp")),
        mesh=mesh,
        in_specs=(SPECS, STREAM),
        out_specs=STREAM,
    )


# -- the block, for all heads or some of them ------------------------------------------------------


def block(params: Params, x_bsd: Tensor, total: Total) -> Tensor:
    """Apply the block, in plain PyTorch. `total` sums this rank's term with those of the others; in
    one process it is the identity.
    """
    x_bsd = x_bsd + total(attention(params, norm(x_bsd, params["norm_1_d"])))
    return x_bsd + total(mlp(params, norm(x_bsd, params["norm_2_d"])))


def norm(x_bsd: Tensor, scale_d: Tensor) -> Tensor:
    return F.rms_norm(x_bsd, scale_d.shape, scale_d)


def attention(params: Params, x_bsd: Tensor) -> Tensor:
    """Apply causal attention with the heads in `params`."""
    q, k, v = torch.einsum("bsd,cdhe->cbhse", x_bsd, params["w_qkv_cdhe"])
    mixed_bhse = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return torch.einsum("bhse,hed->bsd", mixed_bhse, params["w_o_hed"])


def mlp(params: Params, x_bsd: Tensor) -> Tensor:
    """Apply the MLP with the hidden features in `params`."""
    return F.gelu(x_bsd @ params["w_up_df"]) @ params["w_down_fd"]


# -- reference in one process ----------------------------------------------------------------------


def problem() -> tuple[Params, Tensor, Tensor]:
    """Return parameters, input and the gradient of the output, equal on every rank."""
    random = torch.Generator().manual_seed(0)

    def draw(name: str) -> Tensor:  # the end of the name gives the shape
        sizes = [SIZES[letter] for letter in name.rpartition("_")[2]]
        return torch.randn(sizes, generator=random)

    params = {name: draw(name) / math.sqrt(SIZES["d"]) for name in SPECS}
    return params, draw("bsd"), draw("bsd")


def largest_difference(ours: Any, plain: Any) -> float:
    """Return the largest difference between two trees, relative to the largest element of each
    leaf.
    """
    pairs = zip(pytree.tree_leaves(ours), pytree.tree_leaves(plain), strict=True)
    return (
        torch.stack(
            [(x.full_tensor() - other).abs().max() / other.abs().max() for x, other in pairs]
        )
        .max()
        .item()
    )


def main(ranks: int = 4) -> float:
    """Compare output and gradients with one process; return the largest relative difference."""
    tp = 2 if ranks % 2 == 0 else 1
    mesh = sm.init_device_mesh("cpu", (ranks // tp, tp), axis_names=("dp", "tp"))
    params, x_bsd, pull_bsd = problem()
    expected, back = sm.vjp(partial(block, total=lambda share: share), params, x_bsd)
    expected_grads = back(pull_bsd)

    sharded = {name: sm.device_put(p, mesh, SPECS[name]) for name, p in params.items()}
    ours, back = sm.vjp(sharded_block(mesh), sharded, sm.device_put(x_bsd, mesh, STREAM))
    grads = back(sm.device_put(pull_bsd, mesh, STREAM))

    difference = largest_difference(ours, expected)
    of_grads = largest_difference(grads, expected_grads)
    if mesh.get_rank() == 0:
        print(f"transformer block on (dp={ranks // tp}, tp={tp}): output {sm.typeof(ours)}")
        print(
            f"largest relative difference from one process: output {difference:.1e}, gradients "
            f"{of_grads:.1e}"
        )
    return max(difference, of_grads)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Tensor-parallel transformer block, compared with one process"
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
