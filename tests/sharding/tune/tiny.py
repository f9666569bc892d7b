"""A Llama of transformers with a few thousand parameters, and its description."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardmesh.sharding.tune.description import Description

transformers = pytest.importorskip("transformers")

LAYERS, WIDTH, HIDDEN, HEADS, KEY_HEADS, VOCABULARY = 4, 32, 48, 4, 2, 64
ROWS, POSITIONS = 8, 16


def config(**options: Any) -> Any:
    sizes: dict[str, Any] = {
        "hidden_size": WIDTH,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
    }
    return transformers.LlamaConfig(**sizes | options)


def model(**options: Any) -> Any:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config(**options))


def ids(rows: int = ROWS, positions: int = POSITIONS) -> torch.Tensor:
    return torch.empty(rows, positions, dtype=torch.int64, device="meta")


def description(**options: Any) -> Description:
    return Description(model(**options), ids())
