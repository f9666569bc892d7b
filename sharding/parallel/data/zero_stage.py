"""Stages of data parallelism as one table.

The axes that split parameters, gradients and optimizer state.

               parameter   gradient   optimizer   a step of p bytes of parameters on n ranks moves
DDP            ()          ()         ()          all_reduce p
ZeRO-1         ()          ()         dp          reduce_scatter p, all_gather p
ZeRO-2         ()          dp         dp          the same, per microbatch a reduce_scatter
FSDP, ZeRO-3   dp          dp         dp          two all_gathers p, reduce_scatter p
HSDP           fsdp        fsdp       fsdp        the same in fsdp, and all_reduce p / fsdp over dp
"""

from __future__ import annotations

from dataclasses import dataclass

from ....mesh.device_mesh import DeviceMesh

Axes = str | tuple[str, ...]


@dataclass(frozen=True)
class ZeroStage:
    """A row of the table.

    Attributes:
        parameter: the axes over which parameters are split between steps.
        gradient: the axes over which gradients are split while they accumulate: those of the
            optimizer, or none.
        optimizer: the axes over which optimizer state is split, major to minor, those of
            `parameter` first.
    """

    parameter: tuple[str, ...]
    gradient: tuple[str, ...]
    optimizer: tuple[str, ...]

    @property
    def defers_reduction(self) -> bool:
        """Whether gradients stay whole until the last microbatch."""
        return self.gradient != self.optimizer


def axes_of(what: str, axes: Axes, mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the names of axes of a mesh.

    Args:
        what: the argument that has them, for errors: "fully_shard: axes".

    Raises:
        ValueError: the mesh lacks one, or one is there twice.
    """
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    if len(set(names)) < len(names) or not set(names) <= set(mesh.axis_names):
        raise ValueError(
            f"{what}={names!r} on {mesh}: give axes of the mesh, each once, from {mesh.axis_names}"
        )
    return names


def make_zero_stage(
    mesh: DeviceMesh, parameter: Axes, gradient: Axes, optimizer: Axes
) -> ZeroStage:
    """Return the row with these axes.

    Raises:
        ValueError: axes that the mesh lacks, parameters split over axes over which the optimizer is
            not, or gradients over others than it.
    """
    parameter = axes_of("parameter", parameter, mesh)
    gradient = axes_of("gradient", gradient, mesh)
    optimizer = axes_of("optimizer", optimizer, mesh)
    if not set(parameter) <= set(optimizer):
        raise ValueError(
            f"parameter={parameter!r} and optimizer={optimizer!r}: axes that split parameters must "
            "split optimizer state as well; write "
            f"optimizer={(*optimizer, *[axis for axis in parameter if axis not in optimizer])!r}"
        )
    if gradient and set(gradient) != set(optimizer):
        raise ValueError(
            f"gradient={gradient!r} and optimizer={optimizer!r}: gradients must be split like the "
            f"optimizer state, or whole; write gradient={optimizer!r} or gradient=()"
        )
    ordered = (*parameter, *[axis for axis in optimizer if axis not in parameter])
    return ZeroStage(parameter, ordered if gradient else (), ordered)
