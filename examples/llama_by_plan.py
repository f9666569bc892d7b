"""Parallelize a model written for one process, such as Hugging Face's, by a plan of module paths,
without changing its code.

{"*.q_proj": colwise(), "*.o_proj": rowwise(), ...}  tensor parallelism: which weights, and how
fully_shard(model, mesh, units=DecoderLayer)         sharded over fsdp, gathered layer by layer
Muon(model.named_parameters(), ...)                  orthogonalized by rank, two collectives a step

python examples/llama_by_plan.py                         4 ranks simulated in this process
python examples/llama_by_plan.py --launch 4              4 local processes
torchrun --nproc-per-node 4 examples/llama_by_plan.py    the same, started by torchrun
"""

from __future__ import annotations

import argparse
import copy
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardmesh as sm
from shardmesh.parallel import colwise, fully_shard, parallelize, rowwise

STEPS, RATE, MAX_NORM = 12, 0.02, 1.0
VOCABULARY, WIDTH, HEADS, HIDDEN, LAYERS, POSITIONS = 31, 24, 4, 50, 2, 11

PLAN = {
    "*.self_attn.[qkv]_proj": colwise(),  # each tp rank computes some heads
    "*.self_attn.o_proj": rowwise(),  # partial sums over these heads
    "*.mlp.[gu]*_proj": colwise(),
    "*.mlp.down_proj": rowwise(),
    # logits stay sharded by vocabulary: the loss needs two small reductions, not the logits
    "lm_head": colwise(),
}


# -- plain PyTorch ---------------------------------------------------------------------------------


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(-2))


class LlamaMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = nn.RMSNorm(WIDTH), SelfAttention()
        self.post_attention_layernorm, self.mlp = nn.RMSNorm(WIDTH), LlamaMLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(LAYERS))
        self.norm, self.lm_head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def train(model: nn.Module, ids: Tensor, targets: Tensor) -> list[Any]:
    """Return the loss of each step; this function does not depend on the mesh either."""
    optimizer = sm.optim.Muon(
        model.named_parameters(), lr=RATE, adamw=["*embed*", "lm_head*"], ns_dtype=torch.float32
    )
    losses = []
    for _ in range(STEPS):
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        loss.backward()
        sm.training.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


# -- what makes it run on a mesh -------------------------------------------------------------------


def shard(model: nn.Module, mesh: sm.DeviceMesh) -> nn.Module:
    parallelize(model, mesh, PLAN)
    return fully_shard(model, mesh, axes="fsdp", units=DecoderLayer)


def place(x: Tensor, mesh: sm.DeviceMesh) -> Tensor:
    return sm.device_put(x, mesh, sm.P("fsdp"))


def problem(rows: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a model, token ids and targets, equal on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        ids = torch.randint(VOCABULARY, (rows, POSITIONS + 1))
        return Llama(), ids[:, :-1], ids[:, 1:].contiguous()


def main(ranks: int = 4) -> float:
    """Train on a mesh of `ranks` ranks and return the largest difference of a loss or parameter
    from one process.
    """
    tp = 2 if ranks % 2 == 0 else 1
    mesh = sm.init_device_mesh("cpu", (ranks // tp, tp), axis_names=("fsdp", "tp"))
    model, ids, targets = problem(rows=8)
    single = copy.deepcopy(model)
    expected = train(single, ids, targets)
    shard(model, mesh)
    with sm.debug.comm_budget() as used:
        losses = train(model, place(ids, mesh), place(targets, mesh))
    pairs = [(ours.full_tensor(), other) for ours, other in zip(losses, expected, strict=True)]
    pairs += [
        (w.full_tensor(), single.state_dict()[name])
        for name, w in sm.checkpoint.state_dict(model)["model"].items()
    ]
    differences = [(ours - other).abs().max().item() for ours, other in pairs]
    if mesh.get_rank() == 0:
        print(
            f"Llama by plan on {mesh}: loss {pairs[0][0]:.4f} -> {pairs[STEPS - 1][0]:.4f}; in "
            f"{STEPS} steps {used.by_op}"
        )
        print(
            f"largest difference from one process, of any loss or parameter: {max(differences):.1e}"
        )
    return max(differences)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="A model parallelized by a plan of paths, compared with one process"
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
