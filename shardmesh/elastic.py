"""Jobs that lose ranks: state from the parts that the others hold. See docs/elastic.md.

like = build(mesh_of_the_others)
sm.elastic.recover(state, like, alive=[0, 1, 3])
"""

from shardmesh.sharding.elastic.recovery import (
    RecoveryPlan,
    StateLostError,
    plan_recovery,
    recover,
)

__all__ = ["RecoveryPlan", "StateLostError", "plan_recovery", "recover"]
