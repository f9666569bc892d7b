"""Language models, dense and with mixtures of experts, trained in the form of torchtitan.

The meshes are unflattened from one of all ranks; models are built on "meta", parallelized by
torch's styles and by styles of the program's own, recomputed, compiled by block, sharded by
`fully_shard` with the experts on another mesh, filled from a whole state dict, clipped by
`get_total_norm`, saved and resumed by `torch.distributed.checkpoint`.

The import lines are torch's; `tests.sharding.compat.trainers.imports` changes them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

VOCAB, DIM, HEADS, KV_HEADS, HIDDEN, LENGTH = 32, 16, 4, 2, 24, 8
EXPERTS, TOP_K, EXPERT_HIDDEN = 4, 2, 12
GLOBAL_BATCH, IGNORE_INDEX, MAX_NORM = 8, -100, 0.1


@dataclass(frozen=True)
class Config:
    """The degrees of parallelism, as in torchtitan's job configuration."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    mixture: bool = False
    loss_parallel: bool = True
    recompute: str = "none"  # "none", "full" or "selective"
    compile: bool = False
    reshard_after_forward: bool = True

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.dp_shard * self.tp


# -- the model -------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim = DIM // HEADS
        self.wq = nn.Linear(DIM, HEADS * self.head_dim, bias=False)
        self.wk = nn.Linear(DIM, KV_HEADS * self.head_dim, bias=False)
        self.wv = nn.Linear(DIM, KV_HEADS * self.head_dim, bias=False)
        self.wo = nn.Linear(HEADS * self.head_dim, DIM, bias=False)

    def forward(self, x: Tensor, freqs: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, -1, self.head_dim) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, freqs), rotate(k, freqs)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).contiguous().view(batch, length, -1))


def rotate(x: Tensor, freqs: Tensor) -> Tensor:
    """Rotate pairs of features by the angle of their position; `freqs` [length, head_dim /
    2, 2].
    """
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    cos, sin = freqs[: x.shape[1], None, :, 0], freqs[: x.shape[1], None, :, 1]
    first, second = pairs[..., 0], pairs[..., 1]
    return torch.stack([first * cos - second * sin, first * sin + second * cos], -1).flatten(-2)


class FeedForward(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(DIM, hidden, bias=False)
        self.w2 = nn.Linear(hidden, DIM, bias=False)
        self.w3 = nn.Linear(DIM, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.softmax(self.gate(x), dim=1)
        _, selected = torch.topk(scores, k=TOP_K, dim=-1, sorted=False)
        return scores.gather(dim=1, index=selected), selected


class Reorderer(nn.Module):
    """Sort the choices of the tokens by expert."""

    def forward(self, scores: Tensor, selected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        counts = torch.bincount(selected.reshape(-1), minlength=EXPERTS)
        order = torch.argsort(selected.reshape(-1), stable=True)
        return scores.reshape(-1)[order], order, counts


class GroupedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.w1 = nn.Parameter(torch.empty(EXPERTS, EXPERT_HIDDEN, DIM))
        self.w2 = nn.Parameter(torch.empty(EXPERTS, DIM, EXPERT_HIDDEN))
        self.w3 = nn.Parameter(torch.empty(EXPERTS, EXPERT_HIDDEN, DIM))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        weights: list[Any] = [self.w1, self.w2, self.w3]
        if isinstance(self.w1, DTensor):
            weights = [w.to_local() for w in weights]
        w1, w2, w3 = weights
        parts = torch.split(x, counts.tolist())
        out = [
            (F.silu(part @ w1[i].t()) * (part @ w3[i].t())) @ w2[i].t()
            for i, part in enumerate(parts)
        ]
        return torch.cat(out)


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.reorderer = Router(), Reorderer()
        self.experts, self.shared_experts = GroupedExperts(), FeedForward(EXPERT_HIDDEN)
        self.register_buffer("tokens_per_expert", torch.zeros(EXPERTS), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        x = x.reshape(-1, dim)
        scores, selected = self.router(x)
        with torch.no_grad():
            counts = torch.bincount(selected.reshape(-1), minlength=EXPERTS)
            self.tokens_per_expert.add_(counts)
        sorted_scores, order, counts = self.reorderer(scores, selected)
        routed = x[order // TOP_K] * sorted_scores.reshape(-1, 1)
        routed = self.experts(routed, counts)
        shared = self.shared_experts(x)
        unsorted = torch.zeros((x.shape[0] * TOP_K, dim), dtype=routed.dtype, device=routed.device)
        unsorted[order] = routed
        return (shared + unsorted.reshape(-1, TOP_K, dim).sum(dim=1)).reshape(batch, length, dim)


class TransformerBlock(nn.Module):
    def __init__(self, mixture: bool) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.attention = Attention()
        self.moe_enabled = mixture
        if mixture:
            self.moe = MoE()
        else:
            self.feed_forward = FeedForward(HIDDEN)

    def forward(self, x: Tensor, freqs: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), freqs)
        return h + (self.moe if self.moe_enabled else self.feed_forward)(self.ffn_norm(h))


class Transformer(nn.Module):
    def __init__(self, mixture: bool) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleDict({"0": TransformerBlock(False), "1": TransformerBlock(mixture)})
        self.norm, self.output = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.register_buffer("freqs", torch.empty(LENGTH, DIM // HEADS // 2, 2), persistent=False)

    def init_buffers(self) -> None:
        angles = torch.outer(
            torch.arange(LENGTH), 100.0 ** -torch.linspace(0, 1, self.freqs.shape[1])
        )
        self.freqs.copy_(torch.stack([angles.cos(), angles.sin()], -1))
        for name, buffer in self.named_buffers():
            if name.endswith("tokens_per_expert"):
                buffer.zero_()

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.freqs)
        return self.output(self.norm(h))


# -- meshes ----------------------------------------------------------------------------------------


class ParallelDims:
    """The meshes of a job: each unflattens the mesh of all ranks."""

    def __init__(self, config: Config) -> None:
        self.config, fsdp = config, config.dp_shard
        efsdp = fsdp * config.tp // (config.etp * config.ep)
        self.world = init_device_mesh("cpu", (config.world_size,), mesh_dim_names=("world",))
        loading = self._unflatten(batch=config.dp_replicate * fsdp, tp=config.tp)
        dense = self._unflatten(dp_replicate=config.dp_replicate, fsdp=fsdp, tp=config.tp)
        sparse = self._unflatten(
            dp_replicate=config.dp_replicate, efsdp=efsdp, ep=config.ep, etp=config.etp
        )
        self.meshes = {"loading": loading, "dense": dense, "sparse": sparse}

    def _unflatten(self, **degrees: int) -> DeviceMesh:
        override = {name: "fake" for name, n in degrees.items() if n == 1 and name != "efsdp"}
        return self.world._unflatten(
            0, tuple(degrees.values()), tuple(degrees), backend_override=override
        )

    def __call__(self, *names: str) -> Any:
        """Return the mesh with these axes, or None if one of them is not used."""
        mesh = next(m for m in self.meshes.values() if set(names) <= set(m.mesh_dim_names))
        if any(mesh[name].size() == 1 and name != "efsdp" for name in names):
            return None
        return mesh[names[0]] if len(names) == 1 else mesh[tuple(names)]


# -- styles of the program -------------------------------------------------------------------------


class NoParallel(ParallelStyle):
    """Compute a module on every rank, with `DTensor` parameters; plain in, plain out."""

    @staticmethod
    def _prepare_input_fn(mod: nn.Module, inputs: Any, device_mesh: DeviceMesh) -> Any:
        x, *rest = inputs
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, device_mesh, (Replicate(),), run_check=False)
        return (x, *rest)

    @staticmethod
    def _prepare_output_fn(mod: nn.Module, outputs: Any, device_mesh: DeviceMesh) -> Any:
        if outputs.placements != (Replicate(),):
            outputs = outputs.redistribute(placements=(Replicate(),))
        return outputs.to_local()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module, device_mesh, None, self._prepare_input_fn, self._prepare_output_fn
        )


class TensorParallel(ParallelStyle):
    """Split the hidden features of all experts; their results are partial sums."""

    def _prepare_input_fn(self, mod: nn.Module, inputs: Any, device_mesh: DeviceMesh) -> Any:
        routed, counts = inputs
        routed = DTensor.from_local(routed, device_mesh, (Replicate(),))
        return routed.to_local(grad_placements=(Partial(),)), counts

    def _partition_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        for key, dim in (("w1", 1), ("w2", 2), ("w3", 1)):
            weight = distribute_tensor(getattr(module, key), device_mesh, [Shard(dim)])
            module.register_parameter(key, nn.Parameter(weight))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._partition_fn, self._prepare_input_fn)


class ExpertParallel(ParallelStyle):
    """Each rank has some experts; tokens travel to their experts and back."""

    def _partition_fn(self, name: str, mod: nn.Module, device_mesh: DeviceMesh) -> None:
        for key, param in mod.named_parameters(recurse=False):
            weight = distribute_tensor(param, device_mesh, [Shard(0)])
            mod.register_parameter(key, nn.Parameter(weight))

    def _token_dispatch(self, mod: nn.Module, inputs: Any, device_mesh: DeviceMesh) -> Any:
        routed, counts = inputs
        ranks, group = device_mesh.shape[0], device_mesh.get_group()
        with torch.no_grad():
            received = funcol.all_to_all_single(counts, None, None, group=group)
            received = torch.ops._c10d_functional.wait_tensor(received)
            self.input_splits = counts.view(ranks, -1).sum(dim=1).tolist()
            self.output_splits = received.view(ranks, -1).sum(dim=1).tolist()
            experts = torch.arange(counts.numel() // ranks).repeat(ranks)
            self.order = torch.argsort(experts.repeat_interleave(received), stable=True)
        routed = funcol.all_to_all_single_autograd(
            routed, self.output_splits, self.input_splits, group
        )
        return routed[self.order], received.view(ranks, -1).sum(dim=0)

    def _token_combine(self, mod: nn.Module, routed: Tensor, device_mesh: DeviceMesh) -> Tensor:
        unsorted = routed.new_empty(routed.shape)
        unsorted[self.order] = routed
        group = device_mesh.get_group()
        return funcol.all_to_all_single_autograd(
            unsorted, self.input_splits, self.output_splits, group
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module,
            device_mesh,
            partition_fn=self._partition_fn,
            input_fn=self._token_dispatch,
            output_fn=self._token_combine,
        )


class ExpertTensorParallel(ExpertParallel):
    """Split experts over "ep" and their hidden features over "etp"."""

    def _token_dispatch(self, mod: nn.Module, inputs: Any, device_mesh: DeviceMesh) -> Any:
        routed, counts = inputs
        routed = DTensor.from_local(routed, device_mesh["etp"], (Replicate(),))
        routed = routed.to_local(grad_placements=(Partial(),))
        return super()._token_dispatch(mod, (routed, counts), device_mesh["ep"])

    def _partition_fn(self, name: str, mod: nn.Module, device_mesh: DeviceMesh) -> None:
        for key, dim in (("w1", 1), ("w2", 2), ("w3", 1)):
            weight = distribute_tensor(getattr(mod, key), device_mesh, [Shard(0), Shard(dim)])
            mod.register_parameter(key, nn.Parameter(weight))

    def _token_combine(self, mod: nn.Module, routed: Tensor, device_mesh: DeviceMesh) -> Tensor:
        return super()._token_combine(mod, routed, device_mesh["ep"])


# -- parallelize -----------------------------------------------------------------------------------


def parallelize(model: Transformer, dims: ParallelDims, config: Config) -> None:
    if config.tp > 1:
        apply_tp(model, dims("tp"), config)
    if config.mixture and (config.tp > 1 or config.ep > 1):
        apply_moe_ep_tp(model, dims, config)
    if config.recompute != "none":
        apply_recomputation(model, config.recompute)
    if config.compile:
        for name, block in model.layers.named_children():
            compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
            model.layers.register_module(name, compiled)
    if config.dp_replicate * config.dp_shard > 1:
        apply_fsdp(model, dims, config)


def apply_tp(model: Transformer, tp_mesh: DeviceMesh, config: Config) -> None:
    parallelize_module(
        model,
        tp_mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(
                input_layouts=Shard(1),
                output_layouts=Shard(-1) if config.loss_parallel else Replicate(),
                use_local_output=not config.loss_parallel,
            ),
        },
    )
    for block in model.layers.values():
        plan: dict[str, ParallelStyle] = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1), None),
                desired_input_layouts=(Replicate(), None),
            ),
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
        }
        if not block.moe_enabled:
            plan |= {
                "feed_forward": PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
                ),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
                "feed_forward.w3": ColwiseParallel(),
            }
        parallelize_module(module=block, device_mesh=tp_mesh, parallelize_plan=plan)


def apply_moe_ep_tp(model: Transformer, dims: ParallelDims, config: Config) -> None:
    tp_mesh, ep_mesh = dims("tp"), dims("ep")
    for block in model.layers.values():
        if not block.moe_enabled:
            continue
        if tp_mesh is not None:
            plan: dict[str, ParallelStyle] = {
                "moe": PrepareModuleInputOutput(
                    input_layouts=(Shard(1),),
                    desired_input_layouts=(Replicate(),),
                    use_local_input=True,
                    output_layouts=(Partial(),),
                    desired_output_layouts=(Shard(1),),
                ),
                "moe.router.gate": NoParallel(),
                "moe.shared_experts.w1": ColwiseParallel(),
                "moe.shared_experts.w2": RowwiseParallel(output_layouts=Partial()),
                "moe.shared_experts.w3": ColwiseParallel(),
            }
            parallelize_module(block, tp_mesh, plan)
        style: ParallelStyle
        if ep_mesh is None:
            mesh, style = tp_mesh, TensorParallel()
        elif tp_mesh is None:
            mesh, style = ep_mesh, ExpertParallel()
        else:
            mesh, style = dims("ep", "etp"), ExpertTensorParallel()
        parallelize_module(module=block.moe.experts, device_mesh=mesh, parallelize_plan=style)


_SAVED = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten.max.default,
}


def apply_recomputation(model: Transformer, mode: str) -> None:
    def policy_of(counts: dict[str, int]) -> Any:
        def policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            key = f"{'recompute' if ctx.is_recompute else 'forward'}_mm_count"
            if func == torch.ops.aten.mm.default:
                counts[key] += 1
            every_second = func == torch.ops.aten.mm.default and counts[key] % 2 == 0
            if func in _SAVED and not every_second:
                return CheckpointPolicy.MUST_SAVE
            return CheckpointPolicy.PREFER_RECOMPUTE

        return policy

    def context_fn() -> Any:
        return create_selective_checkpoint_contexts(policy_of(defaultdict(int)))

    options: dict[str, Any] = {"context_fn": context_fn} if mode == "selective" else {}
    for name, block in model.layers.named_children():
        wrapped = checkpoint_wrapper(block, preserve_rng_state=False, **options)
        model.layers.register_module(name, wrapped)


def apply_fsdp(model: Transformer, dims: ParallelDims, config: Config) -> None:
    names = ("dp_replicate", "fsdp") if config.dp_replicate > 1 else ("fsdp",)
    fsdp_config: dict[str, Any] = {
        "mesh": dims(*names),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64),
    }
    reshard = config.reshard_after_forward
    fully_shard(model.tok_embeddings, **fsdp_config, reshard_after_forward=reshard)
    for block in model.layers.values():
        if block.moe_enabled and config.ep > 1:
            edp_mesh = dims(*(name.replace("fsdp", "efsdp") for name in names))
            is_split = edp_mesh["efsdp"].size() * config.ep > block.moe.experts.num_experts
            fully_shard(
                block.moe.experts,
                **{**fsdp_config, "mesh": edp_mesh},
                reshard_after_forward=reshard,
                shard_placement_fn=(lambda param: Shard(1)) if is_split else None,
            )
        fully_shard(block, **fsdp_config, reshard_after_forward=reshard)
    fully_shard([model.norm, model.output], **fsdp_config, reshard_after_forward=False)
    fully_shard(model, **fsdp_config)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    if config.ep > 1:
        prefetch(model)


def prefetch(model: Transformer) -> None:
    """Say which units to gather next, since the exchange of tokens waits for the host."""
    blocks = list(model.layers.values())

    def units(block: Any) -> list[Any]:
        return [block, block.moe.experts] if block.moe_enabled else [block]

    model.tok_embeddings.set_modules_to_forward_prefetch([blocks[0]])
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch(units(following))
    blocks[-1].set_modules_to_forward_prefetch([model.norm, model.output])
    model.output.set_modules_to_backward_prefetch(units(blocks[-1]))
    for block, previous in pairwise(blocks[::-1]):
        block.set_modules_to_backward_prefetch(units(previous))
    blocks[0].set_modules_to_backward_prefetch([model.tok_embeddings])


# -- the job ---------------------------------------------------------------------------------------


def global_batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (GLOBAL_BATCH, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = IGNORE_INDEX
    return tokens[:, :-1], labels


def cross_entropy_loss(pred: Any, labels: Tensor) -> Any:
    return F.cross_entropy(
        pred.flatten(0, 1), labels.flatten(0, 1), reduction="sum", ignore_index=IGNORE_INDEX
    )


@torch.no_grad()
def clip_grad_norm_(parameters: list[Any], max_norm: float, dims: ParallelDims) -> Tensor:
    """Clip by the norm of all gradients; those of experts are on another mesh."""
    dense = [p for p in parameters if "ep" not in mesh_names(p)]
    experts = [p for p in parameters if "ep" in mesh_names(p)]
    total: Any = torch.zeros((), dtype=torch.float64)
    for group in (dense, experts):
        if group:
            norm = torch.nn.utils.get_total_norm([p.grad for p in group], 2.0, False, True)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            total = total + norm**2
    total = total**0.5
    for group in (dense, experts):
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, total, foreach=True)
    return total


def mesh_names(x: Any) -> tuple[str, ...]:
    return tuple(x.device_mesh.mesh_dim_names or ()) if isinstance(x, DTensor) else ()


def initial_values(config: Config) -> dict[str, Tensor]:
    """Return the whole state dict that all runs start from."""
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        model = Transformer(config.mixture)
    return {
        name: torch.randn(x.shape, dtype=torch.float64, generator=generator) / DIM**0.5
        for name, x in model.state_dict().items()
    }


def build(config: Config) -> tuple[Transformer, ParallelDims]:
    dims = ParallelDims(config)
    with torch.device("meta"):
        model = Transformer(config.mixture).double()
    parallelize(model, dims, config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_buffers()
    model.train()
    return model, dims


def train_step(
    model: Any, optimizer: Any, dims: ParallelDims, config: Config, step: int
) -> dict[str, float]:
    optimizer.zero_grad()
    batch = dims("batch")
    ranks, rank = (1, 0) if batch is None else (batch.size(), batch.get_local_rank())
    tokens, labels = (x.chunk(ranks)[rank] for x in global_batch(step))
    valid = (labels != IGNORE_INDEX).sum()
    if batch is not None:
        dist.all_reduce(valid, group=batch.get_group())
    if config.tp > 1 and config.loss_parallel:
        with loss_parallel():
            loss = cross_entropy_loss(model(tokens), labels) / valid
            loss.backward()
    else:
        loss = cross_entropy_loss(model(tokens), labels) / valid
        loss.backward()
    norm = clip_grad_norm_(list(model.parameters()), MAX_NORM, dims)
    optimizer.step()
    total = loss.detach()
    total = total.full_tensor() if isinstance(total, DTensor) else total
    if batch is not None:
        total = funcol.all_reduce(total, "sum", batch)
    return {"loss": total.item(), "norm": norm.item()}


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1, foreach=True)


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=flat),
    }


def train(config: Config, folder: str) -> dict[str, Any]:
    """Train for three steps; save after two, resume in a new model and take the third again."""
    model, dims = build(config)
    whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=True)
    values = initial_values(config) if dist.get_rank() == 0 else {}
    set_model_state_dict(model, values, options=whole)
    optimizer = optimizer_of(model)
    logs = [train_step(model, optimizer, dims, config, step) for step in range(2)]
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    logs.append(train_step(model, optimizer, dims, config, 2))

    resumed, dims = build(config)
    again = optimizer_of(resumed)
    state = state_of(resumed, again)
    dcp.load(state, checkpoint_id=folder)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    set_model_state_dict(resumed, state["model"])
    set_optimizer_state_dict(resumed, again, state["optimizer"], options=flat)
    assert train_step(resumed, again, dims, config, 2) == logs[-1]

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    parameters = get_model_state_dict(resumed, options=options)
    return {"logs": logs, "parameters": parameters if dist.get_rank() == 0 else {}}


def train_alone(mixture: bool) -> dict[str, Any]:
    """Return what one process computes, without any parallelism."""
    config = Config(mixture=mixture)
    model = Transformer(mixture).double()
    model.load_state_dict(initial_values(config))
    with torch.no_grad():
        model.init_buffers()
    optimizer = optimizer_of(model)
    logs = []
    for step in range(3):
        optimizer.zero_grad()
        tokens, labels = global_batch(step)
        loss = cross_entropy_loss(model(tokens), labels) / (labels != IGNORE_INDEX).sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        logs.append({"loss": loss.item(), "norm": norm.item()})
    return {"logs": logs, "parameters": model.state_dict()}
