"""A rank that dies, hangs or raises in a step: all ranks name it, its stage and the microbatch."""

from __future__ import annotations

import signal

import pytest

import shardmesh as sm
from tests import tiers
from tests.forked import Forked, statuses
from tests.sharding.parallel.pipeline import failing_ranks


@pytest.mark.timeout(300)  # some seconds, on a machine that is not busy
@pytest.mark.parametrize(
    ("schedule", "how", "kind", "microbatch", "says"),
    [
        ("1f1b", "dies", "forward", 1, "rank 2 died, while rank 1 waits"),
        ("zb_h1", "hangs", "backward", 2, "rank 1 has waited"),
        tiers.slow("1f1b", "raises", "forward", 2, "rank 2 raised ArithmeticError: a bad row"),
    ],
)
def test_verdict_names_rank_stage_and_microbatch(
    forked: Forked, schedule: str, how: str, kind: str, microbatch: int, says: str
) -> None:
    ended = forked(
        failing_ranks.step, 4, schedule, how, kind, microbatch, limit_s=250.0, SHARDMESH_EXIT_S="2"
    )
    assert statuses(ended) == [1, 1, -signal.SIGKILL if how == "dies" else 1, 1]
    action = "backward for inputs" if schedule == "zb_h1" and kind == "backward" else kind
    place = f"in the {action} of stage 2, microbatch {microbatch}"
    for rank in (0, 1, 3):
        _, _, verdict = ended[rank].output.rpartition(says)
        assert verdict, ended[rank].output
        assert place in verdict.replace("\n[rank", " [rank"), ended[rank].output


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["strict", tiers.slow("on"), tiers.slow("full")])
def test_deadlock_of_a_stage_is_named(forked: Forked, mode: str) -> None:
    """Stage 2 waits for all ranks in a forward, and rank 3 for its activations."""
    ended = forked(
        failing_ranks.step,
        4,
        *("1f1b", "meets", "forward", 1),
        limit_s=250.0,
        SHARDMESH_EXIT_S="2",
        SHARDMESH_MONITOR=mode,
    )
    assert statuses(ended) == [1, 1, 1, 1]
    for one in ended:
        _, _, verdict = one.output.rpartition("DeadlockError")
        assert "in the forward of stage 2, microbatch 1" in verdict, one.output
        assert "activations into stage 3, microbatch 1" in verdict, one.output


@pytest.mark.timeout(300)
@pytest.mark.parametrize("schedule", ["1f1b", tiers.slow("zb_h1")])
def test_debug_level_detail_of_torch(forked: Forked, schedule: str) -> None:
    """Its checks wait for both ranks of a message, as if it was a collective: a ring of waits."""
    ended = forked(failing_ranks.step_in_detail, 4, schedule, limit_s=250.0)
    assert statuses(ended) == [0] * 4, ended[0].output


@pytest.mark.parametrize(("kind", "microbatch"), [("forward", 2), ("backward", 0)])
def test_error_of_a_stage_says_where_it_was_raised(kind: str, microbatch: int) -> None:
    with pytest.raises(ArithmeticError, match="a bad row") as raised:
        sm.simulate(4)(failing_ranks.step)("1f1b", "raises", kind, microbatch)
    assert raised.value.__notes__ == [
        f"raised in the {kind} of stage 2, microbatch {microbatch}, of a pipeline",
        "raised on rank 2 of simulate(4)",
    ]
