"""A language model sharded and trained in the form of accelerate's FSDP2.

A policy says which modules are units, from the bottom up; the model moves to "meta" after its
optimizer was made, its whole state dict is broadcast by rank 0 and distributed by hand, and the
optimizer gets the new parameters. Models and optimizers are saved whole and as shards.

The import lines are torch's; `tests.sharding.compat.trainers.imports` changes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor

VOCAB, WIDTH, LENGTH, ROWS = 19, 8, 6, 8


class DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return x + self.down(F.gelu(self.up(self.norm(mixed))))


class LanguageModel(nn.Module):
    """A decoder whose head is tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([DecoderLayer(), DecoderLayer(), DecoderLayer()])
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.register_buffer("scale", torch.full((), WIDTH**0.5), persistent=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def children_bottom_up(model: nn.Module) -> list[nn.Module]:
    """Return the modules, children before their parents; the model is the last."""
    top_down, stack = [], [model]
    while stack:
        module = stack.pop()
        top_down.append(module)
        stack.extend(module.children())
    return top_down[::-1]


def prepare(
    model: Any, optimizer: Any, policy: Callable[[nn.Module], bool], mesh: DeviceMesh, offload: bool
) -> None:
    """Shard a model, and switch its optimizer to the new parameters."""
    assert not isinstance(model, FSDPModule)
    fsdp2_kwargs: dict[str, Any] = {
        "reshard_after_forward": True,
        "offload_policy": CPUOffloadPolicy(pin_memory=False) if offload else None,
        "mp_policy": MixedPrecisionPolicy(),
        "mesh": mesh,
    }
    if not offload:
        del fsdp2_kwargs["offload_policy"]
    original = model.state_dict()
    old = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers())
    model.to(torch.device("meta"))
    model.tie_weights()
    for module in children_bottom_up(model)[:-1]:
        if policy(module) and not isinstance(module, FSDPModule):
            fully_shard(module, **fsdp2_kwargs)
    if not isinstance(model, FSDPModule):
        fully_shard(model, **fsdp2_kwargs)
    load_full_state_dict(model, original)
    for name, buffer in buffers.items():
        model.register_buffer(name, buffer, persistent=False)
    model.tie_weights()
    new = dict(model.named_parameters(remove_duplicate=False))
    mapping = {id(p): new[name] for name, p in old.items()}
    for group in optimizer.param_groups:
        group["params"] = [mapping[id(p)] for p in group["params"]]


def load_full_state_dict(model: nn.Module, whole: dict[str, Tensor]) -> None:
    """Broadcast each tensor from rank 0, and keep this rank's part."""
    sharded = {}
    for name, param in model.state_dict().items():
        mesh = param.device_mesh
        if dist.get_rank() == 0:
            full = whole[name].detach().to(mesh.device_type)
        else:
            full = torch.empty(param.size(), device=mesh.device_type, dtype=param.dtype)
        dist.broadcast(full, src=0, group=dist.group.WORLD)
        sharded[name] = distribute_tensor(full, mesh, param.placements)
    model.load_state_dict(sharded, assign=True)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def build(rank: int = 0) -> tuple[LanguageModel, torch.optim.AdamW]:
    """Make model and optimizer; only the values of rank 0 count."""
    torch.manual_seed(rank)
    model = LanguageModel().double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train_step(model: Any, optimizer: Any, step: int, rank: int, ranks: int) -> float:
    optimizer.zero_grad()
    ids, labels = (x.chunk(ranks)[rank] for x in batch(step))
    F.cross_entropy(model(ids).flatten(0, 1), labels.flatten()).backward()
    norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2, norm_type=2)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    optimizer.step()
    return norm.item()


def is_layer(module: nn.Module) -> bool:
    return type(module).__name__ in {"DecoderLayer"}


def train(offload: bool, folder: str) -> dict[str, Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp_shard_cp",))
    model, optimizer = build(rank)
    prepare(model, optimizer, is_layer, mesh, offload)
    norms = [train_step(model, optimizer, step, rank, ranks) for step in range(2)]

    shards = StateDictOptions(full_state_dict=False, cpu_offload=False)
    states = {
        "model": get_model_state_dict(model, options=shards),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=shards),
    }
    dcp.save(state_dict=states, storage_writer=dcp.FileSystemWriter(folder))
    norms.append(train_step(model, optimizer, 2, rank, ranks))

    resumed, again = build(rank + 1)
    prepare(resumed, again, is_layer, mesh, offload)
    states = {
        "model": get_model_state_dict(resumed, options=shards),
        "optimizer": get_optimizer_state_dict(resumed, again, options=shards),
    }
    dcp.load(states, storage_reader=dcp.FileSystemReader(folder))
    set_model_state_dict(resumed, states["model"], options=shards)
    set_optimizer_state_dict(resumed, again, states["optimizer"], options=shards)
    assert train_step(resumed, again, 2, rank, ranks) == norms[-1]

    full = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)
    parameters = get_model_state_dict(resumed, options=full)
    moments = get_optimizer_state_dict(resumed, again, options=full)
    return {"norms": norms, "parameters": parameters, "moments": moments}


def train_alone() -> dict[str, Any]:
    """Return what one process computes, without any parallelism."""
    model, optimizer = build()
    norms = [train_step(model, optimizer, step, 0, 1) for step in range(3)]
    moments = {name: optimizer.state[p]["exp_avg"] for name, p in model.named_parameters()}
    return {"norms": norms, "parameters": model.state_dict(), "moments": moments}
