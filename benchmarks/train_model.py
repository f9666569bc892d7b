"""The model and the data of `train.py`: a byte-level language model in plain PyTorch without any
parallelism.

Tensor names end in one letter per dim: b batch, s position, d width of the residual stream, h head,
e width of a head, v byte value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    """Shapes of the model and of the global batch.

    Attributes:
        experts: of the mixture that each MLP is; 0 for one MLP.
    """

    layers: int
    d: int
    heads: int
    f: int
    s: int
    b: int
    vocabulary: int = 256
    experts: int = 0


class Attention(nn.Module):
    """Causal self-attention with rotary position embeddings, over the local heads of a rank."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.e = size.d // size.heads
        self.q, self.k, self.v, self.o = (nn.Linear(size.d, size.d, bias=False) for _ in range(4))

    def forward(self, x_bsd: Tensor, rotary_se: Tensor) -> Tensor:
        b, s, _ = x_bsd.shape
        q, k, v = (
            linear(x_bsd).view(b, s, -1, self.e).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        mixed_bhse = F.scaled_dot_product_attention(
            rotate(q, rotary_se), rotate(k, rotary_se), v, is_causal=True
        )
        return self.o(mixed_bhse.transpose(1, 2).flatten(2))


def rotate(x_bhse: Tensor, rotary_se: Tensor) -> Tensor:
    """Apply rotary position embeddings (Su et al. 2021, arXiv:2104.09864)."""
    first, second = x_bhse.chunk(2, dim=-1)
    cos, sin = rotary_se.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(size.d, size.f, bias=False) for _ in range(2))
        self.down = nn.Linear(size.f, size.d, bias=False)

    def forward(self, x_bsd: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_bsd)) * self.up(x_bsd))


CHOICES = 2  # experts of a token


class Mixture(nn.Module):
    """Experts that are SwiGLUs, of which each token chooses two.

    Rows are sorted by expert and multiplied in groups, as transformers' "grouped_mm" experts do, so
    that no shape depends on values. Tensor names: n rows, x expert.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.router = nn.Linear(size.d, size.experts, bias=False)
        self.gate_up_xdf = nn.Parameter(torch.empty(size.experts, size.d, 2 * size.f))
        self.down_xfd = nn.Parameter(torch.empty(size.experts, size.f, size.d))
        for w in (self.gate_up_xdf, self.down_xfd):
            nn.init.normal_(w, std=w.shape[1] ** -0.5)

    def forward(self, x_bsd: Tensor) -> Tensor:
        x_nd = x_bsd.flatten(0, 1)
        weights_nc, experts_nc = self.router(x_nd).softmax(-1).topk(CHOICES, sorted=False)
        experts = experts_nc.flatten()
        order = experts.argsort(stable=True)
        rows = order // CHOICES
        is_chosen = experts[:, None] == torch.arange(len(self.down_xfd), device=x_nd.device)
        ends = is_chosen.sum(0).cumsum(0).int()
        hidden = F.grouped_mm(x_nd[rows], self.gate_up_xdf, offs=ends)
        gate, up = hidden.chunk(2, dim=-1)
        y = F.grouped_mm(F.silu(gate) * up, self.down_xfd, offs=ends)
        weighted = y * weights_nc.flatten()[order, None]
        return torch.zeros_like(x_nd).index_add(0, rows, weighted).view_as(x_bsd)


class Block(nn.Module):
    """A transformer layer."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(size.d, eps=1e-6) for _ in range(2))
        self.attention = Attention(size)
        self.mlp = Mixture(size) if size.experts else MLP(size)

    def forward(self, x_bsd: Tensor, rotary_se: Tensor) -> Tensor:
        x_bsd = x_bsd + self.attention(self.attention_norm(x_bsd), rotary_se)
        return x_bsd + self.mlp(self.mlp_norm(x_bsd))


class Model(nn.Module):
    """A language model: bytes [b, s] to logits [b, s, v]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.d)
        self.blocks = nn.ModuleList([Block(size) for _ in range(size.layers)])
        self.norm = nn.RMSNorm(size.d, eps=1e-6)
        self.head = nn.Linear(size.d, size.vocabulary, bias=False)
        self.register_buffer("rotary_se", rotary_table(size), persistent=False)

    def forward(self, bytes_bs: Tensor) -> Tensor:
        x_bsd = self.embedding(bytes_bs)
        for block in self.blocks:
            x_bsd = block(x_bsd, self.rotary_se)
        return self.head(self.norm(x_bsd))


def rotary_table(size: Size) -> Tensor:
    """Return cosines and sines of the rotary angles, [s, e]."""
    e = size.d // size.heads
    angles = torch.outer(torch.arange(size.s).float(), 10_000.0 ** (-torch.arange(0, e, 2) / e))
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def make_model(size: Size) -> Model:
    """Create the model with the same values in every process."""
    torch.manual_seed(0)
    return Model(size)


def batch(size: Size, step: int) -> tuple[Tensor, Tensor]:
    """Return the global batch of a step: bytes and the bytes that follow them, each [b, s]."""
    bytes_bs = torch.randint(
        0, size.vocabulary, (size.b, size.s), generator=torch.Generator().manual_seed(step)
    )
    return bytes_bs, (bytes_bs * 7 + 3) % size.vocabulary


def cross_entropy(logits_bsv: Tensor, targets_bs: Tensor) -> Tensor:
    """Return the mean loss over all tokens."""
    return F.cross_entropy(logits_bsv.flatten(0, 1), targets_bs.flatten())
