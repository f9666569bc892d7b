"""The outcome of a random program on processes, as in `random_outcome`, or "hang": a rank had to be killed."""

from __future__ import annotations

from collections.abc import Sequence

from tests.faults.random_outcome import judged_verdict, outcome
from tests.faults.random_programs import Program
from tests.faults.random_table import FAULTS, program_of
from tests.faults.runner import Outcome, RankOutcome, Runner


def job(runner: Runner, name: str, limit_s: float = 40.0) -> tuple[str, str]:
    """(what became of it, what the ranks said)."""
    found = runner.run(FAULTS[name], limit_s=limit_s)
    return judged(runner, name, found), _said(found)


def _said(found: Outcome) -> str:
    return "\n".join(f"rank {n}: exit status {r.status} {r.error} {r.text or r.output[-1500:]}" for n, r in enumerate(found.ranks))


def healthy_job(runner: Runner, seed: int, raw: bool = False) -> int:
    """How many collectives the ranks of a job of correct programs have called. Raises: RuntimeError for anything but a good end."""
    found = runner.run(FAULTS[f"{'raw ' * raw}healthy {seed}"], limit_s=300.0)
    if found.killed or any(not rank.done or rank.status for rank in found.ranks):
        raise RuntimeError(_said(found))
    return sum(rank.value for rank in found.ranks)


def judged(runner: Runner, name: str, found: Outcome) -> str:
    program = program_of(name)
    if found.killed:
        return "hang"
    told = [rank for n, rank in enumerate(found.ranks) if n != program.odd and rank.error]
    if told:
        return _judged_errors(program, told)
    if any(rank.error for rank in found.ranks):
        return "named"  # by its own traceback; nobody else was left who needed it
    if all(rank.done and rank.status == 0 for n, rank in enumerate(found.ranks) if n != program.odd):
        return _judged_values(runner, name, found)
    return "died without a word"


def _judged_errors(program: Program, told: Sequence[RankOutcome]) -> str:
    """What all ranks but the odd one say; the worst of it, where they differ."""
    found = {_judged_error(program, rank) for rank in told}
    return next(word for word in ("innocent", "unnamed", "tie", "named") if word in found)


def _judged_error(program: Program, rank: RankOutcome) -> str:
    verdict = rank.verdict
    return "innocent" if verdict is None else judged_verdict(program, verdict["kind"], verdict["ranks"], len(verdict["seen"]))


def _judged_values(runner: Runner, name: str, found: Outcome) -> str:
    """Where no rank raised. A rank that has left the program has no values; what the others have must be right."""
    right = runner.run(FAULTS[name], healthy=True)
    if all(one.value == other.value for one, other in zip(found.ranks, right.ranks, strict=True) if one.done and one.value is not None):
        return "nothing"
    with_simulated, _ = outcome(program_of(name))  # which knows what the collectives moved
    return with_simulated if with_simulated in ("local", "unseen") else "silent"
