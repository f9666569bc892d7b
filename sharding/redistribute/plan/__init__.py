"""Plans: the steps that take a tensor from one layout to another, computed before anything moves.

`plan(src, dst)` is a pure function of two layouts and a topology: no process group, no tensor, and
the same result on every rank. Read the files in this order:

    steps.py                  the steps of a plan, as data
    intermediate_layouts.py   layouts between two others, and the collectives that lead through them
    overlap.py                which ranks hold a part of a given box
    routes.py                 which rank sends which box to which in an all_to_all_v
    nodes.py, traffic.py      bytes between nodes, and per rank
    memory.py                 bytes in memory
    cost.py                   seconds
    candidates.py             the plans that are considered
    planner.py                the choice among them
    cross_mesh.py             plans between two meshes
    bounds.py                 how few bytes any plan must move
"""

from .intermediate_layouts import without_trivial_axes
from .planner import check_transport, plan
from .steps import Plan, Step

__all__ = ["Plan", "Step", "check_transport", "plan", "without_trivial_axes"]
