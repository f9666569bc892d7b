"""Jobs that lose ranks: state from the parts that the others hold. See docs/elastic.md.

like = build(mesh_of_the_others)
sm.elastic.recover(state, like, alive=[0, 1, 3])
"""

from shardmesh.sharding.elastic.plan import RecoveryPlan
from shardmesh.sharding.elastic.recovery import StateLostError, plan_recovery, recover
from shardmesh.sharding.elastic.redundancy import Redundancy, StateCopy

__all__ = [
    "RecoveryPlan",
    "Redundancy",
    "StateCopy",
    "StateLostError",
    "plan_recovery",
    "recover",
]
