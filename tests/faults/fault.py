"""A faulty program, and the errors that the ranks of its job should raise.

    @fault("mismatch", odd=2, field="operation", says="all_gather")
    def skips_a_redistribute(at):
        x = at.put(SQUARE, at.d.Shard(0))
        if not at.odd():
            x.redistribute(at.mesh, [at.d.Replicate()])   # <- rest
        return x.redistribute(at.mesh, [at.d.Shard(1)])   # <- odd

Every rank runs the program; on the ranks `odd`, and nowhere else, `at.odd()` is true. So the same program run with no odd
rank is a healthy one, and gives the values that a silent fault is compared with. The comments mark the lines that an error
must name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.faults.at import At

RANKS = 4
STALL_S = 2.0  # see `Fault.stalls`
ERRORS = {
    "mismatch": "CollectiveMismatchError",
    "deadlock": "DeadlockError",
    "stall": "StallError",
    "lost": "RankLostError",
    "left": "RankLostError",
    "raised": "PeerError",
    "mesh": "MeshMismatchError",
}

Program = Callable[["At"], Any]


@dataclass(frozen=True)
class Fault:
    """A program, and what comes of it.

    Attributes:
        program: run on every rank; what it returns can be written as JSON.
        kinds: of the verdict, any of several where more than one is true; none for a healthy program, of which every rank comes to
            its end.
        odd: the ranks that go wrong.
        blamed: the ranks that the verdict must name; none where votes are equal.
        fields: what the verdict must say that differs; any of several, where more than one is true.
        says: words that the error's text must contain.
        ends: how an odd rank ends, in one of these ways: the class of its own error, its exit status, minus the signal that kills
            it; "busy" where its program never goes on and "frozen" where the process must be let go on: the watch ends both.
            Without any: as all others, with the verdict.
        mesh: axes and sizes of the mesh that the program is given.
        twin: whether the program means something in torch.distributed, too.
    """

    program: Program
    kinds: tuple[str, ...]
    odd: tuple[int, ...]
    blamed: tuple[int, ...]
    fields: tuple[str, ...]
    says: tuple[str, ...]
    ends: tuple[str | int, ...]
    mesh: Mapping[str, int]
    twin: bool

    @property
    def stalls(self) -> bool:
        """Whether a rank that does not come within `STALL_S` is an error; else within minutes."""
        return "stall" in self.kinds

    @property
    def name(self) -> str:
        """In the table."""
        return self.program.__name__

    @property
    def errors(self) -> set[str]:
        """The classes of error that ranks may raise."""
        return {ERRORS[kind] for kind in self.kinds}

    @property
    def text(self) -> str:
        """What happens, in a few words."""
        return (self.program.__doc__ or self.name.replace("_", " ")).splitlines()[0].rstrip(".")

    def places(self, mark: str) -> list[str]:
        """file:line of the lines with the comment `# <- mark`."""
        lines, first = inspect.getsourcelines(self.program)
        file = inspect.getsourcefile(self.program)
        return [f"{file}:{first + i}" for i, line in enumerate(lines) if f"# <- {mark}" in line]


FAULTS: dict[str, Fault] = {}


def fault(
    kind: str | tuple[str, ...],
    odd: int | tuple[int, ...] = 2,
    *,
    blamed: tuple[int, ...] | None = None,
    field: str | tuple[str, ...] = (),
    says: str | tuple[str, ...] = (),
    ends: str | int | tuple[str | int, ...] = (),
    mesh: Mapping[str, int] | None = None,
    twin: bool = True,
) -> Callable[[Program], Program]:
    """Puts a program into the table; see `Fault` for the arguments. Without `blamed` it is the odd ranks that are to blame."""
    odd = _several(odd)
    blamed = odd if blamed is None else blamed
    mesh = {"x": RANKS} if mesh is None else mesh

    def add(program: Program) -> Program:
        assert program.__name__ not in FAULTS, f"two programs are called {program.__name__}"
        FAULTS[program.__name__] = Fault(
            program, _several(kind), odd, blamed, _several(field), _several(says), _several(ends), mesh, twin
        )
        return program

    return add


def healthy(*, mesh: Mapping[str, int] | None = None, twin: bool = True) -> Callable[[Program], Program]:
    """Puts a program in which nothing is wrong into the table: an error of any rank is a false alarm."""
    return fault((), (), mesh=mesh, twin=twin)


def _several(one_or_more: Any) -> tuple[Any, ...]:
    return one_or_more if isinstance(one_or_more, tuple) else (one_or_more,)
