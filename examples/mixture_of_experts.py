"""A mixture of experts with the experts sharded over the ranks: dispatch tokens to their experts,
and combine the results.

    tokens P("ep"), experts P("ep"), router P()    each token goes to one expert; each rank has two

    rank 0  tokens  a b c d    by expert  [ b | a d |   | c ]    received [b e | a d f]  experts 0 1
            expert  1 0 3 1    of expert    0    1    2   3
    rank 1  tokens  e f g      by expert  [ e |  f  | g |   ]    received [g | c]        experts 2 3
            expert  0 1 2

    the results are sent back in the same way:    rank 0  [b a d c]  ->  a b c d     rank 1  [e f g]

Ranks first exchange row counts; then `ragged_all_to_all` moves exactly these rows. No token is
dropped and nothing is padded, whatever the router chooses. Combining uses the transposed counts;
backward runs both exchanges in reverse.

    python examples/mixture_of_experts.py                         4 ranks simulated in this process
    python examples/mixture_of_experts.py --launch 4              4 local processes
    torchrun --nproc-per-node 4 examples/mixture_of_experts.py    the same, started by torchrun

Tensor names end in one letter per dim where that helps: t token, k choice, e expert, r row (a
dispatched token), d width.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.nn.functional as F
from torch import Tensor

import shardmesh as sm
from shardmesh import P

CHOICES, WIDTH, HIDDEN = 2, 16, 24
Params = dict[str, Tensor]
# [d e], [e d f], [e f d]: experts are sharded over the ranks.
LAYOUT = {"router": P(), "up": P("ep"), "down": P("ep")}
TOKENS = P("ep")  # [t d]


def choose(x_td: Tensor, router_de: Tensor) -> tuple[Tensor, Tensor]:
    """Return the experts of each token [t k] and their weights [t k], in plain PyTorch."""
    score_tk, expert_tk = (x_td @ router_de).topk(CHOICES)
    return expert_tk, score_tk.softmax(-1)


def expert(x_rd: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Apply one expert to rows, in plain PyTorch."""
    return F.silu(x_rd @ up) @ down


# -- what makes it expert-parallel -----------------------------------------------------------------


@sm.shard_map(in_specs=(LAYOUT, TOKENS), out_specs=TOKENS)
def mixture(params: Params, x_td: Tensor) -> Tensor:
    """Return the weighted sum of the experts' outputs for each of this rank's tokens.

    Raises: ValueError, on every rank, if ranks would have different numbers of experts.
    """
    ranks, experts = sm.axis_size("ep"), params["router"].shape[1]
    if experts % ranks:
        raise ValueError(
            f"{experts} experts over {ranks} ranks; use {experts + -experts % ranks}, as many on "
            "each"
        )
    expert_tk, share_tk = choose(x_td, params["router"])
    # Rows in the order of experts, and so of ranks.
    by_expert_r = expert_tk.flatten().argsort(stable=True)
    token_r = by_expert_r // CHOICES
    mine_e = torch.bincount(expert_tk.flatten(), minlength=experts)
    # [source, destination, its expert]
    counts = sm.all_gather(mine_e, "ep").unflatten(1, (ranks, -1))
    rows = counts.sum(-1)
    expert_outputs = local_experts(
        params, exchange(x_td[token_r], rows), counts[:, int(sm.axis_index("ep"))]
    )
    back_rd = exchange(expert_outputs, rows.T) * share_tk.flatten()[by_expert_r, None]
    return torch.zeros_like(x_td).index_add(0, token_r, back_rd)


def exchange(x_rd: Tensor, rows: Tensor) -> Tensor:
    """Send this rank's rows, sorted by destination; return the received rows, sorted by source.
    `rows`: [source, destination].
    """
    send_at = rows.cumsum(1) - rows
    receive_at = rows.cumsum(0) - rows
    rank = int(sm.axis_index("ep"))
    output = x_rd.new_zeros(int(rows[:, rank].sum()), x_rd.shape[1])
    return sm.ragged_all_to_all(
        x_rd, output, send_at[rank], rows[rank], receive_at[rank], rows[:, rank], axis_name="ep"
    )


def local_experts(params: Params, x_rd: Tensor, counts: Tensor) -> Tensor:
    """Apply this rank's experts to rows sorted by source, then by expert. `counts`: [source,
    expert].
    """
    ranks, experts = counts.shape
    expert_r = (
        torch.arange(experts, device=counts.device)
        .repeat(ranks)
        .repeat_interleave(counts.flatten())
    )
    order_r = expert_r.argsort(stable=True)
    parts = zip(
        x_rd[order_r].split(counts.sum(0).tolist()), params["up"], params["down"], strict=True
    )
    return torch.zeros_like(x_rd).index_copy(
        0, order_r, torch.cat([expert(*part) for part in parts])
    )


# -- reference in one process ----------------------------------------------------------------------


def mixture_dense(params: Params, x_td: Tensor) -> Tensor:
    """Apply every expert to every token, with weight zero for experts that were not chosen."""
    expert_tk, share_tk = choose(x_td, params["router"])
    share_te = x_td.new_zeros(len(x_td), params["router"].shape[1]).scatter(1, expert_tk, share_tk)
    made_etd = torch.stack(
        [expert(x_td, up, down) for up, down in zip(params["up"], params["down"], strict=True)]
    )
    return torch.einsum("te,etd->td", share_te, made_etd)


def problem(experts: int, seed: int = 0) -> Params:
    """Return weights that are equal on every rank."""
    random = torch.Generator().manual_seed(seed)
    shapes = {
        "router": (WIDTH, experts),
        "up": (experts, WIDTH, HIDDEN),
        "down": (experts, HIDDEN, WIDTH),
    }
    return {
        name: torch.randn(shape, generator=random) / shape[-2] ** 0.5
        for name, shape in shapes.items()
    }


def compare(mesh: sm.DeviceMesh, params: Params, x: Tensor) -> float:
    """Return the largest difference from the dense computation, of outputs or gradients, relative
    to the largest element.
    """
    plain = [p.requires_grad_() for p in params.values()] + [x.requires_grad_()]
    expected = mixture_dense(params, x)
    expected_grads = torch.autograd.grad(expected.square().mean(), plain)

    def loss(params: Params, x: Tensor) -> tuple[Tensor, Tensor]:
        y = mixture(params, x)
        return y.square().mean(), y

    placed = {name: sm.device_put(p.detach(), mesh, LAYOUT[name]) for name, p in params.items()}
    tokens = sm.device_put(x.detach(), mesh, TOKENS)
    (_, y), (grads, x_grad) = sm.value_and_grad(loss, argnums=(0, 1), has_aux=True)(placed, tokens)
    pairs = zip([y, *grads.values(), x_grad], [expected, *expected_grads], strict=True)
    return max(
        ((ours.full_tensor() - other).abs().max() / other.abs().max()).item()
        for ours, other in pairs
    )


def main(ranks: int = 4) -> float:
    """Compare three batches with different routing; return the largest relative difference."""
    mesh = sm.init_device_mesh("cpu", (ranks,), axis_names=("ep",))
    params, random = problem(experts=2 * ranks), torch.Generator().manual_seed(1)
    # Not a multiple.
    batches = [torch.randn(40 * ranks - 1, WIDTH, generator=random) + 0.3 for _ in range(3)]
    difference = max(compare(mesh, params, x) for x in batches)
    if mesh.get_rank() == 0:
        loads = choose(batches[0], params["router"])[0].flatten().bincount(minlength=2 * ranks)
        print(
            f"{len(batches[0])} tokens on {ranks} ranks with {CHOICES} experts each; tokens per "
            f"expert: {loads.tolist()}"
        )
        print(
            "largest relative difference from the dense computation, of output or any gradient: "
            f"{difference:.1e}"
        )
    return difference


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="A mixture of experts over ranks, compared with the dense computation"
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
