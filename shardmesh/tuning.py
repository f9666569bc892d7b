"""Forms of parallelism, devices and results of `sm.tune` and `sm.propose_plan`.

    device = dataclasses.replace(sm.tuning.DEVICES["h100"], float32=494e12)  # products in TF32
    tuning = sm.tune(model, batch, devices=8, device=device, near=sm.tuning.Form(fsdp=8))

See docs/tune.md.
"""

from shardmesh.sharding.tune.devices import DEVICES, Device
from shardmesh.sharding.tune.events import Event, StepEvents
from shardmesh.sharding.tune.form import Form
from shardmesh.sharding.tune.measure import Measured
from shardmesh.sharding.tune.memory import Memory
from shardmesh.sharding.tune.program_costs import Check
from shardmesh.sharding.tune.propose import LayerChoice, ProposedPlan
from shardmesh.sharding.tune.search import Candidate
from shardmesh.sharding.tune.step_time import StepTime
from shardmesh.sharding.tune.tuning import Tuning

__all__ = [
    "DEVICES",
    "Candidate",
    "Check",
    "Device",
    "Event",
    "Form",
    "LayerChoice",
    "Measured",
    "Memory",
    "ProposedPlan",
    "StepEvents",
    "StepTime",
    "Tuning",
]
