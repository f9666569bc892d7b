"""Values of hosts, by the names of `jax.experimental.multihost_utils`. A rank is a host."""

from shardmesh.sharding.tensor.multihost import (
    assert_equal,
    broadcast_one_to_all,
    global_array_to_host_local_array,
    host_local_array_to_global_array,
    process_allgather,
    reached_preemption_sync_point,
    sync_global_devices,
)
from shardmesh.sharding.tensor.sharded_tensor import AddressableShard

__all__ = [
    "AddressableShard",
    "assert_equal",
    "broadcast_one_to_all",
    "global_array_to_host_local_array",
    "host_local_array_to_global_array",
    "process_allgather",
    "reached_preemption_sync_point",
    "sync_global_devices",
]
