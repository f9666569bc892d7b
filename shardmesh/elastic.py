"""Jobs that lose ranks and go on.

    run = sm.elastic.run(build, step, data, make_mesh=make_mesh, steps=1000)
    run.losses, run.events

See docs/elastic.md.
"""

from shardmesh.mesh.elastic.membership import ElasticJobError
from shardmesh.sharding.elastic.job import Attempt, ElasticEvent, ElasticJob
from shardmesh.sharding.elastic.plan import RecoveryPlan
from shardmesh.sharding.elastic.recovery import StateLostError, plan_recovery, recover
from shardmesh.sharding.elastic.redundancy import Redundancy, StateCopy
from shardmesh.sharding.elastic.run import ElasticRun, run

__all__ = [
    "Attempt",
    "ElasticEvent",
    "ElasticJob",
    "ElasticJobError",
    "ElasticRun",
    "RecoveryPlan",
    "Redundancy",
    "StateCopy",
    "StateLostError",
    "plan_recovery",
    "recover",
    "run",
]
