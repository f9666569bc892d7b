"""A faulty program, and the errors that the ranks of its job must raise.

    @fault("mismatch", outliers=2, field="operation", says="all_gather")
    def skips_a_redistribute(ctx):
        x = ctx.put(SQUARE, ctx.d.Shard(0))
        if not ctx.is_outlier():
            x.redistribute(ctx.mesh, [ctx.d.Replicate()])   # <- others
        return x.redistribute(ctx.mesh, [ctx.d.Shard(1)])   # <- outlier

Every rank runs the program; `ctx.is_outlier()` is true only on the ranks `outliers`. Without
outliers the same program is healthy, and returns the values that a silent fault is compared with.
The comments mark the lines that an error must name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.faults.rank_context import RankContext

RANKS = 4
# The short timeout, see `Fault.has_short_timeout`. Ranks of a busy machine may be seconds apart
# where nothing is wrong.
STALL_S = 4.0
WARN_S = 0.5  # see `RankContext.set_short_warning`
ERRORS = {
    "mismatch": "CollectiveMismatchError",
    "deadlock": "DeadlockError",
    "stall": "StallError",
    "lost": "RankLostError",
    "left": "RankLostError",
    "raised": "PeerError",
    "mesh": "MeshMismatchError",
}

FaultProgram = Callable[["RankContext"], Any]


@dataclass(frozen=True)
class Fault:
    """A program and its expected outcome.

    Attributes:
        program: runs on every rank; its result must be JSON-serializable.
        kinds: the expected kinds of verdict, any of them if several are correct; none for a healthy
            program, which ends normally on every rank.
        outliers: the ranks that diverge.
        named: the ranks that the verdict must name; none if votes are equal.
        fields: the difference that the verdict must report, any of them if several are correct.
        says: words that the error's text must contain.
        ends: how an outlier may end: the class of its own error, its exit status, or minus the
            signal that kills it; "busy" if its program never continues and "frozen" if the process
            must be resumed: the monitor ends both. Empty if it raises the verdict like the other
            ranks.
        mesh: axes and sizes of the program's mesh.
        in_torch: whether the program also runs with torch.distributed alone.
    """

    program: FaultProgram
    kinds: tuple[str, ...] = ()
    outliers: tuple[int, ...] = ()
    named: tuple[int, ...] = ()
    fields: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    ends: tuple[str | int, ...] = ()
    mesh: Mapping[str, int] = field(default_factory=lambda: {"x": RANKS})
    in_torch: bool = False

    @property
    def has_short_timeout(self) -> bool:
        """Whether a rank that does not arrive within `STALL_S` is an error; otherwise the timeout
        is minutes.
        """
        return "stall" in self.kinds

    @property
    def name(self) -> str:
        """The name in the table."""
        return self.program.__name__

    @property
    def errors(self) -> set[str]:
        """The classes of error that ranks may raise."""
        return {ERRORS[kind] for kind in self.kinds}

    @property
    def text(self) -> str:
        """A description of the fault in a few words."""
        return (self.program.__doc__ or self.name.replace("_", " ")).splitlines()[0].rstrip(".")

    def places(self, mark: str) -> list[str]:
        """Return file:line of the lines with the comment `# <- mark`."""
        lines, first = inspect.getsourcelines(self.program)
        file = inspect.getsourcefile(self.program)
        return [f"{file}:{first + i}" for i, line in enumerate(lines) if f"# <- {mark}" in line]


FAULTS: dict[str, Fault] = {}


def fault(
    kind: str | tuple[str, ...],
    outliers: int | tuple[int, ...] = 2,
    *,
    named: tuple[int, ...] | None = None,
    field: str | tuple[str, ...] = (),
    says: str | tuple[str, ...] = (),
    ends: str | int | tuple[str | int, ...] = (),
    mesh: Mapping[str, int] | None = None,
    in_torch: bool = True,
) -> Callable[[FaultProgram], FaultProgram]:
    """Add a program to the table; see `Fault` for the arguments. `named` is `outliers` by
    default.
    """
    outliers = _as_tuple(outliers)
    named = outliers if named is None else named
    mesh = {"x": RANKS} if mesh is None else mesh

    def add(program: FaultProgram) -> FaultProgram:
        assert program.__name__ not in FAULTS, f"two programs are called {program.__name__}"
        FAULTS[program.__name__] = Fault(
            program,
            _as_tuple(kind),
            outliers,
            named,
            _as_tuple(field),
            _as_tuple(says),
            _as_tuple(ends),
            mesh,
            in_torch,
        )
        return program

    return add


def healthy(
    *, mesh: Mapping[str, int] | None = None, in_torch: bool = True
) -> Callable[[FaultProgram], FaultProgram]:
    """Add a correct program to the table: an error on any rank is a false alarm."""
    return fault((), (), mesh=mesh, in_torch=in_torch)


def _as_tuple(one_or_more: Any) -> tuple[Any, ...]:
    return one_or_more if isinstance(one_or_more, tuple) else (one_or_more,)


class FaultsByName(Mapping[str, Fault]):
    """A table that creates the fault of any name when it is looked up."""

    def __init__(self, make: Callable[[str], Fault]) -> None:
        self._make = make

    def __getitem__(self, name: str) -> Fault:
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0
