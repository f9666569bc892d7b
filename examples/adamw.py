"""AdamW as a pure function over pytrees of tensors, plain or sharded, without any code for the
mesh.

    w1 P("dp", "tp")   communication in a training step              in `update`: none
    +----+----+
    | r0 | r1 |        w1:  all_gather over dp to P(None, "tp")      r0: its part of w1, g, m, v
    +----+----+        dw1: reduce_scatter over dp in backward       r1: its part of w1, g, m, v
    | r2 | r3 |        all_reduce over tp of the pending `... @ w2`  ...
    +----+----+

Gradients and both moments have the layout of their parameter, so each rank stores and updates only
its part of them.

    python examples/adamw.py                         4 ranks simulated in this process
    python examples/adamw.py --launch 4              4 local processes
    torchrun --nproc-per-node 4 examples/adamw.py    the same, started by torchrun
"""

from __future__ import annotations

import argparse
import os
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

import shardmesh as sm
from shardmesh import P

STEPS, RATE, WIDTH, HIDDEN = 30, 1e-2, 10, 27
BETA_M, BETA_V, EPS = 0.9, 0.999, 1e-8  # torch's defaults
Tree = Any  # of tensors, plain or sharded


class State(NamedTuple):
    """The optimizer state: the number of steps, and pytrees of the moving averages of gradients and
    squared gradients.
    """

    step: int
    m: Tree
    v: Tree


def init(params: Tree) -> State:
    """Return the state before the first step; moments have the layouts of their parameters."""
    return State(
        0, pytree.tree_map(torch.zeros_like, params), pytree.tree_map(torch.zeros_like, params)
    )


def update(
    params: Tree, grads: Tree, state: State, rate: float, decay: float = 1e-2
) -> tuple[Tree, State]:
    """update(params, grads, state) -> (params, state) after one step of AdamW (Loshchilov and
    Hutter 2019, algorithm 2).

    The arguments are not modified.

    Communication: none, if gradients have the layouts of their parameters.

    Example:
        >>> loss, grads = sm.value_and_grad(loss_of)(params, x, y)
        >>> params, state = update(params, grads, state, rate=1e-3)
    """
    step = state.step + 1
    m = pytree.tree_map(lambda m, g: BETA_M * m + (1 - BETA_M) * g, state.m, grads)
    v = pytree.tree_map(lambda v, g: BETA_V * v + (1 - BETA_V) * g * g, state.v, grads)

    def stepped(p: Tensor, m: Tensor, v: Tensor) -> Tensor:
        # Bias correction.
        direction = m / (1 - BETA_M**step) / ((v / (1 - BETA_V**step)).sqrt() + EPS)
        return p * (1 - rate * decay) - rate * direction

    return pytree.tree_map(stepped, params, m, v), State(step, m, v)


# -- a model on a mesh -----------------------------------------------------------------------------

# 27 columns over 2 ranks: 14 and 13.
STORED = {"w1": P("dp", "tp"), "b1": P("tp"), "w2": P("tp", "dp"), "b2": P()}
USED = {"w1": P(None, "tp"), "b1": P("tp"), "w2": P("tp"), "b2": P()}


def model(params: Tree, x: Tensor) -> Tensor:
    """Apply a small MLP, in plain PyTorch."""
    return F.gelu(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def loss_of(params: Tree, x: Tensor, y: Tensor) -> Tensor:
    """Return the loss for parameters laid out as `STORED`; their gradients have the same
    layouts.
    """
    used = dict(
        zip(
            params,
            sm.redistribute_many(list(params.values()), [USED[name] for name in params]),
            strict=True,
        )
    )
    return F.mse_loss(model(used, x), y)


def train(
    mesh: sm.DeviceMesh, params: Tree, x: Tensor, y: Tensor
) -> tuple[Tree, State, list[Tensor]]:
    """Return the parameters and state after `STEPS` steps, and the loss of each step."""
    params = {name: sm.device_put(p, mesh, STORED[name]) for name, p in params.items()}
    x = sm.device_put(x, mesh, P("dp"))
    y = sm.device_put(y, mesh, P("dp"))
    state = init(params)
    losses = []
    for _ in range(STEPS):
        loss, grads = sm.value_and_grad(loss_of)(params, x, y)
        with sm.debug.comm_budget(launches=0):  # raises if the update communicates
            params, state = update(params, grads, state, rate=RATE)
        losses.append(loss)
    return params, state, losses


# -- reference in one process ----------------------------------------------------------------------


def train_single(params: Tree, x: Tensor, y: Tensor) -> tuple[Tree, list[Tensor]]:
    """Train with `torch.optim.AdamW`."""
    params, losses = {name: p.clone().requires_grad_() for name, p in params.items()}, []
    optimizer = torch.optim.AdamW(params.values(), RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(F.mse_loss(model(params, x), y))
        losses[-1].backward()
        optimizer.step()
    return params, losses


def problem(rows: int) -> tuple[Tree, Tensor, Tensor]:
    """Return initial parameters, inputs and targets, equal on every rank."""
    random = torch.Generator().manual_seed(0)
    shapes = {"w1": (WIDTH, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN, WIDTH), "b2": (WIDTH,)}
    params = {
        name: torch.randn(shape, generator=random) / shape[0] ** 0.5
        for name, shape in shapes.items()
    }
    x = torch.randn(rows, WIDTH, generator=random)
    return params, x, torch.sin(x.cumsum(1))


def main(ranks: int = 4) -> float:
    """Train on a mesh of `ranks` ranks and return the largest difference of a parameter or loss
    from one process.
    """
    tp = 2 if ranks % 2 == 0 else 1
    mesh = sm.init_device_mesh("cpu", (ranks // tp, tp), axis_names=("dp", "tp"))
    params, x, y = problem(rows=16 * ranks)
    trained, state, losses = train(mesh, params, x, y)
    expected, expected_losses = train_single(params, x, y)
    both = zip(
        pytree.tree_leaves((losses, trained)),
        pytree.tree_leaves((expected_losses, expected)),
        strict=True,
    )
    pairs = [(ours.full_tensor(), other) for ours, other in both]
    difference = max((ours - other).abs().max().item() for ours, other in pairs)
    if mesh.get_rank() == 0:
        print(
            f"AdamW: loss {pairs[0][0]:.4f} -> {pairs[STEPS - 1][0]:.4f}; layout of the first "
            f"moment of w1: {sm.typeof(state.m['w1'])}"
        )
        print(
            "largest difference from torch.optim.AdamW in one process, of any parameter or loss: "
            f"{difference:.1e}"
        )
    return difference


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="AdamW as a pure function, compared with torch's")
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
