"""The exceptions of meshes, collectives and launches.

A message says what was given, why it fails and what to write instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


class MeshError(ValueError):
    """A mesh, an axis or a set of ranks is invalid."""


class UnknownAxisError(MeshError, KeyError):
    """The mesh has no axis of this name. A KeyError, as in torch."""

    __str__ = Exception.__str__  # a KeyError would quote its message


class AxisIndexError(MeshError, IndexError):
    """The mesh has no axis of this number. An IndexError, as in torch."""


class MeshRuntimeError(MeshError, RuntimeError):
    """The mesh does not fit the world, its names or the call. A RuntimeError, as in torch."""


class CollectiveError(ValueError):
    """A collective was called with buffers or an operation that are invalid on this rank alone."""


class LaunchEnvironmentError(RuntimeError):
    """The processes of a program cannot start: wrong environment, address, port or device."""


class WatchError(RuntimeError):
    """A program of several ranks cannot continue; every rank raises this, with the same text.

    Attributes:
        verdict: the diagnosis, as plain data: see `mesh.monitor.verdict.Verdict`. None in a
            simulated world.
    """

    def __init__(self, message: str, verdict: Any = None) -> None:
        super().__init__(message)
        self.verdict = verdict

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that caused the failure; empty if that is unknown."""
        return () if self.verdict is None else tuple(self.verdict.ranks)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.verdict)


class CollectiveMismatchError(WatchError):
    """The ranks of a group called different collectives."""


class DeadlockError(WatchError):
    """Ranks wait for each other in different collectives, or for one that never calls theirs."""


class MeshMismatchError(WatchError, MeshError):
    """Ranks made different meshes with init_device_mesh."""


class StallError(WatchError):
    """A rank did not call a collective within the time set by `watchdog`."""


class RankLostError(WatchError):
    """A rank that others wait for has died, has ended its program or cannot be reached."""


class PeerError(WatchError):
    """Another rank raised an error, so it will not call the collectives that this rank waits in."""


class CommBudgetError(RuntimeError):
    """A collective would exceed the limit of the enclosing `comm_budget`."""


class ImplicitCommError(RuntimeError):
    """An operator would communicate inside `implicit_comm("forbid")`."""


def unknown_axis(name: object, known: Sequence[str]) -> UnknownAxisError:
    return UnknownAxisError(
        f"unknown axis {name!r}: the mesh has axes {list(known)}. Write one of these names."
    )


def repeated_axis(names: Sequence[str]) -> MeshRuntimeError:
    twice = sorted({str(n) for n in names if list(names).count(n) > 1})
    return MeshRuntimeError(
        f"axis {', '.join(map(repr, twice))} is used twice in {tuple(names)}: name each axis once."
    )


def names_do_not_fit(names: object, shape: Sequence[int]) -> MeshRuntimeError:
    return MeshRuntimeError(
        f"the mesh shape {tuple(shape)} has {len(shape)} axes, but the names given are {names!r}: "
        "write one non-empty string per axis, for example "
        f"axis_names={tuple(f'axis_{i}' for i in range(len(shape)))}."
    )


def bad_shape(shape: object) -> MeshRuntimeError:
    return MeshRuntimeError(
        f"mesh shape {shape!r}: must be a tuple of positive integers, one per axis, such as (2, 8)."
    )


def shape_does_not_fit_world(
    mesh_text: str, needed: int, world_size: int, hint: str = ""
) -> MeshRuntimeError:
    return MeshRuntimeError(
        f"mesh {mesh_text} needs {needed} ranks, but the world has {world_size}. {hint}Either "
        f"start {needed} processes (torchrun --nproc-per-node {needed} ...), or choose a shape "
        f"whose product is {world_size}, such as ({world_size},). For a mesh over some of the "
        "ranks write DeviceMesh(device_type, array_of_ranks)."
    )


def ranks_outside_world(bad: Iterable[int], world_size: int) -> MeshError:
    return MeshError(
        f"ranks {sorted(bad)} do not exist: the world has {world_size}, numbered 0 to "
        f"{world_size - 1}. Start more processes, or use ranks of this world (AbstractMesh needs "
        "no processes at all)."
    )


def repeated_ranks(ranks: Sequence[int]) -> MeshError:
    twice = sorted({r for r in ranks if list(ranks).count(r) > 1})
    return MeshError(f"ranks {twice} appear more than once in {short(ranks)}: list each rank once.")


def not_a_member(rank: int, ranks: Sequence[int]) -> MeshError:
    return MeshError(
        f"rank {rank} is not in the group of ranks {short(ranks)}: only those ranks may call its "
        "collectives. Ask for the group on these ranks only (mesh.coordinate is None on a rank "
        "outside the mesh)."
    )


def outside_mesh(what: str, mesh_text: str, rank: int) -> MeshError:
    return MeshError(
        f"{what}: rank {rank} is outside {mesh_text}, so it has no index along its axes. Check "
        "`mesh.coordinate is not None` first."
    )


def wrong_reduction(op: object, known: Iterable[str]) -> CollectiveError:
    return CollectiveError(
        f"unknown reduction {op!r}: write one of {sorted(known)} (an average is a sum, divided by "
        "the group size)."
    )


def at(line: str | None) -> str:
    return "" if line is None else f" at {line}"


def short(ranks: Sequence[int]) -> str:
    return (
        str(tuple(ranks))
        if len(ranks) <= 16
        else f"({', '.join(map(str, ranks[:8]))}, ... {len(ranks)} ranks)"
    )
