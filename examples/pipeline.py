"""Pipeline parallelism: each rank has one stage of the network, and microbatches pass from stage to
stage.

    stages over "pp"; time from left to right; each number is the microbatch that a stage processes

    stage 0    0  1  2  3  4  5  .  .  .       each tick: compute, then send the result to the next
    stage 1    .  0  1  2  3  4  5  .  .       stage (`ppermute`); in ticks marked "." a stage
    stage 2    .  .  0  1  2  3  4  5  .       computes an unused result; m microbatches through n
    stage 3    .  .  .  0  1  2  3  4  5       stages take m + n - 1 ticks, and each wastes n - 1

The schedule is GPipe's (Huang et al. 2018), written as a loop in one mapped function. Backward
needs no schedule of its own: the gradient of a `ppermute` is the reverse `ppermute`, so backward
runs the diagram from right to left.

    python examples/pipeline.py                         4 ranks simulated in this process
    python examples/pipeline.py --launch 4              4 local processes
    torchrun --nproc-per-node 4 examples/pipeline.py    the same, started by torchrun
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import shardmesh as sm
from shardmesh import P

MICROBATCHES, ROWS, WIDTH = 6, 5, 16
Params = Mapping[str, Tensor]


def stage(params: Params, x: Tensor) -> Tensor:
    """Apply one stage of the network, in plain PyTorch: [rows width] -> [rows width]."""
    return x + torch.tanh(x @ params["w"] + params["b"])


# -- the pipeline ----------------------------------------------------------------------------------


@sm.shard_map(in_specs=(P("pp"), P()), out_specs=P())
def pipeline(params: Params, batches: Tensor) -> Tensor:
    """Apply all stages to microbatches, one after the other, on one rank.

    Args:
        params: parameters of this rank's stage, with a first dim of size 1.
        batches: all microbatches [m rows width]; only the first stage uses them.

    Returns: results [m rows width], the same on every rank.
    """
    own = pytree.tree_map(lambda p: p.squeeze(0), params)
    stage_index, stages, m = sm.axis_index("pp"), sm.axis_size("pp"), len(batches)
    onward = [(i, i + 1) for i in range(stages - 1)]
    arriving, finished = torch.zeros_like(batches[0]), []
    for tick in range(m + stages - 1):
        x = torch.where(stage_index == 0, batches[min(tick, m - 1)], arriving)
        y = stage(own, x)
        if tick >= stages - 1:
            finished.append(y)  # in the last stage: microbatch number tick - (stages - 1)
        if tick < m + stages - 2:
            arriving = sm.ppermute(y, "pp", onward)
    return sm.pbroadcast(torch.stack(finished), "pp", stages - 1)


# -- reference in one process ----------------------------------------------------------------------


def sequential(params: Params, batches: Tensor) -> Tensor:
    """Apply all stages in one process."""
    for i in range(len(params["b"])):
        batches = stage({name: p[i] for name, p in params.items()}, batches)
    return batches


def loss_and_grads(network: Callable[[Params, Tensor], Tensor], *arguments: Any) -> Any:
    """Return the mean squared error of a network, and its gradients with respect to parameters and
    microbatches.
    """

    def loss_of(params: Params, batches: Tensor, targets: Tensor) -> Tensor:
        return (network(params, batches) - targets).square().mean()

    return sm.value_and_grad(loss_of, argnums=(0, 1))(*arguments)


def problem(stages: int) -> tuple[Params, Tensor, Tensor]:
    """Return parameters of all stages, microbatches and targets, equal on every rank."""
    random = torch.Generator().manual_seed(0)
    w = torch.randn(stages, WIDTH, WIDTH, generator=random) / math.sqrt(WIDTH)
    b = torch.randn(stages, WIDTH, generator=random)
    batches, targets = torch.randn(2, MICROBATCHES, ROWS, WIDTH, generator=random)
    return {"w": w, "b": b}, batches, targets


def main(ranks: int = 4) -> float:
    """Compare loss and gradients with one process; return the largest difference."""
    mesh = sm.init_device_mesh("cpu", (ranks,), axis_names=("pp",))
    params, batches, targets = problem(stages=ranks)

    expected = loss_and_grads(sequential, params, batches, targets)

    stages = {name: sm.device_put(p, mesh, P("pp")) for name, p in params.items()}
    ours = loss_and_grads(
        pipeline, stages, sm.device_put(batches, mesh, P()), sm.device_put(targets, mesh, P())
    )

    pairs = zip(pytree.tree_leaves(ours), pytree.tree_leaves(expected), strict=True)
    difference = (
        torch.stack([(x.full_tensor() - other).abs().max() for x, other in pairs]).max().item()
    )
    if mesh.get_rank() == 0:
        idle = (ranks - 1) / (MICROBATCHES + ranks - 1)
        print(
            f"{MICROBATCHES} microbatches, {ranks} stages, idle for {idle:.0%} of the ticks: loss "
            f"{expected[0]:.4f}"
        )
        print(
            "largest difference from the stages in one process, of the loss or any gradient: "
            f"{difference:.1e}"
        )
    return difference


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Pipeline of stages, compared with one process")
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
