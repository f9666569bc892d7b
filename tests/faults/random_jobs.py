"""Outcomes of random programs on processes, as in `random_outcome`, or "hang": a rank had to be
killed.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.faults.random_outcome import classify_verdict, outcome
from tests.faults.random_programs import RandomProgram
from tests.faults.random_table import FAULTS, program_of
from tests.faults.runner import Outcome, RankOutcome, Runner


def run_faulty(runner: Runner, name: str, limit_s: float = 40.0) -> tuple[str, str]:
    """Run a program with an outlier; return its outcome and what the ranks reported."""
    outcome = runner.run(FAULTS[name], limit_s=limit_s)
    return classify(runner, name, outcome), _report(outcome)


def _report(outcome: Outcome) -> str:
    return "\n".join(
        f"rank {n}: exit status {r.status} {r.error} {r.text or r.output[-1500:]}"
        for n, r in enumerate(outcome.ranks)
    )


def run_healthy(runner: Runner, seed: int, raw: bool = False) -> int:
    """Run a job of correct programs; return the number of collectives called by all ranks.

    Raises:
        RuntimeError: if a rank does not end normally.
    """
    outcome = runner.run(FAULTS[f"{'raw ' * raw}healthy {seed}"], limit_s=300.0)
    if outcome.killed or any(not rank.done or rank.status for rank in outcome.ranks):
        raise RuntimeError(_report(outcome))
    return sum(rank.value for rank in outcome.ranks)


def classify(runner: Runner, name: str, outcome: Outcome) -> str:
    program = program_of(name)
    if outcome.killed:
        return "hang"
    others = [rank for n, rank in enumerate(outcome.ranks) if n != program.outlier]
    if raising := [rank for rank in others if rank.error]:
        return _classify_errors(program, raising)
    if any(rank.error for rank in outcome.ranks):
        return "named"  # by the outlier's traceback; all other ranks had finished
    if all(rank.done and rank.status == 0 for rank in others):
        return _classify_values(runner, name, outcome)
    return "died without an error"


def _classify_errors(program: RandomProgram, raising: Sequence[RankOutcome]) -> str:
    """Return the worst outcome among the ranks."""
    kinds = {_classify_error(program, rank) for rank in raising}
    return next(word for word in ("wrong rank", "unnamed", "tie", "named") if word in kinds)


def _classify_error(program: RandomProgram, rank: RankOutcome) -> str:
    verdict = rank.verdict
    return (
        "wrong rank"
        if verdict is None
        else classify_verdict(program, verdict["kind"], verdict["ranks"], len(verdict["seen"]))
    )


def _classify_values(runner: Runner, name: str, actual: Outcome) -> str:
    """Return the outcome where no rank raised. A rank that left the program has no values; those of
    the others must be correct.
    """
    right = runner.run(FAULTS[name], healthy=True)
    if all(
        one.value == other.value
        for one, other in zip(actual.ranks, right.ranks, strict=True)
        if one.done and one.value is not None
    ):
        return "nothing"
    # The simulated world records the inputs of collectives.
    in_simulation, _ = outcome(program_of(name))
    return in_simulation if in_simulation in ("local", "unseen") else "silent"
