"""What stages need of each other where units read, view and write the model's inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardmesh as sm
from shardmesh.parallel import pipeline

WIDTH, LENGTH, VOCABULARY, ROWS, BLOCKS = 8, 5, 11, 4, 3
Cache = tuple[Tensor, Tensor]


class Block(nn.Module):
    """Attention of one token of each row to those before, whose keys and values are in a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Cache, position: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        keys = cache[0].index_copy_(1, position, key)
        values = cache[1].index_copy_(1, position, value)
        mask = torch.arange(LENGTH, device=x.device) <= position[:, None]
        return x + self.out(F.scaled_dot_product_attention(query, keys, values, attn_mask=mask))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, caches: tuple[Cache, ...], position: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, cache, position)
        return self.head(x)


def make_decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder().double().eval()


def generate(
    next_token: Callable[[Tensor, tuple[Cache, ...], Tensor], Tensor],
    own_blocks: Sequence[int] = range(BLOCKS),
) -> Tensor:
    """Return tokens; the caches of other blocks have no memory."""

    def cache(block: int) -> Tensor:
        device = "cpu" if block in own_blocks else "meta"
        return torch.zeros(ROWS, LENGTH, WIDTH, dtype=torch.float64, device=device)

    caches = tuple((cache(block), cache(block)) for block in range(BLOCKS))
    tokens = [torch.arange(ROWS).view(ROWS, 1)]
    for position in range(LENGTH):
        tokens.append(next_token(tokens[-1], caches, torch.tensor([position])))
    return torch.cat(tokens, 1)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_decoding_with_caches(microbatches: int) -> None:
    """A rank writes the caches of its own blocks; microbatches have rows of the same caches."""

    def program() -> Tensor:
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("pp",))
        pipe = pipeline(make_decoder(), mesh, split=["blocks.1"], microbatches=microbatches)

        def next_token(ids: Tensor, caches: tuple[Cache, ...], position: Tensor) -> Tensor:
            results = pipe.forward(ids, caches=caches, position=position)
            token = torch.empty_like(ids)
            if results is not None:
                token = torch.cat(results).argmax(-1)
            mesh.group("pp").broadcast(token, src=1)
            return token

        return generate(next_token, [0] if mesh.get_rank() == 0 else [1, 2])

    decoder = make_decoder()
    with torch.no_grad():
        expected = generate(lambda *inputs: decoder(*inputs).argmax(-1))
    assert len(expected.unique()) > 3
    for tokens in sm.simulate(2)(program)():
        assert torch.equal(tokens, expected)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor, adds: bool) -> Tensor:
        if adds:
            scale += 1
        return self.linear(x) * scale[:, None]


class ScaledLayers(nn.Module):
    """Layers that take views of an input of the model, and may write it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Scaled() for _ in range(2)])

    def forward(self, x: Tensor, scale: Tensor, adds: bool = False) -> Tensor:
        for layer in self.layers:
            x = layer(x, scale, adds)
        return x


def loss_of_scaled_layers(adds: bool) -> tuple[float, float]:
    """Return the loss of a pipeline and of one process."""
    torch.manual_seed(0)
    model = ScaledLayers().double()
    x, scale = torch.randn(ROWS, WIDTH, dtype=torch.float64), torch.rand(ROWS, dtype=torch.float64)
    expected = F.mse_loss(model(x, scale.clone(), adds), x)
    mesh = sm.init_device_mesh("cpu", (2,), axis_names=("pp",))
    pipe = pipeline(model, mesh, split=["layers.1"], microbatches=2)
    loss = pipe.step(x, x, loss_fn=F.mse_loss, scale=scale, adds=adds)
    return loss.item(), expected.item()


def test_views_of_an_input_in_units_of_several_stages() -> None:
    for loss, expected in sm.simulate(2)(loss_of_scaled_layers)(False):
        assert loss == pytest.approx(expected, abs=1e-12)


def test_an_input_that_an_earlier_stage_writes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stage 1 needs .* unit 'layers\.0' of stage 0"):
        sm.simulate(2)(loss_of_scaled_layers)(True)
