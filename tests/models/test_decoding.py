"""Decoding under `sm.jit`: one graph for all tokens, which are those of eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardmesh as sm
from shardmesh.parallel import parallelize
from tests.models.tiny import IDS, model
from tests.sharding.parallel.compositions import whole

transformers = pytest.importorskip("transformers")

NEW = 8
MASK = torch.ones_like(IDS)
MASK[0, :2] = 0  # padded on the left


def decoded(module: Any, jit: Callable[..., Any]) -> tuple[list[list[int]], int]:
    """Decode greedily by a loop of our own, with a static cache."""
    cache = transformers.StaticCache(config=module.config, max_cache_len=32)

    @torch.no_grad()
    def decode(ids: Tensor, positions: Tensor, cache: Any) -> Tensor:
        result = module(input_ids=ids, position_ids=positions, cache=cache, use_cache=True)
        return whole(result.logits)[:, -1].argmax(-1, keepdim=True)

    step = jit(decode)
    length = IDS.shape[1]
    tokens = [decode(IDS, torch.arange(length)[None], cache)]
    for i in range(NEW):
        tokens.append(step(tokens[-1], torch.tensor([[length + i]]), cache))
    return torch.cat(tokens, 1).tolist(), len(getattr(step, "recorded", ()))


def generated(module: Any, jit: Callable[..., Any]) -> tuple[list[list[int]], int]:
    """Generate twice by transformers, which compiles the steps after the first by
    `get_compiled_call`.
    """
    step = jit(module.__call__)
    module.get_compiled_call = lambda config: step
    config = transformers.CompileConfig()
    config._compile_all_devices = True  # by default on accelerators alone
    cache = transformers.StaticCache(config=module.config, max_cache_len=32)
    tokens = []
    for ids in (IDS, IDS.flip(0)):
        cache.reset()
        tokens += module.generate(
            ids,
            attention_mask=MASK,
            cache=cache,
            max_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
            compile_config=config,
        ).tolist()
    return tokens, len(getattr(step, "recorded", ()))


@pytest.mark.parametrize("way", [decoded, generated], ids=lambda way: way.__name__)
def test_one_graph_for_all_tokens(way: Callable[..., Any]) -> None:
    def main(jit: Callable[..., Any]) -> Any:
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("tp",))
        module = parallelize(model("llama").eval(), mesh, "auto")
        return way(module, jit)

    eager = sm.simulate(2)(main)(lambda f: f)
    results = sm.simulate(2)(main)(lambda f: sm.jit(f, backend="eager", fullgraph=True))
    assert [tokens for tokens, _ in results] == [tokens for tokens, _ in eager]
    assert [graphs for _, graphs in results] == [1, 1]
