"""Plans: the steps that take a tensor from one layout to another, worked out before anything moves.

`plan(src, dst)` is a pure function of two layouts and a topology: no process group, no tensor, and the same answer on
every rank. Read on in this order:

    steps.py      what a plan is made of
    toward.py     layouts on the way from one to another, and which collective the geometry between two is
    meeting.py    which ranks hold a part of a given box
    route.py      who sends which box to whom in an exchange
    traffic.py    bytes per rank, per node and in memory
    cost.py       seconds
    planner.py    the candidates, and the choice
    bounds.py     what no plan can do better
"""

from .intermediate_layouts import without_trivial_axes
from .planner import check_transport, plan
from .steps import Plan, Step

__all__ = ["Plan", "Step", "check_transport", "plan", "without_trivial_axes"]
