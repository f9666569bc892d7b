"""`RandomState`: the state of all random number generators, as a leaf of a checkpoint."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch

from ..tensor.random import get_rng_state, set_rng_state
from .tree import PerRank


class RandomState:
    """RandomState(): saves and restores the state of all random number generators.

    The generator of `ShardedTensor`s is the same on every rank; those of torch (CPU and this rank's
    GPU) and Python's `random` are saved per rank. On ranks beyond the saving world these do not
    change.

    Communication: none.

    Example:
        >>> state = {"model": model, "random": sm.checkpoint.RandomState()}
        >>> sm.checkpoint.save(state, "checkpoints")
        >>> sm.checkpoint.load("checkpoints", state)
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the current states."""
        state = {
            "sharded": get_rng_state(),
            "torch": PerRank(torch.get_rng_state()),
            "python": PerRank(random.getstate()),
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = PerRank(torch.cuda.get_rng_state())
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore these states."""
        set_rng_state(state["sharded"])
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        if state.get("cuda") is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
