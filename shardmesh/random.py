"""Random numbers that do not depend on the sharding: seeds, states, and keys as in `jax.random`."""

from shardmesh.sharding.functional.keys import fold_in, key, seeded
from shardmesh.sharding.tensor.random import (
    check_rng_state,
    fork_rng,
    get_rng_state,
    manual_seed,
    replay_random,
    set_rng_state,
)

__all__ = [
    "check_rng_state",
    "fold_in",
    "fork_rng",
    "get_rng_state",
    "key",
    "manual_seed",
    "replay_random",
    "seeded",
    "set_rng_state",
]
