"""A language model in plain PyTorch with Hugging Face's module names, which the tests of layers
parallelize.

It does not depend on a mesh. Tensor names end in one letter per dim: b batch, s position, d width
of the residual stream, h head, e width of a head, f width of the SwiGLU, v token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.device import DEVICE

Rotary = tuple[Tensor, Tensor]  # cosines and sines, each of shape [s, e]


@dataclass(frozen=True)
class Config:
    """Shapes of the model; `kv_heads` None means `heads`, `positions` is the maximal sequence
    length.
    """

    vocabulary: int = 32
    d: int = 16
    layers: int = 2
    heads: int = 4
    head_dim: int = 4
    f: int = 32
    kv_heads: int | None = None
    tied: bool = False
    bias: bool = False
    positions: int = 64
    dtype: torch.dtype = torch.float64


class RotaryAttention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_heads = config.kv_heads or config.heads
        self.repeats = config.heads // kv_heads
        options = {"bias": config.bias, "dtype": config.dtype}
        self.q_proj = nn.Linear(config.d, config.heads * config.head_dim, **options)
        self.k_proj = nn.Linear(config.d, kv_heads * config.head_dim, **options)
        self.v_proj = nn.Linear(config.d, kv_heads * config.head_dim, **options)
        self.o_proj = nn.Linear(config.heads * config.head_dim, config.d, **options)

    def forward(self, x_bsd: Tensor, rotary: Rotary) -> Tensor:
        b, s, _ = x_bsd.shape
        q_bhse, k_bhse, v_bhse = (
            project(x_bsd).view(b, s, -1, self.head_dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q_bhse, k_bhse = rotated(q_bhse, rotary), rotated(k_bhse, rotary)
        if self.repeats > 1:
            k_bhse, v_bhse = (x.repeat_interleave(self.repeats, dim=1) for x in (k_bhse, v_bhse))
        out_bhse = F.scaled_dot_product_attention(q_bhse, k_bhse, v_bhse, is_causal=True)
        return self.o_proj(out_bhse.transpose(1, 2).flatten(2))


def rotary_tables(config: Config) -> Rotary:
    """Return cosines and sines by position (Su et al. 2021, arXiv:2104.09864)."""
    rates = 10_000.0 ** (
        -torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    )
    angles_pe = torch.outer(torch.arange(config.positions, dtype=torch.float64), rates).repeat(1, 2)
    return angles_pe.cos().to(config.dtype), angles_pe.sin().to(config.dtype)


def rotated(x_bhse: Tensor, rotary: Rotary) -> Tensor:
    """Rotate each pair of features by the angle of its position."""
    (first, second), (cos_se, sin_se) = x_bhse.chunk(2, dim=-1), rotary
    return x_bhse * cos_se + torch.cat([-second, first], dim=-1) * sin_se


class SwiGLU(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        options = {"bias": config.bias, "dtype": config.dtype}
        self.gate_proj = nn.Linear(config.d, config.f, **options)
        self.up_proj = nn.Linear(config.d, config.f, **options)
        self.down_proj = nn.Linear(config.f, config.d, **options)

    def forward(self, x_bsd: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_bsd)) * self.up_proj(x_bsd))


class ResidualMLP(nn.Module):
    """x + down(relu(up(norm(x))))"""

    def __init__(self, d: int, f: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, f), nn.Linear(f, d)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class TransformerBlock(nn.Module):
    """A layer: attention and SwiGLU, each after a norm."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.d, eps=1e-6, dtype=config.dtype)
        self.self_attn = RotaryAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.d, eps=1e-6, dtype=config.dtype)
        self.mlp = SwiGLU(config)

    def forward(self, x_bsd: Tensor, rotary: Rotary) -> Tensor:
        x_bsd = x_bsd + self.self_attn(self.input_layernorm(x_bsd), rotary)
        return x_bsd + self.mlp(self.post_attention_layernorm(x_bsd))


class SmallGPT(nn.Module):
    """Map tokens [b, s] to logits [b, s, v].

    Parameters by path: `embed_tokens.weight`, `layers.0.self_attn.{q,k,v,o}_proj.weight`,
    `layers.0.mlp.{gate,up,down}_proj.weight`, `layers.0.{input,post_attention}_layernorm.weight`,
    `norm.weight`, `lm_head.weight`.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocabulary, config.d, dtype=config.dtype)
        self.layers = nn.ModuleList([TransformerBlock(config) for _ in range(config.layers)])
        self.norm = nn.RMSNorm(config.d, eps=1e-6, dtype=config.dtype)
        self.lm_head = nn.Linear(config.d, config.vocabulary, bias=False, dtype=config.dtype)
        cos_pe, sin_pe = rotary_tables(config)
        self.register_buffer("cos", cos_pe, persistent=False)
        self.register_buffer("sin", sin_pe, persistent=False)
        if config.tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens_bs: Tensor) -> Tensor:
        x_bsd, s = self.embed_tokens(tokens_bs), tokens_bs.shape[1]
        for layer in self.layers:
            x_bsd = layer(x_bsd, (self.cos[:s], self.sin[:s]))
        return self.lm_head(self.norm(x_bsd))


def gpt(config: Config = Config(), seed: int = 0) -> SmallGPT:
    """Return the model with the same values on every rank of every mesh, independent of torch's
    global generator.
    """
    model, generator = SmallGPT(config), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(
                parameter.shape, generator=generator, dtype=torch.float64, device="cpu"
            )
            parameter.copy_(
                1 + drawn / 8 if parameter.ndim == 1 else drawn / parameter.shape[1] ** 0.5
            )
    return model


def tokens(b: int = 4, s: int = 8, vocabulary: int = 32, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, each of shape [b, s]."""
    drawn = torch.randint(
        0, vocabulary, (2, b, s), generator=torch.Generator().manual_seed(seed), device="cpu"
    ).to(DEVICE)
    return drawn[0], drawn[1]


def loss_of(logits_bsv: Tensor, targets_bs: Tensor) -> Tensor:
    """Return the mean loss over all tokens."""
    return F.cross_entropy(logits_bsv.flatten(0, 1), targets_bs.flatten())
