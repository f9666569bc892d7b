"""Random programs under `shard_map(check=True)`: values and gradients of the single process, or a
type error, never a wrong gradient.

5,000 programs in slices. Each is called twice on the same layouts: first its types are followed,
then they are trusted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.layout.layout import Layout
from tests.sharding.functional.lockstep import NAMES, Lockstep, LockstepProgram, Meaning, weight
from tests.sharding.functional.programs import make
from tests.sharding.ranks import on_mesh, place

SLICES, LENGTH = 20, 250
ALWAYS = 1  # so many slices are no slow test
# in the refusal of a result that types let pass, and a comparison of values did not
LATE = "by its type it is the same"


class ProgramOutcome(NamedTuple):
    """The outcome of a program on one rank.

    Attributes:
        kind: "equal", "refused", "wrong" or "failed".
        text: of the refusal, or what is wrong.
    """

    kind: str
    text: str = ""


# -- in the library --------------------------------------------------------------------------------


def mapped(program: LockstepProgram, mesh: sm.DeviceMesh) -> Callable[..., Any]:
    names = {**NAMES, "sm": sm}
    exec(compile(program.source(), f"<program {program.seed}>", "exec"), names)
    return sm.shard_map(
        names["program"],
        mesh=mesh,
        in_specs=tuple(program.in_specs),
        out_specs=tuple(program.out_specs),
    )


def call(
    program: LockstepProgram, f: Callable[..., Any], leaves: Sequence[Any]
) -> tuple[list[Tensor], list[Any]]:
    """Return full results and gradients of one call."""
    if program.outside == "backward":
        results = [y.full_tensor() for y in f(*leaves)]
        loss = sum((y * weight(y)).sum() for y in results)
        if isinstance(loss, Tensor) and loss.requires_grad:
            loss.backward()
        return results, [x.grad for x in leaves]

    def loss_and_results(*args: Any) -> Any:
        results = f(*args)
        return sum((y * place(y.mesh, weight(y))).sum() for y in results), results

    by = tuple(i for i, frozen in enumerate(program.frozen) if not frozen)
    (_, results), grads = sm.value_and_grad(loss_and_results, by, has_aux=True)(*leaves)
    found = dict(zip(by, grads, strict=True))
    return [y.full_tensor() for y in results], [found.get(i) for i in range(len(leaves))]


def spec_placements(spec: P, mesh: sm.DeviceMesh, ndim: int) -> Sequence[Any]:
    return Layout.of(mesh, spec, (1,) * ndim, torch.float64).placements


def difference(name: str, got: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    for i, (x, y) in enumerate(zip(got, expected, strict=True)):
        if x.shape != y.shape or not torch.allclose(x, y, rtol=1e-7, atol=1e-9):
            return f"{name} {i}: {x.tolist()}, and in one process {y.tolist()}"
    return ""


def outcome(
    program: LockstepProgram, meanings: Sequence[Meaning], mesh: sm.DeviceMesh
) -> ProgramOutcome:
    """Return the outcome of a program on this rank."""
    found = ""  # a rank that finds a difference goes on, so that the others do not wait for it
    try:
        f = mapped(program, mesh)
        for number, expected in enumerate(meanings):
            inputs = zip(program.inputs(number), program.given, strict=True)
            leaves = [
                place(mesh, x.detach(), *spec_placements(spec, mesh, x.ndim), grad=x.requires_grad)
                for x, spec in inputs
            ]
            results, grads = call(program, f, leaves)
            parts = zip(expected.gradients, program.given, strict=True)
            whole = [Lockstep(program.mesh).enter(g, spec)[mesh.world.rank] for g, spec in parts]
            mine = [
                torch.zeros_like(g) if x is None else x.to_local()
                for x, g in zip(grads, whole, strict=True)
            ]
            wrong = "ranks hold different values" if expected.unequal else ""
            wrong = (
                wrong
                or difference("result", results, expected.results)
                or difference("gradient", mine, whole)
            )
            found = found or (wrong and f"call {number}: {wrong}")
    except sm.errors.ShardingTypeError as error:
        return ProgramOutcome("refused", str(error))
    return ProgramOutcome("wrong" if found else "equal", found)


def outcomes(
    programs: Sequence[tuple[LockstepProgram, Sequence[Meaning]]],
) -> list[list[ProgramOutcome]]:
    """Return the outcomes of programs on each rank; programs on one mesh run together while all
    ranks continue.
    """

    def together(mesh: sm.DeviceMesh) -> list[ProgramOutcome]:
        return [outcome(*each, mesh) for each in programs]

    try:
        return [list(ranks) for ranks in zip(*on_mesh(programs[0][0].mesh, together), strict=True)]
    except Exception as error:
        if len(programs) == 1:
            return [[ProgramOutcome("failed", f"{type(error).__name__}: {error}")]]
        half = len(programs) // 2
        return outcomes(programs[:half]) + outcomes(programs[half:])


def verdict(program: LockstepProgram, ranks: Sequence[ProgramOutcome]) -> ProgramOutcome:
    """Return the outcome of a program on all ranks; a rejection must occur everywhere, with the
    same text if all take the same path.
    """
    worst = next((each for each in ranks if each.kind in ("failed", "wrong")), ranks[0])
    if worst.kind in ("failed", "wrong"):
        return worst
    if len({each.kind for each in ranks}) > 1:
        return ProgramOutcome("wrong", f"refused on some ranks only: {ranks}")
    if len({each.text for each in ranks}) > 1 and not program.uses(r"\bif\b"):
        return ProgramOutcome(
            "wrong", f"refused in different words: {[each.text for each in ranks]}"
        )
    return ranks[0]


def judged(seeds: Sequence[int]) -> list[tuple[LockstepProgram, Sequence[Meaning], ProgramOutcome]]:
    made = sorted((make(seed) for seed in seeds), key=lambda each: each[0].mesh)
    found = []
    for mesh in sorted({program.mesh for program, _ in made}):
        group = [each for each in made if each[0].mesh == mesh]
        found += [
            (*each, verdict(each[0], ranks))
            for each, ranks in zip(group, outcomes(group), strict=True)
        ]
    return found


def is_late(program: LockstepProgram, end: ProgramOutcome) -> bool:
    """Return whether types missed a varying value, as they must for numbers read from shapes that
    differ between ranks.
    """
    sizes = dict(zip("ab", program.mesh, strict=True))
    pairs = zip(program.shapes, program.in_specs, strict=True)
    cuts = [cut for shape, spec in pairs for cut in zip(shape, spec.dims, strict=False)]
    even = all(n % math.prod(sizes[axis] for axis in axes) == 0 for n, axes in cuts)
    return even and end.kind == "refused" and LATE in end.text


# -- tests -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "part",
    [*range(ALWAYS), *(pytest.param(i, marks=pytest.mark.slow) for i in range(ALWAYS, SLICES))],
)
def test_random_programs_match_one_process_or_raise_a_type_error(part: int) -> None:
    found = judged(range(part * LENGTH, (part + 1) * LENGTH))
    ends = [
        (program, end)
        for program, _, end in found
        if end.kind in ("wrong", "failed") or is_late(program, end)
    ]
    bad = [f"{program}# {end.kind}: {end.text}" for program, end in ends]
    assert not bad, f"{len(bad)} programs, among them\n" + "\n\n".join(sorted(bad, key=len)[:3])
    kinds = Counter(end.kind for _, _, end in found)
    assert kinds["equal"] >= 0.6 * LENGTH, kinds
    assert kinds["refused"] >= 0.1 * LENGTH, kinds
