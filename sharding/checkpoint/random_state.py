"""The state of all random numbers, as a leaf of a tree that is saved."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch

from ..tensor.random import get_rng_state, set_rng_state
from .tree import PerRank


class RandomState:
    """RandomState(): saved, the state of all random numbers; loaded, they go on from there.

    Of `ShardedTensor`s, the same on every rank; of torch, on the CPU and on this rank's GPU, and of Python's `random`, each rank's own.
    On more ranks than had saved, the generators of the others stay as they are.

    Communication: none.

    Example:
        >>> sm.save({"model": model, "random": sm.RandomState()}, "checkpoints")
        >>> sm.load("checkpoints", {"model": model, "random": sm.RandomState()})
    """

    def state_dict(self) -> dict[str, Any]:
        """The states, now."""
        state = {"sharded": get_rng_state(), "torch": PerRank(torch.get_rng_state()), "python": PerRank(random.getstate())}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = PerRank(torch.cuda.get_rng_state())
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from these states."""
        set_rng_state(state["sharded"])
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        if state.get("cuda") is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
