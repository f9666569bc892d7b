r"""Data-parallel training: every rank has a part of the batch and a copy of all parameters.

    batch P("dp")                parameters P()
    rank 0   [rows  0..15]       [w1 b1 w2 b2]   gradient of its rows --\
    rank 1   [rows 16..31]       [w1 b1 w2 b2]   gradient of its rows ---\  one all_reduce
    rank 2   [rows 32..47]       [w1 b1 w2 b2]   gradient of its rows ---/  for all of them
    rank 3   [rows 48..63]       [w1 b1 w2 b2]   gradient of its rows --/

The loss is a `pmean`, the same on every rank, so the gradient of a replicated parameter is the sum
of the ranks' gradients. `value_and_grad` returns that sum. Since every rank applies the same
update, the copies stay equal.

    python examples/data_parallel.py                         4 ranks simulated in this process
    python examples/data_parallel.py --launch 4              4 local processes
    torchrun --nproc-per-node 4 examples/data_parallel.py    the same, started by torchrun
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import shardmesh as sm
from shardmesh import P

STEPS, RATE, WIDTH = 60, 0.05, 32
Params = Mapping[str, Tensor]


def loss_of(params: Params, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean squared error of a small MLP, in plain PyTorch."""
    hidden = torch.tanh(x @ params["w1"] + params["b1"])
    return (hidden @ params["w2"] + params["b2"] - y).square().mean()


def update(params: Params, grads: Params) -> Params:
    """Take one step of gradient descent, in plain PyTorch."""
    return pytree.tree_map(lambda p, g: p - RATE * g, params, grads)


# -- what makes it data-parallel -------------------------------------------------------------------


@sm.shard_map(in_specs=(P(), P("dp"), P("dp")), out_specs=(P(), P()))
def step(params: Params, x: Tensor, y: Tensor) -> tuple[Params, Tensor]:
    """Take one training step on one rank, given the parameters and this rank's rows of the
    batch.
    """

    def loss(params: Params) -> Tensor:
        # Equal numbers of rows, so this is the mean over all rows.
        return sm.pmean(loss_of(params, x, y), "dp")

    value, grads = sm.value_and_grad(loss)(params)
    return update(params, grads), value


def train(
    mesh: sm.DeviceMesh, params: Params, x: Tensor, y: Tensor
) -> tuple[dict[str, Any], list[Any]]:
    """Return the parameters after `STEPS` steps and the loss of each step, as sharded tensors."""
    copies = {name: sm.device_put(p, mesh, P()) for name, p in params.items()}
    rows = [sm.device_put(each, mesh, P("dp")) for each in (x, y)]
    losses = []
    for _ in range(STEPS):
        copies, loss = step(copies, *rows)
        losses.append(loss)
    return copies, losses


# -- reference in one process ----------------------------------------------------------------------


def train_single(params: Params, x: Tensor, y: Tensor) -> tuple[Params, list[Tensor]]:
    losses = []
    for _ in range(STEPS):
        params = {name: p.detach().requires_grad_() for name, p in params.items()}
        loss = loss_of(params, x, y)
        grads = torch.autograd.grad(loss, list(params.values()))
        params = update(params, dict(zip(params, grads, strict=True)))
        losses.append(loss.detach())
    return params, losses


def problem(rows: int) -> tuple[Params, Tensor, Tensor]:
    """Return initial parameters, inputs and targets, equal on every rank."""
    random = torch.Generator().manual_seed(0)
    w1 = torch.randn(1, WIDTH, generator=random)
    w2 = torch.randn(WIDTH, 1, generator=random) / math.sqrt(WIDTH)
    x = torch.linspace(-2, 2, rows)[:, None]
    return {"w1": w1, "b1": torch.zeros(WIDTH), "w2": w2, "b2": torch.zeros(1)}, x, torch.sin(2 * x)


def main(ranks: int = 4) -> float:
    """Train on a mesh of `ranks` ranks and return the largest difference of a parameter or loss
    from one process.
    """
    mesh = sm.init_device_mesh("cpu", (ranks,), axis_names=("dp",))
    params, x, y = problem(rows=16 * ranks)
    trained, losses = train(mesh, params, x, y)
    expected, expected_losses = train_single(params, x, y)
    pairs = [(trained[name].full_tensor(), expected[name]) for name in params]
    pairs += [
        (loss.full_tensor(), other) for loss, other in zip(losses, expected_losses, strict=True)
    ]
    difference = torch.stack([(ours - plain).abs().max() for ours, plain in pairs]).max().item()
    if mesh.get_rank() == 0:
        first, last = expected_losses[0], expected_losses[-1]
        print(f"data parallel on {ranks} ranks: loss {first:.4f} -> {last:.4f} in {STEPS} steps")
        print(f"largest difference from one process, of any parameter or loss: {difference:.1e}")
    return difference


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Data-parallel training, compared with one process"
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
